"""Where ranks are, and why a run makes no progress."""
