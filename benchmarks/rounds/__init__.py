"""Measures rounds: time spent computing, bytes, slow ranks, kills, and peers in the same run."""
