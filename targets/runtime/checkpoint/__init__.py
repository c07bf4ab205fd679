"""Checkpoints: shards, series, manifests, and the changes that a resumed run may make."""
