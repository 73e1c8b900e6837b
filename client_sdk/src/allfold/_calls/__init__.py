"""What each kind of call asks of the agent: pure, from its arguments to a :class:`Call`.

Everything that this rank alone can see to be wrong is refused here, before anything is sent.
"""
