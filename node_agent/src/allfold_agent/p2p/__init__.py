"""Send and receive."""
