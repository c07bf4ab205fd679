"""The timed run of a program: event loop, shared bandwidth, idle time and its causes, figures."""
