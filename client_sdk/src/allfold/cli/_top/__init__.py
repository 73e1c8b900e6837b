"""``allfold top``: the nodes, groups and ranks of an Allfold, live."""
