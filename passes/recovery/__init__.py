"""What is dropped after forward and computed again, and where."""
