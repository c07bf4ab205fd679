"""The OpenBLAS of the package `scipy-openblas64`, with one thread, for the kernels of `fast` only.

numpy has an OpenBLAS too, but its products cannot be added to an output, and a loop that calls them needs the
interpreter's lock for every product. One thread, because the library's own pool would compete with the team's threads
for the cores.

The library is loaded here and not by importing the package, which would export its names to the whole process: a scipy
that is imported later would find LAPACK helpers with 64-bit integers there, and its decompositions would fail
(https://github.com/MacPython/openblas-libs/issues/124).
"""

from __future__ import annotations

import ctypes
from importlib.metadata import distribution

_package = distribution("scipy-openblas64")
PATH = str(next(path for path in _package.files or () if path.name.startswith("libscipy_openblas64")).locate())
"""Path of the library."""

_library = ctypes.CDLL(PATH)
_library.scipy_openblas_set_num_threads64_(1)
_library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p

_INT, _SIZE, _NUMBER, _ARRAY = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

Sgemm = ctypes.CFUNCTYPE(None, *[_INT] * 3, *[_SIZE] * 3, _NUMBER, _ARRAY, _SIZE, _ARRAY, _SIZE, _NUMBER, _ARRAY, _SIZE)
"""Type of `cblas_sgemm`: order, transpositions of a and b; m, n, k; alpha, a, lda, b, ldb, beta, c, ldc."""

SGEMM: int = ctypes.cast(_library.scipy_cblas_sgemm64_, ctypes.c_void_p).value or 0
"""Address of `cblas_sgemm`."""

ROWS_FIRST, AS_IS, TRANSPOSED = 101, 111, 112
"""Arguments of `cblas_sgemm` for the order of elements and for transpositions."""

VERSION = f"openblas {_package.version}"


def core_type() -> str:
    """Return the processor type whose kernels are used: this machine's, or the value of OPENBLAS_CORETYPE."""
    return str(_library.scipy_openblas_get_corename64_().decode())
