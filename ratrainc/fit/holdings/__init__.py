"""Bytes that each rank of a training job holds under its framework."""
