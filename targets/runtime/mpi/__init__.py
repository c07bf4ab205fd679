"""Ranks over MPI: mpi4py's calls as the protocol of `ranks/communicator.py`. Importing `transport` starts MPI."""
