"""The kernel set `reference`: plain numpy."""
