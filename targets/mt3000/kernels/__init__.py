"""Kernels that run by their tile schedules."""
