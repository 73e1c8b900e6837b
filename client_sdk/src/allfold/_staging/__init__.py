"""The memory of a call's tensors while the agent works on them."""
