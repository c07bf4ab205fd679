"""Training state in and out of the ranks' arenas: initial weights, checkpoints. The outside sees whole blocks, never shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.blocks import Block, flat_elements, is_sharded
from ratrain.ratrain_ir.diagnostics import fail
from ratrain.targets.runtime.checkpoint import BlockState, TrainingState
from ratrain.targets.runtime.optimizer import GROWTH_INTERVAL, LossScale
from ratrain.targets.runtime.weights import WeightSource, block_elements, flat_master

if TYPE_CHECKING:
    from ratrain.targets.runtime.engine import ProgramEngine
    from ratrain.targets.runtime.rank import Rank

Flat = NDArray[np.float32]
_LEAST_SCALE = 2.0**-32
"""Loss scales are between this and its inverse, as plans have them."""
_STATE_TENSORS = ("p", "m1", "m2")


def start_from_weights(engine: ProgramEngine, source: WeightSource) -> None:
    """Fill the carried tensors for a first step: masters from a source, views rounded from them, moments zero."""
    program = engine.program
    for block, ranks in _owners(engine):
        flat = flat_master(program.model, program.plan, block, source)
        zeros = np.zeros_like(flat)
        for rank in ranks:
            _fill(engine, rank, block, (flat, zeros, zeros), updates=0)
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
    for block, ranks in _owners(engine):
        saved = state.blocks[block]
        elements = flat_elements(program.model, program.plan, block)
        flats = tuple(_padded(array, elements) for array in (saved.p, saved.m1, saved.m2))
        for rank in ranks:
            _fill(engine, rank, block, (flats[0], flats[1], flats[2]), updates=saved.t)
    for ranks in engine.ranks:
        for rank in ranks:
            if program.plan.loss_scale is None and keep_scale:
                rank.fill("scale", "", state.scale)
            else:
                _start_scale(rank, program.plan.loss_scale)
    engine.first_step = state.step


def training_state(engine: ProgramEngine, step: int) -> TrainingState:
    """What a checkpoint keeps after `step` steps; blocks are copied out when they are asked for."""
    return TrainingState(step, _Blocks(engine), engine.loss_scale)


def master_weights(engine: ProgramEngine) -> Iterator[tuple[Block, Flat]]:
    """Every block's whole master weights."""
    for block, ranks in _owners(engine):
        yield block, _gathered(engine, ranks, block, "p")


class _Blocks(Mapping[Block, BlockState]):
    """Block states fetched one at a time, so that saving never holds all of them."""

    def __init__(self, engine: ProgramEngine) -> None:
        self.engine = engine
        self.ranks = dict(_owners(engine))

    def __getitem__(self, block: Block) -> BlockState:
        ranks = self.ranks[block]
        p, m1, m2 = (_gathered(self.engine, ranks, block, name) for name in _STATE_TENSORS)
        return BlockState(p, m1, m2, int(ranks[0].carried("t", str(block))[0]))

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


def _fill(engine: ProgramEngine, rank: Rank, block: Block, flats: tuple[Flat, Flat, Flat], *, updates: int) -> None:
    owner = str(block)
    shard = engine.program.topology.shard_range(block, rank.replica)
    for name, flat in zip(_STATE_TENSORS, flats, strict=True):
        rank.fill(name, owner, flat[shard.start : shard.stop])
    rank.fill("t", owner, updates)
    for number in rank.stage.carried.get(("w", owner), ()):  # none where views are gathered for each use
        engine.scratch.reset()
        engine.kernels.cast(flats[0], rank.views[number], scratch=engine.scratch)


def _start_scale(rank: Rank, fixed: float | None) -> None:
    for number in rank.stage.carried["scale", ""]:
        LossScale(rank.views[number]).start(fixed)


def _gathered(engine: ProgramEngine, ranks: list[Rank], block: Block, name: str) -> Flat:
    program = engine.program
    parts = [rank.carried(name, str(block)) for rank in (ranks if is_sharded(program.plan) else ranks[:1])]
    return np.concatenate(parts)[: block_elements(program.model, block)]


def _padded(flat: Flat, elements: int) -> Flat:
    whole = np.zeros(elements, np.float32)
    whole[: flat.size] = flat[:elements]
    return whole
