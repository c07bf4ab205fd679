"""Passes that decide the order of each stage's work: 1F1B, GPipe, ZB-H1, schedules from files, and split backwards."""
