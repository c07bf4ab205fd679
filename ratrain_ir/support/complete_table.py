"""Tables that layers keep of things declared elsewhere: complete over what is declared, or they cannot be made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class CompleteTable(Mapping[str, T]):
    """Entries by name, one for each that is declared.

    `what` says what an entry is; `never` are the names that do not occur there. Raises TypeError, naming them, where declared names
    have no entry, names with one are not declared, or are said never to occur.
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
        """A line for each of these names of which the table says nothing."""
        return [f"'{name}' has no {self.what}" for name in names if name not in self._known]

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # the one inherited goes by an exception

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
