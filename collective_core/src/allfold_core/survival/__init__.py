"""The agreement by which a group outlives its members, as pure state machines.

One *term* is one set of nodes, decided by the orchestrator. Inside it the agents agree by *rounds*:
the leader freezes every node, gathers a report from each, decides one outcome for every open op and
one membership, and sends that decision to all. Nothing here does I/O or reads a clock.
"""
