"""Allfold's node agent: folds the tensors of a machine's ranks, exchanges them with other agents.

One process per machine. Its threads: the *hub* talks with the local ranks, *workers* fold and
distribute, each edge has a thread of its own, the control plane is an asyncio loop.
"""

__version__ = "0.1.0"
