"""The driver: command line, strategies, reports."""
