"""Folding in GPU memory: the CUDA kernel, and what brings it to a device."""
