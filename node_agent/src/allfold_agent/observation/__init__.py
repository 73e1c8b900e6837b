"""Watching the groups of this agent over time, and finding their incidents."""
