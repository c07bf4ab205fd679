"""Weights in and out: names, files, what stands beside them."""
