"""GPT blocks for timing only: the kernels of a training framework on a GPU, as shapes that the cost model prices.

A block is never lowered, allocated or run. Attention is unfused (scores in memory, as frameworks did before fused attention), every
layer recomputes its forward before its backward, the schedule is 1F1B, gradients are reduced after the last backward.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.types import Dtype
from ratrain.targets.machine.collective_cost import all_reduces, cheapest
from ratrain.targets.machine.cost import message_work, routine_work, update_work
from ratrain.targets.machine.placement import Members
from ratrain.targets.program.routine import Formal, Routine, Shape, Step

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

VOCAB = 51_200
"""50,257 words, padded."""
_FFN = 4
_GRADIENT_BYTES = 2
_UPDATE_BYTES = 30
"""Of AdamW a parameter: f32 master and two moments read and written, an f32 gradient read, an f16 weight written."""
_DIRECTIONS = 2
"""The pipeline fills with activations and drains with gradients."""


@frozen
class GptRun:
    """A GPT under a parallel plan, as a measurement names it. `micro_batch` in sequences, without tensor parallelism."""

    hidden: int
    heads: int
    layers: int
    seq_len: int
    pp: int
    dp: int
    micro_batch: int
    micro_batches: int


@frozen
class _Blocks:
    forward: Routine
    backward: Routine
    head: Routine
    embedding: Routine


class _Builder:
    """Collects steps; every distinct shape becomes a formal."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.formals: dict[str, Formal] = {}
        self.steps: list[Step] = []

    def operand(self, *shape: int, dtype: Dtype = Dtype.F16) -> str:
        name = f"{dtype.value}_{'x'.join(map(str, shape))}"
        self.formals[name] = Formal(name, dtype, Shape(shape))
        return name

    def product(self, rows: int, inner: int, columns: int, times: int = 1) -> None:
        """`times` products in one kernel, in a batch."""
        a, b = self.operand(times * rows, inner), self.operand(times * inner, columns)
        self.steps.append(Step("gemm", {"a": a, "b": b, "out": self.operand(times * rows, columns)}, {"batch": times}))

    def passes(self, count: int, *shape: int, dtype: Dtype = Dtype.F16) -> None:
        """`count` element-wise kernels that read and write an array: each takes as long as a copy."""
        operand = self.operand(*shape, dtype=dtype)
        self.steps += [Step("cast", {"src": operand, "dst": operand}, {})] * count

    def routine(self) -> Routine:
        return Routine(self.key, tuple(self.formals.values()), (), (), 0, tuple(self.steps))


@cache
def _blocks(hidden: int, heads: int, seq_len: int, micro_batch: int) -> _Blocks:
    rows, ffn, pairs = micro_batch * seq_len, _FFN * hidden, micro_batch * heads
    width = hidden // heads
    products = ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden))
    forward = _Builder("gpt-forward")
    for inner, columns in products:
        forward.product(rows, inner, columns)
    forward.product(seq_len, width, seq_len, pairs)
    forward.product(seq_len, seq_len, width, pairs)
    forward.passes(2, pairs * seq_len, seq_len)  # scale, mask and softmax; dropout
    forward.passes(6, rows, hidden)  # two norms, two of bias, dropout and residual, two transpositions of heads
    forward.passes(1, rows, ffn)  # bias and GELU
    backward = _Builder("gpt-backward")
    for inner, columns in products:
        backward.product(rows, columns, inner)
        backward.product(inner, rows, columns)
    for _ in range(2):
        backward.product(seq_len, width, seq_len, pairs)
        backward.product(seq_len, seq_len, width, pairs)
    backward.passes(2, pairs * seq_len, seq_len)
    backward.passes(10, rows, hidden)  # as forward, and sums over rows for biases and norms
    backward.passes(2, rows, ffn)
    head = _Builder("gpt-head")
    table, normed = head.operand(VOCAB, hidden), head.operand(rows, hidden)
    for kernel in ("head_forward", "head_backward"):
        head.steps.append(Step(kernel, {"table": table, "xn": normed, "logits": head.operand(rows, VOCAB)}, {}))
    head.passes(4, rows, VOCAB, dtype=Dtype.F32)  # cast, maximum, exponent and sum, gradient
    embedding = _Builder("gpt-embedding")
    embedding.passes(4, rows, hidden)
    return _Blocks(forward.routine(), backward.routine(), head.routine(), embedding.routine())


@frozen
class BlockSeconds:
    """Seconds of one micro-batch: a layer forward twice and backward, the head both ways, the embedding both ways."""

    layer: float
    head: float
    embedding: float


def block_seconds(hidden: int, heads: int, seq_len: int, micro_batch: int, machine: Machine) -> BlockSeconds:
    """What the blocks of a shape take."""
    blocks = _blocks(hidden, heads, seq_len, micro_batch)
    forward, backward = routine_work(blocks.forward, machine).seconds, routine_work(blocks.backward, machine).seconds
    head, embedding = routine_work(blocks.head, machine).seconds, routine_work(blocks.embedding, machine).seconds
    return BlockSeconds(2 * forward + backward, head, embedding)


def iteration_seconds(run: GptRun, blocks: BlockSeconds, machine: Machine) -> float:
    """Seconds of one iteration: 1F1B over equal stages of layers, the head on the last one, then gradients and the update."""
    stages = [run.layers / run.pp * blocks.layer] * run.pp
    stages[0] += blocks.embedding
    stages[-1] += blocks.head
    link = machine.link_groups[-1].link
    message = message_work(2 * run.micro_batch * run.seq_len * run.hidden, link, 0, machine).seconds
    seconds = sum(stages) + (run.micro_batches - 1) * max(stages) + _DIRECTIONS * (run.pp - 1) * message
    parameters = (12 * run.hidden + 13) * run.hidden * run.layers // run.pp + (VOCAB + run.seq_len) * run.hidden
    if run.dp > 1:
        ways = all_reduces(parameters, _GRADIENT_BYTES, Members((run.dp,), (link,)), machine)
        seconds += cheapest(ways, machine).seconds(machine)
    return seconds + update_work(_UPDATE_BYTES * parameters, machine, on_host=False).seconds
