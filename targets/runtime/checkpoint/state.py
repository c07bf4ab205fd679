"""Training state in and out of the ranks' arenas: initial weights and checkpoints, as whole blocks, never shards.

State is copied piece by piece straight to its place: the embedding alone can be as large as the rest of a model, and
would otherwise be in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.tensor_ranks import rank_model, rank_part
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import Block, Held, parameters, trains
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import (
    frozen_elements,
    gathered_bits,
    packed_frozen_bytes,
    shard_elements,
    shares_frozen,
)
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.runtime.arena.scalars import GROWTH_INTERVAL, LossScale
from ratrain.targets.runtime.checkpoint.rank_state import (
    FlatReader,
    choice_bias,
    rank_pieces,
    whole_of_experts,
    whole_pieces,
)
from ratrain.targets.runtime.checkpoint.training_state import BlockStates, TrainingState
from ratrain.targets.runtime.engine.engine import ProgramEngine
from ratrain.targets.runtime.engine.quantised import round_view
from ratrain.targets.runtime.engine.rank import RankExecutor
from ratrain.targets.runtime.kernels.reference.reference_nf4 import pack_nf4
from ratrain.targets.runtime.weights.weight_source import FlatPieces, WeightSource, flat_pieces
from ratrain.targets.runtime.weights.weights import block_elements

_LEAST_SCALE = 2.0**-32
"""Smallest loss scale that a plan may have; the largest is its inverse."""
_MOMENTS = ("m1", "m2")


def start_from_weights(engine: ProgramEngine, source: WeightSource) -> None:
    """Fill the carried tensors for a first step: masters from a source, views rounded from them, moments zero."""
    program, model = engine.program, engine.program.trained_model

    def master(block: Block) -> FlatReader:
        return lambda start, stop: flat_pieces(model, block, source, start, stop)

    fill_frozen(engine, source)
    for block, ranks in _trained(engine):
        _fill(engine, ranks, block, "p", master(block))
        for rank in ranks:
            for kind in (*_MOMENTS, "t"):
                rank.fill(kind, str(block), 0)
        _fill_bias(engine, ranks, block, 0)
    for ranks in engine.ranks:
        for rank in ranks:
            _start_scale(rank, program.plan.loss_scale)


def fill_frozen(engine: ProgramEngine, source: WeightSource) -> None:
    """Fill the frozen parameters of all ranks from a source: rounded as views are, or packed."""
    program, memory = engine.program, engine.kernels.memory
    model = program.trained_model

    def whole(block: Block) -> FlatReader:
        return lambda start, stop: flat_pieces(model, block, source, start, stop, Held.PLAIN)

    for block, ranks in _owners(engine) if model.training else ():
        for peer in sorted({rank.peer for rank in ranks}):
            alike = [rank for rank in ranks if rank.peer == peer]
            _fill_packed(engine, alike, block, source)
            pieces = whole(block)
            if program.plan.tp > 1:
                pieces = rank_pieces(program.model, program.plan, peer, block, pieces, Held.PLAIN)
            held = _emptied(alike, "f", block)
            stop = frozen_elements(program.model, program.plan, block)
            for at, given in pieces(0, stop) if held else ():
                values = memory.staged(given)
                rounded = None
                for each in held:
                    low, high = max(at, each.part.start), min(at + given.size, each.part.stop)
                    if low >= high:
                        continue
                    if each.array is not None:
                        target = each.array[low - each.part.start : high - each.part.start]
                        engine.scratch.reset()
                        engine.kernels.cast(values[low - at : high - at], target, scratch=engine.scratch)
                        continue
                    if rounded is None:
                        rounded = _new_array(engine, Dtype(program.plan.view_dtype), given.size)
                        engine.scratch.reset()
                        engine.kernels.cast(values, rounded, scratch=engine.scratch)
                    each.write(low, rounded[low - at : high - at])


@frozen(eq=False)
class _FrozenTensor:
    """Frozen parameters of a block on a rank: all of them, or the part that its replica has."""

    rank: RankExecutor
    what: str
    block: Block
    part: range
    """elements of the block's tensor that it holds"""
    array: Any
    """its array, if that is in DDR, where kernels can write it; else None"""

    def has(self, start: int, stop: int) -> bool:
        """Tell whether it holds all elements of a range."""
        return self.part.start <= start and stop <= self.part.stop

    def write(self, start: int, values: Any) -> None:
        """Write elements from `start` of the block's tensor on."""
        self.rank.write_carried(self.what, str(self.block), start - self.part.start, values)


