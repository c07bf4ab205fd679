"""Compiler of the inner loops. Import modules that use it late, and only where it pays: the first loop imports numba.

Compiled loops are cached on disk by `ratrain.ratrain_ir.support.loops`.
"""

from __future__ import annotations

from typing import cast

from ratrain.ratrain_ir.support.loops import F, compiled


def kernel(function: F) -> F:
    """Compile a function over numbers and arrays when it is first called."""
    return cast("F", compiled(function))
