"""``allfold trace``: the flight recorders of all nodes, on one clock, as a file for other tools."""
