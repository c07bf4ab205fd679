"""Training state in and out of the ranks' arenas: initial weights, checkpoints. The outside sees whole blocks, never shards.

What comes in goes piece by piece to where it stays: a tensor of the embedding alone may be as large as all the rest of a model, and would
have to be in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.blocks import Block, is_sharded
from ratrain.ratrain_ir.diagnostics import fail
from ratrain.targets.runtime.engine import ProgramEngine
from ratrain.targets.runtime.rank import Rank
from ratrain.targets.runtime.scalars import GROWTH_INTERVAL, LossScale
from ratrain.targets.runtime.training_state import BlockStates, TrainingState
from ratrain.targets.runtime.weight_source import FlatPieces, WeightSource, flat_pieces
from ratrain.targets.runtime.weights import block_elements

_LEAST_SCALE = 2.0**-32
"""Loss scales are between this and its inverse, as plans have them."""
_MOMENTS = ("m1", "m2")
_Pieces: TypeAlias = Callable[[int, int], FlatPieces]
"""From a range of elements to those of a block's flat tensor."""


def start_from_weights(engine: ProgramEngine, source: WeightSource) -> None:
    """Fill the carried tensors for a first step: masters from a source, views rounded from them, moments zero."""
    program = engine.program

    def master(block: Block) -> _Pieces:
        return lambda start, stop: flat_pieces(program.model, block, source, start, stop)

    for block, ranks in _owners(engine):
        _fill(engine, ranks, block, "p", master(block))
        for rank in ranks:
            for kind in (*_MOMENTS, "t"):
                rank.fill(kind, str(block), 0)
    for ranks in engine.ranks:
        for rank in ranks:
            _start_scale(rank, program.plan.loss_scale)


def start_from_state(engine: ProgramEngine, state: TrainingState, *, keep_scale: bool = True) -> None:
    """Fill the carried tensors from a checkpoint, which may come from another plan; go on at its step.

    With `keep_scale` a dynamic loss scale goes on too, else it starts anew; a fixed one is always the plan's. Raises `DiagnosticError` RT092 where its loss scale cannot be one.
    """
    program = engine.program
    if not (_LEAST_SCALE <= state.scale[0] <= 1 / _LEAST_SCALE and 0 <= state.scale[1] < GROWTH_INTERVAL):
        fail("RT092", f"the checkpoint has the loss scale {state.scale}, which no run has")

    def saved(block: Block, kind: str) -> _Pieces:
        return lambda start, stop: state.blocks.pieces(block, kind, start, stop)

    for block, ranks in _owners(engine):
        for kind in ("p", *_MOMENTS):
            _fill(engine, ranks, block, kind, saved(block, kind))
        for rank in ranks:
            rank.fill("t", str(block), state.blocks.updates(block))
    for ranks in engine.ranks:
        for rank in ranks:
            if program.plan.loss_scale is None and keep_scale:
                rank.fill("scale", "", state.scale)
            else:
                _start_scale(rank, program.plan.loss_scale)
    engine.first_step = state.step


def training_state(engine: ProgramEngine, step: int) -> TrainingState:
    """What a checkpoint keeps after `step` steps; blocks are copied out when they are asked for, pieces of them are the arenas' own bytes."""
    return TrainingState(step, _ArenaStates(engine.program.model, engine, dict(_owners(engine))), engine.loss_scale)


@frozen(eq=False)
class _ArenaStates(BlockStates):
    """Block states as they are in the ranks' arenas."""

    engine: ProgramEngine
    ranks: dict[Block, list[Rank]]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Elements [start, stop) of a block's tensor of a kind, as views of what the ranks hold."""
        program = self.engine.program
        holders = self.ranks[block]
        for rank in holders if is_sharded(program.plan) else holders[:1]:
            shard = program.topology.shard_range(block, rank.replica)
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                held = rank.carried(kind, str(block))[low - shard.start : high - shard.start]
                yield low, rank.memory.to_host(held)

    def updates(self, block: Block) -> int:
        """Updates applied to a block."""
        return int(self.ranks[block][0].carried("t", str(block))[0])

    def __iter__(self) -> Iterator[Block]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)


def _owners(engine: ProgramEngine) -> Iterator[tuple[Block, list[Rank]]]:
    """Each block with the ranks of this process that hold it, if any do."""
    program = engine.program
    for index, ranks in enumerate(engine.ranks):
        for block in program.topology.stage_blocks[index] if ranks else ():
            yield block, ranks


def _fill(engine: ProgramEngine, ranks: Sequence[Rank], block: Block, kind: str, pieces: _Pieces) -> None:
    """Fill a tensor of a block on all ranks of this process, and of masters the views; each element is asked for once.

    What is between pieces, and behind the last one, is zero. Only the shards of these ranks are asked for, where no view is whole.
    """
    parts: list[tuple[range, NDArray[Any]]] = []
    views: list[NDArray[Any]] = []
    for rank in ranks:
        parts += [
            (engine.program.topology.shard_range(block, rank.replica), tensor)
            for tensor in rank.all_carried(kind, str(block))
        ]
        # There are none where views are gathered for each use.
        views += [tensor.reshape(-1) for tensor in rank.all_carried("w", str(block)) if kind == "p"]
    for tensor in (*(tensor for _, tensor in parts), *views):
        engine.kernels.memory.write(tensor, 0)
    last = block_elements(engine.program.model, block)
    start = 0 if views else min(shard.start for shard, _ in parts)
    stop = last if views else min(last, max(shard.stop for shard, _ in parts))
    memory = engine.kernels.memory
    for at, given in pieces(start, stop):
        end, values = at + given.size, memory.staged(given)
        for shard, tensor in parts:
            low, high = max(at, shard.start), min(end, shard.stop)
            if low < high:
                memory.copy(tensor[low - shard.start : high - shard.start], values[low - at : high - at])
        for view in views:
            engine.scratch.reset()
            engine.kernels.cast(values, view[at:end], scratch=engine.scratch)


def _start_scale(rank: Rank, fixed: float | None) -> None:
    for tensor in rank.all_carried("scale", ""):
        LossScale(tensor).start(fixed)
