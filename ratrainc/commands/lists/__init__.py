"""Commands that list what there is: machines, strategies, passes, examples, models."""
