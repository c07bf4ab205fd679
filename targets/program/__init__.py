"""The executable program: its container, its verifier, its way back to a schedule. No machine in it."""
