"""The life of a group on this node."""
