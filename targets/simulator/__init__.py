"""The timed run of a program, and what it says."""
