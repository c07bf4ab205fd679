"""Commands that train, watch over training, and use what was trained."""
