"""Parts of programs: tensors with their places, instructions with their operands and waits."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from attrs import define, frozen

from ratrain.ratrain_ir.config.types import Home, StateKind, TensorType, aligned
from ratrain.ratrain_ir.ops.base import Direction, Engine, Piece, Slice
from ratrain.ratrain_ir.ops.kinds import DIRECTIONS
from ratrain.ratrain_ir.ops.messages import payload_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop, Topology


HEAD_GROUP = "g{}"
"""Word of a group of heads in a variant."""

_LONGEST_GROUP = 10


class Access(Enum):
    """Access of an instruction to an operand's bytes."""

    READ = 0
    WRITE = 1
    UPDATE = 2
    SCRATCH = 3

    __hash__ = object.__hash__  # members are single objects; the hash of `Enum` is several times slower


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
    """A bound operand: its role, the tensor's index in the stage, its access."""

    role: str
    tensor: int
    access: Access


def bound_operands(roles: Iterable[str], tensors: Iterable[int], accesses: Iterable[Access]) -> list[Operand]:
    """Return operands made of roles, tensors and accesses, quickly: a program has millions."""
    return list(map(_NEW_OPERAND, zip(roles, tensors, accesses, strict=True)))


_NEW_OPERAND = partial(tuple.__new__, Operand)
"""Constructor as `Operand._make`, without a Python call for each operand."""


@frozen
class CountWait:
    """Wait until `count` instructions of an engine's stream have completed, in this step or the previous one."""

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
    """payload, part, quantity or phase of the op, and its group of heads, joined by dots; empty where it has none"""
    group: str
    """group of a collective; empty elsewhere"""
    blocks: tuple[str, ...]
    accumulates: bool
    operands: tuple[Operand, ...]
    waits: tuple[CountWait, ...]
    blocking: bool = False
    """of a collective: compute waits for it"""
    chunk: int | None = None
    """of a message, where stages hold several chunks: the chunk that it goes into"""
    slice: int | None = None
    """where micro-batches are cut: the slice that it works on"""

    @property
    def piece(self) -> Piece:
        """Micro-batch, or slice of one, that an instruction of the pipeline works on."""
        assert self.micro_batch is not None
        return self.micro_batch if self.slice is None else Slice(self.micro_batch, self.slice)

    @property
    def head_group(self) -> int | None:
        """Group of heads that an exchange of keys, or attention to them, is of; None where it names none."""
        word = self.variant.rpartition(".")[2]
        of_group = word[:1] == HEAD_GROUP[0] and word[1:].isdecimal() and len(word) < _LONGEST_GROUP
        return int(word[1:]) if of_group else None

    @property
    def title_without_blocks(self) -> str:
        """Text that is equal on all members of a collective: the ends of the pipeline hold different blocks."""
        return " ".join([self.keyword, self.variant, self.group, str(self.micro_batch)])

    @property
    def title(self) -> str:
        """The op in words, as the text writes it."""
        return self._title(with_micro_batch=True)

    @property
    def title_without_micro_batch(self) -> str:
        """The title without the micro-batch."""
        return self._title(with_micro_batch=False)

    @property
    def carried(self) -> tuple[Operand, ...]:
        """Operands that a message carries, in the order in which they are sent: all but a workspace."""
        return tuple(operand for operand in self.operands if operand.access is not Access.SCRATCH)

    @property
    def direction(self) -> Direction | None:
        """Direction of a message; None for other instructions."""
        return DIRECTIONS[self.keyword]

    def ends(self, stage: int) -> tuple[int, int] | None:
        """Return the stages that a message of `stage` leaves and reaches; None for an instruction without a peer."""
        direction = self.direction
        if direction is None or self.peer is None:
            return None
        return (stage, self.peer) if direction is Direction.OUT else (self.peer, stage)

    def hop(self, stage: int, topology: Topology) -> Hop | None:
        """Return the channel of a message of `stage`; None for other instructions, or where no channel goes."""
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
