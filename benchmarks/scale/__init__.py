"""Allfold with thousands of nodes: the control plane for real, the collectives by the model."""
