"""What a user hands in: the model and the parallel plan, and their lowering into a module."""
