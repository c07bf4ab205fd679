"""The compiler of inner loops that allocate. Importing this module imports numba with the first of them: do it late, and only where it pays.

Compiled loops are cached on disk, by `ratrain.ratrain_ir.support.loops`.
"""

from __future__ import annotations

from typing import cast

from ratrain.ratrain_ir.support.loops import F, compiled


def kernel(function: F) -> F:
    """A function over numbers and arrays, compiled when it is first called."""
    return cast("F", compiled(function))
