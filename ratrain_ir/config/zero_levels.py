"""ZeRO levels of single blocks, where these differ from the plan's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from attrs import frozen

LEVELS = (0, 1, 2, 3)
_LAYER = "(0|[1-9][0-9]{0,8})"
_SELECTOR = re.compile(rf"(?P<end>embed|head)|(?P<kind>attention|mlp)\.(?:(?P<all>\*)|{_LAYER}(?:-{_LAYER})?)")


@frozen
class BlockLevel:
    """ZeRO level of some blocks: `embed`, `head`, all of a kind (`mlp.*`), or layers `first` to `last`, inclusive."""

    kind: str
    level: int
    first: int | None = None
    last: int | None = None

    @property
    def blocks(self) -> str:
        """Blocks as the plan names them."""
        if self.kind in ("embed", "head"):
            return self.kind
        if self.first is None:
            return f"{self.kind}.*"
        return f"{self.kind}.{self.first}" + ("" if self.last == self.first else f"-{self.last}")

    def __str__(self) -> str:
        return f"{self.blocks} {self.level}"

    @property
    def layers(self) -> range:
        """Layers that it names; empty for a whole kind."""
        return range(0) if self.first is None or self.last is None else range(self.first, self.last + 1)


@frozen(slots=False)  # for its cached properties
class ZeroLevels:
    """ZeRO levels of blocks. The level of a named layer takes precedence over that of its kind.

    As text: `embed 3, mlp.* 2, mlp.0-3 1` gathers the embedding for each use, and shards the first four MLPs less than
    the others.
    """

    entries: tuple[BlockLevel, ...]

    @classmethod
    def parse(cls, text: str) -> ZeroLevels | None:
        """Return the levels that a text describes; None if it describes none."""
        entries = [_entry(part) for part in text.split(", ")]
        known = tuple(entry for entry in entries if entry is not None)
        return cls(known) if len(known) == len(entries) else None

    def __str__(self) -> str:
        return ", ".join(map(str, self.entries))

    @cached_property
    def of_kinds(self) -> dict[str, int]:
        """Levels of whole kinds."""
        return {entry.kind: entry.level for entry in self.entries if entry.first is None}

    @cached_property
    def of_layers(self) -> dict[tuple[str, int], int]:
        """Levels of blocks that are named by their layer."""
        return {(entry.kind, layer): entry.level for entry in self.entries for layer in entry.layers}

    def level(self, kind: str, layer: int | None, usual: int) -> int:
        """Return the level of a block; `usual` if no entry names it."""
        found = None if layer is None else self.of_layers.get((kind, layer))
        return self.of_kinds.get(kind, usual) if found is None else found

    def usual(self, entry: BlockLevel, usual: int) -> int:
        """Return the level that the blocks of an entry would have without it."""
        return usual if entry.first is None else self.of_kinds.get(entry.kind, usual)

    @property
    def named_twice(self) -> str | None:
        """First blocks that have two levels, as the second entry names them; None if there are none."""
        kinds: set[str] = set()
        layers: set[tuple[str, int]] = set()
        for entry in self.entries:
            each = {(entry.kind, layer) for layer in entry.layers}
            if (entry.first is None and entry.kind in kinds) or each & layers:
                return entry.blocks
            layers |= each
            if entry.first is None:
                kinds.add(entry.kind)
        return None

    @property
    def last_layer(self) -> BlockLevel | None:
        """Entry with the last layer that is named; None if none is."""
        named = [entry for entry in self.entries if entry.last is not None]
        return max(named, key=lambda entry: entry.last or 0, default=None)

    def __iter__(self) -> Iterator[BlockLevel]:
        return iter(self.entries)


MOST_LAYERS_NAMED = 100_000
"""Most layers in one entry, more than any model has. Longer runs are refused, as they would take too much memory."""


def _entry(text: str) -> BlockLevel | None:
    selector, _, level = text.rpartition(" ")
    match = _SELECTOR.fullmatch(selector)
    if match is None or level not in map(str, LEVELS):
        return None
    if match["end"]:
        return BlockLevel(match["end"], int(level))
    if match["all"]:
        return BlockLevel(match["kind"], int(level))
    first = int(match[4])
    last = first if match[5] is None else int(match[5])
    if not first <= last < first + MOST_LAYERS_NAMED:
        return None
    return BlockLevel(match["kind"], int(level), first, last)