def _emptied(ranks: Sequence[RankExecutor], what: str, block: Block) -> list[_FrozenTensor]:
    """Return the frozen parameters of ranks (`f` plain, `fq` packed), set to zero, which padding stays."""
    found = []
    for rank in ranks:
        program = rank.program
        role = f"{what}s" if shares_frozen(program.model, program.plan, block) else what
        arrays = rank.all_carried(role, str(block))
        if not arrays:
            continue
        rank.fill(role, str(block), 0)
        size = frozen_elements if what == "f" else packed_frozen_bytes
        part = program.topology.frozen_range(block, rank.replica, size(program.model, program.plan, block))
        if rank.computes_with(role, str(block)):
            found += [_FrozenTensor(rank, role, block, part, array) for array in arrays]
        else:
            found.append(_FrozenTensor(rank, role, block, part, None))
    return found


def _new_array(engine: ProgramEngine, dtype: Dtype, elements: int) -> Any:
    """Allocate an array of elements where kernels can write it."""
    memory = engine.kernels.memory
    return memory.typed(memory.allocate(elements * dtype.itemsize), dtype, (elements,))


def _fill_packed(engine: ProgramEngine, ranks: Sequence[RankExecutor], block: Block, source: WeightSource) -> None:
    """Fill the packed matrices of ranks of one peer, each from the whole of its values."""
    plan, model = engine.program.plan, engine.program.trained_model
    held = _emptied(ranks, "fq", block)
    for parameter in parameters(rank_model(model, plan), block) if held else ():
        if parameter.packed is not None:
            given = source(parameter.name)
            part = given[rank_part(model, plan.tp, ranks[0].peer, parameter.weight, given.shape)]
            mine = np.zeros(parameter.shape, np.float32)  # a peer's part may be padded
            mine[tuple(map(slice, part.shape))] = part
            at, (count,) = parameter.offset, parameter.stored_shape
            # Matrices that are in DDR as a whole are packed there; of all others the bytes are copied.
            direct = [each for each in held if each.array is not None and each.has(at, at + count)]
            copied = [each for each in held if each not in direct]
            targets = [each.array[at - each.part.start :][:count] for each in direct]
            if copied:
                targets.append(_new_array(engine, Dtype.U8, count))
            _pack(engine, mine.reshape(-1), parameter.packed, targets)
            for each in copied:
                low, high = max(at, each.part.start), min(at + count, each.part.stop)
                if low < high:
                    each.write(low, targets[-1][low - at : high - at])


def _pack(engine: ProgramEngine, values: NDArray[np.float32], name: str, targets: Sequence[Any]) -> None:
    """Set targets to a matrix's elements [n], packed in one of `FROZEN_FORMATS`."""
    kernels, bits = engine.kernels, FORMATS.get(name)
    if bits is None:
        # The first target takes the bytes itself where it is an array: a copy would be memory that no plan counts.
        packed = pack_nf4(values, next((target for target in targets if isinstance(target, np.ndarray)), None))
        for target in targets:
            if target is not packed:
                kernels.memory.write(target, packed)
        return
    staged = kernels.memory.staged(values)
    for target in targets:
        needed = kernels.scratch_bytes("quantise", a=staged, packed=target, bits=bits)
        kernels.quantise(staged, target, scratch=kernels.memory.scratch(needed), bits=bits)


