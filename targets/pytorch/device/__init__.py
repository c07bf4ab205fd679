"""Kernels in PyTorch on a device."""
