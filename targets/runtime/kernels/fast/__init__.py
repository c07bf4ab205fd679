"""The kernel set `fast`: numba loops and BLAS."""
