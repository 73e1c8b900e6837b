"""Reduction and encoding of memory."""
