"""The strategies: one module each, with a pure function that yields the program of one node.

Every ``program(kind, nodes, numel, me)`` is called with ``nodes >= 2``, and with ``numel >= 1``
unless the kind is a barrier; :mod:`allfold_core.compiler` sees to the trivial cases. Programs are
written for *positions* 0..nodes-1; position 0 is the root where there is one.
"""
