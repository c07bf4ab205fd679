"""Cross-entropy head in plain numpy: chunks of rows, and blocks of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.kernels.reference_common import f32, put, quiet, row_blocks
from ratrain.targets.runtime.kernels.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE, NORM_EPS, check_indices

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, F64, I32, Array


def head_forward_plan(table: Array, *, normalise: bool, **_: object) -> Plan:
    """Inverse norms."""
    return [Buffer((table.shape[0],))] if normalise else []


def head_backward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, **_: object) -> Plan:
    """Gradient of a chunk of rows, then inverse norms."""
    chunk = min(xn.shape[0], logits.shape[0])
    return [Buffer((chunk, xn.shape[1])), *head_forward_plan(table, normalise=normalise)]


def _inverse_norms(table: Array, out: F32) -> None:
    for rows in row_blocks(*table.shape):
        norm = np.sqrt(np.square(f32(table[rows])).sum(axis=1))
        out[rows] = np.float32(1) / np.maximum(norm, np.float32(NORM_EPS))


def _logits(xn: F32, table: Array, inverse: F32 | None, out: F32) -> None:
    for rows in row_blocks(*table.shape):
        out[:, rows] = xn @ f32(table[rows]).T
        if inverse is not None:
            out[:, rows] *= inverse[rows]


class ReferenceHead:
    """The head kernels of `Reference`."""

    @quiet
    def head_forward(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        loss: F64,
        logits: F32,
        *,
        scratch: Scratch,
        normalise: bool,
        accumulate: bool,
    ) -> None:
        """See `KERNELS["head_forward"]`."""
        check_indices(labels, table.shape[0])
        inverse = None
        if normalise:
            (inverse,) = scratch.take_all(head_forward_plan(table, normalise=True))
            _inverse_norms(table, inverse)
        total = float(loss[0]) if accumulate else 0.0
        for start in range(0, xn.shape[0], logits.shape[0]):
            stop = min(start + logits.shape[0], xn.shape[0])
            chunk = logits[: stop - start]
            _logits(f32(xn[start:stop]), table, inverse, chunk)
            for t, row in enumerate(chunk, start):
                peak = row.max()
                lse[t] = peak + np.log(np.exp(row - peak).sum())
                total += float(lse[t]) - float(row[labels[t]])
        loss[0] = total

    @quiet
    def head_backward(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        dxn: Array,
        dtable: Array,
        *,
        scratch: Scratch,
        denominator: float,
        normalise: bool,
        accumulate: bool,
    ) -> None:
        """See `KERNELS["head_backward"]`."""
        check_indices(labels, table.shape[0])
        buffers = scratch.take_all(head_backward_plan(xn, table, logits, normalise=normalise))
        inverse = buffers[1] if normalise else None
        if inverse is not None:
            _inverse_norms(table, inverse)
        factor = np.float32(float(scale[0]) / denominator)
        for start in range(0, xn.shape[0], logits.shape[0]):
            stop = min(start + logits.shape[0], xn.shape[0])
            chunk, acc = logits[: stop - start], buffers[0][: stop - start]
            x = f32(xn[start:stop])
            _logits(x, table, inverse, chunk)
            acc.fill(0)
            for rows in row_blocks(*table.shape):
                weight, logit = f32(table[rows]), chunk[:, rows]
                dlogit = np.exp(logit - lse[start:stop, None])
                for t, label in enumerate(labels[start:stop]):
                    if rows.start <= label < rows.stop:
                        dlogit[t, label - rows.start] -= 1
                dlogit *= factor
                # of logit = inverse * (x . w) with inverse = 1 / |w|: d inverse / dw = -inverse^3 w
                pull = None
                if inverse is not None:
                    live = inverse[rows] < LARGEST_INVERSE
                    pull = np.where(live, np.square(inverse[rows]) * (dlogit * logit).sum(axis=0), np.float32(0))
                    dlogit *= inverse[rows]
                acc += dlogit @ weight
                dweight = dlogit.T @ x
                if pull is not None:
                    dweight -= pull[:, None] * weight
                if accumulate or start:
                    dweight += f32(dtable[rows])
                put(dtable[rows], dweight)
            put(dxn[start:stop], acc)
