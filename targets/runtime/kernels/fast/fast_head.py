"""Cross-entropy head on BLAS: chunks of rows times blocks of the table, of which no whole float32 copy is made.

    forward   for each chunk of rows:   for each block of the table:   logits = x @ block^T
                                        lse and loss of the chunk
    backward  for each chunk of rows:   for each block of the table:   logits again (unless given), dlogits in their
                                                                       place, block's gradient += dlogits^T @ x
                                        for each block of the table:   dx += dlogits @ block
    one pass  for each chunk of rows:   the forward's lines, then the backward's, which are given the chunk's logits

Each thread has its own blocks of the table, and for dx its own columns or rows; it meets the others five times a chunk.
Memory is one chunk of logits, and for each thread one block of the table and one of its gradient. The backward makes
three products of the forward's size: logits, dx, dtable. One pass makes three in place of four.
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
from ratrain.targets.runtime.kernels.fast.blas import has_bits_of_whole, product, product_rows
from ratrain.targets.runtime.kernels.fast.fast_flat import cast
from ratrain.targets.runtime.kernels.fast.fast_logits import LogitShape
from ratrain.targets.runtime.kernels.fast.fast_numba import bits, exact, exp32, flat, load, maximum, reducing, span
from ratrain.targets.runtime.kernels.fast.fast_rows import store_product
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE, NORM_EPS, check_labels
from ratrain.targets.runtime.kernels.team import PRODUCT_COLUMNS

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, F64, I32, Array
    from ratrain.targets.runtime.kernels.team import Team

TABLE_ELEMENTS = 1 << 18
"""Elements of a block of the table, 1 MiB in float32: a thread's two blocks stay near the second-level cache."""

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


@exact()
def _widen_block(table: Any, first_row: Any, first_column: Any, block: Any) -> None:
    """Set a block to the rows and columns of the table that begin there."""
    for r in range(block.shape[0]):
        out = block[r]
        row = span(table[first_row + r], first_column, first_column + out.size)
        for i in range(out.size):
            out[i] = load(row[i])


def _part_of_lse(logits: F32, lse: F32, rows: slice) -> None:
    log_sum_exp(logits[rows], lse[rows])


def _block_rows(table: Array) -> int:
    rows: int = min(table.shape[0], max(256, TABLE_ELEMENTS // table.shape[1]))
    return rows


def _plan(xn: Array, table: Array, logits: F32, threads: int, *, normalise: bool) -> dict[str, Buffer]:
    chunk, hidden = min(xn.shape[0], logits.shape[0]), xn.shape[1]
    plan = {}
    if xn.dtype != np.float32:
        plan["x"] = Buffer((chunk, hidden))
    if table.dtype != np.float32:
        plan["weights"] = Buffer((threads, _block_rows(table) * hidden))
    if normalise:
        plan["inverse"] = Buffer((table.shape[0],))
    return plan


def _backward_plan(xn: Array, table: Array, logits: F32, threads: int, *, normalise: bool) -> dict[str, Buffer]:
    chunk, hidden = min(xn.shape[0], logits.shape[0]), xn.shape[1]
    return _plan(xn, table, logits, threads, normalise=normalise) | {
        "dx": Buffer((chunk, hidden)),
        "dweights": Buffer((threads, _block_rows(table), hidden)),
        "pull": Buffer((table.shape[0],)),
    }


def head_forward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, threads: int, **_: object) -> Plan:
    """Plan a chunk of rows in float32, a block of the table for each thread, and inverse norms, each if needed."""
    return list(_plan(xn, table, logits, threads, normalise=normalise).values())


def head_backward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, threads: int, **_: object) -> Plan:
    """Plan the forward's buffers, a chunk's gradient, and that of a block of the table for each thread."""
    return list(_backward_plan(xn, table, logits, threads, normalise=normalise).values())


head_backward_from_logits_plan = head_backward_plan
"""Plan of the backward from given logits, in which all rows are one chunk."""


