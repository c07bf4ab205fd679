"""Forward pass of a model on one sequence without a program, by the routines and kernels that train it.

Nothing is kept for a backward, and blocks share their activations: besides the weights it takes the activations of one
layer. There is no cache of keys and values: the logits after a prefix take a forward pass over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block_chain, flat_elements
from ratrain.ratrain_ir.model.slots import activation_type
from ratrain.targets.codegen.routines import RoutineForm, derived_routine, representative
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.engine.rank import bind_steps, resolve, routine_scratch_bytes
from ratrain.targets.runtime.weights.weight_source import flat_pieces

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.types import Dtype
    from ratrain.targets.program.routine import Routine
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.settings import Sampling
    from ratrain.targets.runtime.weights.weight_source import WeightSource

LENGTH_STEP = 64
"""Multiple to which prefixes are padded, so that routines are made again only once in 64 tokens. Assumed, not
measured."""

_ROLES = {"embed": ("tokens", "w", "y"), "head": ("x", "w", "labels", "lse", "loss")}
_LAYER_ROLES = ("x", "w", "y")


def sequence_plan(length: int, dtype: Dtype) -> Plan:
    """Return the plan of one sequence on one rank, with weights and activations of `dtype`."""
    return Plan(pp=1, dp=1, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=length, view_dtype=dtype.value)


@frozen(eq=False)
class _Bound:
    """All blocks but the head, bound to the activations of sequences of one length."""

    tokens: NDArray[np.int32]
    hidden: NDArray[Any]
    """[length, hidden]: output of the last layer"""
    blocks: tuple[Callable[[], None], ...]


class ForwardModel:
    """Model with its weights that computes the logits after a prefix."""

    def __init__(self, model: ModelConfig, source: WeightSource, dtype: Dtype, kernels: KernelSet) -> None:
        self._model = model
        self._dtype = dtype
        self._kernels = kernels
        self._views = {owner: self._view(owner, source) for owner in block_chain(model)}
        self._bound: _Bound | None = None
        head, plan = block_chain(model)[-1], sequence_plan(1, dtype)
        routine = self._routine(head, plan)
        self._last = np.zeros((1, model.hidden_size), NUMPY_DTYPES[dtype])
        operands = {
            "x": self._last,
            "w": self._views[head],
            "labels": np.zeros(1, np.int32),
            "lse": np.zeros(1, np.float32),
            "loss": np.zeros(1, np.float64),
            "workspace": HOST.allocate(routine.workspace_bytes),
        }
        self._head = bind_steps(routine, operands, kernels, Scratch(routine_scratch_bytes(routine, kernels)))
        logits = next(step.operands["logits"] for step in routine.steps if "logits" in step.operands)
        self._logits: NDArray[np.float32] = resolve(routine, logits, operands)

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits, shape [vocabulary], of the token after a non-empty prefix; valid until the next call."""
        length = -(-len(prefix) // LENGTH_STEP) * LENGTH_STEP
        if self._model.learned_positions is not None:
            length = min(length, self._model.learned_positions)
        if self._bound is None or len(self._bound.tokens) != length:
            self._bound = self._bind(length)
        bound = self._bound
        bound.tokens[: len(prefix)] = prefix
        bound.tokens[len(prefix) :] = 0  # padding; attention is causal, so no row of the prefix sees it
        with np.errstate(all="ignore"):  # the caller checks whether logits are finite
            for run in bound.blocks:
                run()
            self._last[...] = bound.hidden[len(prefix) - 1]
            self._head()
        found: NDArray[np.float32] = self._logits.reshape(-1)
        return found

    def _view(self, owner: Block, source: WeightSource) -> NDArray[Any]:
        """Return a block's weights, [elements], in the dtype that forward passes read."""
        plan = sequence_plan(1, self._dtype)
        view = np.zeros(flat_elements(self._model, plan, owner), NUMPY_DTYPES[self._dtype])
        for at, values in flat_pieces(self._model, owner, source, 0, view.size):
            part = view[at : at + values.size]
            scratch = Scratch(self._kernels.scratch_bytes("cast", src=values, dst=part))
            self._kernels.cast(values, part, scratch=scratch)
        return view

    def _routine(self, owner: Block, plan: Plan) -> Routine:
        roles = _ROLES.get(owner.kind, _LAYER_ROLES)
        alike = representative(owner, self._model, plan)
        return derived_routine(RoutineForm("forward", alike, roles, (), accumulates=False), self._model, plan)

    def _bind(self, length: int) -> _Bound:
        plan = sequence_plan(length, self._dtype)
        blocks = block_chain(self._model)[:-1]
        routines = {owner: self._routine(owner, plan) for owner in blocks}
        each = list({id(routine): routine for routine in routines.values()}.values())  # layers share theirs
        workspace = HOST.allocate(max(routine.workspace_bytes for routine in each))
        scratch = Scratch(max(routine_scratch_bytes(routine, self._kernels) for routine in each))
        shapes = [activation_type(self._model, plan, owner).shape for owner in block_chain(self._model)]
        # Two activations take turns as a block's input and output.
        one, other = (np.zeros(max(shapes), NUMPY_DTYPES[self._dtype]) for _ in range(2))
        tokens = np.zeros(length, np.int32)
        bound = []
        for owner, ((before, _), (after, _)) in zip(blocks, pairwise(shapes), strict=True):
            operands = {"tokens": tokens, "x": one[:before], "y": other[:after]}
            operands |= {"w": self._views[owner], "workspace": workspace}
            bound.append(bind_steps(routines[owner], operands, self._kernels, scratch))
            one, other = other, one
        return _Bound(tokens, one[:length], tuple(bound))


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
