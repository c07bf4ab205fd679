"""The MPI engine: one process a rank. Importing `ratrain.targets.runtime.mpi.engine` starts MPI; `layout` does not need it."""