def _take(scratch: Scratch, plan: dict[str, Buffer]) -> dict[str, Array]:
    return dict(zip(plan, scratch.take_all(list(plan.values())), strict=True))


def _chunks(xn: Array, logits: F32) -> Iterator[slice]:
    step = logits.shape[0]
    for start in range(0, xn.shape[0], step):
        yield slice(start, min(start + step, xn.shape[0]))


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
        self._table = table
        self._labels = labels
        self._lse = lse
        self._factor = factor
        self._shape = shape
        self._buffers = buffers
        self._weights = buffers.get("weights")
        self._inverse = buffers.get("inverse")
        if self._inverse is not None:
            _inverse_norms(bits(table), self._inverse)

    def converted(self, xn: Array, rows: slice) -> F32:
        """Return rows of xn in float32, valid until the next call."""
        buffer = self._buffers.get("x")
        if buffer is None:
            return xn[rows]
        x = buffer[: rows.stop - rows.start]
        source, stored = flat(xn[rows]), flat(x)
        self._team.run(lambda part: cast(source[part], stored[part]), self._team.rows(stored.shape))
        return x

    def forward(self, x: F32, rows: slice, logits: F32, loss: F64) -> None:
        """Compute the logits of some rows and their lse; add their loss."""

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            for block in self._blocks(mine):
                self._logits(x, number, block, logits)

        self._team.run(part, self._parts_of_table(x))
        sums = self._lse[rows]
        self._team.run(partial(_part_of_lse, logits, sums), self._team.rows(logits.shape))
        add_loss(logits, self._labels[rows], sums, loss)

    def backward(
        self,
        x: F32,
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
        dx, labels, lse = self._buffers["dx"][: len(x)], self._labels[rows], self._lse[rows]

        def part_of_table(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            for block in self._blocks(mine):
                if logits is None:
                    self._logits(x, number, block, dlogits)
                elif logits is not dlogits:
                    np.copyto(dlogits[:, block], logits[:, block])
                self._gradient(dlogits, block, labels, lse)
                if dtable is not None:
                    self._add_to_table(dlogits[:, block], x, number, block, dtable, accumulate=accumulate)

        def part_of_dx(numbered: tuple[int, tuple[slice, slice]]) -> None:
            number, (mine, columns) = numbered
            # a sum over the blocks of the table: the first block's product starts it
            for block in self._blocks(slice(0, len(self._table))):
                product(
                    dlogits[mine, block], self._weight(number, block, columns), dx[mine, columns], add=block.start > 0
                )

        self._team.run(part_of_table, self._parts_of_table(x))
        self._team.run(part_of_dx, self._parts_of_dx(dx))
        cast(flat(dx), flat(dxn[rows]))

    def _parts_of_table(self, x: Array) -> list[tuple[int, slice]]:
        """Number the ranges of the table's rows that threads have: of whole blocks where a cut may change bits."""
        unit = PRODUCT_COLUMNS if has_bits_of_whole() else _block_rows(self._table)
        return list(enumerate(self._team.product_columns(len(self._table), x.size, unit)))

    def _parts_of_dx(self, dx: F32) -> list[tuple[int, tuple[slice, slice]]]:
        """Number the rows and columns of dx that threads have."""
        rows, columns = (slice(0, count) for count in dx.shape)
        size = dx.shape[0] * len(self._table)
        if has_bits_of_whole():  # then a thread converts and packs its own columns of the table only
            return list(enumerate((rows, some) for some in self._team.product_columns(dx.shape[1], size)))
        return list(enumerate((some, columns) for some in product_rows(self._team, len(dx), self._table.size)))

    def _blocks(self, rows: slice) -> Iterator[slice]:
        step = _block_rows(self._table)
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))

    def _weight(self, number: int, block: slice, columns: slice) -> F32:
        """Return rows and columns of the table in float32, converted in the buffer of a thread's part."""
        width = columns.stop - columns.start
        if self._weights is None:
            return self._table[block, columns]
        weight = self._weights[number, : (block.stop - block.start) * width].reshape(-1, width)
        _widen_block(bits(self._table), block.start, columns.start, weight)
        return weight

    def _logits(self, x: Array, number: int, block: slice, logits: F32) -> None:
        """Set the logits of some rows in the columns of a block of the table."""
        weight = self._weight(number, block, slice(0, self._table.shape[1]))
        product(x, weight.T, logits[:, block])
        if self._inverse is not None:
            _scale_columns(logits, len(x), block.start, self._inverse[block])
        if self._shape is not None:
            self._shape.apply(logits, block)

    def _gradient(self, dlogits: F32, block: slice, labels: I32, lse: F32) -> None:
        """Turn logits into their gradient in the columns of a block of the table."""
        if self._shape is not None:
            self._shape.gradient(dlogits, block, labels, lse, self._factor)
            return
        pull, normalise = self._buffers["pull"][block], self._inverse is not None
        # without `normalise` the loop reads no inverse norms: any array of the type will do
        inverse = pull if self._inverse is None else self._inverse[block]
        _logit_gradient(dlogits, block.start, labels, lse, self._factor, inverse, pull, normalise)

    def _add_to_table(
        self, dlogits: F32, x: Array, number: int, block: slice, dtable: Array, *, accumulate: bool
    ) -> None:
        """Set a block of the table's gradient to [it +] dlogits^T @ x."""
        dweight = self._buffers["dweights"][number, : block.stop - block.start]
        product(dlogits.T, x, dweight)
        if self._inverse is not None:
            _subtract_rows(dweight, self._buffers["pull"][block], bits(self._table[block]))
        stored = bits(dtable[block])
        store_product(dweight, stored, stored[0], False, stored, False, accumulate)


