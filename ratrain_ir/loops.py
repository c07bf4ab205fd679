"""Loops that numba compiles, kept on disk from one process to the next where there is a place for that.

Importing this module does not import numba, which takes a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

WAY_OUT = "set NUMBA_CACHE_DIR to a directory that can be written"


class UncachedWarning(RuntimeWarning):
    """Compiled loops cannot be kept: every process compiles them anew."""


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function, compiled by numba when it is first called, without Python's lock; `options` are those of `njit`.

    Where neither the package's folder, nor one in the user's home, nor NUMBA_CACHE_DIR can be written, it is not kept on disk, and
    an `UncachedWarning` says so, once.
    """
    import numba as nb

    njit: Any = nb.njit
    options = {"nogil": True, "error_model": "numpy"} | options
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:  # numba has tried to write in each of these
        if "cannot cache" not in str(error):
            raise
    _warn()
    return njit(**options)(function)


@cache
def _warn() -> None:
    text = (
        "compiled loops are not kept, and every process compiles them anew: neither the package's folder nor one in the home "
        f"directory can be written; {WAY_OUT}"
    )
    warnings.warn(UncachedWarning(text), stacklevel=3)
