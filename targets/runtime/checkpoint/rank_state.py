"""Conversion between whole flat tensors of blocks and the parts that tensor-parallel or expert ranks hold.

    whole parameter [4, 6], two peers by columns      flat tensor of peer 0: [4, 3]     of peer 1: [4, 3]
      a a a b b b                                       a a a                             b b b
      ...                                               ...                               ...

Parameters follow each other in a block's flat tensor, whole or a peer's. A range of elements is read in runs of whole
rows, so that at most `PIECE_ELEMENTS` elements (or one row) are copied at a time. A parameter of three dimensions (of
all experts) is taken as one matrix after the other; an expert rank has a run of these, and all of every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.config.tensor_ranks import model_of_rank, rank_model, rank_part, trained_model
from ratrain.ratrain_ir.model.blocks import Block, Held, Parameter, parameters, parameters_within
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, is_stack
from ratrain.targets.runtime.arena import tensor_file

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.runtime.arena.tensor_file import Float32
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.weights.weight_source import FlatPieces

FlatReader: TypeAlias = Callable[[int, int], "FlatPieces"]
"""Reader of elements [start, stop) of a block's flat tensor, in pieces with their first index; skipped elements are
zero."""


def choice_bias(rank: RankExecutor, owner: Block) -> Float32 | None:
    """Return a copy of the bias with which a block's router chooses; None without one. All ranks have the same."""
    if not biases_choice(rank.program.model, rank.program.plan, owner):
        return None
    return np.array(rank.memory.to_host(rank.carried("bias", str(owner))), np.float32)


def rank_pieces(
    model: ModelConfig,
    plan: Plan,
    peer: int,
    owner: Block,
    whole: FlatReader,
    held: Held = Held.TRAINED,
    expert_rank: int = 0,
) -> FlatReader:
    """Return a reader of a rank's flat tensor of a block, which takes its elements from the whole tensor's reader."""
    model = trained_model(model, plan)
    wholes = {parameter.weight: parameter for parameter in parameters(model, owner)}

    def read(start: int, stop: int) -> FlatPieces:
        for parameter, low, high in parameters_within(rank_model(model, plan), owner, start, stop - start, held):
            for number, first, last in _sheets_within(parameter, start + low, start + high):
                before = expert_rank * parameter.shape[0] if is_stack(parameter.weight) else 0
                mine, other = _sheet(parameter, number), _sheet(wholes[parameter.weight], before + number)
                part = _sheet_part(model, plan.tp, peer, wholes[parameter.weight])
                for at, values in _peer_values(part, mine, other, whole, first, last):
                    yield mine.offset + at, values

    return read


def _sheets_within(parameter: Parameter, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first, last) of the matrices of a parameter with elements [start, stop) of the flat tensor.

    The range is counted from the matrix's own first element. A parameter of at most two dimensions is one matrix.
    """
    count = parameter.shape[0] if len(parameter.shape) == 3 else 1
    size = parameter.elements // count
    for number in range((start - parameter.offset) // size, -(-(stop - parameter.offset) // size)):
        begins = parameter.offset + number * size
        yield number, max(start - begins, 0), min(stop - begins, size)


def _sheet(parameter: Parameter, number: int) -> Parameter:
    """Return one matrix of a parameter as a parameter of its own."""
    if len(parameter.shape) < 3:
        return parameter
    size = parameter.elements // parameter.shape[0]
    return evolve(parameter, shape=parameter.shape[1:], offset=parameter.offset + number * size)


def _sheet_part(model: ModelConfig, peers: int, peer: int, whole: Parameter) -> tuple[slice, ...]:
    """Return a peer's part of each matrix of a whole parameter."""
    part = rank_part(model, peers, peer, whole.weight, whole.shape)
    return part[1:] if len(part) == 3 else part


