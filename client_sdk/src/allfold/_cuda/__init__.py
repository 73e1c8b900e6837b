"""Tensors in the memory of NVIDIA GPUs: how they reach the node agent.

Of CUDA only the driver is used, through NVIDIA's own bindings, so that it does not matter which
library the tensors are of. Nothing here is imported before the first such tensor comes.
"""
