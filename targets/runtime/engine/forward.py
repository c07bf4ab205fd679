"""Forward passes of a model over a text that grows, without a program, by the routines and kernels that train it.

Keys and values of all tokens read so far are kept, so a further token takes the forward pass of one row:

    read [a b c] -> logits behind c     read [d] -> logits behind d, from keys of a b c d

Nothing is kept for a backward, and blocks share their activations: besides weights, keys and values it takes the
activations of one layer. An attention is the routine of a slice (`slice_routines`) cut in two: its steps up to queries,
keys and values, and those behind the output of the heads. Between them queries meet keys run by run.

Several ranks may hold keys and values between them (`KeyHolders`). The first tokens read are shared out, as context
ranks share out a sequence: each rank computes its run of rows, against gathered keys. For what is read later every rank
computes all rows but attends to its own keys alone, and the states of the softmax are merged (Tree Attention, Shyam et
al., 2024): a token moves `heads * (head_dim + 2)` floats a layer, however long the text is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block_chain, flat_elements
from ratrain.ratrain_ir.model.context_rows import sees
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import KEY_SLOTS, activation_type
from ratrain.ratrain_ir.ops.roles import of_slice
from ratrain.targets.codegen.routines import RoutineForm, derived_routine, representative
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.engine.rank import BoundRoutine, bind_steps, resolve, routine_scratch_bytes
from ratrain.targets.runtime.weights.weight_source import flat_pieces

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.types import Dtype
    from ratrain.targets.program.routine import Routine
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.settings import Sampling
    from ratrain.targets.runtime.weights.weight_source import WeightSource

HOLDER_RUN = 256
"""Tokens behind the first ones that a holder keeps before it is the next one's turn. Assumed, not measured."""

_ATTEND = "attention_partial_forward"
_ROLES = {
    "embed": ("tokens", "w", "y"),
    "attention": ("x", "w", "y", *KEY_SLOTS, *(of_slice(name, 0) for name in KEY_SLOTS)),
    "mlp": ("x", "w", "y"),
    "head": ("x", "w", "labels", "lse", "loss"),
}

Float32: TypeAlias = NDArray[np.float32]


@frozen(eq=False)
class SoftmaxState:
    """State of the softmax of some queries over the keys met so far, as the kernels of partial attention keep it."""

    acc: Float32
    """[rows, heads * head_dim]: values weighted by `2 ** (score - peak)`"""
    peak: Float32
    """[heads, rows]: largest score, in units of log 2; -inf before any key"""
    total: Float32
    """[heads, rows]: sum of the weights"""

    def clear(self) -> None:
        """Forget all keys."""
        self.acc.fill(0)
        self.peak.fill(-np.inf)
        self.total.fill(0)

    def merge(self, other: SoftmaxState) -> None:
        """Add the keys of another state of the same queries."""
        peak = np.maximum(self.peak, other.peak)
        own, theirs = (_weight(each.peak, peak) for each in (self, other))
        by_head = (len(self.acc), len(peak), -1)
        acc = self.acc.reshape(by_head)
        acc *= own.T[:, :, None]
        acc += other.acc.reshape(by_head) * theirs.T[:, :, None]
        self.total[...] = self.total * own + other.total * theirs
        self.peak[...] = peak


def _weight(peak: Float32, common: Float32) -> Float32:
    """Return the weight of sums relative to one peak in sums relative to a common one; 0 without keys."""
    met = ~np.isneginf(peak)
    return np.exp2(np.subtract(peak, common, where=met, out=np.full_like(peak, -np.inf)))


