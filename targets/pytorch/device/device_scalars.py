"""Single numbers of a step (loss, norm, flags, loss scale) on a device.

The host reads none of them during a step, so a captured step repeats them. Everything that differs from step to step is
in tensors: the host writes the learning rate before a step, the rest is computed from the arenas. Numbers are float64
where Python's would be. Temporaries are scratch, since streams of several ranks may be in these methods at the same
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.pytorch.device.device_adamw import DeviceAdamW
from ratrain.targets.pytorch.device.device_common import F32, F64, I64, Array
from ratrain.targets.pytorch.device.device_flat import DeviceFlat
from ratrain.targets.pytorch.device.device_quantised import DeviceQuantised
from ratrain.targets.runtime.arena.kernel_memory import SQUARES_CHUNK
from ratrain.targets.runtime.arena.scalars import GROWTH_INTERVAL, LARGEST_SCALE, StepLog
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scalars import BiasMove, BlockUpdate, Chunks, Flags, Place, Views
    from ratrain.targets.runtime.arena.scratch import Plan

SCALARS_PLAN = [
    *[Buffer((1,), np.float64)] * 4,
    *[Buffer((1,))] * 3,
    *[Buffer((1,), np.bool_)] * 2,
    Buffer((1,), np.int64),
    Buffer((1,), np.int32),
    Buffer((SQUARES_CHUNK,), np.float64),
]
"""Temporaries of every method: numbers of each type, and a chunk whose squares are summed."""


def label_logits_plan(rows: int) -> Plan:
    """Plan `logits_of_labels`: a term and a mask for each row, and their sum."""
    return [Buffer((rows,), np.float64), Buffer((rows,), np.bool_), Buffer((1,), np.float64)]


def combined_logs_plan(rows: int) -> Plan:
    """Plan `combine_losses`: for each row peak, log, peak in float64, a sum, a term and a mask; then the loss."""
    single, double = Buffer((rows,)), Buffer((rows,), np.float64)
    return [single, single, double, double, double, Buffer((rows,), np.bool_), Buffer((1,), np.float64)]


_LOSS, _NORM, _OTHERS = 0, 1, 2
"""Places in the log."""


def log_bytes(ranks: int, blocks: int) -> int:
    """Return the bytes of a step's numbers that are kept: the log (by ranks and their blocks), the learning rate."""
    return (_OTHERS + ranks + blocks) * torch.float64.itemsize + torch.float32.itemsize


@frozen(eq=False)
class _Work:
    """Temporaries of one call."""

    doubles: list[F64]
    singles: list[F32]
    bools: list[Array]
    count: I64
    flag: Array
    chunk: F64

    @classmethod
    def of(cls, scratch: Scratch) -> _Work:
        """Take them from scratch; kernels called afterwards take theirs behind them."""
        taken = scratch.take_all(SCALARS_PLAN)
        return cls(taken[:4], taken[4:7], taken[7:9], *taken[9:])


def _flag(flag: Array) -> Array:
    """View a flag as int32: PyTorch has few operations on unsigned numbers."""
    return flag.view(torch.int32)


class ScalarKernels(DeviceFlat, DeviceQuantised, DeviceAdamW):
    """The kernels that yield or need single numbers."""

    device: torch.device

    def add_squares(self, chunks: Chunks, total: F64, term: F64, buffer: F64) -> F64:
        """Set total = the sum of the squares of all chunks; `term` and `buffer` are temporaries."""
        total.zero_()
        for chunk in _wide(chunks, buffer):
            total.add_(torch.sum(chunk.square_(), dim=0, keepdim=True, out=term))
        return total