class FastHead:
    """The head kernels of `Fast`."""

    team: Team

    def head_forward(self, xn, table, labels, lse, loss, logits, *, scratch, accumulate, **shaping):
        check_labels(labels, table.shape[0])
        given = LogitOptions(**shaping)
        buffers = _take(scratch, _plan(xn, table, logits, self.team.threads, normalise=given.normalise))
        products = _Products(self.team, table, labels, lse, _ZERO, LogitShape.of(given), buffers)
        if not accumulate:
            loss[0] = 0
        for rows in _chunks(xn, logits):
            # a chunk is as many rows as the workspace of logits has
            products.forward(products.converted(xn, rows), rows, logits[: rows.stop - rows.start], loss)

    def head_backward(
        self, xn, table, labels, lse, scale, logits, dxn, *, scratch, denominator, accumulate, dtable=None, **shaping
    ):
        products = self._products(xn, table, labels, lse, scale, logits, scratch, denominator=denominator, **shaping)
        for rows in _chunks(xn, logits):
            chunk = logits[: rows.stop - rows.start]
            x = products.converted(xn, rows)
            products.backward(x, rows, None, chunk, dxn, dtable, accumulate or rows.start > 0)

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
            x = products.converted(xn, rows)
            products.forward(x, rows, chunk, loss)
            products.backward(x, rows, chunk, chunk, dxn, dtable, accumulate or rows.start > 0)

    def makes_head_in_one_pass(self, xn: Array, table: Array, logits: F32, **shaping: Any) -> bool:
        return True

    def head_backward_from_logits(
        self, xn, table, labels, lse, scale, logits, dlogits, dxn, *, scratch, accumulate, dtable=None, **options
    ):
        products = self._products(xn, table, labels, lse, scale, logits, scratch, **options)
        rows = slice(0, len(xn))
        products.backward(products.converted(xn, rows), rows, logits, dlogits, dxn, dtable, accumulate)

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
        buffers = _take(scratch, _backward_plan(xn, table, logits, self.team.threads, normalise=given.normalise))
        factor = np.float32(float(scale[0]) / float(denominator))
        return _Products(self.team, table, labels, lse, factor, LogitShape.of(given), buffers)
