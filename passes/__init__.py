"""Passes: what rewrites a module, one file each, and the manager that runs them."""
