"""The messages of the control plane, and of agents about members: one definition for all who read.

Values that machines work with are dataclasses of ``allfold_core``. Here is how each is written and
read: whatever comes becomes a value that works, or one error. The SDK has no part in it.
"""
