"""Lifetimes, releases, workspace and addresses of tensors."""
