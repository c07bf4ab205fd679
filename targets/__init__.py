"""What every target shares: the executable program and its container, its verifier, the simulator, the runtime."""