class KeyHolders(Protocol):
    """Ranks that hold the keys and values of a text between them. All of them make the same calls."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, own: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
        """Return the rows of all ranks, in their order; rank r has `counts[r]` of them."""

    def merge(self, state: SoftmaxState) -> None:
        """Merge the states of all ranks, in one order: every rank has the same bits afterwards."""

    def from_rank(self, values: NDArray[Any], rank: int) -> None:
        """Replace `values` with those of one rank."""


class OneHolder:
    """One rank that holds all keys and values."""

    rank = 0
    size = 1

    def gather(self, own: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
        """Return the rows."""
        del counts
        return own

    def merge(self, state: SoftmaxState) -> None:
        """Do nothing: the state has all keys."""

    def from_rank(self, values: NDArray[Any], rank: int) -> None:
        """Do nothing: the values are those of the one rank."""


@frozen
class KeyRun:
    """Keys of tokens that follow one another, as a holder keeps them."""

    first: int
    """position of the first token"""
    row: int
    """row of the cache that has its key"""
    rows: int

    @property
    def positions(self) -> range:
        """Positions of the tokens."""
        return range(self.first, self.first + self.rows)


def sequence_plan(length: int, dtype: Dtype) -> Plan:
    """Return the plan of one sequence on one rank, with weights and activations of `dtype`."""
    return Plan(pp=1, dp=1, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=length, view_dtype=dtype.value)


class ForwardModel:
    """Model with its weights that computes logits."""

    def __init__(
        self,
        model: ModelConfig,
        source: WeightSource,
        dtype: Dtype,
        kernels: KernelSet,
        biases: Mapping[Block, NDArray[np.float32]] | None = None,
    ) -> None:
        """Make the model; `biases` are those with which its routers choose, by block, if they do."""
        self.model = model
        self.biases = biases or {}
        self.dtype = dtype
        self.kernels = kernels
        self.views = {owner: self._view(owner, source) for owner in block_chain(model)}
        head = block_chain(model)[-1]
        routine = self.routine(head, sequence_plan(1, dtype))
        self.last = np.zeros((1, model.hidden_size), NUMPY_DTYPES[dtype])
        """[1, hidden]: row that `head` turns into logits"""
        operands = {
            "x": self.last,
            "w": self.views[head],
            "labels": np.zeros(1, np.int32),
            "lse": np.zeros(1, np.float32),
            "loss": np.zeros(1, np.float64),
            "workspace": HOST.allocate(routine.workspace_bytes),
        }
        self._head = bind_steps(routine, operands, kernels, Scratch(routine_scratch_bytes(routine, kernels)))
        logits = next(step.operands["logits"] for step in routine.steps if "logits" in step.operands)
        self._logits: Float32 = resolve(routine, logits, operands)

    def reading(self, most: int, holders: KeyHolders | None = None) -> Reading:
        """Begin a text of `most` tokens at most; `holders` have its keys between them, without them this rank alone."""
        return Reading(self, most, holders or OneHolder())

    def head(self) -> Float32:
        """Return the logits, shape [vocabulary], of the row `last`; valid until the next call."""
        self._head()
        found: Float32 = self._logits.reshape(-1)
        return found

    def routine(self, owner: Block, plan: Plan) -> Routine:
        """Return the routine of a block's forward; of later rows if the plan has such."""
        alike = representative(owner, self.model, plan)
        part = 1 if plan.slices else None
        roles = (*_ROLES[owner.kind], *(("bias",) if owner in self.biases else ()))
        form = RoutineForm("forward", alike, roles, (), accumulates=False, slice=part)
        return derived_routine(form, self.model, plan)

    def _view(self, owner: Block, source: WeightSource) -> NDArray[Any]:
        """Return a block's weights, [elements], in the dtype that forward passes read."""
        plan = sequence_plan(1, self.dtype)
        view = np.zeros(flat_elements(self.model, plan, owner), NUMPY_DTYPES[self.dtype])
        for at, values in flat_pieces(self.model, owner, source, 0, view.size):
            part = view[at : at + values.size]
            scratch = Scratch(self.kernels.scratch_bytes("cast", src=values, dst=part))
            self.kernels.cast(values, part, scratch=scratch)
        return view


