"""Positions of ranks, and the reason why a run makes no progress."""
