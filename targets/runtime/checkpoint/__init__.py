"""Checkpoints: shards, series, manifests, and what a resumed run may change."""
