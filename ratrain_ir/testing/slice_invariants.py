"""Invariants of the slices of a sound module, checked by brute force over positions of tokens.

Each check raises AssertionError with the violation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import Piece, Slice
from ratrain.ratrain_ir.ops.compute import BackwardHeads, Forward, InputGradientOp, Recompute
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys, ReduceKeys
from ratrain.ratrain_ir.ops.kinds import piece_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.collectives import TensorOp
    from ratrain.ratrain_ir.ops.compute import BlockOp
    from ratrain.ratrain_ir.ops.tensor import Tensor

_KEYS, _SUMS = ("k", "v"), ("dk_sum", "dv_sum")
_WHOLE_KEYS = ("keys", "values")


def pieces(module: Module, micro_batch: int) -> list[Piece]:
    """Return the pieces of a micro-batch: its slices, or the micro-batch itself."""
    return [Slice(micro_batch, number) for number in range(len(module.plan.slices))] or [micro_batch]


def sees(module: Module, later: int, earlier: int) -> bool:
    """Tell whether any token of slice `later` attends to one of slice `earlier` in the layer of the widest window."""
    positions: list[range] = []
    for length in module.plan.slices:
        start = positions[-1].stop if positions else 0
        positions.append(range(start, start + length))
    window = module.model.widest_window
    return earlier < later and any(
        window is None or query - key < window for query in positions[later] for key in positions[earlier]
    )


def slices_see_each_other(module: Module, stage: Stage) -> None:
    """Check which keys, values and gradient sums each slice of an attention reads.

    It must read the keys and values of exactly the earlier slices that it attends to, as their forwards left them. Its
    backward must read sums to which each later slice that attends to it has added once; if there is none, there is no
    sum. With context ranks, keys and values are the gathered ones, also its own, and sums are those that are reduced.
    """
    if module.plan.cp > 1:
        _gathered_keys_are_seen(module, stage)
        return
    written: dict[Tensor, tuple[Block, Piece]] = {}
    added: dict[Tensor, list[tuple[Block, Piece]]] = {}
    for position, op in enumerate(stage.ops):
        where = f"stage {stage.index}, op {position} '{op!r}'"
        if isinstance(op, Forward | Recompute | InputGradientOp) and op.block.kind == "attention":
            piece = piece_of(op)
            _reads_seen_keys(module, op, where, written)
            if isinstance(op, InputGradientOp):
                _takes_whole_sums(module, op, where, added)
                for tensor in op.writes:
                    if tensor.slot in _SUMS:
                        added[tensor] = []
                for tensor in op.writes + op.updates:
                    if tensor.slot in _SUMS:
                        added[tensor].append((op.block, piece))
        for tensor in op.writes:
            written.pop(tensor, None)
            if isinstance(op, Forward) and op.block.kind == "attention" and tensor.slot in _KEYS:
                written[tensor] = op.block, piece_of(op)


def _gathered_keys_are_seen(module: Module, stage: Stage) -> None:
    gathered: dict[Tensor, tuple[Block, Piece]] = {}
    added: dict[Tensor, list[Piece]] = {}
    for position, op in enumerate(stage.ops):
        where = f"stage {stage.index}, op {position} '{op!r}'"
        for tensor in op.writes:
            gathered.pop(tensor, None)
        if isinstance(op, GatherKeys):
            gathered |= dict.fromkeys(op.writes, (op.block, piece_of(op)))
        elif isinstance(op, ReduceKeys):
            wanted = [*_others(module, op, later=True), piece_of(op)]
            for tensor in op.reads:
                assert sorted(added[tensor], key=str) == sorted(wanted, key=str), f"{where}: parts of {added[tensor]}"
        elif isinstance(op, Forward | BackwardHeads | Recompute) and op.block.kind == "attention":
            found = {(gathered.get(tensor), tensor.slot) for tensor in op.reads if tensor.slot in _WHOLE_KEYS}
            pieces_seen = [*_others(module, op, later=False), piece_of(op)]
            seen = {((op.block, other), slot) for other in pieces_seen for slot in _WHOLE_KEYS}
            assert found == seen or (isinstance(op, Recompute) and not found), f"{where}: keys are {found}, not {seen}"
            for tensor in op.writes + op.updates if isinstance(op, BackwardHeads) else ():
                if tensor.kind is StateKind.PARTIAL:
                    parts = added[tensor] = [] if tensor in op.writes else added[tensor]
                    parts.append(piece_of(op))


def _others(module: Module, op: BlockOp | TensorOp, *, later: bool) -> list[Piece]:
    """Return the other pieces of a micro-batch that attend to an op's piece (`later`), or to which it attends."""
    own = _number(piece_of(op))
    every = pieces(module, op.micro_batch)
    return [each for each in every if sees(module, *((_number(each), own) if later else (own, _number(each))))]


def _slots(tensors: tuple[Tensor, ...], slots: tuple[str, ...]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.kind is StateKind.SAVED and tensor.slot in slots]


def _number(piece: Piece) -> int:
    return 0 if isinstance(piece, int) else piece.number


def _reads_seen_keys(
    module: Module,
    op: Forward | Recompute | InputGradientOp,
    where: str,
    written: dict[Tensor, tuple[Block, Piece]],
) -> None:
    piece = piece_of(op)
    found = {(written.get(tensor), tensor.slot) for tensor in _slots(op.reads, _KEYS)}
    others = {(maker, slot) for maker, slot in found if maker is not None and maker != (op.block, piece)}
    wanted = {
        ((op.block, other), slot)
        for other in pieces(module, op.micro_batch)
        if sees(module, _number(piece), _number(other))
        for slot in _KEYS
    }
    only_projects = isinstance(op, Recompute) and all(tensor.slot not in ("o", "lse") for tensor in op.writes)
    assert others == (set() if only_projects and not others else wanted), f"{where}: keys are {others}, not {wanted}"


def _takes_whole_sums(
    module: Module, op: InputGradientOp, where: str, added: dict[Tensor, list[tuple[Block, Piece]]]
) -> None:
    piece = piece_of(op)
    viewers = [
        (op.block, other) for other in pieces(module, op.micro_batch) if sees(module, _number(other), _number(piece))
    ]
    sums = _slots(op.reads, _SUMS)
    assert [tensor.slot for tensor in sums] == (list(_SUMS) if viewers else []), f"{where}: sums are {sums}"
    for tensor in sums:
        found = added.get(tensor, [])
        assert sorted(found, key=str) == sorted(viewers, key=str), f"{where}: %{tensor.name} has {found}, not {viewers}"
