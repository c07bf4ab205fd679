"""What a user chooses: strategy, machine, plan, run; and the time of one plan."""
