"""The compilation of a call into the tasks of this node. Pure."""
