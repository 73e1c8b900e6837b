"""Allfold's node agent: folds the tensors of a machine's ranks, exchanges them with other agents.

One process per machine. Its threads: the *reactor* serves local ranks, another one the edges to and
from other nodes, *workers* fold and distribute what is long, and the control plane is an asyncio
loop.
"""

__version__ = "0.3.0"
