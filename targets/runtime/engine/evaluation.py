"""Evaluation: the loss on data that is held out from training, by the very program that trains.

An engine evaluates between two steps by going through one more step of the program, of which it executes only what the loss needs:
inputs, forwards, their messages, gathers of views, the sum of the loss. Everything else is passed over in its turn, so that order,
waits and lives of bytes are those that were verified. An update writes the view anew where it is the one that writes it, from
unchanged master weights; no other carried byte is written. So training goes on as if nothing had been evaluated, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import evolve, frozen

from ratrain.ratrain_ir.ops.base import Payload, Phase, Quantity, WorkGroup
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS
from ratrain.ratrain_ir.ops.messages import GUEST_OPS, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.runtime.data.data import Batches, TokenStream, part_of_stream

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.instruction import Instruction


def _always(_: Instruction) -> bool:
    return True


def _never(_: Instruction) -> bool:
    return False


_SERVES_LOSS: PerOp[Callable[[Instruction], bool]] = PerOp(
    "part in evaluation",
    {
        **{kind: _always if kind.default_work_group is WorkGroup.FORWARD else _never for kind in BLOCK_OPS},
        **dict.fromkeys((LoadInput, AllGather, Update, CombineLoss), _always),
        **dict.fromkeys((ReduceScatter, AllReduce, ScaleUpdate, *MEMORY_OPS, *GUEST_OPS), _never),
        **dict.fromkeys((Send, Recv), lambda item: item.variant == Payload.ACTIVATION.value),
        GatherRows: lambda item: item.variant.endswith(f".{Phase.FORWARD.value}"),
        **dict.fromkeys((ReduceRows, ReduceSums), lambda item: item.variant == Payload.ACTIVATION.value),
        AllReduceScalar: lambda item: item.variant == Quantity.LOSS.value,
    },
    never=(Release,),
)


class Evaluator(Protocol):
    """What evaluation asks of an engine."""

    def run_forward(self, batches: Batches, number: int) -> float:
        """The mean loss of a batch, in nats, with the weights as they are; no carried byte changes."""


@frozen(eq=False)
class HeldOut:
    """Data that is evaluated on, always the same: batches `0 .. count - 1` of the stream, in its order."""

    batches: Batches
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of one evaluation."""
        return self.count * self.batches.plan.tokens_per_step

    def loss(self, engine: Evaluator) -> float:
        """The mean loss over all its tokens that are in the loss, in nats."""
        means = [engine.run_forward(self.batches, number) for number in range(self.count)]
        if self.batches.stream.counts_all:
            return sum(means) / self.count
        counts = [self.batches.counted(number) for number in range(self.count)]
        return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


def serves_the_loss(instruction: Instruction) -> bool:
    """Whether an engine that evaluates executes an instruction; of an update, the writing of the view alone."""
    return _SERVES_LOSS[instruction.keyword](instruction)


def held_out(stream: TokenStream, plan: Plan, most: int | None = None) -> HeldOut:
    """Whole batches of a stream, all of them or the first `most`; what remains of the stream is not used.

    Raises `DiagnosticError` RT090 where it is too short for one batch.
    """
    batches = Batches(stream, plan, "sequential", 0)
    count = batches.sequences // plan.global_batch
    if not count:
        fail(
            "RT090",
            f"'{stream.name}' holds {batches.sequences} sequences to evaluate on: one batch takes {plan.global_batch}",
            help="hold out more of the data with --eval-fraction, or evaluate on another file with --eval-data",
        )
    held = HeldOut(batches, count if most is None else min(most, count))
    if not any(batches.counted(number) for number in range(held.count)):
        text = f"'{stream.name}' has no label in the loss among the evaluated tokens: all belong to prompts"
        fail(
            "RT090",
            text,
            help="hold out more of the data (--eval-fraction), evaluate on more batches (--eval-batches), or on another file (--eval-data)",
        )
    return held


def split_stream(stream: TokenStream, fraction: float) -> tuple[TokenStream, TokenStream]:
    """The part of a stream to train on, and its last `fraction`, which is held out, from where its first document begins."""
    cut = len(stream.tokens) - round(len(stream.tokens) * fraction)
    if stream.documents is not None:
        cut = stream.documents.start_before(cut) or cut
    share = f"last {100 * fraction:g} %"
    training = part_of_stream(stream, 0, cut, f"without its {share}")
    held = part_of_stream(stream, cut, len(stream.tokens), "")
    return training, evolve(held, name=f"the {share} of {stream.name}")
