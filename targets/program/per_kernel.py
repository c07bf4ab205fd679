"""Tables with an entry for every kernel; an incomplete one cannot be made.

The declaration of a kernel (`ratrain.targets.program.kernels`) says what it takes and gives. Facts that only one layer
knows (cost, scratch of an implementation, tiling) are in a table of that layer. A table that forgets a new kernel fails
and names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ratrain.ratrain_ir.support.complete_table import CompleteTable
from ratrain.targets.program.kernels import KERNELS

if TYPE_CHECKING:
    from ratrain.targets.program.kernel import Kernel

T = TypeVar("T")

TABLES: list[PerKernel[Any]] = []
"""All tables that have been made, in the order of their layers' imports."""


class PerKernel(CompleteTable[T]):
    """Entries by name, complete over `KERNELS`; `never` are the kernels that do not occur there."""

    def __init__(self, what: str, entries: Mapping[str, T], *, never: Collection[str] = ()) -> None:
        super().__init__(what, entries, never, KERNELS)
        TABLES.append(self)

    def missing(self, kernels: Iterable[Kernel]) -> list[str]:
        """Return a line for each kernel that the table has no entry for."""
        return self.without(kernel.name for kernel in kernels)
