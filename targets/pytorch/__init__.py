"""What needs PyTorch (extra `torch`), which only this package imports: kernels on its devices, and ranks over torch.distributed."""
