"""From model and plan to a proved program."""
