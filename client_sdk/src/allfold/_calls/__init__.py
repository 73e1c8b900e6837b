"""From the arguments of each kind of call to the :class:`RankCall` that asks for it. Pure.

Everything that this rank alone can see to be wrong is refused here, before anything is sent.
"""
