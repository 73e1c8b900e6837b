"""Side-by-side measurements. ``python -m benchmarks`` prints a table."""
