"""The data connections between agents."""
