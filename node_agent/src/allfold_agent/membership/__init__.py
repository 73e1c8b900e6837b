"""Agreement of this node with the orchestrator and with other nodes."""
