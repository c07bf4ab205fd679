"""Machine files fitted to measured times."""
