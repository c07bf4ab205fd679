"""Lifetimes, releases, workspace, and the bytes of every tensor."""
