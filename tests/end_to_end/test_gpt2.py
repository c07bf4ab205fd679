"""GPT-2 as a family: its runs against the formulas in float64, its strategies, what it shares with the other families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.model_flops import model_flops_per_token
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.data.data import Batches
from ratrain.targets.runtime.weights.weight_files import write_weights
from ratrain.targets.runtime.weights.weights import named_parameters
from tests.end_to_end.tiny_runs import (
    OPTIMIZER,
    losses,
    make_plan,
    make_program,
    make_stream,
    same_bits,
    start,
    train,
)
from tests.end_to_end.toys import GPT2
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

UNTIED = evolve(GPT2, tied_embeddings=False)
Wide = npt.NDArray[np.float64]
Weights = dict[str, Wide]


# The model in float64, as the formulas of its paper and of `GPT2LMHeadModel` have it; weights under the names of blocks


def linear(x: Wide, w: Weights, name: str) -> Wide:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(x: Wide, w: Weights, name: str, eps: float) -> Wide:
    centred = x - x.mean(axis=-1, keepdims=True)
    normed: Wide = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    return normed * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x: Wide, w: Weights, name: str, heads: int) -> Wide:
    parts = (linear(x, w, f"{name}.{part}_proj").reshape(*x.shape[:2], heads, -1) for part in "qkv")
    query, key, value = (part.swapaxes(1, 2) for part in parts)
    scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (weight / weight.sum(axis=-1, keepdims=True)) @ value
    return linear(mixed.swapaxes(1, 2).reshape(x.shape), w, f"{name}.c_proj")


def gelu(x: Wide) -> Wide:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mean_loss(model: ModelConfig, w: Weights, rows: npt.NDArray[Any]) -> float:
    """Of predicting each next token of rows [sequences, tokens + 1]."""
    tokens, labels = rows[:, :-1], rows[:, 1:]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(model.layers):
        at = f"transformer.h.{layer}"
        x = x + attention(layer_norm(x, w, f"{at}.ln_1", model.norm_eps), w, f"{at}.attn", model.heads)
        up = linear(layer_norm(x, w, f"{at}.ln_2", model.norm_eps), w, f"{at}.mlp.c_fc")
        x = x + linear(gelu(up), w, f"{at}.mlp.c_proj")
    x = layer_norm(x, w, "transformer.ln_f", model.norm_eps)
    logits = x @ w["transformer.wte.weight" if model.tied_embeddings else "lm_head.weight"].T
    peak = logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(logits - peak).sum(axis=-1)) + peak[..., 0]
    return float((total - np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]).mean())


def drawn(model: ModelConfig) -> Weights:
    """Weights of which every one matters: norms around 1, biases around 0, matrices that keep the variance."""
    rng = np.random.default_rng(7)
    found = {}
    for name, parameter in named_parameters(model).items():
        values = rng.standard_normal(parameter.shape)
        if parameter.weight == "norm":
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.3 * values
        else:
            values = values / np.sqrt(parameter.shape[-1])
        found[name] = values.astype(np.float32).astype(np.float64)
    return found


@pytest.mark.parametrize(
    ("name", "slices"), [("full-save", ()), ("ratrain", ()), ("zb-h1", ()), ("ratrain", (4, 1, 5))], ids=str
)
@pytest.mark.parametrize("model", [GPT2, UNTIED], ids=["tied", "untied"])
@pytest.mark.sampled(3)
def test_loss_and_gradients_are_those_of_the_formulas(
    model: ModelConfig, name: str, slices: tuple[int, ...], tmp_path: Path
) -> None:
    """f32, one step; Adam's first moment is (1 - beta1) times the gradient, held against central differences of the loss."""
    weights = drawn(model)
    path = tmp_path / "w.safetensors"
    write_weights(str(path), model, lambda key: weights[key].astype(np.float32))
    program = make_program(
        model, name, view_dtype="f32", dp=1, micro_batches=2, mlp_chunk=7, head_chunk=9, slices=slices
    )
    run = start(program, 1, init=str(path), order="sequential")
    list(run.steps())
    plan = program.plan
    batches = Batches(make_stream(model), plan, "sequential", 0)
    first = np.array([batches.sequence_of(0, index) for index in range(plan.global_batch)]) * plan.seq_len
    rows = make_stream(model).tokens[first[:, None] + np.arange(plan.seq_len + 1)].astype(np.int64)
    assert losses(run)[0] == pytest.approx(mean_loss(model, weights, rows), rel=1e-6)
    state = training_state(run.engine, 1)
    rng = np.random.default_rng(8)
    for unit in block_chain(model):
        for key, moment in named_parameters_of(model, unit, state.blocks[unit].m1).items():
            gradient = moment.astype(np.float64) / (1 - OPTIMIZER.betas[0])
            values, scale = weights[key], np.abs(gradient).max()
            for index in [tuple(rng.integers(0, gradient.shape)) for _ in range(4)]:
                kept, step = values[index], 1e-5
                sides = []
                for sign in (1, -1):
                    values[index] = kept + sign * step
                    sides.append(mean_loss(model, weights, rows))
                values[index] = kept
                difference = (sides[0] - sides[1]) / (2 * step)
                # 1e-7: key biases have no gradient, as softmax does not see what all scores of a row have in common
                assert gradient[index] == pytest.approx(difference, abs=2e-4 * scale + 1e-7), key
            if key == "transformer.wpe.weight":
                assert scale > 0
                assert not gradient[plan.seq_len :].any()


