"""The executable program: for every stage and engine a stream of instructions with waits on the other engines.

A wait names an engine and a count: so many instructions of that engine's stream must have completed, in this step or in the one
before. Waits on the engine's own past are implied by its order. What is verified, run and timed is this very program.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import NamedTuple

from attrs import define, field, frozen

from ratrain.ratrain_ir.frontend.model_config import ModelConfig
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrain_ir.messages import DIRECTIONS, Direction, payload_of
from ratrain.ratrain_ir.module import TargetInfo
from ratrain.ratrain_ir.notebook import ShownInNotebook
from ratrain.ratrain_ir.ops import ENGINES, Engine, Evict, GiveBack, Piece, Slice
from ratrain.ratrain_ir.topology import Hop, Topology, topology_of
from ratrain.ratrain_ir.types import Home, StateKind, TensorType, aligned
from ratrain.targets.program.routine import Routine


class Access(Enum):
    """What an instruction does to an operand's bytes."""

    READ = 0
    WRITE = 1
    UPDATE = 2
    SCRATCH = 3

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower


@frozen
class ProgramTensor:
    """A tensor with its place in the stage's part of a memory."""

    name: str
    kind: StateKind
    type: TensorType
    carried: bool
    offset: int
    home: Home = Home.DDR

    @property
    def end(self) -> int:
        """First byte after the tensor, alignment included."""
        return self.offset + aligned(self.type.nbytes)


class Operand(NamedTuple):
    """A bound operand: the role it plays, the tensor's index in the stage, how it is accessed."""

    role: str
    tensor: int
    access: Access


@frozen
class CountWait:
    """`count` instructions of an engine's stream must have completed, in this step or the previous one."""

    engine: Engine
    count: int
    previous_step: bool


@define(eq=False)
class Instruction:
    """One entry of a stream. `keyword` is the op's; only block ops call a routine."""

    keyword: str
    routine: int | None
    micro_batch: int | None
    peer: int | None
    variant: str
    """payload, part, quantity or group of the op; empty where it has none"""
    group: str
    """the group of a collective; empty elsewhere"""
    blocks: tuple[str, ...]
    accumulates: bool
    operands: tuple[Operand, ...]
    waits: tuple[CountWait, ...]
    blocking: bool = False
    """of a collective: whether compute waits for it"""
    chunk: int | None = None
    """of a message where stages hold several chunks: the one that it goes into"""
    slice: int | None = None
    """where micro-batches are cut: the slice that it works on"""

    @property
    def piece(self) -> Piece:
        """The micro-batch, or the slice of one, that an instruction of the pipeline works on."""
        assert self.micro_batch is not None
        return self.micro_batch if self.slice is None else Slice(self.micro_batch, self.slice)

    @property
    def title_without_blocks(self) -> str:
        """What must be equal on all members of a collective: ends hold different blocks."""
        return " ".join([self.keyword, self.variant, self.group, str(self.micro_batch)])

    @property
    def title(self) -> str:
        """The op in words, as the text writes it."""
        return self._title(with_micro_batch=True)

    @property
    def title_without_micro_batch(self) -> str:
        """The title, equal for all micro-batches."""
        return self._title(with_micro_batch=False)

    @property
    def carried(self) -> tuple[Operand, ...]:
        """What of its operands a message carries, in the order in which it goes: all but a workspace."""
        return tuple(operand for operand in self.operands if operand.access is not Access.SCRATCH)

    @property
    def direction(self) -> Direction | None:
        """Which way a message goes; None of what is none."""
        return DIRECTIONS[self.keyword]

    def ends(self, stage: int) -> tuple[int, int] | None:
        """The stages that a message of `stage` leaves and reaches; None of what is no message, or has no peer."""
        direction = self.direction
        if direction is None or self.peer is None:
            return None
        return (stage, self.peer) if direction is Direction.OUT else (self.peer, stage)

    def hop(self, stage: int, topology: Topology) -> Hop | None:
        """The channel of a message of `stage`; None of what is no message, or goes where none does."""
        ends, payload = self.ends(stage), payload_of(self.keyword, self.variant)
        return None if ends is None or payload is None else topology.hop(*ends, payload, self.chunk)

    def _title(self, *, with_micro_batch: bool) -> str:
        parts = [self.keyword]
        if self.variant:
            parts.append(self.variant)
        if self.blocks:
            parts.append("+".join(self.blocks))
        if self.group not in ("", "replicas", "shards"):
            parts.append(self.group)
        if with_micro_batch and self.micro_batch is not None:
            parts.append(f"m{self.micro_batch}")
        if self.slice is not None:
            parts.append(f"s{self.slice}")
        if self.chunk is not None:
            parts.append(f"c{self.chunk}")
        if self.peer is not None:
            parts.append(f"@{self.peer}")
        if self.blocking:
            parts.append("blocking")
        return " ".join(parts)


@define(eq=False)
class ProgramStage:
    """One stage: its tensors and one stream an engine."""

    tensors: list[ProgramTensor]
    streams: dict[Engine, list[Instruction]] = field(factory=lambda: {engine: [] for engine in ENGINES})
    peak_live_bytes: int = 0
    """Most bytes live at once in list order: a lower bound of the arena."""

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

    def execution_order(self) -> list[tuple[Engine, int]]:
        """One step's instructions, as (engine, position), each after all that it waits for in its step.

        Shorter than the streams where engines wait for each other.
        """
        done = dict.fromkeys(ENGINES, 0)
        order: list[tuple[Engine, int]] = []
        running = True
        while running:
            running = False
            for engine in ENGINES:
                stream = self.streams[engine]
                while done[engine] < len(stream) and _may_go(stream[done[engine]], done):
                    order.append((engine, done[engine]))
                    done[engine] += 1
                    running = True
        return order

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of the stage's arena, which is in DDR."""
        return self.bytes_in(Home.DDR)

    def bytes_in(self, home: Home) -> int:
        """Bytes the stage takes of a memory."""
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
    def instructions(self) -> int:
        """Instructions of all engines together."""
        return sum(len(stream) for stream in self.streams.values())


def _may_go(instruction: Instruction, done: dict[Engine, int]) -> bool:
    """Whether what an instruction waits for in its own step has been done."""
    return all(wait.previous_step or done[wait.engine] >= wait.count for wait in instruction.waits)


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
