"""Cross-entropy head in bfloat16 on the host: logits are stored in 16 bits in a workspace that has room for 32."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.program.kernel_options import LogitOptions
from ratrain.targets.pytorch.device.device_common import row_steps
from ratrain.targets.pytorch.device.tensors import (
    are_multiplied_here,
    multiply,
    rows_of_parts,
    share_multiply,
    tensor_of,
)
from ratrain.targets.pytorch.host.product_loops import add_to_product, logit_gradient, widen
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.arena.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels.fast.fast_head import add_loss, head_backward_plan, head_forward_plan, log_sum_exp
from ratrain.targets.runtime.kernels.fast.fast_numba import bits
from ratrain.targets.runtime.kernels.shared import check_labels

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, F64, I32, Array
    from ratrain.targets.runtime.kernels.team import Team

_ROWS = 128
"""Rows of logits that are widened at a time."""
_TABLE_BLOCK = 1 << 20
"""Elements of a block of the table's gradient before it is stored: 2 MiB, which nearly fit the second-level cache."""


def is_direct(xn: Array, table: Array, given: LogitOptions) -> bool:
    """Return whether PyTorch makes a call's products, and they are its logits: not normalised, scaled or capped."""
    return are_multiplied_here(xn, table) and given.is_plain


def forward_plan(xn: Array, table: Array, logits: F32, *, normalise: bool, threads: int, **options: Any) -> Plan:
    """Plan as scratch, for each thread, up to `_ROWS` rows of logits in bfloat16, if products are direct (`is_direct`).

    Otherwise, as where `normalise` divides the table's rows by their norms, return the buffers of the `fast` set.
    """
    if is_direct(xn, table, _given(options, normalise=normalise)):
        return [Buffer((min(len(xn), len(logits), _ROWS), len(table)), BFLOAT16)] * threads
    return head_forward_plan(xn, table, logits, normalise=normalise, threads=threads)


def backward_plan(
    xn: Array,
    table: Array,
    logits: F32,
    *,
    normalise: bool,
    threads: int,
    dtable: Array | None = None,
    **options: Any,
) -> Plan:
    """Plan a block of the table's gradient for each thread; nothing if it is not made, or stored in bfloat16."""
    if not is_direct(xn, table, _given(options, normalise=normalise)):
        return head_backward_plan(xn, table, logits, normalise=normalise, threads=threads)
    return _blocks_of(dtable, threads)


def _blocks_of(dtable: Array | None, threads: int) -> Plan:
    """Return the buffers of a block of the table's gradient for each thread."""
    if dtable is None or dtable.dtype == BFLOAT16:
        return []
    return [Buffer((_block_rows(dtable), dtable.shape[1]), BFLOAT16)] * threads


def _given(options: dict[str, Any], *, normalise: bool) -> LogitOptions:
    """Pick the options that shape logits from all arguments of a kernel."""
    shaping = {name: options[name] for name in ("scale_of_logits", "softcap") if name in options}
    return LogitOptions(normalise=normalise, **shaping)


