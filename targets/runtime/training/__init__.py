"""A training run: prepared, stepped, saved."""
