"""The start of a job's own services where none run: who starts what, and how ranks meet there."""
