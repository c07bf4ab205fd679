"""The MPI engine: one process a rank. Importing `targets.runtime.mpi.engine` starts MPI; `layout` does not need it."""
