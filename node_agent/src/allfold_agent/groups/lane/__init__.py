"""The short lane of a group: small ops that ranks do by themselves."""
