"""Weights in and out: names, files, companion files."""
