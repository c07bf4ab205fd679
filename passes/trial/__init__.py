"""Trials of what a pass may decide: a stage with its workspace, the times of its ops, the bytes that it would take."""
