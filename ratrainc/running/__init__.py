"""Training runs of the command line: launch, display, log, result."""
