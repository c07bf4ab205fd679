"""Activation offload written into a stage's lists: kept tensors leave DDR after the forward and come back before use.

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes
    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %host.x.attention.0.m0, %host.s.attention.0.m0.* = store attention.0 m0 (%x.attention.0.m0, %s.attention.0.m0.*)
    ...
    %back.x.attention.0.m0, %back.s.attention.0.m0.* = fetch attention.0 m0 (%host.x.attention.0.m0,
                                                                             %host.s.attention.0.m0.*)

For a peer stage the ops are `peer_offload` and `peer_reload`; `passes/recovery/peer_offload.py` writes the donor's
side.

A fetch stands as late in the list as its duration allows, by the stage's own times, before the first op that needs its
result; fetches that follow each other share the engine's time. Standing earlier would only hold bytes longer.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.passes.recovery.layer_choice import Donor, KeptHome
from ratrain.passes.recovery.rewriting import made_before
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.ops.base import Op, Payload, Piece, piece_fields
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS, repeats_sum
from ratrain.ratrain_ir.ops.compute import (
    AddBranch,
    AddBranchBackward,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    Forward,
    Project,
    Recompute,
    Release,
)
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward, GatherHeads, gathers_again
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import PeerOffload, PeerReload
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Stage


_OF_BACKWARD = (
    Recompute,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    AddBranchBackward,
    AttendBackward,
)
"""Ops that use what a forward keeps."""
_OF_PEERS = (*TENSOR_OPS, AddBranch)
"""Ops of tensor parallelism right after a forward, which use what the forward has used."""


@frozen
class _Kept:
    """Tensors that a forward keeps for its backward."""

    owner: Forward
    tensors: Tensors
    position: int
    """Position of the last op of the forward pass that uses any of them."""


@frozen
class _Stored:
    """Offload and reload of a block and a piece."""

    position: int
    """Position of the op after which the tensors are stored."""
    store: Store | PeerOffload
    fetch: Fetch | PeerReload

    def seconds_back(self, stage: Stage, trials: Trials) -> float:
        """Return the seconds of the reload.

        From a peer stage that is at least the time of the offload, because only the sending op carries the link's time.
        """
        ops = (self.store, self.fetch) if isinstance(self.fetch, PeerReload) else (self.fetch,)
        return max(trials.op_seconds(stage, op) for op in ops)


def store_kept(stage: Stage, trials: Trials, home_of: Callable[[int, Piece], KeptHome]) -> int:
    """Rewrite a stage's list so that kept tensors are offloaded to `home_of(layer, piece)`.

    Return the number of stores.

    The stage's ops and tensors stay unchanged.
    """
    stored = [
        _stored(stage, kept, home)
        for kept in _kept(stage)
        if kept.owner.block.layer is not None
        and (home := home_of(kept.owner.block.layer, piece_of(kept.owner))) is not Home.DDR
    ]
    if stored:
        stage.ops = _rewritten(stage, trials, stored)
    return len(stored)


def _kept(stage: Stage) -> list[_Kept]:
    """Return what each forward keeps: tensors that it reads or saves and that ops of its backward use.

    Tensors that later slices, or any other op, read are left out. With tensor parallelism they can leave only after the
    exchanges behind the forward have used them.
    """
    forwards = {position: op for position, op in enumerate(stage.ops) if type(op) is Forward}
    projects = {(op.block, piece_of(op)): op for op in stage.ops if type(op) is Project}
    shared: dict[tuple[Block, Piece], list[Tensor]] = {}
    for op in stage.ops:  # what context ranks' heads take and make of all tokens
        if type(op) is Attend or (type(op) is GatherHeads and op.payload is Payload.ACTIVATION):
            shared.setdefault((op.block, piece_of(op)), []).extend(op.writes)
    mine: dict[Tensor, int] = {}
    for position, forward in forwards.items():
        project = projects.get((forward.block, piece_of(forward)))
        source = (project or forward).reads[0]
        # The embedding's input are tokens, which the step holds anyway.
        made = (*made_before(forward, project), *(each for each in forward.writes if each.kind is StateKind.SAVED))
        made = (*made, *shared.get((forward.block, piece_of(forward)), ()))
        mine |= dict.fromkeys(made if forward.block.kind == "embed" else (*made, source), position)
    later: set[Tensor] = set()
    free = {position: position for position in forwards}
    for position, op in enumerate(stage.ops):
        if type(op) is Release:
            continue
        for tensor in op.reads:
            # A read by the backward makes a tensor a candidate, a read by an exchange delays its store, any other read
            # rules it out.
            at = mine.get(tensor)
            if at is None or position <= at:
                continue
            if isinstance(op, _OF_BACKWARD) or repeats_sum(op) or gathers_again(op):
                later.add(tensor)
            elif isinstance(op, _OF_PEERS):
                free[at] = position
            else:
                del mine[tensor]
    kept: dict[int, list[Tensor]] = {}
    for tensor, position in mine.items():
        if tensor in later:
            kept.setdefault(position, []).append(tensor)
    return [_Kept(forwards[position], tuple(tensors), free[position]) for position, tensors in kept.items()]


def _stored(stage: Stage, kept: _Kept, home: KeptHome) -> _Stored:
    fields = {"block": kept.owner.block, **piece_fields(piece_of(kept.owner))}
    # The donor's list declares the remote buffers (`peer_offload.py`); here only the copies that come back.
    there = () if isinstance(home, Donor) else tuple(_copy(stage, t, home.value, home) for t in kept.tensors)
    back = tuple(_copy(stage, tensor, "back", Home.DDR) for tensor in kept.tensors)
    if isinstance(home, Donor):
        offload = PeerOffload(**fields, peer=home.stage, reads=kept.tensors)
        return _Stored(kept.position, offload, PeerReload(**fields, peer=home.stage, writes=back))
    store = Store(**fields, reads=kept.tensors, writes=there)
    return _Stored(kept.position, store, Fetch(**fields, reads=there, writes=back))


def _copy(stage: Stage, tensor: Tensor, prefix: str, home: Home) -> Tensor:
    """Return a new tensor for the same data elsewhere; the slot, which is the last part of its name, stays."""
    name = stage.free_name(f"{prefix}.{tensor.name}")
    return stage.add(attrs.evolve(tensor, name=name, home=home, offset=None, line=0))


def _rewritten(stage: Stage, trials: Trials, stored: list[_Stored]) -> list[Op]:
    """Return the list with stores after forwards, fetches in time, and later ops reading what was fetched."""
    back: dict[Tensor, Tensor] = {}
    after: dict[int, Op] = {}
    for each in stored:
        back |= dict(zip(each.store.reads, each.fetch.writes, strict=True))
        after[each.position] = each.store
    before = _fetch_positions(stage, trials, stored)
    ops: list[Op] = []
    gone: set[Tensor] = set()
    for position, op in enumerate(stage.ops):
        ops += before.get(position, ())
        ops.append(op if gone.isdisjoint(op.reads) else _reading(op, back, gone))
        # From here on the tensors are gone, and later readers get the fetched copies.
        if position in after:
            ops.append(after[position])
            gone.update(after[position].reads)
    return ops


def _reading(op: Op, back: Mapping[Tensor, Tensor], gone: Container[Tensor]) -> Op:
    """Return the op with fetched tensors in place of those that are gone."""
    return attrs.evolve(op, reads=tuple(back[tensor] if tensor in gone else tensor for tensor in op.reads))


def _fetch_positions(stage: Stage, trials: Trials, stored: list[_Stored]) -> dict[int, list[Op]]:
    """Return fetches by the position before which they stand."""
    times = trials.times(stage)
    needs = _first_uses(stage, stored)
    issued = times.issued.tolist()
    placed: dict[int, list[Op]] = {}
    free = float("inf")
    """when the fetch after this one has to start"""
    # From the last need back to the first: a fetch must end before its need, and before the next fetch starts, since
    # they share an engine. It never stands before its store.
    for each, need in sorted(zip(stored, needs, strict=True), key=lambda pair: -pair[1]):
        end = min(issued[need], free)
        free = end - each.seconds_back(stage, trials)
        position = min(need, max(each.position + 1, bisect_right(issued, free) - 1))
        placed.setdefault(position, []).insert(0, each.fetch)
    return placed


def _first_uses(stage: Stage, stored: list[_Stored]) -> list[int]:
    """Return, for each stored entry, the position of the first op that needs it back."""
    owner: dict[Tensor, int] = {t: number for number, each in enumerate(stored) for t in each.store.reads}
    first: dict[int, int] = {}
    for position, op in enumerate(stage.ops):
        for tensor in op.reads:
            number = owner.get(tensor)
            if number is not None and position > stored[number].position:
                first.setdefault(number, position)
    return [first[number] for number in range(len(stored))]
