"""A program, and everything that can be done with one."""
