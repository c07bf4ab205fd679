"""Cross-entropy head on BLAS: chunks of rows times blocks of the table, of which no whole float32 copy is made.

    forward   for each chunk of rows:   logits[chunk] = x @ table block^T, block by block;  lse and loss of the chunk
    backward  for each chunk of rows:   logits again (unless given), dlogits in their place,
                                        dx += dlogits @ table block, dtable block += dlogits^T @ x
    one pass  for each chunk of rows:   the forward's lines, then the backward's, which are given the chunk's logits

Memory is one chunk of logits, one block of the table and one of its gradient. The backward makes three products of the
forward's size: logits, dx, dtable. One pass makes three in place of four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from ratrain.targets.program.kernel_options import LogitOptions
from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.arena.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels.fast.blas import share_product
from ratrain.targets.runtime.kernels.fast.fast_flat import cast
from ratrain.targets.runtime.kernels.fast.fast_logits import LogitShape
from ratrain.targets.runtime.kernels.fast.fast_numba import bits, exact, exp32, flat, load, maximum, reducing, span
from ratrain.targets.runtime.kernels.fast.fast_rows import store_product
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE, NORM_EPS, check_labels

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, F64, I32, Array
    from ratrain.targets.runtime.kernels.team import Team

TABLE_ELEMENTS = 1 << 22
"""Elements of a block of the table, 16 MiB in float32: enough rows for full BLAS speed."""

_ZERO, _ONE, _NORM_EPS = np.float32(0), np.float32(1), np.float32(NORM_EPS)


@reducing()
def _inverse_norms(table: Any, out: Any) -> None:
    """Set out = 1 / max(norm, NORM_EPS) of each row."""
    for r in range(table.shape[0]):
        row = table[r]
        total = _ZERO
        for i in range(row.size):
            value = load(row[i])
            total += value * value
        out[r] = _ONE / maximum(np.sqrt(total), _NORM_EPS)


@exact()
def _scale_columns(logits: Any, rows: Any, first: Any, inverse: Any) -> None:
    """Multiply the columns of a block of logits, from column `first` on, by the inverse norms of its table rows."""
    for r in range(rows):
        row = logits[r, first : first + inverse.size]
        for i in range(row.size):
            row[i] *= inverse[i]


@reducing()
def log_sum_exp(logits: Any, lse: Any) -> None:
    """Set lse[r] = the log-sum-exp of each row."""
    for r in range(lse.size):
        row = logits[r]
        # `maximum` passes a NaN on, so that a row with a NaN has the result NaN
        peak = row[0]
        for i in range(row.size):
            peak = maximum(peak, row[i])
        total = _ZERO
        for i in range(row.size):
            total += exp32(row[i] - peak)
        lse[r] = peak + np.float32(math.log(np.float64(total)))


@exact()
def add_loss(logits: Any, labels: Any, lse: Any, loss: Any) -> None:
    """Add lse - logit of the label to loss[0], row after row in float64; rows without a label add nothing."""
    for r in range(lse.size):
        if labels[r] >= 0:
            loss[0] += np.float64(lse[r]) - np.float64(load(logits[r, labels[r]]))


@exact()
def _logit_gradient(
    logits: Any, first: Any, labels: Any, lse: Any, factor: Any, inverse: Any, pull: Any, normalise: Any
) -> None:
    """Turn a block of logits, from column `first` on, into the gradient of the products xn . w.

    Rows that are ignored get 0. Let p = exp(logit - lse). The gradient of a logit is factor * (p - 1 at the label).
    With `normalise` the logit is inverse * (xn . w), and pull[v] becomes the factor of w in the gradient of the inverse
    norm: d(1/|w|)/dw = -w/|w|^3, so inverse^2 * sum of dlogit * logit, and 0 where the norm is clamped.
    """
    if normalise:
        for i in range(pull.size):
            pull[i] = _ZERO
    for r in range(lse.size):
        row = span(logits[r], first, first + pull.size)
        log_total, label = lse[r], labels[r] - first
        # A label below 0 is either ignored (no gradient) or a row of another rank's table (its softmax still counts
        # here).
        share = factor if labels[r] != IGNORED_LABEL else _ZERO
        if normalise:
            # the logit at the label is read before the loop overwrites it
            at_label = row[label] if 0 <= label < row.size else _ZERO
            for i in range(row.size):
                gradient = exp32(row[i] - log_total) * share
                pull[i] += gradient * row[i]
                row[i] = gradient * inverse[i]
            if 0 <= label < row.size:
                # the label's part of the gradient is -factor: it is added to both sums like any other
                pull[label] -= factor * at_label
                row[label] -= factor * inverse[label]
        else:
            for i in range(row.size):
                row[i] = exp32(row[i] - log_total) * share
            if 0 <= label < row.size:
                row[label] -= factor
    if normalise:
        for i in range(pull.size):
            pull[i] *= inverse[i] * inverse[i] if inverse[i] < LARGEST_INVERSE else _ZERO


@exact()
def _subtract_rows(product: Any, pull: Any, weight: Any) -> None:
    """Set product -= pull * weight, one factor for each row."""
    for r in range(product.shape[0]):
        row, w, factor = product[r], weight[r], pull[r]
        for i in range(row.size):
            # the gradient through the inverse norm, which points along the table's row
            row[i] -= factor * load(w[i])


def _convert(team: Team, src: Array, dst: F32) -> None:
    source, stored = flat(src), flat(dst)
    team.run(lambda part: cast(source[part], stored[part]), team.rows(stored.shape))


def _part_of_lse(logits: F32, lse: F32, rows: slice) -> None:
    log_sum_exp(logits[rows], lse[rows])


def _part_of_gradient(
    logits: F32,
    first: int,
    labels: I32,
    lse: F32,
    factor: np.float32,
    inverse: F32,
    pull: F32,
    normalise: bool,
    rows: slice,
) -> None:
    _logit_gradient(logits[rows], first, labels[rows], lse[rows], factor, inverse, pull, normalise)


def _store_part(dweight: F32, out: Array, pull: F32 | None, weight: Array, accumulate: bool, rows: slice) -> None:
    """Set out = [out +] dweight [- pull * weight], for some rows of the table."""
    product, stored = dweight[rows], out[rows]
    if pull is not None:
        _subtract_rows(product, pull[rows], weight[rows])
    store_product(product, stored, stored[0], False, stored, False, accumulate)


class _Table:
    """The table by blocks of rows; a block is converted to float32 when asked for, unless it was the last one."""

    def __init__(self, team: Team, table: Array, buffer: F32 | None) -> None:
        self._team = team
        self._table = table
        self._buffer = buffer
        self._loaded = -1

    def blocks(self) -> Iterator[slice]:
        step = block_rows(self._table)
        for start in range(0, self._table.shape[0], step):
            yield slice(start, min(start + step, self._table.shape[0]))

    def load(self, rows: slice) -> Array:
        """Return these rows in float32."""
        if self._buffer is None:
            return self._table[rows]
        block = self._buffer[: rows.stop - rows.start]
        # the last block of one chunk of rows is often the first asked for again, if the table has one block
        if self._loaded != rows.start:
            _convert(self._team, self._table[rows], block)
            self._loaded = rows.start
        return block


def block_rows(table: Array) -> int:
    """Return the rows of a block of the table."""
    rows: int = min(table.shape[0], max(256, TABLE_ELEMENTS // table.shape[1]))
    return rows


def _plan(xn: Array, table: Array, logits: F32, normalise: bool) -> dict[str, Buffer]:
    chunk, hidden = min(xn.shape[0], logits.shape[0]), xn.shape[1]
    plan = {}
    if xn.dtype != np.float32:
        plan["x"] = Buffer((chunk, hidden))
    if table.dtype != np.float32:
        plan["weight"] = Buffer((block_rows(table), hidden))
    if normalise:
        plan["inverse"] = Buffer((table.shape[0],))
    return plan


def _backward_plan(xn: Array, table: Array, logits: F32, normalise: bool) -> dict[str, Buffer]:
    chunk, hidden = min(xn.shape[0], logits.shape[0]), xn.shape[1]
    return _plan(xn, table, logits, normalise) | {
        "dx": Buffer((chunk, hidden)),
        "dx_block": Buffer((chunk, hidden)),
        "dweight": Buffer((block_rows(table), hidden)),
        "pull": Buffer((block_rows(table),)),
    }


def head_forward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, **_: object) -> Plan:
    """Plan a chunk of rows and a block of the table in float32, and inverse norms, each if needed."""
    return list(_plan(xn, table, logits, normalise).values())


def head_backward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, **_: object) -> Plan:
    """Plan the forward's buffers, a chunk's gradient, one block's part of it, and the block's own gradient."""
    return list(_backward_plan(xn, table, logits, normalise).values())


head_backward_from_logits_plan = head_backward_plan
"""Plan of the backward from given logits, in which all rows are one chunk."""


def _take(scratch: Scratch, plan: dict[str, Buffer]) -> dict[str, Array]:
    return dict(zip(plan, scratch.take_all(list(plan.values())), strict=True))


def _chunk(team: Team, xn: Array, rows: slice, buffer: F32 | None) -> Array:
    """Return rows of xn in float32."""
    if buffer is None:
        return xn[rows]
    block = buffer[: rows.stop - rows.start]
    _convert(team, xn[rows], block)
    return block


def _chunks(xn: Array, logits: F32) -> Iterator[slice]:
    step = logits.shape[0]
    for start in range(0, xn.shape[0], step):
        yield slice(start, min(start + step, xn.shape[0]))


def _logits_of_block(
    team: Team, x: Array, weight: Array, columns: slice, inverse: F32 | None, shape: LogitShape | None, logits: F32
) -> None:
    """Set the columns of a block of the table in the logits of some rows."""
    share_product(team, x, weight.T, logits[:, columns])
    if inverse is not None:
        _scale_columns(logits, len(x), columns.start, inverse[columns])
    if shape is not None:
        shape.apply(team, logits, columns)


class _Products:
    """Table, labels' sums and buffers of a head, for all its chunks of rows."""

    def __init__(
        self,
        team: Team,
        table: Array,
        labels: I32,
        lse: F32,
        factor: np.float32,
        shape: LogitShape | None,
        buffers: dict[str, Array],
    ) -> None:
        self._team = team
        self._labels = labels
        self._lse = lse
        self._factor = factor
        self._shape = shape
        self._buffers = buffers
        self._inverse = buffers.get("inverse")
        if self._inverse is not None:
            _inverse_norms(bits(table), self._inverse)
        self._weights = _Table(team, table, buffers.get("weight"))

    def forward(self, xn: Array, rows: slice, logits: F32, loss: F64) -> None:
        """Compute the logits of some rows and their lse; add their loss."""
        x = _chunk(self._team, xn, rows, self._buffers.get("x"))
        for columns in self._weights.blocks():
            weight = self._weights.load(columns)
            _logits_of_block(self._team, x, weight, columns, self._inverse, self._shape, logits)
        sums = self._lse[rows]
        self._team.run(partial(_part_of_lse, logits, sums), self._team.rows(logits.shape))
        add_loss(logits, self._labels[rows], sums, loss)

    def backward(
        self,
        xn: Array,
        rows: slice,
        logits: F32 | None,
        dlogits: F32,
        dxn: Array,
        dtable: Array | None,
        accumulate: bool,
    ) -> None:
        """Compute the gradients of some rows: dlogits, their rows of dxn, dtable = [dtable +] their part.

        Without `logits` they are computed again, into `dlogits`, which may be `logits` too. Without `dtable` its
        gradient is not made.
        """
        team, buffers, inverse = self._team, self._buffers, self._inverse
        normalise, labels, lse = inverse is not None, self._labels[rows], self._lse[rows]
        x = _chunk(team, xn, rows, buffers.get("x"))
        dx, dx_block = buffers["dx"][: len(x)], buffers["dx_block"][: len(x)]
        for columns in self._weights.blocks():
            weight, dlogit = self._weights.load(columns), dlogits[:, columns]
            pull, dweight = buffers["pull"][: len(weight)], buffers["dweight"][: len(weight)]
            # without `normalise` the loop reads no inverse norms: any array of the type will do
            norms = pull if inverse is None else inverse[columns]
            if logits is None:
                _logits_of_block(team, x, weight, columns, inverse, self._shape, dlogits)
            elif logits is not dlogits:
                np.copyto(dlogit, logits[:, columns])
            if self._shape is None:
                gradient = partial(
                    _part_of_gradient,
                    dlogits,
                    columns.start,
                    labels,
                    lse,
                    self._factor,
                    norms,
                    pull,
                    normalise,
                )
                # with `normalise` all rows add to `pull`, so they cannot be shared out
                team.run(gradient, [slice(0, len(x))] if normalise else team.rows(dlogit.shape))
            else:
                self._shape.gradient(team, dlogits, columns, labels, lse, self._factor)
            # dx is a sum over the blocks of the table: the first block's product starts it
            share_product(team, dlogit, weight, dx_block if columns.start else dx)
            if columns.start:
                # numpy's addition, on this thread: a chunk of rows is small against the product
                dx += dx_block
            if dtable is None:
                continue
            store = partial(
                _store_part,
                dweight,
                bits(dtable[columns]),
                pull if normalise else None,
                bits(weight),
                accumulate,
            )
            # each range of table rows is stored by the thread that made it, while others still multiply
            share_product(team, dlogit.T, x, dweight, store)
        cast(flat(dx), flat(dxn[rows]))


