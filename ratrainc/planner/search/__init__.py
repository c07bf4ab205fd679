"""Evaluation of plans and the search for the best one."""
