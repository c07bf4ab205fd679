"""Tables that a layer adds to the ops; each must have an entry for every kind of op, or it cannot be made.

An op's class (`ratrain.ratrain_ir.ops.base`, and the files of its families) holds all that the IR knows about it.
Knowledge of one layer (the op's meaning in the symbolic run, its cost, its execution) is in a table of that layer. If a
table lacks an entry for a new op, importing that layer fails and names the op; there is no default to fall into.
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
"""All tables made so far, in the order in which their layers were imported."""


class PerOp(CompleteTable[T]):
    """Entries by keyword, complete over `OP_CLASSES`.

    `what` describes the entries in error messages; `never` lists the kinds of ops that cannot occur in this layer.
    """

    def __init__(self, what: str, entries: Mapping[type[Op], T], *, never: Collection[type[Op]] = ()) -> None:
        self.by_kind = dict(entries)
        """Entries by class instead of keyword, for loops over many ops."""
        by_keyword = {kind.keyword: entry for kind, entry in entries.items()}
        super().__init__(what, by_keyword, [kind.keyword for kind in never], OP_CLASSES)
        TABLES.append(self)

    def missing(self, kinds: Iterable[type[Op]]) -> list[str]:
        """Return one line for each of the given kinds of ops that the table does not mention."""
        return self.without(kind.keyword for kind in kinds)
