"""Agents, ranks, orchestrators and their store in one process, on virtual time, under faults."""
