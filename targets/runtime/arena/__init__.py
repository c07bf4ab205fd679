"""Memory of a rank: arena, scratch, stores, tensor files, locks."""
