"""Facts about a model, a machine, a schedule."""
