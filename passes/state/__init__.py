"""Passes that decide when gradients are reduced, shards updated and views gathered."""
