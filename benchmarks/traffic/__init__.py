"""Caps and classes on a line with a rate: what the foreground feels, and what goes."""
