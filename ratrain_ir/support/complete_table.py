"""Tables that layers keep about things declared elsewhere; an incomplete table cannot be made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class CompleteTable(Mapping[str, T]):
    """Entries by name, one for each declared name.

    `what` names an entry in messages; `never` lists declared names that need no entry here. Raises TypeError that names
    every declared name without an entry, every entry or `never` name that is not declared, and every name that is both.
    """

    def __init__(self, what: str, entries: Mapping[str, T], never: Collection[str], declared: Collection[str]) -> None:
        self.what = what
        self._entries = dict(entries)
        self._known = frozenset({*entries, *never})
        problems = self.without(declared)
        problems += [f"'{name}' has {what}, and never occurs there" for name in never if name in entries]
        problems += [f"'{name}' is not declared" for name in (*entries, *never) if name not in declared]
        if problems:
            raise TypeError("; ".join(problems))

    def without(self, names: Iterable[str]) -> list[str]:
        """Return one line for each of these names that is neither an entry nor in `never`."""
        return [f"'{name}' has no {self.what}" for name in names if name not in self._known]

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # the inherited method calls `__getitem__` and catches KeyError, which is slow

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
