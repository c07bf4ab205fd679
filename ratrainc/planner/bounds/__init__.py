"""Lower bounds of time and bytes for many plans at once."""