class FastHead:
    """The head kernels of `Fast`."""

    team: Team

    def head_forward(self, xn, table, labels, lse, loss, logits, *, scratch, accumulate, **shaping):
        check_labels(labels, table.shape[0])
        given = LogitOptions(**shaping)
        buffers = _take(scratch, _plan(xn, table, logits, given.normalise))
        products = _Products(self.team, table, labels, lse, _ZERO, LogitShape.of(given), buffers)
        if not accumulate:
            loss[0] = 0
        for rows in _chunks(xn, logits):
            # a chunk is as many rows as the workspace of logits has
            products.forward(xn, rows, logits[: rows.stop - rows.start], loss)

    def head_backward(
        self, xn, table, labels, lse, scale, logits, dxn, *, scratch, denominator, accumulate, dtable=None, **shaping
    ):
        products = self._products(xn, table, labels, lse, scale, logits, scratch, denominator=denominator, **shaping)
        for rows in _chunks(xn, logits):
            chunk = logits[: rows.stop - rows.start]
            products.backward(xn, rows, None, chunk, dxn, dtable, accumulate or rows.start > 0)

    def head_in_one_pass(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        dxn: Array,
        loss: F64,
        *,
        scratch: Scratch,
        denominator: float,
        accumulate: bool,
        adds_loss: bool,
        dtable: Array | None = None,
        **shaping: Any,
    ) -> None:
        products = self._products(xn, table, labels, lse, scale, logits, scratch, denominator=denominator, **shaping)
        if not adds_loss:
            loss[0] = 0
        for rows in _chunks(xn, logits):
            chunk = logits[: rows.stop - rows.start]
            products.forward(xn, rows, chunk, loss)
            products.backward(xn, rows, chunk, chunk, dxn, dtable, accumulate or rows.start > 0)

    def makes_head_in_one_pass(self, xn: Array, table: Array, logits: F32, **shaping: Any) -> bool:
        return True

    def head_backward_from_logits(
        self, xn, table, labels, lse, scale, logits, dlogits, dxn, *, scratch, accumulate, dtable=None, **options
    ):
        products = self._products(xn, table, labels, lse, scale, logits, scratch, **options)
        products.backward(xn, slice(0, len(xn)), logits, dlogits, dxn, dtable, accumulate)

    def _products(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        scratch: Scratch,
        *,
        denominator: SupportsFloat,
        **shaping: Any,
    ) -> _Products:
        """Check the labels, and prepare what all chunks of a backward share."""
        check_labels(labels, table.shape[0])
        given = LogitOptions(**shaping)
        buffers = _take(scratch, _backward_plan(xn, table, logits, given.normalise))
        factor = np.float32(float(scale[0]) / float(denominator))
        return _Products(self.team, table, labels, lse, factor, LogitShape.of(given), buffers)
