"""Allfold on an NVIDIA GPU, measured and checked. ``python -m benchmarks.gpu`` prints a table."""
