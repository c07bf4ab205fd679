"""Validation: tables of published measurements, and the simulator's errors on them."""
