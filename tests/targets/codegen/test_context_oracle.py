"""Attention of context ranks, and of slices of theirs, against the whole score matrix in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.context_rows import held_runs, positions_of, run_of, runs_by_holder
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.ops.compute import BackwardHeads, Forward
from ratrain.targets.codegen.routines import routine_of
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.engine.rank import bind_steps, routine_scratch_bytes
from ratrain.targets.runtime.kernels import kernel_set
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.routine import Formal

BATCH = 2
F32 = {"view_dtype": "f32", "grad_dtype": "f32", "grad_shard_dtype": "f32"}
HEADS, KV_HEADS, HEAD_DIM = MODEL.heads, MODEL.kv_heads, MODEL.head_dim


def rows_of_run(plan: Plan, run: int) -> list[tuple[int, int]]:
    """(sequence, position) of each row of a run."""
    return [(sequence, position) for sequence in range(BATCH) for position in positions_of(plan, run)]


def rows_of(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """(sequence, position) of each row of a rank."""
    return [row for number in range(plan.context_runs) for row in rows_of_run(plan, run_of(plan, rank, number))]


def chosen(x: np.ndarray, rows: list[tuple[int, int]]) -> np.ndarray:
    """Rows of x [batch, positions, ...]."""
    return np.stack([x[row] for row in rows])


def wanted(x: dict[str, np.ndarray], starts: np.ndarray, window: int | None) -> dict[str, np.ndarray]:
    """Return the output and the gradients from whole score matrices, float64."""
    length = x["q"].shape[1]
    group = HEADS // KV_HEADS
    q, do = (x[name].reshape(BATCH, length, HEADS, HEAD_DIM).astype(np.float64) for name in ("q", "do"))
    k, v = (x[name].reshape(BATCH, length, KV_HEADS, HEAD_DIM).astype(np.float64) for name in ("k", "v"))
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    place = np.arange(length)
    seen = (place[None, :] <= place[:, None]) & (place[None, None, :] >= starts[:, :, None])
    if window is not None:
        seen &= place[None, :] > place[:, None] - window
    score = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD_DIM)
    score = np.where(seen[:, None], score, -np.inf)
    share = np.exp(score - score.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    o = np.einsum("bhqk,bkhd->bqhd", share, v)
    dshare = np.einsum("bqhd,bkhd->bhqk", do, v)
    dscore = share * (dshare - (dshare * share).sum(axis=-1, keepdims=True)) / np.sqrt(HEAD_DIM)
    found = {
        "o": o,
        "dq": np.einsum("bhqk,bkhd->bqhd", dscore, k),
        "dk": np.einsum("bhqk,bqhd->bkhd", dscore, q),
        "dv": np.einsum("bhqk,bqhd->bkhd", share, do),
    }
    for name in ("dk", "dv"):
        found[name] = found[name].reshape(BATCH, length, KV_HEADS, group, HEAD_DIM).sum(axis=3)
    return {name: value.reshape(BATCH, length, -1) for name, value in found.items()}


class Ranks:
    """The routines of an attention on all context ranks, and what they have computed.

    The output projection is the identity and the stream is 0, so that `y` is the heads' output, and `dy` its gradient.
    """

    def __init__(self, model: ModelConfig, plan: Plan, x: dict[str, np.ndarray], starts: np.ndarray) -> None:
        self.model, self.plan, self.x, self.starts = model, plan, x, starts
        self.ops = lower(model, plan).stages[0].ops
        self.kernels = kernel_set("reference")
        self.numbers: list[int | None] = [*range(len(plan.slices))] or [None]
        self.pieces = {number: slice_plan(plan, number) for number in self.numbers}
        self.made: list[dict[tuple[str, int | None], np.ndarray]] = [{} for _ in range(plan.cp)]
        self.window = model.layer_kind(0).window

    def gathered(self, own: str, number: int | None, rank: int) -> np.ndarray:
        """The keys or values of a slice, as `gather_keys` leaves them on a rank; NaN where nothing arrives."""
        plan = self.pieces[number]
        rows = BATCH * len(positions_of(plan, 0))
        runs = [
            np.full((rows, KV_HEADS * HEAD_DIM), np.nan, np.float32)
            if run is None
            else chosen(self.x[own], rows_of_run(plan, run))
            for run in held_runs(plan, self.window, rank)
        ]
        return np.concatenate(runs)

    def operand(self, formal: Formal, number: int | None, rank: int, rows: list[tuple[int, int]]) -> np.ndarray:
        name, _, other = formal.name.partition("_")
        key = name, int(other) if other.isdigit() else number
        if name in ("keys", "values"):
            return self.gathered(name[0], key[1], rank)
        if name in ("q", "dy"):
            return chosen(self.x["do" if name == "dy" else name], rows)
        if name == "documents":
            return chosen(self.starts, rows)
        if name in ("x", "w"):
            return np.zeros(formal.shape, np.float32)
        # results: of this step or an earlier one, and at first nothing that anybody may read
        return self.made[rank].setdefault(key, np.full(formal.shape, np.nan, np.float32))

    def run(self, kind: type[Forward | BackwardHeads], number: int | None, rank: int) -> None:
        """Run the routine of a slice on a rank."""
        (op,) = (op for op in self.ops if type(op) is kind and str(op.block) == "attention.0" and op.slice == number)
        routine, rows = routine_of(op, self.model, self.plan).on_rank(rank), rows_of(self.pieces[number], rank)
        operands = {formal.name: self.operand(formal, number, rank, rows) for formal in routine.formals}
        (projection,) = (each for each in routine.parameters if each.name == "o_proj")
        view = operands["w"][projection.offset : projection.offset + math.prod(projection.shape)]
        view[:] = np.eye(*projection.shape).ravel()
        operands["workspace"] = np.full(routine.workspace_bytes, 0xFF, np.uint8)
        scratch = Scratch(routine_scratch_bytes(routine, self.kernels))
        bind_steps(routine, operands, self.kernels, scratch)()

    def result(self) -> dict[str, np.ndarray]:
        """Run slice after slice and back; return outputs and gradients of all positions."""
        length = self.plan.seq_len
        widths = {"o": HEADS, "dq": HEADS, "dk": KV_HEADS, "dv": KV_HEADS}
        found = {name: np.full((BATCH, length, heads * HEAD_DIM), np.nan) for name, heads in widths.items()}
        for kind, numbers in ((Forward, self.numbers), (BackwardHeads, self.numbers[::-1])):
            for number in numbers:
                for rank in range(self.plan.cp):
                    self.run(kind, number, rank)
        for number in self.numbers:
            places = [rows_of(self.pieces[number], rank) for rank in range(self.plan.cp)]
            for rank, rows in enumerate(places):
                for name, own in (("o", "y"), ("dq", "dq")):
                    for row, value in zip(rows, self.made[rank][own, number], strict=True):
                        found[name][row] = value
            plan = self.pieces[number]
            for name, part in (("dk", "dkeys"), ("dv", "dvalues")):
                for row in (row for rows in places for row in rows):
                    found[name][row] = 0
                for each in runs_by_holder(plan, self.window):
                    rows = rows_of_run(plan, run_of(plan, each.holder, each.number))
                    values = self.made[each.rank][part, number][each.place * len(rows) : (each.place + 1) * len(rows)]
                    for row, value in zip(rows, values, strict=True):
                        found[name][row] += value
        return found


def documents_of(lengths: list[int], total: int) -> np.ndarray:
    """The first position of each position's document, where documents of these lengths follow one another."""
    starts: list[int] = []
    while len(starts) < total:
        length = lengths[len(starts) % len(lengths)]
        starts += [len(starts)] * length
    return np.array(starts[:total], np.int32)


