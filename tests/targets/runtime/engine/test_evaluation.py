"""Evaluation between steps: it gives the loss that training would report, and changes no bit of the training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.data.documents import Documents, bounds_of
from ratrain.targets.runtime.engine.evaluation import held_out, split_stream
from tests.end_to_end.tiny_runs import (
    MODEL,
    OPTIMIZER,
    WHOLE_STRATEGIES,
    losses,
    make_plan,
    make_program,
    make_stream,
    same_bits,
    start,
)

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    **{item.name: {"passes": item.passes, "zero": item.zero or 1} for item in WHOLE_STRATEGIES},
    "gpipe": {"passes": "place-gpipe,recompute{policy=attention},allocate-ddr"},
    "each-micro-batch": {"zero": 2, "reduce": "each-micro-batch"},
    "zero-3, every micro-batch": {"zero": 3, "reduce": "each-micro-batch"},
    "replicated": {"zero": 0},
    "tied": {"tied": True, "pp": 3},
    "tied, one stage": {"tied": True, "pp": 1, "dp": 1},
    "clipped": {"clip": "global"},
    "f32": {"view_dtype": "f32"},
    "overflow in every step": {"loss_scale": 2.0**32},
}


def program_of(case: dict[str, Any]) -> Any:
    keys = dict(case)
    passes, tied, clip = keys.pop("passes", None), keys.pop("tied", False), keys.pop("clip", "none")
    model = evolve(MODEL, tied_embeddings=tied)
    plan = make_plan(model, optimizer=evolve(OPTIMIZER, clip=clip, max_norm=0.3), **keys)
    return api.emit(api.compile(model, plan, passes=passes or strategy(DEFAULT_STRATEGY).passes))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(7)
def test_no_bit_of_the_training_changes(name: str) -> None:
    program = program_of(CASES[name])
    alone, evaluated = (start(program, STEPS, order="sequential", poison=True) for _ in range(2))
    held = Batches(make_stream(program.model, 900), program.plan, "sequential", 0)
    foreseen: float | None = None
    same_bits(alone, evaluated)
    for one, other in zip(alone.steps(), evaluated.steps(), strict=True):
        step = one.report.step
        assert one.report == other.report
        assert foreseen in {None, one.report.loss}
        evaluated.engine.run_forward(held, 4)
        foreseen = evaluated.engine.run_forward(evaluated.engine.batches, step + 1)
        same_bits(alone, evaluated)


def test_an_interleaved_evaluation_is_the_same() -> None:
    program = make_program()
    held = held_out(make_stream(), program.plan)
    plain, mixed = start(program, 2), start(program, 2, interleave_seed=3)
    assert losses(plain) == losses(mixed)
    list(plain.steps())
    list(mixed.steps())
    assert held.loss(plain.engine) == held.loss(mixed.engine)


def test_an_evaluation_is_the_mean_over_its_batches() -> None:
    program = make_program()
    run = start(program, 1)
    plan = program.plan
    stream = make_stream(count=4 * plan.tokens_per_step + 1)
    whole = held_out(stream, plan)
    assert (whole.count, whole.tokens) == (4, 4 * plan.tokens_per_step)
    each = [run.engine.run_forward(whole.batches, number) for number in range(4)]
    assert len(set(each)) == 4
    assert whole.loss(run.engine) == pytest.approx(np.mean(each), rel=1e-15)
    assert held_out(stream, plan, 3).loss(run.engine) == pytest.approx(np.mean(each[:3]), rel=1e-15)
    assert held_out(stream, plan, 9).count == 4


def test_data_too_short_to_evaluate_on() -> None:
    plan = make_plan()
    with pytest.raises(DiagnosticError, match=r"RT090.*11 sequences.*one batch takes 12"):
        held_out(make_stream(count=119), plan)


@pytest.mark.parametrize(
    ("lengths", "fraction", "held"),
    [((8, 8, 8), 0.1, 8), ((8, 8, 8), 0.5, 16), ((90, 10), 0.3, 10), ((90, 0, 10), 0.99, 10), ((100,), 0.25, 25)],
)
def test_whole_documents_are_held_out(lengths: tuple[int, ...], fraction: float, held: int) -> None:
    documents = Documents(bounds_of(lengths))
    stream = TokenStream("all", np.zeros(sum(lengths), np.uint16), "all", documents=documents)
    assert len(split_stream(stream, fraction)[1].tokens) == held


def test_one_chat_is_not_cut_to_hold_out_a_part_of_it() -> None:
    documents = Documents(bounds_of([100]), np.array([[40, 100]]))
    with pytest.raises(DiagnosticError, match=r"RT090.*one document: none can be held out"):
        split_stream(TokenStream("all", np.zeros(100, np.uint16), "all", documents=documents), 0.1)


@given(st.integers(1, 3000), st.floats(0, 0.5))
def test_the_split_loses_and_shares_nothing(count: int, fraction: float) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    if not 0 < round(count * fraction) < count:
        with pytest.raises(DiagnosticError, match=rf"RT090.*'all' has {count} token.*are (none|all) of them"):
            split_stream(TokenStream("all", tokens, "all"), fraction)
        return
    training, held = split_stream(TokenStream("all", tokens, "all"), fraction)
    assert np.array_equal(np.concatenate([training.tokens, held.tokens]), tokens)
    assert abs(len(held.tokens) - count * fraction) <= 0.5 + 1e-9
    assert training.digest != held.digest
