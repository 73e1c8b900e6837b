"""Diagnosis: from what an agent sees of ranks and links to the culprit of an incident. Pure."""
