import os

# Before anything of Allfold is imported: every lock of the agent is checked in the tests.
os.environ.setdefault("ALLFOLD_CHECK_LOCKS", "1")
