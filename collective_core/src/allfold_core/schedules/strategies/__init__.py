"""The strategies: one module each, which ends with its ``STRATEGY``.

Programs are written for *positions* 0..nodes-1, of which there are two or more; position 0 is the
root where there is one. :mod:`allfold_core.schedules.compiler` handles the trivial ops, and maps
nodes to positions.
"""
