"""What a layer adds to the ops: a table with an entry for every kind, or it cannot be made.

An op's class (`ratrain.ratrain_ir.ops.base`, and the files of its families) says all that the IR knows of it. What
only a layer knows (its meaning in the symbolic run, its cost, its execution) stands in a table of that layer. A new op
that one of them forgets fails by name when that layer is imported, and never falls into a default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.support.complete_table import CompleteTable

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op

T = TypeVar("T")

TABLES: list[PerOp[Any]] = []
"""All tables that have been made, in the order of their layers' imports."""


class PerOp(CompleteTable[T]):
    """Entries by keyword, complete over `OP_CLASSES`; `never` are the kinds that do not occur there."""

    def __init__(self, what: str, entries: Mapping[type[Op], T], *, never: Collection[type[Op]] = ()) -> None:
        self.by_kind = dict(entries)
        """The entries by class: what loops over many ops look up."""
        by_keyword = {kind.keyword: entry for kind, entry in entries.items()}
        super().__init__(what, by_keyword, [kind.keyword for kind in never], OP_CLASSES)
        TABLES.append(self)

    def missing(self, kinds: Iterable[type[Op]]) -> list[str]:
        """A line for each kind of op of which the table says nothing."""
        return self.without(kind.keyword for kind in kinds)