def check(cp: int, layout: str, slices: tuple[int, ...], window: int | None, documents: list[list[int]]) -> None:
    """Compare an attention over context ranks, and slices, with the whole one."""
    model = MODEL if window is None else evolve(MODEL, family="mistral", sliding_window=window)
    length = sum(slices)
    keys = {"cp": cp, "context_layout": layout, "slices": slices if len(slices) > 1 else ()}
    if documents:
        keys["attention_mask"] = "document"
    plan = make_plan(model, pp=1, dp=1, micro_batches=1, micro_batch_size=BATCH, seq_len=length, **F32, **keys)
    random = np.random.default_rng(length * cp)
    widths = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "do": HEADS}
    x = {name: random.normal(size=(BATCH, length, n * HEAD_DIM)).astype(np.float32) for name, n in widths.items()}
    starts = np.stack([documents_of(documents[each] if documents else [length], length) for each in range(BATCH)])
    found, expected = Ranks(model, plan, x, starts).result(), wanted(x, starts, window)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=5e-6 * max(1, np.abs(value).max()), err_msg=name)


@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS)
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("documents", [[], [[1, 12, 3], [6]], [[48], [2, 1, 1, 30]]], ids=str)
@pytest.mark.parametrize("window", [None, 2, 20])
@pytest.mark.sampled(4)
def test_context_ranks_compute_the_attention_of_whole_sequences(
    cp: int, layout: str, documents: list[list[int]], window: int | None
) -> None:
    check(cp, layout, (48,), window, documents)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, str, tuple[int, ...]]:
    """(context ranks, layout, lengths of slices)."""
    cp, layout = draw(st.sampled_from((2, 3, 4))), draw(st.sampled_from(CONTEXT_LAYOUTS))
    unit = cp * (2 if layout == "zigzag" else 1)
    return cp, layout, tuple(unit * length for length in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))


@settings(max_examples=15)
@given(cuts(), st.none() | st.integers(1, 30), st.lists(st.lists(st.integers(1, 9), min_size=1), max_size=2))
def test_slices_of_context_ranks_compute_the_attention_of_whole_sequences(
    cut: tuple[int, str, tuple[int, ...]], window: int | None, documents: list[list[int]]
) -> None:
    check(*cut, window, documents if len(documents) == BATCH else [])
