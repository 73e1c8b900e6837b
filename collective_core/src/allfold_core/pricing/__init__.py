"""The cost of schedules, and the choice of a strategy."""