def _block_rows(dtable: Array) -> int:
    rows, width = dtable.shape
    return int(min(rows, max(64, _TABLE_BLOCK // width)))


def _stored_logits(logits: F32, columns: int) -> Array:
    """View the first half of the workspace as bfloat16 logits."""
    rows = len(logits)
    return logits.reshape(-1).view(BFLOAT16)[: rows * columns].reshape(rows, columns)


def forward(
    team: Team,
    xn: Array,
    table: Array,
    labels: I32,
    lse: F32,
    loss: F64,
    logits: F32,
    scratch: Scratch,
    *,
    accumulate: bool,
) -> None:
    """Compute `head_forward` for calls that are direct (`is_direct`); logits are rounded to bfloat16.

    `logits` is a workspace: the rows go through it in chunks of its length, and only the last chunk is left there.
    """
    check_labels(labels, table.shape[0])
    buffers = scratch.take_all(forward_plan(xn, table, logits, normalise=False, threads=team.threads))
    weight = tensor_of(table).T
    if not accumulate:
        loss[0] = 0
    for rows in row_steps(len(xn), len(logits)):
        chunk, x, sums = logits[: rows.stop - rows.start], xn[rows], lse[rows]

        def part(numbered: tuple[int, slice], chunk: F32 = chunk, x: Array = x, sums: F32 = sums) -> None:
            number, mine = numbered
            for some in row_steps(mine.stop - mine.start, len(buffers[number])):
                at = slice(mine.start + some.start, mine.start + some.stop)
                product = buffers[number][: some.stop - some.start]
                multiply(tensor_of(x[at]), weight, tensor_of(product))
                widen(bits(product), chunk[at])
                log_sum_exp(chunk[at], sums[at])

        team.run(part, list(enumerate(rows_of_parts(team, chunk, table))))
        add_loss(chunk, labels[rows], sums, loss)


def backward(
    team: Team,
    xn: Array,
    table: Array,
    labels: I32,
    lse: F32,
    factor: np.float32,
    logits: F32,
    dxn: Array,
    dtable: Array | None,
    scratch: Scratch,
    *,
    accumulate: bool,
    loss: F64 | None = None,
) -> None:
    """Compute `head_backward` for direct calls; logits and their gradient are rounded to bfloat16.

    With `loss` the logits give lse, and what they add to the loss, before their gradient takes their place.
    """
    check_labels(labels, table.shape[0])
    stored, weight = _stored_logits(logits, len(table)), tensor_of(table)
    buffers = scratch.take_all(_blocks_of(dtable, team.threads))
    for rows in row_steps(len(xn), len(stored)):
        chunk, x = stored[: rows.stop - rows.start], tensor_of(xn[rows])
        share_multiply(team, x, weight.T, tensor_of(chunk))
        if loss is not None:
            _sum_rows(team, bits(chunk), logits, lse[rows])
            add_loss(bits(chunk), labels[rows], lse[rows], loss)
        gradient = partial(_part_of_gradient, bits(chunk), labels[rows], lse[rows], factor)
        team.run(gradient, team.rows(chunk.shape))
        # the logits have become their gradient, in place
        share_multiply(team, tensor_of(chunk), weight, tensor_of(dxn[rows]))
        if dtable is not None:
            _add_to_table(team, chunk, xn[rows], dtable, buffers, accumulate=accumulate or rows.start > 0)


def sums_in_workspace(logits: F32, threads: int) -> bool:
    """Return whether a backward with `loss` has a row of its workspace for each thread to widen logits in."""
    return len(logits) // 2 >= threads


def _sum_rows(team: Team, stored: Array, logits: F32, lse: F32) -> None:
    """Set the lse of rows of logits in bfloat16, whole rows of which are widened behind them in the workspace."""
    free = logits[len(logits) - len(logits) // 2 :]

    def part(numbered: tuple[int, slice]) -> None:
        number, mine = numbered
        each = min(_ROWS, len(free) // team.threads)
        wide = free[number * each : (number + 1) * each]
        for some in row_steps(mine.stop - mine.start, each):
            at = slice(mine.start + some.start, mine.start + some.stop)
            widen(stored[at], wide[: some.stop - some.start])
            log_sum_exp(wide[: some.stop - some.start], lse[at])

    team.run(part, list(enumerate(team.rows(stored.shape))))


def _part_of_gradient(chunk: Array, labels: I32, lse: F32, factor: np.float32, rows: slice) -> None:
    logit_gradient(chunk[rows], labels[rows], lse[rows], factor)


def _add_to_table(
    team: Team, dlogits: Array, x: Array, dtable: Array, buffers: list[Array], *, accumulate: bool
) -> None:
    """Set dtable = [dtable +] dlogits^T @ x, in blocks of its rows."""
    transposed, right, step = tensor_of(dlogits).T, tensor_of(x), _block_rows(dtable)

    def part(numbered: tuple[int, slice]) -> None:
        number, mine = numbered
        for start in range(mine.start, mine.stop, step):
            block = slice(start, min(start + step, mine.stop))
            if not buffers:
                out = tensor_of(dtable[block])
                multiply(transposed[block], right, out, out if accumulate else None)
                continue
            product = buffers[number][: block.stop - block.start]
            multiply(transposed[block], right, tensor_of(product))
            stored = bits(dtable[block])
            add_to_product(bits(product), stored if accumulate else None, None, None, stored)

    team.run(part, list(enumerate(rows_of_parts(team, dtable, x))))
