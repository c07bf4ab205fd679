"""Cross-entropy head on tensors: float32 logits in their workspace, computed and processed by chunks of rows.

    forward   for each chunk of rows:  logits = x @ table^T, shaped;  lse, loss
    backward  for each chunk of rows:  logits again (unless given);  their gradient in place;  dxn, dtable +=

A chunk has as many rows as the workspace; products go by smaller chunks of the table, copied to float32 if need be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsFloat

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.program.kernel_options import LogitOptions
from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.pytorch.device.device_common import (
    I32,
    Array,
    add_wide,
    chunk_rows,
    complement,
    row_chunks,
    row_steps,
    shaped,
    sum_rows,
    wide,
)
from ratrain.targets.pytorch.device.device_products import multiply, operand
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE, NORM_EPS, check_labels

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, I64
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def head_plan(xn: Array, table: Array, logits: F32, **_: object) -> Plan:
    """Plan the buffers of a call, the same for all three kernels."""
    return list(HeadCall.buffers_of(xn, table, logits).values())


def _check(labels: I32, rows: int) -> None:
    """Do `check_labels` on the CPU; on a GPU labels are not checked, since the host would have to wait for it."""
    if labels.device.type == "cpu":
        check_labels(labels.numpy(), rows)


@frozen
class HeadCall:
    """One call of a head kernel: its table, its options and its buffers."""

    xn: Array
    table: Array
    labels: I32
    given: LogitOptions
    halves: bool
    buffers: dict[str, Array]

    @classmethod
    def buffers_of(cls, xn: Array, table: Array, logits: F32) -> dict[str, Buffer]:
        """Return buffers by name: chunks of x, table, their gradients and logits; lines of both; numbers."""
        (vocab, width), rows = table.shape, min(xn.shape[0], logits.shape[0])
        matrix, elements = (
            Buffer((chunk_rows(max(rows, vocab), width) * width,)),
            Buffer((chunk_rows(rows, vocab) * vocab,)),
        )
        row, column = Buffer((rows,)), Buffer((vocab,))
        return {
            **dict.fromkeys(("x", "weight", "term", "total"), matrix),
            "spare": elements,
            **dict.fromkeys(("inverse", "pull", "column"), column),
            "constant": Buffer((vocab,), np.bool_),
            **dict.fromkeys(("peak", "at_label", "held"), row),
            "label": Buffer((rows,), np.int64),
            **dict.fromkeys(("ignored", "absent"), Buffer((rows,), np.bool_)),
            **dict.fromkeys(("loss", "of_label"), Buffer((rows,), np.float64)),
            "double": Buffer((1,), np.float64),
            "factor": Buffer((1,)),
        }

    @classmethod
    def begin(
        cls,
        xn: Array,
        table: Array,
        labels: I32,
        logits: F32,
        scratch: Scratch,
        given: LogitOptions,
        *,
        halves: bool,
    ) -> Self:
        """Check the labels, take the buffers, and fill those that all chunks share."""
        _check(labels, len(table))
        plan = cls.buffers_of(xn, table, logits)
        buffers = dict(zip(plan, scratch.take_all(list(plan.values())), strict=True))
        head = cls(xn, table, labels, given, halves, buffers)
        if given.normalise:
            head.invert_norms()
        return head

    def invert_norms(self) -> None:
        """Compute 1 / norm of each row of the table."""
        for rows in row_chunks(*self.table.shape):
            norms = self.buffers["inverse"][rows]
            torch.sum(wide(self.buffers["weight"], self.table[rows]).square_(), dim=1, out=norms)
            norms.sqrt_().clamp_(min=NORM_EPS).reciprocal_()

    def logits(self, rows: slice, out: F32) -> None:
        """Compute the logits of some rows."""
        width = self.table.shape[1]
        if self.halves or self.xn.dtype == self.table.dtype == torch.float32:  # nothing is copied, and all fits
            multiply(self.xn[rows], self.table.T, out)
            self.shape(out)
            return
        for columns in row_chunks(*self.table.shape):
            weight = operand(self.buffers["weight"], self.table[columns], halves=self.halves)
            for some in row_chunks(len(out), width):
                x = operand(self.buffers["x"], self.xn[rows][some], halves=self.halves)
                multiply(x, weight.T, out[some, columns])
        # shaped once all blocks of the table are multiplied: the whole rows are one pass
        self.shape(out)

    def shape(self, logits: F32) -> None:
        """Turn products into logits, in place."""
        if self.given.normalise:
            logits.mul_(self.buffers["inverse"])
        if self.given.scale_of_logits != 1:
            logits.mul_(self.given.scale_of_logits)
        if self.given.softcap is not None:
            logits.div_(self.given.softcap).tanh_().mul_(self.given.softcap)

    def mark(self, rows: slice) -> tuple[I64, Array]:
        """Return the labels of some rows as indices [rows, 1] and a mask [rows] of those without a row in this table.

        Such rows have the index 0: their label is ignored, or a row of another tensor-parallel rank's table.
        """
        labels = self.labels[rows]
        absent = torch.lt(labels, 0, out=self.buffers["absent"][: len(labels)])
        return self.buffers["label"][: len(labels)].copy_(labels).clamp_(min=0)[:, None], absent

    def add_loss(self, rows: slice, logits: F32, lse: F32, loss: F64) -> None:
        """Set lse of some rows, and add their losses."""
        for some in row_chunks(*logits.shape):
            part = logits[some]
            peak, total = self.buffers["peak"][: len(part)], lse[rows][some]
            torch.amax(part, dim=1, out=peak)
            weights = torch.sub(part, peak[:, None], out=shaped(self.buffers["spare"], part.shape)).exp_()
            torch.sum(weights, dim=1, out=total).log_().add_(peak)
        index, absent = self.mark(rows)
        at_label = torch.gather(logits, 1, index, out=self.buffers["at_label"][: len(logits), None])
        losses = self.buffers["loss"][: len(logits)].copy_(lse[rows])
        losses.sub_(self.buffers["of_label"][: len(logits)].copy_(at_label[:, 0])).masked_fill_(absent, 0)
        loss.add_(torch.sum(losses, dim=0, keepdim=True, out=self.buffers["double"]))

    def set_factor(self, scale: F32, denominator: SupportsFloat) -> None:
        """Set the factor of the logit gradient, scale / denominator (rounded once) times the scale of logits.

        The denominator is a number, or a tensor of one on the device, which may have another value at the next step and
        is not read here.
        """
        divisor = denominator if isinstance(denominator, torch.Tensor) else float(denominator)
        # in float64 on the device, rounded once when it is copied to `factor`
        double = self.buffers["double"].copy_(scale[:1]).div_(divisor)
        self.buffers["factor"].copy_(double).mul_(self.given.scale_of_logits)

    def logit_gradient(self, rows: slice, lse: F32, logits: F32, dlogits: F32) -> None:
        """Turn logits of some rows into the gradient of the products; both may be the same bytes."""
        index, absent = self.mark(rows)
        held = self.buffers["held"][: len(absent)].copy_(absent).neg_().add_(1)[:, None]
        ignored = torch.eq(self.labels[rows], IGNORED_LABEL, out=self.buffers["ignored"][: len(absent)])
        shapes = self.given.normalise or self.given.softcap is not None
        # `pull` is the sum of dlogit * logit over rows, by row of the table
        pull = self.buffers["pull"].zero_()
        for some in row_chunks(*logits.shape):
            gradient = dlogits[some]
            logit = wide(self.buffers["spare"], logits[some]) if shapes else logits[some]
            # exp(logit - lse), minus 1 at the label where this table has it; ignored rows become 0 below
            torch.sub(logit, lse[rows][some, None], out=gradient).exp_()
            at_label = self.buffers["at_label"][: len(gradient), None]
            # a scatter of gathered values: `held` is 0 in rows without a label here, whose index 0 then keeps its value
            gradient.scatter_(1, index[some], torch.gather(gradient, 1, index[some], out=at_label).sub_(held[some]))
            gradient.mul_(self.buffers["factor"]).masked_fill_(ignored[some, None], 0)
            if self.given.softcap is not None:
                gradient.mul_(complement(logit.div_(self.given.softcap).square_(), logit))
            if self.given.normalise:
                pull.add_(sum_rows(torch.mul(logit, gradient, out=logit), self.buffers["column"]))
                gradient.mul_(self.buffers["inverse"])
        if self.given.normalise:  # of logit = inverse * (x . w) with inverse = 1 / |w|: d inverse / dw = -inverse^3 w
            inverse = self.buffers["inverse"]
            constant = torch.ge(inverse, float(LARGEST_INVERSE), out=self.buffers["constant"])
            pull.mul_(inverse).mul_(inverse).masked_fill_(constant, 0)

    def store(self, rows: slice, dlogits: F32, dxn: Array, dtable: Array | None, *, accumulate: bool) -> None:
        """Store the gradients of some rows of x, and add their part of the table's, unless `dtable` is None."""
        width = self.table.shape[1]
        for some in row_chunks(len(dlogits), width):
            of_x = dxn[rows][some]
            # summed in float32 over the blocks of the table, rounded once
            total = shaped(self.buffers["total"], of_x.shape).zero_()
            for columns in row_chunks(*self.table.shape):
                weight = wide(self.buffers["weight"], self.table[columns])
                torch.addmm(total, dlogits[some, columns], weight, out=total)
            of_x.copy_(total)
        if dtable is None:
            return
        for columns in row_chunks(*self.table.shape):
            of_table = dtable[columns]
            total = shaped(self.buffers["total"], of_table.shape).zero_()
            for some in row_chunks(len(dlogits), width):
                x = wide(self.buffers["x"], self.xn[rows][some])
                torch.addmm(total, dlogits[some, columns].T, x, out=total)
            if self.given.normalise:
                weight = wide(self.buffers["weight"], self.table[columns])
                total.sub_(weight.mul_(self.buffers["pull"][columns, None]))
            if accumulate:
                add_wide(total, self.buffers["term"], of_table)
            of_table.copy_(total)


