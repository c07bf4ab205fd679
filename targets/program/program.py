"""The executable program: for every stage and engine a stream of instructions with waits on the other engines.

A wait names an engine and a count: so many instructions of that engine's stream must have completed, in this step or in the one
before. Waits on the engine's own past are implied by its order. What is verified, run and timed is this very program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.module import TargetInfo
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.ops.messages import Evict, GiveBack
from ratrain.ratrain_ir.support.notebook import ShownInNotebook
from ratrain.ratrain_ir.topology import Topology, topology_of
from ratrain.targets.program.columns import Int64s, ProgramColumns, StageObjects, columns_of
from ratrain.targets.program.instruction import Access, Instruction, ProgramTensor
from ratrain.targets.program.routine import Routine

_MAKING = Lock()
"""Held where objects are made of columns: ranks in threads of one process share their stages."""


@define(eq=False, slots=False)
class ProgramStage:
    """One stage: its tensors and one stream an engine.

    One that was read has columns in place of these objects, until somebody asks for them; from then on they are what counts, since they
    may be changed.
    """

    tensors: list[ProgramTensor]
    streams: dict[Engine, list[Instruction]] = field(factory=lambda: {engine: [] for engine in ENGINES})
    order: list[Engine] | None = None
    """The engines of its instructions in list order, in which the schedule has them; what does not fit the streams, as they are now, counts for nothing."""

    @classmethod
    def of_columns(cls, columns: ProgramColumns, number: int, peak_live_bytes: int | None = None) -> ProgramStage:
        """A stage of a program that was read, or emitted: then its peak is known."""
        stage = cls.__new__(cls)
        stage.__dict__.update(read_from=(columns, number), known_peak=peak_live_bytes)
        return stage

    @property
    def unread(self) -> tuple[ProgramColumns, int] | None:
        """The columns that it is still in, and which stage of them it is; None where it is objects."""
        found: tuple[ProgramColumns, int] | None = self.__dict__.get("read_from")
        return found

    def __getattr__(self, name: str) -> Any:
        """What columns are turned into when it is asked for the first time."""
        if name not in ("tensors", "streams", "order"):
            raise AttributeError(name=name, obj=self)
        with _MAKING:
            if (unread := self.unread) is not None:
                columns, number = unread
                self.tensors = columns.tensors(number)
                self.order = None if columns.order is None else columns.engines_in_order(number)
                self.streams = {engine: columns.stream(number, engine) for engine in ENGINES}
                del self.__dict__["read_from"]
        return self.__dict__[name]

    @property
    def objects(self) -> StageObjects:
        """All that is asked of it to make columns."""
        return StageObjects(self.tensors, [self.streams[engine] for engine in ENGINES], self.order)

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes live at once in list order: a lower bound of the arena."""
        unread = self.unread
        if unread is None:
            return columns_of([self.objects], 0).peak_live_bytes(0)
        known: int | None = self.__dict__["known_peak"]
        if known is None:
            known = self.__dict__["known_peak"] = unread[0].peak_live_bytes(unread[1])
        return known

    def list_order(self) -> list[tuple[Engine, int]]:
        """One step's instructions, as (engine, position), in list order; shorter than the streams where engines wait for each other."""
        return self._places(ProgramColumns.list_order)

    def execution_order(self) -> list[tuple[Engine, int]]:
        """One step's instructions, as (engine, position), each after all that it waits for in its step.

        Shorter than the streams where engines wait for each other.
        """
        return self._places(ProgramColumns.execution_order)

    def live_bytes(self) -> dict[tuple[Engine, int], int]:
        """Live bytes in DDR while an instruction, (engine, position), runs, in execution order."""
        columns, number = self._columns
        live = columns.live_bytes(number, columns.execution_order(number))
        return dict(zip(self.execution_order(), live.tolist(), strict=False))

    @property
    def _columns(self) -> tuple[ProgramColumns, int]:
        return self.unread or (columns_of([self.objects], 0), 0)

    def _places(self, order: Callable[[ProgramColumns, int], Int64s]) -> list[tuple[Engine, int]]:
        """Instructions, as (engine, position), in an order that columns have."""
        columns, number = self._columns
        stops = columns.stream_stops[number * len(ENGINES) : (number + 1) * len(ENGINES)]
        found = order(columns, number)
        engines = np.searchsorted(stops, found, side="right")
        positions = found - (stops - columns.lengths[number])[engines]
        return list(zip(map(ENGINES.__getitem__, engines.tolist()), positions.tolist(), strict=True))

    @cached_property
    def carried(self) -> dict[tuple[str, str], list[int]]:
        """Tensors that outlive the step by what they hold, ("p", "mlp.0") or ("scale", ""): names are free, roles are not."""
        carried: dict[tuple[str, str], list[int]] = {}
        for stream in self.streams.values():
            for instruction in stream:
                for operand in instruction.operands:
                    if self.tensors[operand.tensor].carried:
                        what, _, block = operand.role.partition(".")
                        owner = "" if what == "scale" else block or instruction.blocks[0]
                        numbers = carried.setdefault((what, owner), [])
                        if operand.tensor not in numbers:
                            numbers.append(operand.tensor)
        return carried

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of the stage's arena, which is in DDR."""
        return self.bytes_in(Home.DDR)

    def bytes_in(self, home: Home) -> int:
        """Bytes the stage takes of a memory."""
        if (unread := self.unread) is not None:
            return unread[0].bytes_in(unread[1], home)
        return max((t.end for t in self.tensors if t.home is home), default=0)

    def moved_bytes(self, home: Home) -> tuple[int, int]:
        """Bytes that a step reads from another memory, and writes to it."""
        read = written = 0
        for operand in (o for stream in self.streams.values() for item in stream for o in item.operands):
            tensor = self.tensors[operand.tensor]
            if tensor.home is home:
                read += tensor.type.nbytes if operand.access in (Access.READ, Access.UPDATE) else 0
                written += tensor.type.nbytes if operand.access in (Access.WRITE, Access.UPDATE) else 0
        return read, written

    @property
    def lengths(self) -> tuple[int, ...]:
        """Instructions of each engine."""
        if (unread := self.unread) is not None:
            return tuple(unread[0].lengths[unread[1]].tolist())
        return tuple(len(self.streams[engine]) for engine in ENGINES)

    @property
    def instructions(self) -> int:
        """Instructions of all engines together."""
        return sum(self.lengths)


