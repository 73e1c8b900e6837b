"""This process: its rank and settings, its forked children, its end, and calls of the kernel."""
