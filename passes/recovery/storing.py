"""Storing written into a stage's lists: what a layer keeps for its backward leaves DDR behind its forward, and comes back before it is used.

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes
    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %host.x.attention.0.m0, %host.s.attention.0.m0.* = store attention.0 m0 (%x.attention.0.m0, %s.attention.0.m0.*)
    ...
    %back.x.attention.0.m0, %back.s.attention.0.m0.* = fetch attention.0 m0 (%host.x.attention.0.m0, %host.s.attention.0.m0.*)

What goes to another stage is evicted and taken back in place of that; what that stage does, `passes/recovery/guests.py` writes into its list.

A fetch stands as late in the list as still gives it the time it takes, by the stage's own times, before the first op that needs what it brings;
fetches that follow each other share that time. What stands earlier would hold its bytes longer for nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.passes.recovery.rewriting import Elsewhere, Lender, made_before
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.ops.base import Op, Piece, piece_fields
from ratrain.ratrain_ir.ops.collectives import PEER_OPS
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
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import Evict, TakeBack
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from ratrain.passes.memory.trial import Trials
    from ratrain.ratrain_ir.module import Stage


_OF_BACKWARD = (Recompute, Backward, BackwardHeads, BackwardInput, BackwardWeight, AddBranchBackward)
"""Ops that use what a forward keeps."""
_OF_PEERS = (*PEER_OPS, AddBranch)
"""Ops that use, right behind a forward of tensor peers, what that has used."""


@frozen
class _Kept:
    """What a forward keeps for its backward."""

    owner: Forward
    tensors: Tensors
    position: int
    """of the last op of the forward pass that uses any of them"""


@frozen
class _Stored:
    """What is stored of a block and a piece: where in the list, and by what."""

    position: int
    """of the op behind which it is stored"""
    store: Store | Evict
    fetch: Fetch | TakeBack

    def seconds_back(self, stage: Stage, trials: Trials) -> float:
        """What it takes to come back: from another stage as long as the way there, whose time is that of the end that sends."""
        ops = (self.store, self.fetch) if isinstance(self.fetch, TakeBack) else (self.fetch,)
        return max(trials.op_seconds(stage, op) for op in ops)


def store_kept(stage: Stage, trials: Trials, home_of: Callable[[int, Piece], Elsewhere]) -> int:
    """Rewrite a stage's list; its ops and tensors, which others may have too, stay as they are. The number of stores."""
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
    """What each forward keeps, where that is something: what it reads or saves that ops of its backward use.

    Not what later slices of its micro-batch see, or anyone else; tensor peers add to the stream before it can go.
    """
    forwards = {position: op for position, op in enumerate(stage.ops) if type(op) is Forward}
    projects = {(op.block, piece_of(op)): op for op in stage.ops if type(op) is Project}
    mine: dict[Tensor, int] = {}
    for position, forward in forwards.items():
        project = projects.get((forward.block, piece_of(forward)))
        source = (project or forward).reads[0]
        made = (*made_before(forward, project), *(each for each in forward.writes if each.kind is StateKind.SAVED))
        mine |= dict.fromkeys(made if forward.block.kind == "embed" else (*made, source), position)
    later: set[Tensor] = set()
    free = {position: position for position in forwards}
    for position, op in enumerate(stage.ops):
        if type(op) is Release:
            continue
        for tensor in op.reads:
            at = mine.get(tensor)
            if at is None or position <= at:
                continue
            if isinstance(op, _OF_BACKWARD):
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


def _stored(stage: Stage, kept: _Kept, home: Elsewhere) -> _Stored:
    fields = {"block": kept.owner.block, **piece_fields(piece_of(kept.owner))}
    there = () if isinstance(home, Lender) else tuple(_copy(stage, t, home.value, home) for t in kept.tensors)
    back = tuple(_copy(stage, tensor, "back", Home.DDR) for tensor in kept.tensors)
    if isinstance(home, Lender):
        evict = Evict(**fields, peer=home.stage, reads=kept.tensors)
        return _Stored(kept.position, evict, TakeBack(**fields, peer=home.stage, writes=back))
    store = Store(**fields, reads=kept.tensors, writes=there)
    return _Stored(kept.position, store, Fetch(**fields, reads=there, writes=back))


def _copy(stage: Stage, tensor: Tensor, prefix: str, home: Home) -> Tensor:
    """A tensor that holds the same elsewhere; the slot, which is the last part of its name, stays."""
    name = stage.free_name(f"{prefix}.{tensor.name}")
    return stage.add(attrs.evolve(tensor, name=name, home=home, offset=None, line=0))


def _rewritten(stage: Stage, trials: Trials, stored: list[_Stored]) -> list[Op]:
    """The list with stores behind forwards, fetches in time, and later ops reading what was fetched."""
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
        if position in after:
            ops.append(after[position])
            gone.update(after[position].reads)
    return ops


def _reading(op: Op, back: Mapping[Tensor, Tensor], gone: Container[Tensor]) -> Op:
    """The same op on what was fetched in place of what is gone."""
    return attrs.evolve(op, reads=tuple(back[tensor] if tensor in gone else tensor for tensor in op.reads))


def _fetch_positions(stage: Stage, trials: Trials, stored: list[_Stored]) -> dict[int, list[Op]]:
    """Fetches by the position before which they stand."""
    times = trials.times(stage)
    needs = _first_uses(stage, stored)
    issued = times.issued.tolist()
    placed: dict[int, list[Op]] = {}
    free = float("inf")
    """when the fetch after this one has to start"""
    for each, need in sorted(zip(stored, needs, strict=True), key=lambda pair: -pair[1]):
        end = min(issued[need], free)
        free = end - each.seconds_back(stage, trials)
        position = min(need, max(each.position + 1, bisect_right(issued, free) - 1))
        placed.setdefault(position, []).insert(0, each.fetch)
    return placed


def _first_uses(stage: Stage, stored: list[_Stored]) -> list[int]:
    """The position of the first op that needs what is fetched."""
    owner: dict[Tensor, int] = {t: number for number, each in enumerate(stored) for t in each.store.reads}
    first: dict[int, int] = {}
    for position, op in enumerate(stage.ops):
        for tensor in op.reads:
            number = owner.get(tensor)
            if number is not None and position > stored[number].position:
                first.setdefault(number, position)
    return [first[number] for number in range(len(stored))]
