"""What a layer adds to the ops: a table with an entry for every kind, or it cannot be made.

An op's class (`ratrain.ratrain_ir.ops`) says all that the IR knows of it. What only a layer knows (its meaning in the symbolic run, its cost, its
execution) stands in a table of that layer. A new op that one of them forgets fails by name when that layer is imported, and never
falls into a default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ratrain.ratrain_ir.ops import OP_CLASSES, Op

T = TypeVar("T")

TABLES: list[PerOp[Any]] = []
"""All tables that have been made, in the order of their layers' imports."""


class PerOp(Mapping[str, T]):
    """Entries by keyword, complete over `OP_CLASSES`.

    `what` says what an entry is; `never` are the kinds that do not occur there. Raises TypeError, naming them, where kinds have no
    entry, or are said never to occur and have one.
    """

    def __init__(self, what: str, entries: Mapping[type[Op], T], *, never: Collection[type[Op]] = ()) -> None:
        self.what = what
        self.kinds = frozenset({*entries, *never})
        self.by_kind = dict(entries)
        """The entries by class: what loops over many ops look up."""
        self._entries = {kind.keyword: entry for kind, entry in entries.items()}
        problems = self.missing(OP_CLASSES.values())
        problems += [f"'{kind.keyword}' has {what}, and never occurs there" for kind in never if kind in entries]
        if problems:
            raise TypeError("; ".join(problems))
        TABLES.append(self)

    def missing(self, kinds: Iterable[type[Op]]) -> list[str]:
        """A line for each kind of op of which the table says nothing."""
        return [f"'{kind.keyword}' has no {self.what}" for kind in kinds if kind not in self.kinds]

    def __getitem__(self, keyword: str) -> T:
        return self._entries[keyword]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
