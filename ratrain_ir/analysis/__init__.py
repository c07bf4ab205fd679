"""What is derived from the op lists: lifetimes, dependences, progress. Nothing here changes a module."""