def start_from_state(engine: ProgramEngine, state: TrainingState, *, keep_scale: bool = True) -> None:
    """Fill the carried tensors from a checkpoint, which may come from another plan; continue at its step.

    Frozen parameters are in no checkpoint: `fill_frozen` fills them.

    With `keep_scale` a dynamic loss scale continues; otherwise it starts anew. A fixed one is always the plan's. Raises
    `DiagnosticError` RT092 if the checkpoint's loss scale is impossible, or if its routers choose with biases that the
    program has not.
    """
    program = engine.program
    if not program.plan.router.bias_update and any(bias.any() for bias in state.biases.values()):
        text = "the routers of the checkpoint choose with biases, which this plan has not: it would route otherwise"
        way_out = "set bias_update in [experts] of the plan; the smaller it is, the less they change"
        fail("RT092", text, help=way_out)
    if not (_LEAST_SCALE <= state.scale[0] <= 1 / _LEAST_SCALE and 0 <= state.scale[1] < GROWTH_INTERVAL):
        fail("RT092", f"the checkpoint has the loss scale {state.scale}, which no run has")

    def saved(block: Block, kind: str) -> FlatReader:
        return lambda start, stop: state.blocks.pieces(block, kind, start, stop)

    for block, ranks in _trained(engine):
        for kind in ("p", *_MOMENTS):
            _fill(engine, ranks, block, kind, saved(block, kind))
        for rank in ranks:
            rank.fill("t", str(block), state.blocks.updates(block))
        _fill_bias(engine, ranks, block, state.biases.get(block, 0))
    for ranks in engine.ranks:
        for rank in ranks:
            if program.plan.loss_scale is None and keep_scale:
                rank.fill("scale", "", state.scale)
            else:
                _start_scale(rank, program.plan.loss_scale)
    engine.first_step = state.step


def training_state(engine: ProgramEngine, step: int) -> TrainingState:
    """Return the state to checkpoint after `step` steps: a view of the arenas.

    A block is copied when it is asked for; pieces of it are the arenas' own bytes.
    """
    owners = dict(_trained(engine))
    biases = {block: choice_bias(ranks[0], block) for block, ranks in owners.items()}
    states = _ArenaStates(engine.program.trained_model, engine, owners)
    return TrainingState(step, states, engine.loss_scale, {block: b for block, b in biases.items() if b is not None})


@frozen(eq=False)
class _ArenaStates(BlockStates):
    """Block states in the ranks' arenas."""

    engine: ProgramEngine
    ranks: dict[Block, list[RankExecutor]]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of a block's tensor of a kind, as views of the ranks' tensors."""
        plan = self.engine.program.plan
        if shares_experts(self.model, plan, block):
            of_experts = [partial(self._of_part, block, kind, (0, number)) for number in range(plan.ep)]
            return whole_of_experts(self.model, block, of_experts)(start, stop)
        readers = [partial(self._of_part, block, kind, (peer, 0)) for peer in range(plan.tp)]
        return whole_pieces(self.model, block, readers)(start, stop)

    def _of_part(self, block: Block, kind: str, part: tuple[int, int], start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of the tensor that replicas with the same part of a block hold together."""
        program = self.engine.program
        holders = [rank for rank in self.ranks[block] if _part_of(rank, block) == part]
        # Reversed, so that the first of several replicas with the same shard overwrites the others.
        first = {program.topology.shard_range(block, rank.replica): rank for rank in reversed(holders)}
        for shard, rank in sorted(first.items(), key=lambda item: item[0].start):
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                for at, held in rank.carried_pieces(kind, str(block), low - shard.start, high - shard.start):
                    yield at + shard.start, held

    def updates(self, block: Block) -> int:
        """Return the number of updates applied to a block."""
        return int(self.ranks[block][0].carried("t", str(block))[0])

    def __iter__(self) -> Iterator[Block]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)


def _owners(engine: ProgramEngine) -> Iterator[tuple[Block, list[RankExecutor]]]:
    """Yield each block with the ranks of this process that hold it."""
    program = engine.program
    for index, ranks in enumerate(engine.ranks):
        for block in program.topology.stage_blocks[index] if ranks else ():
            yield block, ranks


def _trained(engine: ProgramEngine) -> Iterator[tuple[Block, list[RankExecutor]]]:
    """Yield each block of which any parameter trains, with the ranks of this process that hold it."""
    program = engine.program
    return ((block, ranks) for block, ranks in _owners(engine) if trains(program.model, program.plan, block))


