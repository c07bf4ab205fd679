"""Tile schedules of the MT-3000's matrix kernels: built from tile sizes, timed, and searched for."""
