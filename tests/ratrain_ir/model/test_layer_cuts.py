"""Automatic cuts of layers into stages: the lightest heaviest stage of all cuts, for what trains of the model."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.training import WHOLE, Training
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts, layer_work
from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from tests.ratrain_ir.config.base_plan import BASE, MODEL, parse, refusal

ADAPTED = r"re:model\.layers\.({})\.self_attn\.(q|v)_proj"
"""Targets in some layers."""


@st.composite
def trainings(draw: st.DrawFn, layers: int) -> Training:
    """Draw what trains: everything, adapters in all layers or from one on, or all but some parameters."""
    kind = draw(st.sampled_from(["whole", "lora", "upper", "freeze"]))
    if kind == "whole":
        return WHOLE
    if kind == "lora":
        saved = draw(st.sampled_from(["", "lm_head", "embed_tokens", "embed_tokens, lm_head"]))
        return Training("lora", rank=draw(st.sampled_from([1, 16])), modules_to_save=saved)
    lowest = draw(st.integers(0, layers - 1))
    if kind == "upper":
        return Training("lora", rank=4, targets=ADAPTED.format("|".join(map(str, range(lowest, layers)))))
    names = draw(st.sets(st.sampled_from(["model.embed_tokens.*", "*.mlp.*", "lm_head.*"])))
    return Training(freeze=", ".join(sorted(names) + [f"model.layers.{layer}.*" for layer in range(lowest)]))


def badness(work: list[int], cuts: tuple[int, ...]) -> tuple[int, int]:
    """Return the heaviest stage and the sum of squares."""
    costs = [sum(work[start:end]) for start, end in itertools.pairwise((0, *cuts, len(work)))]
    return max(costs), sum(cost * cost for cost in costs)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.data(), st.sampled_from([2, 256, 1000, 5000, 40_000]), st.sampled_from([1, 16, 512]))
def test_cuts_are_the_best_of_all(layers: int, data: st.DataObject, vocab: int, seq_len: int) -> None:
    """So no worse than those that count every layer as trained in full."""
    model = evolve(MODEL, layers=layers, vocab_size=vocab)
    training = data.draw(trainings(layers))
    pp = data.draw(st.integers(1, layers))
    cuts, work = balance_cuts(model, pp, seq_len, training), layer_work(model, seq_len, training)
    every = itertools.combinations(range(1, layers), pp - 1)
    assert badness(work, cuts) == min(badness(work, other) for other in every)
    assert badness(work, cuts) <= badness(work, balance_cuts(model, pp, seq_len, WHOLE))
    if training == WHOLE:
        sizes = [b - a for a, b in itertools.pairwise((0, *cuts))]
        assert sizes == sorted(sizes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.data(), st.sampled_from([1, 8, 33]))
def test_work_is_that_of_a_step(layers: int, data: st.DataObject, seq_len: int) -> None:
    """Of every layer and the head, as it counts for a device's utilisation."""
    model = evolve(MODEL, layers=layers)
    plan = Plan(1, 1, (), micro_batch_size=1, micro_batches=1, seq_len=seq_len, training=data.draw(trainings(layers)))
    work = layer_work(model, seq_len, plan.training)
    assert sum(work) == pytest.approx(trained_flops_per_token(model, plan) * seq_len)


def test_work_of_a_layer() -> None:
    # weights: 64 * (64 + 2 * 32 + 64) + 3 * 64 * 176 = 46080 multiply-adds a token; 3 tokens see 1 + 2 + 3 tokens
    layer, head = 2 * 46080 * 3 + 4 * 64 * 6, 2 * 64 * 256 * 3
    assert layer_work(MODEL, 3, WHOLE) == [3 * layer] * 7 + [3 * (layer + head)]
    frozen = Training(freeze="model.embed_tokens.*, model.layers.[0-3].*")
    work = layer_work(MODEL, 3, frozen)
    assert work[:4] == [layer] * 4, "forward alone"
    assert 2 * layer < work[4] < 3 * layer, "nothing below its attention needs a gradient"
    assert work[5:] == [3 * layer] * 2 + [3 * (layer + head)]
    windowed = evolve(MODEL, family="mistral", sliding_window=2)
    assert layer_work(windowed, 3, WHOLE)[0] == 3 * (2 * 46080 * 3 + 4 * 64 * 5)
    assert layer_work(evolve(windowed, sliding_window=9), 3, WHOLE) == layer_work(MODEL, 3, WHOLE)


@pytest.mark.parametrize(
    ("pp", "seq_len", "phrase"), [(9, 8, "8 layers cannot fill 9"), (0, 8, "at least 1"), (1, 0, "1")]
)
def test_impossible_cuts(pp: int, seq_len: int, phrase: str) -> None:
    (error,) = refusal(balance_cuts, MODEL, pp, seq_len, WHOLE)
    assert error.code == "RT064"
    assert phrase in error.message


def test_a_plan_that_leaves_cuts_open_gets_those_of_what_it_trains() -> None:
    """Also where nothing is left to train, which is refused later, with its reason."""
    freeze = '[train]\nfreeze = "model.embed_tokens.*, model.layers.[0-5].*"\n'
    assert parse(BASE + freeze).cuts == balance_cuts(MODEL, 4, 32, parse(BASE + freeze).training) != parse(BASE).cuts
    assert len(parse(f'{BASE}[train]\nfreeze = "*"\n').cuts) == 3


def test_the_lower_layers_of_a_real_model_are_spread_over_fewer_stages() -> None:
    model = load_model("llama-2-7b")
    training = Training("lora", rank=16, targets=ADAPTED.format("|".join(map(str, range(16, 32)))))
    assert balance_cuts(model, 4, 512, training) == (13, 21, 27)
    assert balance_cuts(model, 4, 512, Training("lora", rank=16)) == (8, 16, 24)
