"""The training state of a rank, and how late ranks get it from others."""

from allfold._state.state import State

__all__ = ["State"]
