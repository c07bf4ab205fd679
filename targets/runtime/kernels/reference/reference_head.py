"""Cross-entropy head in plain numpy, by chunks of rows and blocks of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import numpy as np
from attrs import frozen

from ratrain.targets.program.kernel_options import LogitOptions
from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE, NORM_EPS, check_labels

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array


def head_forward_plan(table: Array, *, normalise: bool, **_: object) -> Plan:
    """Plan the inverse norms of the table's rows."""
    return [Buffer((table.shape[0],))] if normalise else []


def head_backward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, **_: object) -> Plan:
    """Plan the gradient of a chunk of rows, then inverse norms."""
    chunk = min(xn.shape[0], logits.shape[0])
    return [Buffer((chunk, xn.shape[1])), *head_forward_plan(table, normalise=normalise)]


def head_backward_from_logits_plan(xn: Array, table: Array, *, normalise: bool, **_: object) -> Plan:
    """Plan the gradient of all rows, then inverse norms."""
    return [Buffer(xn.shape), *head_forward_plan(table, normalise=normalise)]


def _inverse_norms(table: Array, out: F32) -> None:
    for rows in row_blocks(*table.shape):
        norm = np.sqrt(np.square(f32(table[rows])).sum(axis=1))
        out[rows] = np.float32(1) / np.maximum(norm, np.float32(NORM_EPS))


@frozen
class _Shaping:
    """Scale and cap that turn products of rows and table into logits."""

    scale: np.float32
    softcap: np.float32 | None

    @classmethod
    def of(cls, given: LogitOptions) -> Self:
        """Make it from the options of a kernel."""
        return cls(np.float32(given.scale_of_logits), None if given.softcap is None else np.float32(given.softcap))

    def shape(self, logits: F32) -> None:
        """Turn products into logits, in place."""
        logits *= self.scale
        if self.softcap is not None:
            logits[:] = self.softcap * np.tanh(logits / self.softcap)

    def slope(self, logits: F32, dlogits: F32) -> None:
        """Turn the gradient of logits into that of the products, in place."""
        if self.softcap is not None:
            dlogits *= np.float32(1) - np.square(logits / self.softcap)
        dlogits *= self.scale


def _logits(xn: F32, table: Array, inverse: F32 | None, shaping: _Shaping, out: F32) -> None:
    for rows in row_blocks(*table.shape):
        out[:, rows] = xn @ f32(table[rows]).T
        if inverse is not None:
            out[:, rows] *= inverse[rows]
        shaping.shape(out[:, rows])


def _begin(
    table: Array, labels: I32, scale: F32, buffers: list[Array], *, denominator: SupportsFloat, **options: Any
) -> tuple[np.float32, _Shaping, F32 | None]:
    """Check the labels of a backward; return the factor of its gradient, its shaping, and inverse norms if any."""
    check_labels(labels, table.shape[0])
    inverse = buffers[1] if len(buffers) > 1 else None
    if inverse is not None:
        _inverse_norms(table, inverse)
    return np.float32(float(scale[0]) / float(denominator)), _Shaping.of(LogitOptions(**options)), inverse


def _gradients(
    x: F32,
    table: Array,
    labels: I32,
    lse: F32,
    factor: np.float32,
    inverse: F32 | None,
    shaping: _Shaping,
    logits: F32,
    dlogits: F32,
    acc: F32,
    dtable: Array | None,
    accumulate: bool,
) -> None:
    """Compute gradients of some rows: dlogits, acc = the gradient of x, dtable = [dtable +] the table's (None: none).

    `dlogits` may be the bytes of `logits`.
    """
    acc.fill(0)
    for rows in row_blocks(*table.shape):
        weight, logit = f32(table[rows]), logits[:, rows]
        dlogit = np.exp(logit - lse[:, None])
        for t, label in enumerate(labels):
            if rows.start <= label < rows.stop:
                dlogit[t, label - rows.start] -= 1
        dlogit *= np.where(labels == IGNORED_LABEL, np.float32(0), factor)[:, None]
        shaping.slope(logit, dlogit)
        # of logit = inverse * (x . w) with inverse = 1 / |w|: d inverse / dw = -inverse^3 w
        pull = None
        if inverse is not None:
            live = inverse[rows] < LARGEST_INVERSE
            pull = np.where(live, np.square(inverse[rows]) * (dlogit * logit).sum(axis=0), np.float32(0))
            dlogit *= inverse[rows]
        acc += dlogit @ weight
        dlogits[:, rows] = dlogit
        if dtable is None:
            continue
        dweight = dlogit.T @ x
        if pull is not None:
            dweight -= pull[:, None] * weight
        if accumulate:
            dweight += f32(dtable[rows])
        put(dtable[rows], dweight)


class ReferenceHead:
    """The head kernels of `ReferenceKernels`."""

    @quiet
    def head_forward(self, xn, table, labels, lse, loss, logits, *, scratch, accumulate, **shaping):
        check_labels(labels, table.shape[0])
        given, inverse = LogitOptions(**shaping), None
        if given.normalise:
            (inverse,) = scratch.take_all(head_forward_plan(table, normalise=True))
            _inverse_norms(table, inverse)
        total = float(loss[0]) if accumulate else 0.0
        for start in range(0, xn.shape[0], logits.shape[0]):
            stop = min(start + logits.shape[0], xn.shape[0])
            chunk = logits[: stop - start]
            _logits(f32(xn[start:stop]), table, inverse, _Shaping.of(given), chunk)
            for t, row in enumerate(chunk, start):
                peak = row.max()
                lse[t] = peak + np.log(np.exp(row - peak).sum())
                total += float(lse[t]) - float(row[labels[t]]) if labels[t] >= 0 else 0.0
        loss[0] = total

    @quiet
    def head_backward(self, xn, table, labels, lse, scale, logits, dxn, *, scratch, accumulate, dtable=None, **options):
        buffers = scratch.take_all(head_backward_plan(xn, table, logits, normalise=options["normalise"]))
        factor, shaping, inverse = _begin(table, labels, scale, buffers, **options)
        for start in range(0, xn.shape[0], logits.shape[0]):
            rows = slice(start, min(start + logits.shape[0], xn.shape[0]))
            chunk, acc = logits[: rows.stop - start], buffers[0][: rows.stop - start]
            x = f32(xn[rows])
            _logits(x, table, inverse, shaping, chunk)
            adds = accumulate or start > 0
            _gradients(x, table, labels[rows], lse[rows], factor, inverse, shaping, chunk, chunk, acc, dtable, adds)
            put(dxn[rows], acc)

    @quiet
    def head_backward_from_logits(
        self, xn, table, labels, lse, scale, logits, dlogits, dxn, *, scratch, accumulate, dtable=None, **options
    ):
        buffers = scratch.take_all(head_backward_from_logits_plan(xn, table, normalise=options["normalise"]))
        factor, shaping, inverse = _begin(table, labels, scale, buffers, **options)
        acc = buffers[0]
        _gradients(f32(xn), table, labels, lse, factor, inverse, shaping, logits, dlogits, acc, dtable, accumulate)
        put(dxn, acc)
