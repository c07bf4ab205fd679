"""What the planner says."""
