"""The executable program: instructions, routines, its file, its way back to a schedule. No machine in it."""
