"""GPT-2's counterparts of RMSNorm and rotation, in fused numba loops: layer norm, learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.fast import fast_rows
from ratrain.targets.runtime.kernels.fast.fast_flat import add_into
from ratrain.targets.runtime.kernels.fast.fast_numba import bits, exact, flat, load, narrow, reducing
from ratrain.targets.runtime.kernels.fast.row_sums import row_groups, store_sums, sum_groups
from ratrain.targets.runtime.kernels.shared import check_starts, document_positions, token_keys

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import I32, Array
    from ratrain.targets.runtime.kernels.team import Team

_ZERO, _ONE = np.float32(0), np.float32(1)


@reducing()
def _layernorm_forward(x: Any, gamma: Any, beta: Any, xn: Any, mean: Any, rstd: Any, eps: Any) -> None:
    """Set xn = (x - mean) * rstd * gamma + beta, and the mean and rstd of each row."""
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        row, out = x[t], xn[t]
        total = _ZERO
        for i in range(row.size):
            total += load(row[i])
        # two passes, first the mean: mean(x^2) - mean^2 would cancel
        middle = total / width
        total = _ZERO
        for i in range(row.size):
            centred = load(row[i]) - middle
            total += centred * centred
        scale = _ONE / np.sqrt(total / width + eps)
        mean[t] = middle
        rstd[t] = scale
        for i in range(row.size):
            out[i] = narrow((load(row[i]) - middle) * scale * load(gamma[i]) + load(beta[i]), out.dtype)


@reducing()
def _layernorm_backward(
    dxn: Any,
    x: Any,
    gamma: Any,
    mean: Any,
    rstd: Any,
    dx: Any,
    residual: Any,
    has_residual: Any,
    gamma_sum: Any,
    beta_sum: Any,
    line: Any,
) -> None:
    """Set dx [+ residual], and add the rows' parts of dgamma and dbeta to the sums.

    A row of dx is built in `line` first, so that dx may be the same array as dxn or the residual.
    """
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        grad, row, out, middle, scale = dxn[t], x[t], dx[t], mean[t], rstd[t]
        plain, along = _ZERO, _ZERO
        for i in range(row.size):
            normed = (load(row[i]) - middle) * scale
            gamma_sum[i] += load(grad[i]) * normed
            beta_sum[i] += load(grad[i])
            weighted = load(grad[i]) * load(gamma[i])
            plain += weighted
            along += weighted * normed
        # with n the normalised row and g = dxn * gamma: dx = rstd * (g - mean(g) - n * mean(g * n))
        plain /= width
        along /= width
        for i in range(row.size):
            normed = (load(row[i]) - middle) * scale
            line[i] = scale * (load(grad[i]) * load(gamma[i]) - plain - normed * along)
        if has_residual:
            extra = residual[t]
            for i in range(row.size):
                line[i] += load(extra[i])
        for i in range(row.size):
            out[i] = narrow(line[i], out.dtype)


@exact()
def _position_backward(dy: Any, dpositions: Any, first: Any, last: Any, line: Any, accumulate: Any) -> None:
    """Set dpositions[p] = [dpositions[p] +] the sum of dy[:, p], for the positions [first, last)."""
    for p in range(first, last):
        out = dpositions[p]
        for i in range(line.size):
            line[i] = _ZERO
        for sequence in range(dy.shape[0]):
            row = dy[sequence, p]
            for i in range(line.size):
                line[i] += load(row[i])
        if accumulate:
            for i in range(line.size):
                line[i] += load(out[i])
        for i in range(line.size):
            out[i] = narrow(line[i], out.dtype)


def layernorm_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan for each group of rows its part of dgamma and dbeta, and a line; then one whole sum."""
    groups = Buffer((row_groups(len(x)), gamma.size))
    return [groups, groups, groups, Buffer(gamma.shape)]


def position_backward_plan(dy: Array, *, documents: I32 | None = None, threads: int, **_: object) -> Plan:
    """Plan a line for each thread; with documents, sorted keys of the rows' positions and one line."""
    if documents is None:
        return [Buffer((threads, dy.shape[1]))]
    return [Buffer(documents.shape, np.int64), Buffer((dy.shape[1],))]


class FastGpt:
    """The kernels of `Fast` for layer norms and learned positions."""

    team: Team

    def layernorm_forward(self, x, gamma, beta, xn, mean, rstd, *, scratch, eps):
        source, scale, shift, stored = bits(x), bits(gamma), bits(beta), bits(xn)

        def part(rows: slice) -> None:
            _layernorm_forward(source[rows], scale, shift, stored[rows], mean[rows], rstd[rows], np.float32(eps))

        self.team.run(part, self.team.rows(x.shape))

    def layernorm_backward(self, dxn, x, gamma, mean, rstd, dx, dgamma, dbeta, *, scratch, residual=None, accumulate):
        gamma_sums, beta_sums, lines, total = scratch.take_all(layernorm_backward_plan(x, gamma))
        grad, source, factor, stored = bits(dxn), bits(x), bits(gamma), bits(dx)
        extra = stored if residual is None else bits(residual)

        def group_of_rows(group: int, rows: slice) -> None:
            _layernorm_backward(
                grad[rows],
                source[rows],
                factor,
                mean[rows],
                rstd[rows],
                stored[rows],
                extra[rows],
                residual is not None,
                gamma_sums[group],
                beta_sums[group],
                lines[group],
            )

        gamma_sums.fill(0)
        beta_sums.fill(0)
        sum_groups(self.team, group_of_rows, len(x))
        store_sums(gamma_sums, total, dgamma, accumulate)
        store_sums(beta_sums, total, dbeta, accumulate)

    def position_forward(self, positions, y, *, documents=None, scratch, seq_len, first_position=0):
        check_starts(documents, seq_len, first_position)
        sequences, table = bits(y).reshape(-1, seq_len, y.shape[1]), bits(positions)

        def part(rows: slice) -> None:
            first = first_position + rows.start
            for number, sequence in enumerate(sequences):
                if documents is None:
                    add_into(flat(sequence[rows]), None, flat(table[first : first_position + rows.stop]), None)
                else:
                    fast_rows.add_positions(table, documents.reshape(-1, seq_len)[number, rows], first, sequence[rows])

        self.team.run(part, self.team.rows(sequences.shape[1:]))

    def position_backward(self, dy, dpositions, *, documents=None, scratch, seq_len, accumulate, first_position=0):
        if documents is not None:
            if not accumulate:
                dpositions.fill(0)
            keys, line = scratch.take_all(position_backward_plan(dy, documents=documents, threads=self.team.threads))
            document_positions(documents, seq_len, first_position, keys)
            token_keys(keys, keys)
            line.fill(0)
            fast_rows.embedding_backward(keys, bits(dy), bits(dpositions), line, None)
            return
        (lines,) = scratch.take_all(position_backward_plan(dy, threads=self.team.threads))
        sequences, stored = bits(dy).reshape(-1, seq_len, dy.shape[1]), bits(dpositions)[first_position:]

        def part(numbered: tuple[int, slice]) -> None:
            number, rows = numbered
            _position_backward(sequences, stored, rows.start, rows.stop, lines[number], accumulate)

        self.team.run(part, list(enumerate(self.team.rows(sequences.shape[1:]))))
        if not accumulate:
            dpositions[:first_position].fill(0)
            stored[seq_len:].fill(0)
