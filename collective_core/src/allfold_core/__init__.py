"""The pure algebra of Allfold: schedules, their proof, their price, and the words for all of it.

Nothing here does input or output, reads a clock or starts a thread, and only the standard library
is imported, so agents, the orchestrator, the client and every test can use it alike.
"""

__version__ = "0.3.0"
