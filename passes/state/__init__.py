"""When gradients are reduced, shards updated and views gathered."""
