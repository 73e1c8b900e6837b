"""The handles of what is in flight."""
