"""Runtime: executes a program with the kernels of this machine and moves training state in and out of files."""
