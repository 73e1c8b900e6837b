"""One op's run on this node."""
