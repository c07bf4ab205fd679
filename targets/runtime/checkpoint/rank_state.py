"""Conversion between whole flat tensors of blocks and the parts that tensor-parallel ranks hold.

    whole parameter [4, 6], two peers by columns      flat tensor of peer 0: [4, 3]     of peer 1: [4, 3]
      a a a b b b                                       a a a                             b b b
      ...                                               ...                               ...

Parameters follow each other in a block's flat tensor, whole or a peer's. A range of elements is read in runs of whole
rows, so that at most `PIECE_ELEMENTS` elements (or one row) are copied at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ratrain.ratrain_ir.config.tensor_ranks import model_of_rank, rank_model, rank_part
from ratrain.ratrain_ir.model.blocks import Block, Parameter, parameters, parameters_within
from ratrain.targets.runtime.arena import tensor_file

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.runtime.arena.tensor_file import Float32
    from ratrain.targets.runtime.weights.weight_source import FlatPieces

FlatReader: TypeAlias = Callable[[int, int], "FlatPieces"]
"""Reader of elements [start, stop) of a block's flat tensor, in pieces with their first index; skipped elements are
zero."""


def rank_pieces(model: ModelConfig, plan: Plan, peer: int, owner: Block, whole: FlatReader) -> FlatReader:
    """Return a reader of a peer's flat tensor of a block, which takes its elements from the whole tensor's reader."""
    wholes = {parameter.weight: parameter for parameter in parameters(model, owner)}

    def read(start: int, stop: int) -> FlatPieces:
        for mine, low, high in parameters_within(rank_model(model, plan), owner, start, stop - start):
            first, last = start + low - mine.offset, start + high - mine.offset
            for at, values in _peer_values(model, plan, peer, mine, wholes[mine.weight], whole, first, last):
                yield mine.offset + at, values

    return read


def _peer_values(
    model: ModelConfig,
    plan: Plan,
    peer: int,
    mine: Parameter,
    parameter: Parameter,
    whole: FlatReader,
    start: int,
    stop: int,
) -> FlatPieces:
    """Yield elements [start, stop) of a peer's part of a parameter, in runs of whole rows that are cut at both ends."""
    part = rank_part(model, plan.tp, peer, mine.weight, parameter.shape)
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
            first, last = start + low - parameter.offset, start + high - parameter.offset
            width = _width(parameter)
            for row, end in _runs(first // width, -(-last // width), width):
                values = _whole_rows(model, parameter, mine[parameter.weight], peers, row, end).reshape(-1)
                begin, until = max(first, row * width), min(last, end * width)
                yield parameter.offset + begin, values[begin - row * width : until - row * width]

    return read


def _whole_rows(
    model: ModelConfig,
    parameter: Parameter,
    mine: Parameter,
    peers: Sequence[FlatReader],
    low: int,
    high: int,
) -> Float32:
    """Return rows [low, high) of a parameter; where several peers hold the same elements, the last one's are taken."""
    values = np.empty((high - low, _width(parameter)), np.float32)
    width = _width(mine)
    for peer, reader in enumerate(peers):
        part = rank_part(model, len(peers), peer, parameter.weight, parameter.shape)
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
