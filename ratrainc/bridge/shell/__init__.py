"""Shell scripts, read without running them: which training commands a script may start, and what each of their words comes from."""
