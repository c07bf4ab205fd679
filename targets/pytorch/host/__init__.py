"""Kernels in PyTorch on the host."""
