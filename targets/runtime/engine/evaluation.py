"""Evaluation: the loss on held-out data, by the very program that trains.

Between two steps an engine goes through one more step of the program, of which it executes only what the loss needs:
inputs, forwards and their messages, gathers of views, the sum of the loss. All other instructions are counted as done
without being executed, so that order, waits and lifetimes are the verified ones. An update that also writes its view
does this again, from unchanged masters; no other carried byte is written. Training therefore continues as if nothing
had been evaluated, bit for bit.
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
from ratrain.ratrain_ir.ops.context_ranks import HEAD_OPS, GatherKeys, ReduceKeys
from ratrain.ratrain_ir.ops.expert_ranks import EXPERT_OPS
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.runtime.data.data import WITHOUT_ITS_LAST, Batches, TokenStream, part_of_stream, without_labels

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
        **dict.fromkeys((ReduceScatter, AllReduce, ReduceKeys, ScaleUpdate, Store, *OFFLOAD_OPS), _never),
        Fetch: lambda item: item.variant == Phase.FORWARD.value,  # of frozen parameters; of activations it is empty
        **dict.fromkeys((Send, Recv, *HEAD_OPS, *EXPERT_OPS), lambda item: item.variant == Payload.ACTIVATION.value),
        GatherRows: lambda item: item.variant.endswith(f".{Phase.FORWARD.value}"),
        GatherKeys: lambda item: item.variant.partition(".")[0] == Phase.FORWARD.value,
        # A sum that is repeated for a recovery has the variant `activation.backward`.
        **dict.fromkeys((ReduceRows, ReduceSums), lambda item: item.variant == Payload.ACTIVATION.value),
        AllReduceScalar: lambda item: item.variant == Quantity.LOSS.value,
    },
    never=(Release,),
)


class Evaluator(Protocol):
    """Engine as evaluation sees it."""

    def run_forward(self, batches: Batches, number: int) -> float:
        """Return the mean loss of a batch, in nats, under the present weights; change no carried byte."""


@frozen(eq=False)
class HeldOut:
    """Held-out data, the same at every evaluation: batches `0 .. count - 1` of the stream, in its order."""

    batches: Batches
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of one evaluation, without those that fill the stream's last sequences."""
        return min(self.count * self.batches.plan.tokens_per_step, self.batches.stream.given_tokens)

    def loss(self, engine: Evaluator) -> float:
        """Return the mean loss over all its tokens that count, in nats."""
        means = [engine.run_forward(self.batches, number) for number in range(self.count)]
        if self.batches.stream.counts_all:
            return sum(means) / self.count
        counts = [self.batches.counted(number) for number in range(self.count)]
        return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


def serves_the_loss(instruction: Instruction) -> bool:
    """Return True if an evaluating engine executes an instruction; of an update only the writing of the view."""
    return _SERVES_LOSS[instruction.keyword](instruction)


def held_out(stream: TokenStream, plan: Plan, most: int | None = None) -> HeldOut:
    """Return whole batches of a stream, all or the first `most`; the rest of the stream is not used.

    Raises `DiagnosticError` RT090 where it is too short for one batch, or no token of the batches counts in the loss.
    """
    batches = Batches(stream, plan, "sequential", 0)
    count = batches.sequences // plan.global_batch
    if not count:
        fail(
            "RT090",
            f"'{stream.name}' holds {number_of(batches.sequences, 'sequence')} to evaluate on: one "
            f"batch takes {plan.global_batch}",
            help="hold out more of the data with --eval-fraction, or evaluate on another file with --eval-data",
        )
    held = HeldOut(batches, count if most is None else min(most, count))
    if not any(batches.counted(number) for number in range(held.count)):
        why, way_out = without_labels(stream, plan.seq_len)
        if not stream.reading.get("left_out"):
            more = "" if most is None else "evaluate on more batches (--eval-batches), "
            way_out = f"hold out more of the data (--eval-fraction), {more}or evaluate on another file (--eval-data)"
        fail("RT090", f"'{stream.name}' has no label in the loss among the evaluated tokens: {why}", help=way_out)
    return held


def split_stream(stream: TokenStream, fraction: float) -> tuple[TokenStream, TokenStream]:
    """Split a stream into a part to train on and its last `fraction`, held out from the start of a document on.

    One text alone is cut within it. Raises `DiagnosticError` RT090 for one chat, or one prompt with its answer, and
    where one of the parts would have no token.
    """
    cut = len(stream.tokens) - round(len(stream.tokens) * fraction)
    if stream.documents is not None:
        start = stream.documents.start_near(cut)
        if start is None and stream.documents.answers is not None:
            text = f"'{stream.name}' has one document: none can be held out"
            fail("RT090", text, help="add others, or evaluate on another file with --eval-data")
        cut = cut if start is None else start
    share = f"{100 * fraction:g} %"
    if not 0 < cut < len(stream.tokens):
        part = "none" if cut else "all"
        text = f"'{stream.name}' has {number_of(len(stream.tokens), 'token')}: its last {share} are {part} of them"
        way_out = "use more data, hold out another part with --eval-fraction, or evaluate on another file (--eval-data)"
        fail("RT090", text, help=way_out)
    training = part_of_stream(stream, 0, cut, f"{WITHOUT_ITS_LAST} {share}")
    held = part_of_stream(stream, cut, len(stream.tokens), "")
    return training, evolve(held, name=f"the last {share} of {stream.name}")