class DeviceScalars:
    """`Scalars` of tensors."""

    def __init__(self, kernels: ScalarKernels, blocks: Mapping[Place, Sequence[str]]) -> None:
        self._kernels = kernels
        self._places = list(blocks)
        names = [(place, block) for place, held in blocks.items() for block in held]
        skipped = range(_OTHERS, _OTHERS + len(self._places))
        self._skipped = dict(zip(self._places, skipped, strict=True))
        self._squares = dict(zip(names, range(skipped.stop, skipped.stop + len(names)), strict=True))
        self._noted: set[tuple[Place, str]] = set()
        """Blocks whose squares the log has.

        Every step notes the same ones, so this stays right while a captured step is repeated.
        """
        self._has_norm = False
        self._scale = 1.0
        self._log = torch.zeros(skipped.stop + len(names), dtype=torch.float64, device=kernels.device)
        self._rate = torch.zeros(1, device=kernels.device)

    def begin_step(self, learning_rate: float, scale: float) -> None:
        """Write the learning rate, and clear the log."""
        self._scale = scale
        self._rate.fill_(learning_rate)
        self._log.zero_()

    def read(self) -> StepLog:
        """Wait for the device; return the log of the step."""
        log = self._log.tolist()
        squares: dict[Place, dict[str, float]] = {}
        for place, block in self._noted:
            squares.setdefault(place, {})[block] = log[self._squares[place, block]] / self._scale**2
        norm = log[_NORM] / self._scale if self._has_norm else None
        return StepLog(log[_LOSS], norm, int(sum(log[at] for at in self._skipped.values())), squares)

    def clear(self, flags: Flags) -> None:
        """Lower flags."""
        for flag in flags:
            _flag(flag).zero_()

    def spread(self, flags: Flags, outs: Flags) -> None:
        """Set all of `outs` to 1 if any flag is raised, else to 0."""
        # flags are 0 or 1, so the first out can gather them by bitwise or
        first = _flag(outs[0])
        for number, flag in enumerate(flags):
            if number or flag is not outs[0]:
                (first.bitwise_or_ if number else first.copy_)(_flag(flag))
        for out in outs[1:]:
            _flag(out).copy_(first)

    def mean_of_replicas(
        self,
        parts: Sequence[Array],
        out: Array,
        flags: Flags,
        *,
        scratch: Scratch,
        accumulate: bool,
        divisor: float,
        bits: int | None = None,
    ) -> None:
        """Run the kernel of parts as they are or of packed ones; raise the flags unless all results are finite."""
        work, kernels = _Work.of(scratch), self._kernels
        mean = kernels.told_mean_of_replicas if bits is None else partial(kernels.told_mean_of_quantised, bits=bits)
        _raise(flags, mean(parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor), work)

    def check_finite(self, a: Array, flags: Flags, *, scratch: Scratch) -> None:
        """Raise flags unless all elements are finite."""
        work = _Work.of(scratch)
        _raise(flags, self._kernels.told_all_finite(a, scratch=scratch), work)

    def sum_losses(self, losses: Sequence[Array], *, scratch: Scratch) -> None:
        """Set the step's loss to the sum of `losses`, in order."""
        del scratch
        total = self._at(_LOSS).zero_()
        for loss in losses:
            total.add_(loss)

    def logits_of_labels(self, peers: Sequence[Views], out: F64, *, scratch: Scratch) -> None:
        """Set `out[i]` to the sum of the label logits that tensor-parallel rank i holds, in float64."""
        term, left_out, total = scratch.take_all(label_logits_plan(len(peers[0]["labels"])))
        for number, mine in enumerate(peers):
            torch.lt(mine["labels"], 0, out=left_out)
            torch.sum(term.copy_(mine["lse_part"]).masked_fill_(left_out, 0), dim=0, keepdim=True, out=total)
            out[number : number + 1].copy_(total.sub_(mine["loss_part"]))

    def combine_losses(
        self, parts: Sequence[F32], at_labels: F64, peers: Sequence[Views], *, scratch: Scratch, accumulate: bool
    ) -> None:
        """Combine partial log-sum-exps and label logits into all ranks' `lse` and `loss`, in float64, rank by rank."""
        labels = peers[0]["labels"]
        peak, log, safe, acc, term, mask, loss = scratch.take_all(combined_logs_plan(len(labels)))
        peak.copy_(parts[0])
        for part in parts[1:]:
            torch.maximum(peak, part, out=peak)
        torch.ne(torch.sub(peak, peak, out=log), 0, out=mask)  # an infinity minus itself is NaN
        safe.copy_(peak).masked_fill_(mask, 0)
        acc.zero_()
        for part in parts:
            acc.add_(term.copy_(part).sub_(safe).exp_())
        torch.where(mask, peak, log.copy_(acc.log_().add_(safe)), out=log)
        torch.eq(labels, IGNORED_LABEL, out=mask)
        torch.sum(term.copy_(log).masked_fill_(mask, 0), dim=0, keepdim=True, out=loss)
        for number in range(len(parts)):
            loss.sub_(at_labels[number : number + 1])
        for mine in peers:
            mine["lse"].copy_(log)
            (mine["loss"].add_ if accumulate else mine["loss"].copy_)(loss)

    def norm(
        self,
        stages: Sequence[Mapping[str, Chunks]],
        flags: Flags,
        outs: Sequence[Array],
        *,
        scratch: Scratch,
    ) -> None:
        """Set `outs` to the norm of the reduced gradient.

        Squares are summed in float64 chunk by chunk, then over blocks, then over stages.
        """
        scratch.reset()
        work = _Work.of(scratch)
        of_all, of_stage, of_block, term = work.doubles
        of_all.zero_()
        for blocks in stages:
            of_stage.zero_()
            for chunks in blocks.values():
                of_stage.add_(self._kernels.add_squares(chunks, of_block, term, work.chunk))
            of_all.add_(of_stage)
        self.spread(flags, [work.flag])
        raised = torch.ne(work.flag, 0, out=work.bools[0])
        norm = of_all.sqrt_().masked_fill_(raised, float("inf"))
        # replicas' streams write the log at the same time: only what is final
        for out in (self._at(_NORM), *outs):
            out.copy_(norm)
        self._has_norm = True

    def squares_of(self, chunks: Chunks, *, scratch: Scratch) -> list[float]:
        """Return the sum of the squares of each chunk, computed as in `norm`."""
        scratch.reset()
        work = _Work.of(scratch)
        *_, of_chunk, term = work.doubles
        return [float(self._kernels.add_squares([chunk], of_chunk, term, work.chunk)) for chunk in chunks]

    def update(self, update: BlockUpdate, *, scratch: Scratch) -> None:
        """Update one block by AdamW, with selection instead of branches.

        If the gradient is not finite, only the view is stored again, and the block's count of updates `t` does not
        grow.
        """
        scratch.reset()
        work = _Work.of(scratch)
        views, settings = update.views, update.settings
        # the host does not know whether this update is skipped: everything below selects by `skip`
        skip = _find_multiplier(views, settings.max_norm, work)
        multiplier = work.singles[0].copy_(work.doubles[0])
        if update.squares is not None:
            *_, of_block, term = work.doubles
            squares = self._kernels.add_squares(update.squares, of_block, term, work.chunk)
            squares.masked_fill_(skip, float("inf"))
            self._at(self._squares[update.place, update.block]).copy_(squares)
            self._noted.add((update.place, update.block))
        # each rank has its own count: streams of several ranks add at the same time
        self._at(self._skipped[update.place]).add_(work.doubles[1].copy_(skip))
        views["t"].add_(work.count.copy_(skip).neg_().add_(1))
        for part in update.parts():
            with scratch.lent():
                self._kernels.adamw_on_device(
                    part.views["p"],
                    part.views["m1"],
                    part.views["m2"],
                    part.views["g"],
                    scratch=scratch,
                    view=part.views.get("w"),
                    t=views["t"],
                    multiplier=multiplier,
                    skip=skip,
                    lr=self._rate,
                    beta1=settings.betas[0],
                    beta2=settings.betas[1],
                    eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    decay=part.decay,
                )

    def move_bias(self, move: BiasMove, *, scratch: Scratch) -> None:
        """Move a bias as `HostScalars` does, by selection instead of a branch."""
        scratch.reset()
        work = _Work.of(scratch)
        total, *others = move.counts
        for counts in others:
            total.add_(counts)
        step = work.chunk.view(torch.float32)[: len(total)]
        step.copy_(total.mul_(-2).add_(move.doubled_mean).sign_()).mul_(float(np.float32(move.rate)))
        self.spread(move.flags, [work.flag])
        skips = torch.ne(work.flag, 0, out=work.bools[0])
        if move.norm is not None:
            endless = torch.ne(torch.sub(move.norm, move.norm, out=work.doubles[0]), 0, out=work.bools[1])
            skips.logical_or_(endless)  # an infinity minus itself is NaN
        step.masked_fill_(skips, 0)
        for bias, counts in move.ranks:
            bias.add_(step)
            counts.zero_()

    def advance_scale(self, scale: F32, overflow: Array, *, scratch: Scratch) -> None:
        """Do `LossScale.advance` by selection: halve after overflow, double after `GROWTH_INTERVAL` steps without."""
        scratch.reset()
        work = _Work.of(scratch)
        value, count = scale[:1], scale[1:2]
        halved, doubled, _ = work.singles
        overflows, grows = work.bools
        torch.ne(_flag(overflow), 0, out=overflows)
        torch.ge(count.add_(1), GROWTH_INTERVAL, out=grows)
        torch.mul(value, 0.5, out=halved).clamp_(min=1)
        torch.where(grows, torch.mul(value, 2, out=doubled).clamp_(max=LARGEST_SCALE), value, out=value)
        # overflow has the last word, so it is selected last
        torch.where(overflows, halved, value, out=value)
        count.masked_fill_(grows, 0).masked_fill_(overflows, 0)

    def _at(self, place: int) -> F64:
        """Return a number of the log, as a view."""
        return self._log[place : place + 1]


