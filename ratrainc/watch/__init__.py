"""A page of runs, from their logs."""
