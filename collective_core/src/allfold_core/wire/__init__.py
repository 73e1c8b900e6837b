"""The formats on sockets: frames between agents, messages between rank and agent."""
