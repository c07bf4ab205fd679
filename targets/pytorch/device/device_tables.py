"""Embeddings and learned positions on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.targets.pytorch.device.device_common import (
    add_wide,
    check_documents,
    chunk_buffers,
    chunk_rows,
    document_positions,
    flat_chunks,
    row_chunks,
    row_steps,
    shaped,
    size,
    store_sum,
    stored,
    wide,
)
from ratrain.targets.pytorch.device.device_sums import add_rows, keyed_sum_plan
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels import shared

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import I32, Array
    from ratrain.targets.runtime.arena.scratch import Plan


def check_tokens(tokens: I32, rows: int) -> None:
    """Do `shared.check_tokens` on the CPU; on a GPU tokens are not checked, as the host would have to wait for it."""
    if tokens.device.type == "cpu":
        shared.check_tokens(tokens.numpy(), rows)


def embedding_forward_plan(y: Array, *, scale: float = 1.0, **_: object) -> Plan:
    """Plan rows of the table and a mask of absent ones; some rows, if they are scaled."""
    rows = len(y)
    return [Buffer((rows,), np.int32), Buffer((rows,), np.bool_), *(() if scale == 1 else chunk_buffers(1, size(y)))]


def embedding_backward_plan(dy: Array, **_: object) -> Plan:
    """Plan sums by keys."""
    return keyed_sum_plan(*dy.shape)


def position_forward_plan(y: Array, *, seq_len: int, documents: I32 | None = None, **_: object) -> Plan:
    """Plan some rows of a sequence and of the table; with documents also stored table rows, positions twice."""
    plan = chunk_buffers(2, seq_len, y.shape[1])
    if documents is None:
        return plan
    positions = Buffer((chunk_rows(seq_len, y.shape[1]),), np.int64)
    return [*plan, *chunk_buffers(1, seq_len, y.shape[1]), positions, positions]


def position_backward_plan(dy: Array, *, seq_len: int, documents: I32 | None = None, **_: object) -> Plan:
    """Plan the sum of some rows and a term; with documents sums by keys, and positions twice."""
    if documents is None:
        return chunk_buffers(2, seq_len, dy.shape[1])
    positions = Buffer((dy.shape[0],), np.int64)
    return [*keyed_sum_plan(*dy.shape), positions, positions]


class DeviceTables:
    """The kernels of `TorchDevice` on tables."""

    def embedding_forward(self, tokens, table, y, *, scratch, scale=1.0):
        """Look up tokens; they are checked on the CPU only."""
        check_tokens(tokens, len(table))
        held, absent, *buffers = scratch.take_all(embedding_forward_plan(y, scale=scale))
        torch.lt(tokens, 0, out=absent)  # rows of other tensor-parallel ranks
        torch.index_select(table, 0, torch.clamp(tokens, min=0, out=held), out=y)
        y.masked_fill_(absent[:, None], 0)
        for buffer in buffers:
            for (part,) in flat_chunks(y):
                part.copy_(wide(buffer, part).mul_(scale))

    def embedding_backward(self, tokens, dy, dtable, *, scratch, accumulate, scale=1.0, padding_token=None):
        """Add gradients to the table, in the order of `device_sums`; tokens are checked on the CPU only."""
        check_tokens(tokens, len(dtable))
        buffers = scratch.take_all(embedding_backward_plan(dy))
        add_rows(tokens, dy, dtable, buffers, scale=scale, accumulate=accumulate, without=padding_token)

    def position_forward(self, positions, y, *, documents=None, scratch, seq_len, first_position=0):
        """Add positions; starts of documents are checked on the CPU only."""
        check_documents(documents, seq_len, first_position)
        of_y, of_table, *others = scratch.take_all(position_forward_plan(y, seq_len=seq_len, documents=documents))
        for rows in row_chunks(seq_len, y.shape[1]):
            first = first_position + rows.start
            for number, sequence in enumerate(y.view(-1, seq_len, y.shape[1])):
                part = sequence[rows]
                if documents is None:
                    added = positions[first : first + len(part)]
                else:
                    gathered, *places = others
                    at = document_positions(documents.view(-1, seq_len)[number, rows], first, *places)
                    added = torch.index_select(positions, 0, at, out=stored(gathered, part.shape, part.dtype))
                part.copy_(wide(of_y, part).add_(wide(of_table, added)))

    def position_backward(self, dy, dpositions, *, documents=None, scratch, seq_len, accumulate, first_position=0):
        """Sum gradients by position; with documents in the order of `device_sums`."""
        check_documents(documents, seq_len, first_position)
        buffers = scratch.take_all(position_backward_plan(dy, seq_len=seq_len, documents=documents))
        if documents is None:
            _add_sequences(
                dy.view(-1, seq_len, dy.shape[1]), dpositions, first_position, buffers, accumulate=accumulate
            )
            return
        *of_sums, positions, spare = buffers
        for sequence in row_steps(len(dy), seq_len):
            document_positions(documents[sequence], first_position, positions[sequence], spare)
        add_rows(positions, dy, dpositions, of_sums, scale=1.0, accumulate=accumulate)


def _add_sequences(dy: Array, dpositions: Array, first: int, buffers: list[Array], *, accumulate: bool) -> None:
    """Sum dy[sequences, seq_len, width] over the sequences, in order."""
    of_sum, term = buffers
    last = first + dy.shape[1]
    table = dpositions[first:last]
    for rows in row_chunks(*table.shape):
        total = shaped(of_sum, table[rows].shape).zero_()
        for sequence in dy:
            add_wide(total, term, sequence[rows])
        store_sum(total, term, table[rows], accumulate=accumulate)
    if not accumulate:
        dpositions[:first].zero_()
        dpositions[last:].zero_()
