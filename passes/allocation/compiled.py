"""The compiler of inner loops. Importing this module imports numba: do it late, and only where it pays.

Compiled loops are cached on disk. The cache notices a change of the file a loop stands in, but not of a function it takes from
another file: after editing one of those, delete the `__pycache__` folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba as nb

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """A function over numbers and arrays, compiled when it is first called."""
    compiled: Any = nb.njit(cache=True, nogil=True, error_model="numpy")(function)
    return cast("F", compiled)
