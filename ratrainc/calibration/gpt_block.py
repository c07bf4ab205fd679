"""GPT blocks for timing only: the kernels of a training framework on a GPU, as shapes that the cost model prices.

A block is never lowered, allocated or run. Attention is unfused: scores are in memory, as in frameworks before fused
attention. Each of T tensor-parallel ranks ("peers") has 1/T of the heads, the MLP and the vocabulary, and the rest
whole (Shoeybi et al., "Megatron-LM", 2019). Norms, dropouts and residuals work on whole activations, which four
all-reduces per layer make, two in each direction.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import kernel_work
from ratrain.targets.program.routine import Formal, Routine, Shape, Step

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

VOCAB = 50_257
"""Tokens of the vocabulary, unpadded as in vTrain's own model; each of T tensor-parallel ranks has VOCAB // T."""
_FFN = 4
ACTIVATION_BYTES = 2
_FUSED_MATRICES = 4
"""Megatron-LM's fused softmax takes multiples of this number of score matrices (megatron/model/fused_softmax.py)."""
_APART = (3, 4, 4, 3)
"""Arrays of the kernels that other numbers take instead: scores are widened to f32, scaled, masked, narrowed."""
_PROCESSORS = 108
"""Streaming multiprocessors of an A100 (NVIDIA A100 data sheet)."""
_TILE = 128
"""Rows and columns of a large product's result for which one multiprocessor works: usual for cuBLAS on an A100."""
_SUM_BYTES_A_WORD = 2
"""Size of a partial sum (f32) in elements of f16."""
_REDUCED = 2
"""All-reduces of a layer in one direction: one for the attention, one for the MLP."""


@frozen
class BlockShape:
    """Sizes that the kernels of a layer depend on: `micro_batch` in sequences, `peers` in tensor-parallel ranks."""

    hidden: int
    heads: int
    seq_len: int
    micro_batch: int
    peers: int

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def words(self) -> int:
        """Rows of the embedding table on a tensor-parallel rank."""
        return VOCAB // self.peers

    @property
    def activation(self) -> int:
        """Elements of a micro-batch between two layers: whole on every rank, and summed by an all-reduce."""
        return self.rows * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer on one rank. Matrices and their biases are divided; norms and later biases are not."""
        return (12 * self.hidden + 7) * self.hidden // self.peers + 6 * self.hidden


@frozen
class BlockWork:
    """Kernels of one direction of a block, and its all-reduces over tensor-parallel ranks."""

    routine: Routine
    all_reduces: int
    """number of sums of a whole activation"""
    row_sums: int = 0
    """number of sums of one f32 number per row"""

    @property
    def collectives(self) -> int:
        """Number of all-reduces over the tensor-parallel ranks."""
        return self.all_reduces + self.row_sums

    def seconds(self, machine: Machine, all_reduce: float, row_sum: float) -> float:
        """Return the seconds of the kernels and sums, one after the other.

        They are never shorter than the host needs to issue all of them (`Machine.dispatch`).
        """
        busy = sum(kernel_work(self.routine, step, machine).seconds for step in self.routine.steps)
        busy += self.all_reduces * all_reduce + self.row_sums * row_sum
        return max(busy, machine.dispatch * (len(self.routine.steps) + self.collectives))


@frozen
class Blocks:
    """A layer, the head and the embedding in both directions, of one micro-batch."""

    forward: BlockWork
    backward: BlockWork
    head: BlockWork
    embedding: BlockWork


class _Builder:
    """A builder of routines; every distinct shape becomes a formal."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.formals: dict[str, Formal] = {}
        self.steps: list[Step] = []

    def operand(self, *shape: int, dtype: Dtype = Dtype.F16) -> str:
        name = f"{dtype.value}_{'x'.join(map(str, shape))}"
        self.formals[name] = Formal(name, dtype, Shape(shape))
        return name

    def product(self, rows: int, inner: int, columns: int, times: int = 1) -> None:
        """Add a kernel that computes `times` products in a batch."""
        a, b = self.operand(times * rows, inner), self.operand(times * inner, columns)
        self.steps.append(Step("gemm", {"a": a, "b": b, "out": self.operand(times * rows, columns)}, {"batch": times}))

    def projection(self, rows: int, inner: int, columns: int) -> None:
        """Add a product with a weight, or for its gradient, and for a small result a kernel that adds partial sums.

        cuBLAS splits the inner extent (split-K) if the result has too few tiles for the multiprocessors. The limit,
        half of them, is assumed.
        """
        self.product(rows, inner, columns)
        if ceil(rows / _TILE) * ceil(columns / _TILE) <= _PROCESSORS // 2:
            self.kernel(2 * _SUM_BYTES_A_WORD, rows, columns)

    def kernel(self, arrays: int, *shape: int, masks: int = 0) -> None:
        """Add an element-wise kernel over `arrays` arrays and `masks` byte masks of a shape, at the cost of a copy."""
        operands = {f"array{i}": self.operand(*shape) for i in range(arrays)}
        operands |= {f"mask{i}": self.operand(*shape, dtype=Dtype.U8) for i in range(masks)}
        self.steps.append(Step("cast", operands, {}))

    def work(self, all_reduces: int = 0, row_sums: int = 0) -> BlockWork:
        routine = Routine(self.key, tuple(self.formals.values()), (), (), 0, tuple(self.steps))
        return BlockWork(routine, all_reduces, row_sums)


@cache
def blocks_of(shape: BlockShape) -> Blocks:
    """Return the kernels of a layer, the head and the embedding, as Megatron-LM issues them."""
    return Blocks(_forward(shape), _backward(shape), _head(shape), _embedding(shape))