def _peer_values(
    part: tuple[slice, ...], mine: Parameter, parameter: Parameter, whole: FlatReader, start: int, stop: int
) -> FlatPieces:
    """Yield elements [start, stop) of a peer's part of a matrix, in runs of whole rows that are cut at both ends."""
    width, whole_width = _width(mine), _width(parameter)
    columns = part[1] if len(part) > 1 else slice(0, 1)
    rows = part[0]
    # Rows [low, high) of the peer's part. A padded part may be wider or longer than what the whole parameter has for
    # it: the rest stays zero.
    for low, high in _runs(start // width, min(-(-stop // width), rows.stop - rows.start), whole_width):
        first = parameter.offset + (rows.start + low) * whole_width
        values = np.zeros((high - low, width), np.float32)
        taken = _joined(whole, first, (high - low) * whole_width).reshape(high - low, whole_width)[:, columns]
        values[:, : taken.shape[1]] = taken
        begin, end = max(start, low * width), min(stop, high * width)
        yield begin, values.reshape(-1)[begin - low * width : end - low * width]


def whole_pieces(model: ModelConfig, owner: Block, peers: Sequence[FlatReader]) -> FlatReader:
    """Return a reader of the whole flat tensor of a block, which takes its elements from its peers' readers."""
    if len(peers) == 1:
        return peers[0]
    mine = {parameter.weight: parameter for parameter in parameters(model_of_rank(model, len(peers)), owner)}

    def read(start: int, stop: int) -> FlatPieces:
        for parameter, low, high in parameters_within(model, owner, start, stop - start):
            parts = [_sheet_part(model, len(peers), peer, parameter) for peer in range(len(peers))]
            for number, first, last in _sheets_within(parameter, start + low, start + high):
                sheet, own = _sheet(parameter, number), _sheet(mine[parameter.weight], number)
                width = _width(sheet)
                for row, end in _runs(first // width, -(-last // width), width):
                    values = _whole_rows(parts, sheet, own, peers, row, end).reshape(-1)
                    begin, until = max(first, row * width), min(last, end * width)
                    yield sheet.offset + begin, values[begin - row * width : until - row * width]

    return read


def whole_of_experts(model: ModelConfig, owner: Block, ranks: Sequence[FlatReader]) -> FlatReader:
    """Return a reader of the whole flat tensor of an mlp, which takes its elements from its expert ranks' readers.

    Parameters that all of them have are taken from the first.
    """
    mine = {each.weight: each for each in parameters(evolve(model, expert_ranks=len(ranks)), owner)}

    def read(start: int, stop: int) -> FlatPieces:
        for parameter, low, high in parameters_within(model, owner, start, stop - start):
            own = mine[parameter.weight]
            for number, first, last in _sheets_within(parameter, start + low, start + high):
                rank, place = divmod(number, own.shape[0]) if is_stack(parameter.weight) else (0, 0)
                sheet, held = _sheet(parameter, number), _sheet(own, place)
                for at, values in ranks[rank](held.offset + first, held.offset + last):
                    yield sheet.offset + at - held.offset, values

    return read


def _whole_rows(
    parts: Sequence[tuple[slice, ...]],
    parameter: Parameter,
    mine: Parameter,
    peers: Sequence[FlatReader],
    low: int,
    high: int,
) -> Float32:
    """Return rows [low, high) of a matrix; where several peers hold the same elements, the last one's are taken."""
    values = np.empty((high - low, _width(parameter)), np.float32)
    width = _width(mine)
    for part, reader in zip(parts, peers, strict=True):
        rows = part[0]
        columns = part[1] if len(part) > 1 else slice(0, 1)
        first, last = max(low, rows.start), min(high, rows.stop)
        if first >= last:
            continue
        at = mine.offset + (first - rows.start) * width
        taken = _joined(reader, at, (last - first) * width).reshape(last - first, width)
        # A padded part is cut to what the whole parameter has. Copies of a part overwrite each other with equal values.
        values[first - low : last - low, columns] = taken[:, : columns.stop - columns.start]
    return values


def _width(parameter: Parameter) -> int:
    """Return the elements of a row; a vector has rows of one."""
    return parameter.shape[1] if len(parameter.shape) > 1 else 1


def _runs(low: int, high: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut rows [low, high) of `width` elements into runs of at most `PIECE_ELEMENTS` elements, or of one row."""
    return tensor_file.cut(low, high, max(1, tensor_file.PIECE_ELEMENTS // width)) if low < high else iter(())


def _joined(reader: FlatReader, start: int, count: int) -> Float32:
    """Read `count` elements from `start` on into one array; skipped elements are zero."""
    values = np.zeros(count, np.float32)
    for at, piece in reader(start, start + count):
        values[at - start : at - start + piece.size] = piece
    return values
