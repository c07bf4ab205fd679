"""Shell scripts, followed without running them, to find the training commands that they may start."""
