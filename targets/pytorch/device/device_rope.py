"""Rotary position embedding on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.pytorch.device.device_common import (
    F32,
    I32,
    chunk_buffers,
    chunk_rows,
    document_positions,
    row_chunks,
    shaped,
    wide,
)
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.reference.reference_common import rotated_halves

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import Array
    from ratrain.targets.runtime.arena.scratch import Plan


def rope_plan(
    *,
    heads: int,
    head_dim: int,
    seq_len: int,
    rotary_dim: int | None = None,
    documents: I32 | None = None,
    **_: object,
) -> Plan:
    """Plan both halves of pairs of some rows, a sum, a product; with documents cosines, sines, positions twice."""
    pairs = (rotary_dim or head_dim) // 2
    plan = chunk_buffers(4, seq_len, heads * pairs)
    if documents is None:
        return plan
    rows = chunk_rows(seq_len, heads * pairs)
    return [*plan, *[Buffer((rows * pairs,))] * 2, *[Buffer((rows,), np.int64)] * 2]


@frozen
class RotaryTurn:
    """A rotation of rows. Tables start at position 0, a sequence at `first`; `documents` are [sequences, seq_len]."""

    cos: F32
    sin: F32
    first: int
    documents: I32 | None
    width: int
    interleaved: bool
    inverse: bool

    def table(self, sequence: int, rows: slice, buffers: list[Array]) -> tuple[F32, F32]:
        """Return cosines and sines [rows, 1, width / 2] of some rows of a sequence."""
        if self.documents is None:
            at = slice(self.first + rows.start, self.first + rows.stop)
            return self.cos[at, None], self.sin[at, None]
        starts = self.documents[sequence, rows]
        positions = document_positions(starts, self.first + rows.start, *buffers[6:])
        shape = (len(starts), self.width // 2)
        cos, sin = (
            torch.index_select(each, 0, positions, out=shaped(buffer, shape))
            for each, buffer in zip((self.cos, self.sin), buffers[4:], strict=False)
        )
        return cos[:, None], sin[:, None]

    def rotate(self, x: Array, buffers: list[Array]) -> None:
        """Rotate x [sequences, seq_len, heads, head_dim] in place."""
        sign = -1 if self.inverse else 1
        for rows in row_chunks(x.shape[1], x.shape[2] * self.width // 2):
            for number, sequence in enumerate(x[:, rows]):
                c, s = self.table(number, rows, buffers)
                halves = rotated_halves(sequence, self.width, interleaved=self.interleaved)
                low, high = (wide(buffer, half) for buffer, half in zip(buffers, halves, strict=False))
                out, term = (shaped(buffer, low.shape) for buffer in buffers[2:4])
                # each product is rounded before the sum: with a fused product, bits would depend on an element's place
                halves[0].copy_(torch.mul(low, c, out=out).add_(torch.mul(high, s, out=term), alpha=-sign))
                halves[1].copy_(torch.mul(high, c, out=out).add_(torch.mul(low, s, out=term), alpha=sign))
