"""The ranks of this machine: their socket, their connections, their calls."""
