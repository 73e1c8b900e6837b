"""The short lane of a rank: small ops that the ranks of a node do by themselves, in shared memory.

The page and its words are described in :mod:`allfold_core.short_lane.page`.
"""
