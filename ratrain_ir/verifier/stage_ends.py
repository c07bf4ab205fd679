"""Ends of a stage: its messages, its collectives, and who waits for whom in it. Rules across stages compare them.

They are small compared with the stage, so that a process that looks at one stage can send them to another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence import StageNumbers
from ratrain.ratrain_ir.analysis.progress import StageEvents, hop_of, meeting_stages, stage_edges
from ratrain.ratrain_ir.ops.base import Direction, Op, Piece, Slice
from ratrain.ratrain_ir.ops.collectives import AllReduce, AllReduceScalar
from ratrain.ratrain_ir.ops.messages import MessageOp, OffloadOp
from ratrain.ratrain_ir.topology import Hop

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.columns import StageColumns
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage

T = TypeVar("T", bound=Hashable)
Int64s = NDArray[np.int64]


class Message(NamedTuple):
    """Content of a message: its piece and, for offloaded activations, the block and the types of the tensors."""

    block: Block | None
    piece: Piece
    types: tuple[str, ...]

    @property
    def carried(self) -> tuple[Block | None, Piece]:
        """Block and piece, which are sent once a step."""
        return self.block, self.piece


@frozen(eq=False)
class StageEnds:
    """Facts about one stage that rules across stages need."""

    events: StageEvents
    sent: Mapping[Hop, Sequence[Message]]
    """messages of each channel, in order"""
    received: Mapping[Hop, Sequence[Message]]
    met: Mapping[tuple[int, ...], Sequence[str]]
    """names of collectives, in order, by the stages that meet in them"""


def stage_ends(module: Module, stage: Stage, columns: StageColumns) -> StageEnds:
    """Collect the ends of a stage whose structure is sound, kind by kind."""
    topology = module.topology
    sends: dict[Hop, list[int]] = {}
    recvs: dict[Hop, list[int]] = {}
    meetings: dict[tuple[int, ...], list[int]] = {}
    for kind, op in enumerate(columns.examples):
        if isinstance(op, MessageOp):
            hop = hop_of(op, stage, topology)
            assert hop is not None  # the structure of a sound module
            (sends if op.direction is Direction.OUT else recvs).setdefault(hop, []).append(kind)
        if group := meeting_stages(op, stage, topology):
            meetings.setdefault(group, []).append(kind)
    met, sent, received = (_places(columns, each) for each in (meetings, sends, recvs))
    edges = stage_edges(StageNumbers(columns.swept, []))
    kinds = np.asarray(columns.kinds, np.int64)
    names = {kind: _name(columns.examples[kind]) for each in meetings.values() for kind in each}
    return StageEnds(
        StageEvents(len(columns), *edges, met, sent, received),
        {hop: _messages(columns, places) for hop, places in sent.items()},
        {hop: _messages(columns, places) for hop, places in received.items()},
        {group: [names[kind] for kind in kinds[places].tolist()] for group, places in met.items()},
    )


def _places(columns: StageColumns, kinds: Mapping[T, Sequence[int]]) -> dict[T, Int64s]:
    return {key: columns.places(each) for key, each in kinds.items()}


def _messages(columns: StageColumns, places: Int64s) -> list[Message]:
    kinds, micro_batches = (np.asarray(each, np.int64)[places] for each in (columns.kinds, columns.micro_batches))
    parts = {kind: _parts(columns.examples[kind]) for kind in dict.fromkeys(kinds.tolist())}
    found = []
    for kind, micro_batch in zip(kinds.tolist(), micro_batches.tolist(), strict=True):
        block, number, types = parts[kind]
        found.append(Message(block, micro_batch if number is None else Slice(micro_batch, number), types))
    return found


def _parts(op: Op) -> tuple[Block | None, int | None, tuple[str, ...]]:
    """Return what messages of a kind have in common: block, slice and types."""
    assert isinstance(op, MessageOp)
    if not isinstance(op, OffloadOp):
        return None, op.slice, ()
    moved = op.reads if op.direction is Direction.OUT else op.writes
    return op.block, op.slice, tuple(str(tensor.type) for tensor in moved)


def _name(op: Op) -> str:
    """Return what must be equal on all members of a collective: its kind, and what it combines."""
    assert isinstance(op, AllReduce | AllReduceScalar)
    quantity = op.quantity.value if isinstance(op, AllReduceScalar) else "gradient"
    return f"{op.keyword} {quantity} {op.group.value}"
