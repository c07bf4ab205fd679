"""Passes, which rewrite a module (one file each), and the manager that runs them."""
