"""The control port: health, status and records for people and tools."""
