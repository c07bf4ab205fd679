"""What a user hands in: the model and the parallel plan, read, checked and printed."""