def _raise(flags: Flags, told: F32, work: _Work) -> None:
    """Raise the flags if `told` is NaN."""
    raised = work.flag.copy_(torch.ne(told, 0, out=work.bools[0]))
    for flag in flags:
        _flag(flag).bitwise_or_(raised)


def _wide(chunks: Chunks, buffer: F64) -> Iterator[F64]:
    """Yield each chunk in float64, in the same buffer."""
    for chunk in chunks:
        each: Any = chunk
        yield buffer[: len(each)].copy_(each)


def _find_multiplier(views: Mapping[str, Any], max_norm: float, work: _Work) -> Array:
    """Set the first double to the factor of the gradient, as in `HostScalars`; return a flag to skip the update."""
    inverse, norm, factor, _ = work.doubles
    skip, is_endless = work.bools
    torch.ne(_flag(views["flag"]), 0, out=skip)
    inverse.copy_(views["scale"][:1]).reciprocal_()
    if "norm" in views:
        torch.mul(inverse, views["norm"], out=norm)
        torch.ne(torch.sub(norm, norm, out=factor), 0, out=is_endless)  # an infinity minus itself is NaN
        skip.logical_or_(is_endless)
        factor.fill_(max_norm).div_(norm.add_(1e-6)).clamp_(max=1)
        inverse.mul_(factor)
    return skip
