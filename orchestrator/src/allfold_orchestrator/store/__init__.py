"""Everything that touches Redis."""