_GUESTS_LEAVE = (Evict.keyword, GiveBack.keyword)


@define(eq=False, repr=False)
class Program(ShownInNotebook):
    """The whole program of one training step."""

    name: str
    model: ModelConfig
    plan: Plan
    target: str
    capacity_bytes: int
    pipeline: str
    routines: list[Routine]
    stages: list[ProgramStage]
    machine_digest: str = ""
    """of the machine it was compiled for; empty where the program does not say it"""
    machine_text: str = ""
    """that machine in its own words; empty where its name, `target`, says it all"""
    stores: tuple[tuple[Home, int], ...] = ()
    """the other memories that a stage may use, and how many bytes of each"""

    def __repr__(self) -> str:
        count = sum(stage.instructions for stage in self.stages)
        words = f"{self.topology.words}, {count} instructions, {len(self.routines)} routines"
        return f"Program({self.name}: {words}, for {self.target})"

    @property
    def info(self) -> TargetInfo:
        """What the program says of the machine it was compiled for."""
        return TargetInfo(self.target, self.capacity_bytes, self.machine_digest, self.machine_text, self.stores)

    @property
    def topology(self) -> Topology:
        """Who is where under its model and plan."""
        return topology_of(self.model, self.plan)

    def columns(self) -> ProgramColumns:
        """Its instructions and tensors as columns, as they are now."""
        slices = self.plan.shape.slices if self.plan.slices else 0
        unread = [stage.unread for stage in self.stages]
        if unread and unread[0] is not None:
            columns = unread[0][0]
            whole = [(columns, number) for number in range(columns.stages)]
            if columns.slices == slices and unread == whole:
                return columns
        return columns_of([each.objects for each in self.stages], slices)

    @cached_property
    def senders_of_guests(self) -> dict[int, set[int]]:
        """The stages that each stage receives guests from, its own that come back included."""
        found: dict[int, set[int]] = {}
        for number, stage in enumerate(self.stages):
            for item in (item for stream in stage.streams.values() for item in stream):
                hop = item.hop(number, self.topology) if item.keyword in _GUESTS_LEAVE else None
                if hop is not None:
                    found.setdefault(hop.target, set()).add(number)
        return found

    @property
    def arena_bytes_of_all_ranks(self) -> int:
        """Bytes that all arenas of the job take together."""
        return self.topology.lanes * sum(stage.arena_bytes for stage in self.stages)
