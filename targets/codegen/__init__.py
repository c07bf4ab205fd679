"""Code generation that every target shares: the routines of block ops, derived from the model and the plan alone."""
