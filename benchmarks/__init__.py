"""Allfold side by side with Gloo and MPICH. ``python -m benchmarks`` prints a table."""
