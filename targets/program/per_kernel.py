"""What a layer adds to the kernels: a table with an entry for every one, or it cannot be made.

The declaration of a kernel (`ratrain.targets.program.kernels`) says what it takes and gives. What only a layer knows (its cost, the
scratch of an implementation, whether it is tiled) stands in a table of that layer; a new kernel that one of them forgets fails by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from ratrain.ratrain_ir.support.complete_table import CompleteTable
from ratrain.targets.program.kernels import KERNELS, Kernel

T = TypeVar("T")

TABLES: list[PerKernel[Any]] = []
"""All tables that have been made, in the order of their layers' imports."""


class PerKernel(CompleteTable[T]):
    """Entries by name, complete over `KERNELS`; `never` are the kernels that do not occur there."""

    def __init__(self, what: str, entries: Mapping[str, T], *, never: Collection[str] = ()) -> None:
        super().__init__(what, entries, never, KERNELS)
        TABLES.append(self)

    def missing(self, kernels: Iterable[Kernel]) -> list[str]:
        """A line for each kernel of which the table says nothing."""
        return self.without(kernel.name for kernel in kernels)
