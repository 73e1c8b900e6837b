"""Frames between agents, and the messages between a rank and its agent."""
