"""The user's choices: strategy, machine, plan and run; and the simulated time of one plan."""