class Reading:
    """A text that a model reads piece by piece, with the keys and values of its tokens."""

    def __init__(self, forward: ForwardModel, most: int, holders: KeyHolders) -> None:
        self._forward = forward
        self._holders = holders
        self._most = most
        self._read = 0
        self._began = 0
        """tokens of the first call, which ranks share out"""
        self._runs: list[KeyRun] = []
        self._caches: dict[Block, tuple[NDArray[Any], ...]] = {}
        """keys and values of each attention, [rows, width]"""
        self._piece: _Piece | None = None

    def read(self, tokens: Sequence[int]) -> Float32:
        """Read further tokens, one or more; return the logits behind the last one, valid until the next call."""
        assert 0 < len(tokens) <= self._most - self._read
        begins = not self._read
        own, shares = range(len(tokens)), [len(tokens)]
        if begins:
            self._began = len(tokens)
            ends = [len(tokens) * number // self._holders.size for number in range(self._holders.size + 1)]
            own, shares = range(*ends[self._holders.rank :][:2]), [stop - start for start, stop in pairwise(ends)]
            self._make_room(len(own))
        first = self._read + own.start
        piece = self._piece_of(len(own))
        with np.errstate(all="ignore"):  # the caller checks whether logits are finite
            if piece is not None:
                piece.tokens[:] = tokens[own.start : own.stop]
                piece.begin_at(first)
            self._run(piece, first, shares if begins else None)
            if piece is not None:
                self._forward.last[...] = piece.hidden[-1]
            if begins:
                self._holders.from_rank(self._forward.last, max(rank for rank, share in enumerate(shares) if share))
            self._read += len(tokens)
            return self._forward.head()

    def _piece_of(self, rows: int) -> _Piece | None:
        """Return the blocks bound to some rows: those of the last call if it had as many. None without rows."""
        if self._piece is None or len(self._piece.tokens) != rows:
            self._piece = None  # the activations of the last one are freed before others are allocated
            self._piece = _Piece.of(self._forward, rows, self._most) if rows else None
        return self._piece

    def _make_room(self, own: int) -> None:
        """Allocate all keys and values that this rank will hold, its share of the first tokens among them."""
        model, stride = self._forward.model, self._holders.size * HOLDER_RUN
        turns = range(self._began + self._holders.rank * HOLDER_RUN, self._most, stride)
        rows = own + sum(min(HOLDER_RUN, self._most - start) for start in turns)
        shape, dtype = (rows, model.kv_heads * model.head_dim), NUMPY_DTYPES[self._forward.dtype]
        for owner in block_chain(model):
            if owner.kind == "attention":
                self._caches[owner] = tuple(np.empty(shape, dtype) for _ in KEY_SLOTS)

    def _run(self, piece: _Piece | None, first: int, shares: Sequence[int] | None) -> None:
        """Run all blocks but the head on rows from position `first` on.

        `shares` are the rows of each rank where rows are shared out. `piece` is None on a rank without any, which takes
        part in the gathers.
        """
        added = self._keep(range(first, first + len(piece.tokens)), begins=shares is not None) if piece else []
        for owner in block_chain(self._forward.model)[:-1]:
            if owner.kind == "attention":
                attention = piece.attentions[owner] if piece else None
                self._attend(attention, self._caches[owner], added, first, shares)
            elif piece is not None:
                piece.others[owner]()

    def _keep(self, positions: range, *, begins: bool) -> list[KeyRun]:
        """Decide which of some tokens this rank keeps the keys of; return runs of them."""
        added: list[KeyRun] = []
        at = positions.start
        while at < positions.stop:
            turn, within = (0, 0) if begins else divmod(at - self._began, HOLDER_RUN)
            rows = positions.stop - at if begins else min(positions.stop - at, HOLDER_RUN - within)
            if begins or turn % self._holders.size == self._holders.rank:
                added.append(KeyRun(at, sum(run.rows for run in self._runs), rows))
                if self._runs and self._runs[-1].positions.stop == at:
                    self._runs[-1] = evolve(self._runs[-1], rows=self._runs[-1].rows + rows)
                else:
                    self._runs.append(added[-1])
            at += rows
        return added

    def _attend(
        self,
        attention: _Attention | None,
        caches: Sequence[NDArray[Any]],
        added: Sequence[KeyRun],
        first: int,
        shares: Sequence[int] | None,
    ) -> None:
        """Run an attention: keep its keys and values, and let queries meet those of the whole text."""
        if attention is not None:
            attention.before()
            for cache, new in zip(caches, attention.keys, strict=True):
                for run in added:
                    row = run.first - first
                    cache[run.row : run.row + run.rows] = new[row : row + run.rows]
        runs, keys = self._runs, caches
        if shares is not None:
            own = shares[self._holders.rank]
            keys, runs = [self._holders.gather(cache[:own], shares) for cache in caches], [KeyRun(0, 0, first + own)]
        if attention is not None:
            attention.meet(runs, keys, first)
            if shares is None:
                self._holders.merge(attention.state)
            attention.behind()


@frozen(eq=False)
class _Attention:
    """An attention bound to some rows."""

    before: BoundRoutine
    """steps to queries, keys and values"""
    behind: BoundRoutine
    """steps from the state of the softmax to the block's output"""
    query: NDArray[Any]
    keys: tuple[NDArray[Any], NDArray[Any]]
    """keys and values of these rows"""
    state: SoftmaxState
    options: dict[str, Any]
    """options of the kernel by which queries meet keys, at other positions"""
    kernel: Callable[..., None]
    scratch: Scratch

    def meet(self, runs: Sequence[KeyRun], keys: Sequence[NDArray[Any]], first: int) -> None:
        """Begin the state of the softmax, for queries from position `first` on, with runs of keys."""
        self.state.clear()
        queries = range(first, first + len(self.query))
        state = {"acc": self.state.acc, "peak": self.state.peak, "total": self.state.total}
        for run in runs:
            if not sees(self.options["window"], queries, run.positions):
                continue
            k, v = (cache[run.row : run.row + run.rows] for cache in keys)
            places = {"first_query": first, "first_key": run.first, "keys": run.rows, "accumulate": True}
            options = KERNELS[_ATTEND].arguments({**self.options, **places})
            self.scratch.reset()
            self.kernel(self.query, k, v, **state, scratch=self.scratch, **options)


@define(eq=False)
class _Piece:
    """All blocks but the head, bound to the activations of some rows."""

    tokens: NDArray[np.int32]
    hidden: NDArray[Any]
    """[rows, hidden]: output of the last layer"""
    attentions: dict[Block, _Attention] = field(factory=dict)
    others: dict[Block, BoundRoutine] = field(factory=dict)

    @classmethod
    def of(cls, forward: ForwardModel, rows: int, most: int) -> _Piece:
        """Bind the blocks of a model to some rows of a text of `most` tokens at most."""
        model, kernels = forward.model, forward.kernels
        plan = evolve(sequence_plan(1 + rows, forward.dtype), slices=(1, rows))
        owners = block_chain(model)
        routines = {owner: forward.routine(owner, plan) for owner in owners[:-1]}
        each = list({id(routine): routine for routine in routines.values()}.values())  # layers share theirs
        workspace = HOST.allocate(max(routine.workspace_bytes for routine in each))
        scratch = Scratch(max(_scratch_bytes(routine, kernels, most) for routine in each))
        shapes = [activation_type(model, slice_plan(plan, 1), owner).shape for owner in owners]
        # Two activations take turns as a block's input and output.
        one, other = (np.zeros(max(shapes), NUMPY_DTYPES[forward.dtype]) for _ in range(2))
        piece = cls(np.zeros(rows, np.int32), one)
        for owner, ((before, _), (after, _)) in zip(owners, pairwise(shapes), strict=False):
            operands = {"tokens": piece.tokens, "x": one[:before], "y": other[:after]}
            operands |= {"w": forward.views[owner], "workspace": workspace}
            operands |= {"bias": forward.biases[owner]} if owner in forward.biases else {}
            if owner.kind == "attention":
                piece.attentions[owner] = _bound_attention(routines[owner], operands, kernels, scratch)
            else:
                piece.others[owner] = bind_steps(routines[owner], operands, kernels, scratch)
            one, other = other, one
        piece.hidden = one[:rows]
        return piece

    def begin_at(self, position: int) -> None:
        """Let the first row be the token at a position of the text."""
        for bound in (*self.others.values(), *(each.before for each in self.attentions.values())):
            bound.begin_at(position)


def _scratch_bytes(routine: Routine, kernels: KernelSet, most: int) -> int:
    """Return the scratch of a routine whose queries meet up to `most` keys."""
    longest = tuple(
        evolve(step, options={**step.options, "keys": most}) if step.kernel == _ATTEND else step
        for step in routine.steps
    )
    return routine_scratch_bytes(evolve(routine, steps=longest), kernels)


def _bound_attention(
    routine: Routine, operands: dict[str, NDArray[Any]], kernels: KernelSet, scratch: Scratch
) -> _Attention:
    """Bind the steps of an attention before and behind those in which queries meet keys."""
    meeting = [number for number, step in enumerate(routine.steps) if step.kernel == _ATTEND]
    shapes = {formal.name: formal for formal in routine.formals if formal.name in KEY_SLOTS}
    made = {name: np.empty(shape.shape, NUMPY_DTYPES[shape.dtype]) for name, shape in shapes.items()}
    operands = {**operands, **made}
    last = routine.steps[meeting[-1]]
    query, acc, peak, total = (
        resolve(routine, last.operands[name], operands) for name in ("q", "acc", "peak", "total")
    )
    before, behind = routine.steps[: meeting[0]], routine.steps[meeting[-1] + 1 :]
    return _Attention(
        bind_steps(evolve(routine, steps=before), operands, kernels, scratch),
        bind_steps(evolve(routine, steps=behind), operands, kernels, scratch),
        query,
        (made["k"], made["v"]),
        SoftmaxState(acc, peak, total),
        last.options,
        getattr(kernels, last.kernel),
        scratch,
    )


_DRAW_KEY = 2  # keeps these random numbers apart from those of weights and data order
_BITS = 53
"""Bits of a random fraction: all that a float64 holds."""


class Chooser:
    """Sampler of tokens; the same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._bits = np.random.PCG64(np.random.SeedSequence(sampling.seed, spawn_key=(_DRAW_KEY,)))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from finite logits, shape [vocabulary]."""
        if self._sampling.temperature == 0.0:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - float(logits.max())) / self._sampling.temperature
        weights = np.exp(scaled)
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        kept = min(int(np.searchsorted(sums, self._sampling.top_p * sums[-1])) + 1, len(order))
        # Raw bits of numpy's bit generators are the same in all its versions; its distributions are not.
        fraction = (int(self._bits.random_raw()) >> (64 - _BITS)) / (1 << _BITS)
        return int(order[min(int(np.searchsorted(sums[:kept], fraction * sums[kept - 1], "right")), kept - 1)])
