"""The short lane: small ops that go through a page of memory which the ranks of a node share."""
