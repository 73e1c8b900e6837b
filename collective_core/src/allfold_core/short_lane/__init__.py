"""The short lane: small ops that ranks of one node exchange through a page of shared memory."""
