"""The types of devices of the torch backend. Imports nothing: ``import torch`` loads it."""

DEVICES = ("cpu", "cuda", "xpu", "mps")
"""The devices of tensors that the backend takes; torch itself copies those of the last two."""
