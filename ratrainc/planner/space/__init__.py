"""Which plans there are."""
