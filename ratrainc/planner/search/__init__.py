"""Which plan is best: evaluation and search."""
