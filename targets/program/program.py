"""The executable program: for every stage and engine a stream of instructions with waits on the other engines.

A wait names an engine and a count: that many instructions of that engine's stream must have completed, in this step or
in the one before. Waits on the engine's own past are implied by its order. The very same program is verified, run and
timed.
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
from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.module import TargetInfo
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.ops.messages import DonorReturn, PeerOffload
from ratrain.ratrain_ir.support.notebook import ShownInNotebook
from ratrain.ratrain_ir.topology import Topology, topology_of
from ratrain.targets.program.columns import Int64s, ProgramColumns, StageObjects, program_columns
from ratrain.targets.program.instruction import Access, Instruction, ProgramTensor
from ratrain.targets.program.routine import Routine

_MAKING = Lock()
"""Held while objects are made of columns: ranks in threads of one process share their stages."""


@define(eq=False, slots=False)
class ProgramStage:
    """One stage: its tensors and one stream an engine.

    A stage that was read holds columns until `tensors`, `streams` or `order` is asked for. From then on these objects
    count, since they may be changed.
    """

    tensors: list[ProgramTensor]
    streams: dict[Engine, list[Instruction]] = field(factory=lambda: {engine: [] for engine in ENGINES})
    order: list[Engine] | None = None
    """Engines of its instructions in list order, in which the schedule has them; ignored where it does not fit the
    streams."""

    @classmethod
    def of_columns(cls, columns: ProgramColumns, number: int, peak_live_bytes: int | None = None) -> ProgramStage:
        """Return a stage of a program in columns; `peak_live_bytes` is given where it is known already."""
        stage = cls.__new__(cls)
        stage.__dict__.update(read_from=(columns, number), known_peak=peak_live_bytes)
        return stage

    @property
    def unread(self) -> tuple[ProgramColumns, int] | None:
        """Columns that the stage is still in, and its number there; None where it is objects."""
        found: tuple[ProgramColumns, int] | None = self.__dict__.get("read_from")
        return found

    def __getattr__(self, name: str) -> Any:
        """Make the objects of a stage in columns at the first access to one of them."""
        if name not in ("tensors", "streams", "order"):
            raise AttributeError(name=name, obj=self)
        # Another thread may have made the objects while this one waited for the lock. `read_from` goes last: until then
        # `unread` is true.
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
        """Everything that `program_columns` needs of the stage."""
        return StageObjects(self.tensors, [self.streams[engine] for engine in ENGINES], self.order)

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes live at once in list order: a lower bound of the arena."""
        unread = self.unread
        if unread is None:
            return program_columns([self.objects], 0).peak_live_bytes(0)
        known: int | None = self.__dict__["known_peak"]
        if known is None:
            known = self.__dict__["known_peak"] = unread[0].peak_live_bytes(unread[1])
        return known

    def list_order(self) -> list[tuple[Engine, int]]:
        """Return one step's instructions in list order, as (engine, position).

        The list is shorter than the streams where engines wait for each other.
        """
        return self._places(ProgramColumns.list_order)

    def execution_order(self) -> list[tuple[Engine, int]]:
        """Return one step's instructions, as (engine, position), each after all that it waits for in its step.

        The list is shorter than the streams where engines wait for each other.
        """
        return self._places(ProgramColumns.execution_order)

    def live_bytes(self) -> dict[tuple[Engine, int], int]:
        """Return the live bytes in DDR while each instruction, (engine, position), runs, in execution order."""
        columns, number = self.in_columns
        live = columns.live_bytes(number, columns.execution_order(number))
        return dict(zip(self.execution_order(), live.tolist(), strict=False))

    @property
    def in_columns(self) -> tuple[ProgramColumns, int]:
        """Columns of the stage in its present state, and its number there; slices are not told if it is objects."""
        return self.unread or (program_columns([self.objects], 0), 0)

    def _places(self, order: Callable[[ProgramColumns, int], Int64s]) -> list[tuple[Engine, int]]:
        """Return instructions, as (engine, position), in an order that columns have."""
        columns, number = self.in_columns
        stops = columns.stream_stops[number * len(ENGINES) : (number + 1) * len(ENGINES)]
        found = order(columns, number)
        engines = np.searchsorted(stops, found, side="right")
        positions = found - (stops - columns.lengths[number])[engines]
        return list(zip(map(ENGINES.__getitem__, engines.tolist()), positions.tolist(), strict=True))

    @cached_property
    def carried(self) -> dict[tuple[str, str], list[int]]:
        """Tensors that outlive the step, by contents: ("p", "mlp.0") or ("scale", "").

        Roles tell these; names are free.
        """
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
        """Return the bytes the stage takes of a memory."""
        if (unread := self.unread) is not None:
            return unread[0].bytes_in(unread[1], home)
        return max((t.end for t in self.tensors if t.home is home), default=0)

    def moved_bytes(self, home: Home) -> tuple[int, int]:
        """Return the bytes that a step reads from a memory, and the bytes that it writes to it."""
        read = written = 0
        for operand in (o for stream in self.streams.values() for item in stream for o in item.operands):
            tensor = self.tensors[operand.tensor]
            if tensor.home is home:
                read += tensor.type.nbytes if operand.access in (Access.READ, Access.UPDATE) else 0
                written += tensor.type.nbytes if operand.access in (Access.WRITE, Access.UPDATE) else 0
        return read, written

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of instructions of each engine."""
        if (unread := self.unread) is not None:
            return tuple(unread[0].lengths[unread[1]].tolist())
        return tuple(len(self.streams[engine]) for engine in ENGINES)

    @property
    def instructions(self) -> int:
        """Number of instructions of all engines together."""
        return sum(self.lengths)


_LEAVE = (PeerOffload.keyword, DonorReturn.keyword)


@define(eq=False, repr=False)
class Program(ShownInNotebook):
    """Program of one training step, of all stages."""

    name: str
    model: ModelConfig
    plan: Plan
    target: str
    capacity_bytes: int
    pipeline: str
    routines: list[Routine]
    stages: list[ProgramStage]
    machine_digest: str = ""
    """digest of the machine it was compiled for; empty where the program does not give it"""
    machine_text: str = ""
    """text of that machine's file; empty where its name, `target`, is enough"""
    stores: tuple[tuple[Home, int], ...] = ()
    """other memories that a stage may use, and how many bytes of each"""

    def __repr__(self) -> str:
        count = sum(stage.instructions for stage in self.stages)
        words = f"{self.topology.words}, {count} instructions, {len(self.routines)} routines"
        return f"Program({self.name}: {words}, for {self.target})"

    @property
    def info(self) -> TargetInfo:
        """Facts that the program carries of the machine it was compiled for."""
        return TargetInfo(self.target, self.capacity_bytes, self.machine_digest, self.machine_text, self.stores)

    @property
    def trained_model(self) -> ModelConfig:
        """Return its model with what the plan trains of it: adapters are among its parameters, as in checkpoints."""
        return trained_model(self.model, self.plan)

    @property
    def topology(self) -> Topology:
        """Topology of its model and plan: the place of every rank."""
        return topology_of(self.model, self.plan)

    def columns(self) -> ProgramColumns:
        """Return its instructions and tensors as columns, in their present state."""
        slices = self.plan.shape.slices if self.plan.slices else 0
        unread = [stage.unread for stage in self.stages]
        if unread and unread[0] is not None:
            columns = unread[0][0]
            whole = [(columns, number) for number in range(columns.stages)]
            # Nobody has asked for objects of any stage, so nothing was changed: the columns that were read are still
            # right.
            if columns.slices == slices and unread == whole:
                return columns
        return program_columns([each.objects for each in self.stages], slices)

    @cached_property
    def peer_memory_senders(self) -> dict[int, set[int]]:
        """Stages that offload to, or return to, each stage."""
        found: dict[int, set[int]] = {}
        for number, stage in enumerate(self.stages):
            for item in (item for stream in stage.streams.values() for item in stream):
                hop = item.hop(number, self.topology) if item.keyword in _LEAVE else None
                if hop is not None:
                    found.setdefault(hop.target, set()).add(number)
        return found

    @property
    def arena_bytes_of_all_ranks(self) -> int:
        """Bytes that all arenas of the job take together."""
        return self.topology.lanes * sum(stage.arena_bytes for stage in self.stages)