def _products(shape: BlockShape) -> tuple[tuple[int, int], ...]:
    """Return the inner extent and the columns of a layer's products with weights, on one rank."""
    hidden, part, ffn = shape.hidden, shape.hidden // shape.peers, _FFN * shape.hidden // shape.peers
    return (hidden, 3 * part), (part, hidden), (hidden, ffn), (ffn, hidden)


def _pairs(shape: BlockShape) -> tuple[int, int, int]:
    """Return, for the scores of a micro-batch on one rank: number of matrices, their rows together, width of a head."""
    matrices = shape.micro_batch * shape.heads // shape.peers
    return matrices, matrices * shape.seq_len, shape.hidden // shape.heads


def _forward(shape: BlockShape) -> BlockWork:
    rows, hidden, seq_len, part = shape.rows, shape.hidden, shape.seq_len, shape.hidden // shape.peers
    matrices, score_rows, width = _pairs(shape)
    made = _Builder("gpt-forward")
    for inner, columns in _products(shape):
        made.projection(rows, inner, columns)
    made.product(seq_len, width, seq_len, matrices)
    made.kernel(2, score_rows, seq_len)  # scale, mask and softmax
    for arrays in _APART if matrices % _FUSED_MATRICES else ():
        made.kernel(arrays, score_rows, seq_len)
    made.kernel(2, score_rows, seq_len, masks=1)  # dropout
    made.product(seq_len, seq_len, width, matrices)
    made.kernel(2, rows, part)  # heads side by side
    made.kernel(2, rows, _FFN * part)  # bias and GELU
    for _ in range(2):
        made.kernel(2, rows, hidden)  # norm
        made.kernel(3, rows, hidden, masks=1)  # bias, dropout and residual
    return made.work(_REDUCED if shape.peers > 1 else 0)


def _backward(shape: BlockShape) -> BlockWork:
    rows, hidden, seq_len, part = shape.rows, shape.hidden, shape.seq_len, shape.hidden // shape.peers
    matrices, score_rows, width = _pairs(shape)
    made = _Builder("gpt-backward")
    for inner, columns in _products(shape):
        made.projection(rows, columns, inner)
        made.projection(inner, rows, columns)
        made.kernel(_ACCUMULATED, inner, columns)  # the gradient of a weight is added to that of earlier micro-batches
    for _ in range(2):
        made.product(seq_len, width, seq_len, matrices)
        made.product(seq_len, seq_len, width, matrices)
    made.kernel(2, score_rows, seq_len, masks=1)  # dropout
    made.kernel(3, score_rows, seq_len)  # softmax
    for arrays in _APART if matrices % _FUSED_MATRICES else ():  # forward's kernels in turn
        made.kernel(arrays, score_rows, seq_len)
    made.kernel(2, rows, part)  # heads apart
    made.kernel(2, rows, 3 * part)  # gradients of queries, keys and values side by side
    made.kernel(1, rows, 3 * part)  # sum over rows for their bias
    made.kernel(3, rows, _FFN * part)  # GELU
    made.kernel(1, rows, _FFN * part)  # sum over rows for its bias
    for _ in range(2):
        made.kernel(2, rows, hidden, masks=1)  # dropout
        made.kernel(1, rows, hidden)  # sum over rows for a bias
        made.kernel(3, rows, hidden)  # norm
        made.kernel(2, rows, hidden)  # sums over rows for its weights
        made.kernel(3, rows, hidden)  # the residual's gradient added
    return made.work(_REDUCED if shape.peers > 1 else 0)


_ACCUMULATED = 3
"""Arrays that an addition to a gradient moves: it reads the new part and the sum, and writes the sum."""
_WORDS_ALIGNED = 2
"""Elements that one load takes: a product with an odd extent of f16 cannot load pairs."""


def _head(shape: BlockShape) -> BlockWork:
    """Return the work of the head: norm, logits, loss and their backward.

    With an odd number of words its products have an efficiency of their own (`head_efficiency`).
    """
    rows, hidden, words = shape.rows, shape.hidden, shape.words
    made = _Builder("gpt-head")
    if words % _WORDS_ALIGNED:
        table, normed, logits = made.operand(words, hidden), made.operand(rows, hidden), made.operand(rows, words)
        for kernel in ("head_forward", "head_backward_from_logits"):
            made.steps.append(Step(kernel, {"table": table, "xn": normed, "logits": logits}, {}))
    else:
        made.product(rows, hidden, words)
        made.product(rows, words, hidden)
        made.product(words, rows, hidden)
    made.kernel(_ACCUMULATED, words, hidden)
    made.kernel(2, rows, hidden)  # norm
    made.kernel(3, rows, hidden)
    made.kernel(2, rows, hidden)
    made.kernel(1, rows, words)  # maximum
    made.kernel(2, rows, words)  # less the maximum
    made.kernel(2, rows, words)  # exponents
    made.kernel(1, rows, words)  # their sum
    made.kernel(2, rows, words)  # divided by it
    made.kernel(2, rows, words)  # times the gradient of the loss
    return made.work(1, _LOSS_SUMS) if shape.peers > 1 else made.work()


_LOSS_SUMS = 3
"""Sums per row over tensor-parallel ranks: the maximum, the label's logit, and the sum of exponentials."""


def _embedding(shape: BlockShape) -> BlockWork:
    rows, hidden, words = shape.rows, shape.hidden, shape.words
    made = _Builder("gpt-embedding")
    made.kernel(2, rows, hidden)  # rows of words
    made.kernel(3, rows, hidden)  # positions added
    made.kernel(2, rows, hidden, masks=1)  # dropout
    made.kernel(2, rows, hidden, masks=1)
    made.kernel(1, words, hidden)  # a gradient of zeros
    made.kernel(2, rows, hidden)  # to which rows are added
    made.kernel(_ACCUMULATED, words, hidden)
    return made.work(1 if shape.peers > 1 else 0)
