"""The observation of a running system: the agents' views in one picture, while somebody watches."""