class DeviceHead:
    """The head kernels of `TorchDevice`. Labels are checked on the CPU only."""

    halves: bool
    head_class: ClassVar[type[HeadCall]] = HeadCall

    def head_forward(self, xn, table, labels, lse, loss, logits, *, scratch, accumulate, **shaping):
        """Compute lse and loss; the losses of a chunk are summed in float64, in PyTorch's order."""
        head = self.head_class.begin(xn, table, labels, logits, scratch, LogitOptions(**shaping), halves=self.halves)
        if not accumulate:
            loss.zero_()
        for rows in row_steps(len(xn), len(logits)):
            chunk = logits[: rows.stop - rows.start]
            head.logits(rows, chunk)
            head.add_loss(rows, chunk, lse, loss)

    def head_backward(self, xn, table, labels, lse, scale, logits, dxn, *, scratch, accumulate, dtable=None, **options):
        head = self._begin(xn, table, labels, scale, logits, scratch, **options)
        for rows in row_steps(len(xn), len(logits)):
            chunk = logits[: rows.stop - rows.start]
            head.logits(rows, chunk)
            head.logit_gradient(rows, lse, chunk, chunk)
            head.store(rows, chunk, dxn, dtable, accumulate=accumulate or rows.start > 0)

    def head_backward_from_logits(
        self, xn, table, labels, lse, scale, logits, dlogits, dxn, *, scratch, accumulate, dtable=None, **options
    ):
        head = self._begin(xn, table, labels, scale, logits, scratch, **options)
        rows = slice(0, len(xn))
        head.logit_gradient(rows, lse, logits, dlogits)
        head.store(rows, dlogits, dxn, dtable, accumulate=accumulate)

    def _begin(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        scale: F32,
        logits: F32,
        scratch: Scratch,
        *,
        denominator: SupportsFloat,
        **shaping: Any,
    ) -> HeadCall:
        """Prepare what all chunks of a backward share."""
        head = self.head_class.begin(xn, table, labels, logits, scratch, LogitOptions(**shaping), halves=self.halves)
        head.set_factor(scale, denominator)
        return head
