"""The time until a rank that comes late has the state of the others."""
