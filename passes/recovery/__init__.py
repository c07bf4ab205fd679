"""Passes that drop activations after forward and recompute them, or offload them, and where that happens."""
