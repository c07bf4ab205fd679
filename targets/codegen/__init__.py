"""Code generation that every target shares: routines of block ops, of model and plan alone; emission of programs."""
