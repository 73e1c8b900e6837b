"""Frames between agents, messages between a rank and its agent, and caps on what agents send."""
