"""Messages and collectives over torch.distributed."""
