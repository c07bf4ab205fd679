"""The OpenBLAS of the package `scipy-openblas64`, for `fast` kernels alone and with one thread.

numpy has an OpenBLAS too, but it cannot add a product to what is there, and a loop that calls it needs the interpreter's lock
for every product. One thread, because the library's own pool would fight for the cores with the team's threads.

The library is loaded here and not by importing the package, which would give its names to the whole process: a scipy that is imported
later finds helpers of LAPACK there that take 64-bit integers, and its decompositions fail
(https://github.com/MacPython/openblas-libs/issues/124).
"""

from __future__ import annotations

import ctypes
from importlib.metadata import distribution

_package = distribution("scipy-openblas64")
PATH = str(next(path for path in _package.files or () if path.name.startswith("libscipy_openblas64")).locate())
"""The file of the library."""

_library = ctypes.CDLL(PATH)
_library.scipy_openblas_set_num_threads64_(1)
_library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p

_INT, _SIZE, _NUMBER, _ARRAY = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

Sgemm = ctypes.CFUNCTYPE(None, *[_INT] * 3, *[_SIZE] * 3, _NUMBER, _ARRAY, _SIZE, _ARRAY, _SIZE, _NUMBER, _ARRAY, _SIZE)
"""The type of `cblas_sgemm`: order, transpositions of a and b; m, n, k; alpha, a, lda, b, ldb, beta, c, ldc."""

SGEMM: int = ctypes.cast(_library.scipy_cblas_sgemm64_, ctypes.c_void_p).value or 0
"""The address of `cblas_sgemm`."""

ROWS_FIRST, AS_IS, TRANSPOSED = 101, 111, 112
"""What `cblas_sgemm` takes for the order of elements and for transpositions."""

VERSION = f"openblas {_package.version}"


def core_type() -> str:
    """The processor type whose kernels are used: this machine's, or what OPENBLAS_CORETYPE says."""
    return str(_library.scipy_openblas_get_corename64_().decode())