def _fill(engine: ProgramEngine, ranks: Sequence[RankExecutor], block: Block, kind: str, whole: FlatReader) -> None:
    """Fill a block's tensor of a kind on the given ranks; for masters (`p`) also fill the views."""
    program = engine.program
    if program.plan.tp == 1 and not shares_experts(program.model, program.plan, block):
        _fill_alike(engine, ranks, block, kind, whole)
        return
    for part in sorted({_part_of(rank, block) for rank in ranks}):
        peer, expert_rank = part
        pieces = rank_pieces(program.model, program.plan, peer, block, whole, expert_rank=expert_rank)
        _fill_alike(engine, [rank for rank in ranks if _part_of(rank, block) == part], block, kind, pieces)


def _fill_bias(engine: ProgramEngine, ranks: Sequence[RankExecutor], block: Block, bias: Any) -> None:
    """Set the bias of a block's router on some ranks, if it has one, and begin counting."""
    if biases_choice(engine.program.model, engine.program.plan, block):
        for rank in ranks:
            rank.fill("bias", str(block), bias)
            rank.fill("load", str(block), 0)


def _part_of(rank: RankExecutor, block: Block) -> tuple[int, int]:
    """Return which part of a block a rank has: (tensor-parallel rank, expert rank)."""
    model, plan = rank.program.model, rank.program.plan
    return rank.peer, rank.replica % plan.ep if shares_experts(model, plan, block) else 0


def _fill_alike(
    engine: ProgramEngine, ranks: Sequence[RankExecutor], block: Block, kind: str, pieces: FlatReader
) -> None:
    """Fill a tensor on ranks that hold the same tensor of a block, sharded or not; ask for each element once.

    Elements between pieces, and after the last one, are zero. Only the range that these ranks' shards and views span is
    asked for.
    """
    parts = [(engine.program.topology.shard_range(block, rank.replica), rank) for rank in ranks]
    views: list[tuple[range, NDArray[Any]]] = []
    for rank in ranks:
        rank.fill(kind, str(block), 0)
        views += _carried_views(rank, block) if kind == "p" else ()
    # Zeros first: padding, and elements that no piece covers, stay zero.
    for _, view in views:
        engine.kernels.memory.write(view, 0)
    wanted = [*(shard for shard, _ in parts), *(held for held, _ in views)]
    last = block_elements(rank_model(engine.program.model, engine.program.plan), block)
    start, stop = min(part.start for part in wanted), min(last, max(part.stop for part in wanted))
    memory = engine.kernels.memory
    for at, given in pieces(start, stop):
        end, values = at + given.size, memory.staged(given)
        for shard, rank in parts:
            low, high = max(at, shard.start), min(end, shard.stop)
            if low < high:
                rank.write_carried(kind, str(block), low - shard.start, values[low - at : high - at])
        for held, view in views:
            low, high = max(at, held.start), min(end, held.stop)
            if low < high:
                engine.scratch.reset()
                into = view[low - held.start : high - held.start]
                engine.kernels.cast(values[low - at : high - at], into, scratch=engine.scratch)
    bits = gathered_bits(engine.program.model, engine.program.plan, block)
    if bits is not None:  # a gather would have quantised the views: round them alike
        length = shard_elements(engine.program.model, engine.program.plan, block)
        for part in (part for _, view in views for part in view.reshape(-1, length)):
            round_view(part, bits, engine.kernels, engine.scratch)


def _carried_views(rank: RankExecutor, block: Block) -> Iterator[tuple[range, NDArray[Any]]]:
    """Yield the views of a block that a rank carries from step to step, each with its range of the whole view.

    None where each use gathers masters.
    """
    for tensor in rank.all_carried("w", str(block)):
        yield range(len(tensor)), tensor
    for tensor in rank.all_carried("v", str(block)):
        yield rank.program.topology.view_range(block, rank.replica), tensor


def _start_scale(rank: RankExecutor, fixed: float | None) -> None:
    """Set a rank's loss scale for the first step."""
    for tensor in rank.all_carried("scale", ""):
        LossScale(tensor).start(fixed)
