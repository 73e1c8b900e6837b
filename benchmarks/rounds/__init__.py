"""What rounds must reach: computing, bytes, slow ranks, kills, and others in the same run."""
