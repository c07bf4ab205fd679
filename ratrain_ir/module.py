"""Modules, their stages, and the text that a module was read from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from itertools import chain

from attrs import define, evolve, field, fields, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Home, TensorType, aligned
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.support.diagnostics import Location
from ratrain.ratrain_ir.support.notebook import ShownInNotebook
from ratrain.ratrain_ir.topology import Topology, topology_of


class Level(Enum):
    """Degree of lowering of a module; each level has its own legality table in the verifier."""

    DATAFLOW = "dataflow"
    """complete and correct, in plain micro-batch order"""
    PLACED = "placed"
    """in schedule order"""
    ALLOCATED = "allocated"
    """every tensor has an address"""


@frozen
class SourceText:
    """Text that a module was read from, for diagnostics."""

    file: str
    lines: tuple[str, ...]

    def line(self, number: int) -> str | None:
        """Return the text of a 1-based line, or None."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else None

    def locate(self, number: int, word: str | None = None) -> Location | None:
        """Return the place of a word in a line (1-based), or of the line's text if no word is given or found.

        None if there is no such line.
        """
        text = self.line(number)
        if text is None:
            return None
        # a word ends where no name goes on: %x.m1 is not in %x.m10
        match = re.search(re.escape(word) + r"(?![\w\-*]|\.[\w*])", text) if word else None
        if match is None:
            stripped = text.lstrip()
            return Location(self.file, number, len(text) - len(stripped) + 1, max(1, len(stripped.rstrip())))
        return Location(self.file, number, match.start() + 1, len(match[0]))


@define(eq=False, repr=False)
class Stage:
    """One pipeline stage: its tensors by name, in declaration order, and one ordered list of ops."""

    index: int
    tensors: dict[str, Tensor] = field(factory=dict)
    ops: list[Op] = field(factory=list)
    line: int = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Declare a tensor.

        Raises ValueError when the name is taken.
        """
        if tensor.name in self.tensors:
            raise ValueError(f"%{tensor.name} is declared twice in stage @{self.index}")
        self.tensors[tensor.name] = tensor
        return tensor

    def free_name(self, name: str) -> str:
        """Return a name that no tensor of the stage has: `name` itself, or `n2.name`, `n3.name`, ...

        The number stands first because the last part of a name may be a slot, which must stay.
        """
        free, number = name, 1
        while free in self.tensors:
            number += 1
            free = f"n{number}.{name}"
        return free

    @property
    def arena_bytes(self) -> int:
        """Bytes of the stage's arena: the highest end of a tensor that is allocated in DDR."""
        return self.bytes_in(Home.DDR)

    @property
    def homes(self) -> tuple[Home, ...]:
        """Memories that the stage's tensors are in, in the order of `Home`."""
        found = {tensor.home for tensor in self.tensors.values()}
        return tuple(home for home in Home if home in found)

    @property
    def bytes_by_home(self) -> dict[Home, int]:
        """Bytes that the stage takes of each memory its tensors are in."""
        return {home: self.bytes_in(home) for home in self.homes}

    def bytes_in(self, home: Home) -> int:
        """Return the bytes that the stage takes of a memory: the highest end of a tensor that is allocated there."""
        highest: dict[TensorType, int] = {}  # a stage has thousands of tensors, of a few types
        for t in self.tensors.values():
            if t.offset is not None and t.home is home and t.offset >= highest.get(t.type, 0):
                highest[t.type] = t.offset
        return max((offset + aligned(type_.nbytes) for type_, offset in highest.items()), default=0)

    def __repr__(self) -> str:
        return f"Stage(@{self.index}, {len(self.tensors)} tensors, {len(self.ops)} ops)"

    def draft(self, ops: Iterable[Op] | None = None) -> Stage:
        """Return a stage with its own lists, of the same ops or of `ops`. The ops and tensors themselves are shared."""
        return Stage(self.index, dict(self.tensors), list(self.ops if ops is None else ops), self.line)

    def prune(self) -> None:
        """Drop the declarations of tensors that no op touches."""
        used = {tensor.name for tensor in set(chain.from_iterable([op.operands for op in self.ops]))}
        self.tensors = {name: t for name, t in self.tensors.items() if name in used}


@frozen
class TargetInfo:
    """Machine that a module was compiled for, and the bytes that a stage may use.

    Only its target interprets `machine`.
    """

    name: str
    capacity_bytes: int
    digest: str = ""
    """digest of the machine's description, 64 hexadecimal digits; empty if the text has none"""
    machine: str = field(default="", repr=False)
    """the machine's description in its target's own words, any number of lines; empty if the name says it all"""
    stores: tuple[tuple[Home, int], ...] = ()
    """the other memories that a stage may use, and the bytes of each"""
    line: int = field(default=0, eq=False, repr=False)

    def capacity_of(self, home: Home) -> int:
        """Return the bytes of a memory that a stage may use; 0 if the machine does not have it."""
        return self.capacity_bytes if home is Home.DDR else dict(self.stores).get(home, 0)


@define(eq=False, repr=False)
class Module(ShownInNotebook):
    """One training step of one model under one plan."""

    name: str
    level: Level
    model: ModelConfig
    plan: Plan
    stages: list[Stage]
    target: TargetInfo | None = None
    pipeline: str = ""
    source: SourceText | None = None

    def draft(self) -> Module:
        """Return a module whose stages have their own lists. The ops and tensors themselves are shared."""
        return evolve(self, stages=[stage.draft() for stage in self.stages])

    def adopt(self, draft: Module) -> None:
        """Take over everything from a draft of this module; the stage objects stay the same."""
        for stage, drafted in zip(self.stages, draft.stages, strict=True):
            stage.tensors, stage.ops = drafted.tensors, drafted.ops
        for name in (a.name for a in fields(Module) if a.name != "stages"):
            setattr(self, name, getattr(draft, name))

    @property
    def topology(self) -> Topology:
        """Ranks under its model and plan: stages, chunks, channels, groups."""
        return topology_of(self.model, self.plan)

    def __repr__(self) -> str:
        return f"Module(@{self.name}, level {self.level.value}, {self.stages})"