@cache
def trained(model: ModelConfig, name: str) -> Any:
    return train(make_program(model, name, zero=2), 12)


@pytest.mark.parametrize("model", [GPT2, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["baseline-1f1b", "zb-h1"])
@pytest.mark.sampled(2)
def test_it_learns_the_same_bits_under_every_strategy(model: ModelConfig, name: str) -> None:
    found = losses(trained(model, "ratrain"))
    assert found[-1] < found[0] - 0.3
    assert losses(trained(model, name)) == found
    same_bits(trained(model, name), trained(model, "ratrain"))


def test_chunks_of_rows_change_only_the_order_of_sums() -> None:
    whole, chunked = (
        losses(train(make_program(GPT2, view_dtype="f32", **keys), 4))
        for keys in ({}, {"mlp_chunk": 7, "head_chunk": 3})
    )
    np.testing.assert_allclose(chunked, whole, rtol=1e-6)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    assert make_plan(GPT2, seq_len=21).seq_len == GPT2.learned_positions
    with pytest.raises(DiagnosticError, match=r"RT064.*22 tokens.*21 learned positions of toy"):
        make_plan(GPT2, seq_len=22)
    with pytest.raises(DiagnosticError, match=r"RT064.*22 tokens"):
        planning_request(GPT2, 4, 8, 22)


def test_positions_without_a_row_are_trained_by_decay_alone() -> None:
    """What no sequence reaches has no gradient, in any micro-batch: the rows only shrink."""
    run = start(make_program(GPT2, pp=1, dp=1, seq_len=4), 3)
    rank = run.engine.ranks[0][0]
    table = named_parameters_of(GPT2, block_chain(GPT2)[0], rank.carried("p", "embed"))["transformer.wpe.weight"]
    before = table.copy()
    list(run.steps())
    assert np.abs(table[:4] - before[:4]).max() > 1e-3
    shrunk = table[4:] / before[4:]
    assert (shrunk < 1).all()
    np.testing.assert_allclose(shrunk, shrunk[0, 0], rtol=1e-5)


def test_norms_and_biases_are_not_decayed() -> None:
    for name, parameter in named_parameters(UNTIED).items():
        assert parameter.decayed == (len(parameter.shape) == 2), name


def test_operations_are_those_of_two_matrices_in_the_mlp() -> None:
    hidden, ffn = GPT2.hidden_size, GPT2.ffn_size
    weights = GPT2.layers * (4 * hidden * hidden + 2 * hidden * ffn) + GPT2.vocab_size * hidden
    seen = (10 + 1) / 2
    assert model_flops_per_token(GPT2, 10) == pytest.approx(6 * weights + 12 * seen * hidden * GPT2.layers)


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_dropout_that_is_not_applied_is_said(
    dropout: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**hugging_face_config(GPT2), "attn_pdrop": 0.0, "embd_pdrop": None, "resid_pdrop": dropout}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "plan.toml").write_text(plan_to_toml(make_plan(GPT2)), "utf-8")
    words = ["compile", "--model", str(tmp_path), "--plan", str(tmp_path / "plan.toml")]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("resid_pdrop 0.1 of its config.json: without effect, training here has no dropout" in said) is (dropout > 0)


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b"])
def test_a_preset_compiles_for_the_default_machine(name: str) -> None:
    """GPT-3 in a slice of its layers: what is compiled is two of each stage's."""
    model = evolve(load_model(name), layers=4)
    plan = make_plan(
        model, pp=4, dp=8, micro_batch_size=1, micro_batches=4, seq_len=model.learned_positions, mlp_chunk=256
    )
    simulated = api.simulate(api.emit(api.compile(model, plan)))
    assert simulated.step_seconds > 0
