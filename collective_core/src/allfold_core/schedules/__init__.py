"""Strategies, the schedules that they compile to, and their proof."""
