"""Kernels on PyTorch's devices and ranks over torch.distributed. No other package imports PyTorch (extra `torch`)."""
