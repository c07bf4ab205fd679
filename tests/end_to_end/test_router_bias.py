"""Routers that choose with a bias: it follows the counts of tokens, is alike in every layout, and balances experts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.ops.base import Part
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE, read_biases
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_biases
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.checkpoint.whole_weights import whole_weights
from ratrain.targets.runtime.engine.forward import ForwardModel
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.test_expert_ranks import SCALED_EXPERTS
from tests.end_to_end.test_experts import F32, drawn, trained
from tests.end_to_end.test_slices import POLICIES
from tests.end_to_end.tiny_runs import (
    MODEL,
    OPTIMIZER,
    make_plan,
    make_program,
    same_bits,
    start,
    train,
)
from tests.end_to_end.toys import EXPERTS, SIX_EXPERTS, UNEVEN

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.targets.runtime.training.training import TrainingRun

Values = npt.NDArray[np.float64]
Biases = dict["Block", npt.NDArray[np.float32]]

STEP = 0.02
BIASED = RouterLosses(bias_update=STEP)
MIXTRAL = in_family(UNEVEN, "mixtral", experts=4, experts_per_token=2)
ONE: dict[str, Any] = {**F32, "pp": 1, "dp": 1, "micro_batches": 4, "cuts": (), "router": BIASED}
"""One rank that trains on the whole batch."""


def biases_of(run: TrainingRun) -> Biases:
    """The biases of all layers; fail unless all ranks of a stage have the same, and no counts of another step."""
    biases = dict(training_state(run.engine, 0).biases)
    for ranks in run.engine.ranks:
        for rank in ranks:
            for unit in (each for each in run.program.topology.stage_blocks[rank.stage_index] if each in biases):
                assert np.array_equal(rank.carried("bias", str(unit)), biases[unit])
                assert not rank.carried("load", str(unit)).any()
    return biases


def same_biases(one: Biases, other: Biases) -> None:
    """Fail unless some biases are equal, bit for bit."""
    assert list(one) == list(other)
    assert all(bias.tobytes() == other[unit].tobytes() for unit, bias in one.items())


# Against the formulas, in float64


def masters(run: TrainingRun, layer: int) -> dict[str, Values]:
    """The master weights of a layer, and of both ends, by short name; those of the mlp begin with `mlp.`."""
    states, model = training_state(run.engine, 0).blocks, run.program.model
    units = {block("embed"): "", block("head"): "head.", block("attention", layer): "", block("mlp", layer): "mlp."}
    found = {}
    for unit, prefix in units.items():
        flat = states[unit].p.astype(np.float64)
        for each in parameters(model, unit):
            found[prefix + each.weight] = flat[each.offset : each.offset + each.elements].reshape(each.shape)
    return found


def normed(model: ModelConfig, x: Values, gamma: Values) -> Values:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + model.norm_eps) * gamma


def softmax(x: Values) -> Values:
    wide = np.exp(x - x.max(axis=-1, keepdims=True))
    return wide / wide.sum(axis=-1, keepdims=True)


def attended(model: ModelConfig, x: Values, of: dict[str, Values]) -> Values:
    """The output of a causal attention on sequences [b, S, h] with rotated queries and keys."""
    xn, (batch, length, _) = normed(model, x, of["norm"]), x.shape
    angle = np.arange(length)[:, None] * model.rope_theta ** (-np.arange(0, model.head_dim, 2) / model.head_dim)

    def heads(name: str, count: int) -> Values:
        return (xn @ of[f"{name}_proj"].T).reshape(batch, length, count, -1).transpose(0, 2, 1, 3)

    def turned(y: Values) -> Values:
        low, high = np.split(y, 2, axis=-1)
        return np.concatenate(
            (low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)), axis=-1
        )

    q, k, v = turned(heads("q", model.heads)), turned(heads("k", model.kv_heads)), heads("v", model.kv_heads)
    k, v = (np.repeat(each, model.heads // model.kv_heads, axis=1) for each in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * (model.attention_scale or model.head_dim**-0.5)
    scores = np.where(np.tri(length, dtype=np.bool_), scores, -np.inf)
    out = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
    return out @ of["o_proj"].T


def routed(model: ModelConfig, x: Values, of: dict[str, Values], bias: Values) -> tuple[Values, npt.NDArray[Any]]:
    """The output of the experts of a layer, and how many tokens each gets."""
    xn = normed(model, x, of["mlp.norm"]).reshape(-1, model.hidden_size)
    logits = xn @ of["mlp.router_proj"].T
    chosen = np.argsort(-(softmax(logits) + bias), axis=1, kind="stable")[:, : model.experts_per_token]
    weights = softmax(np.take_along_axis(logits, chosen, axis=1))
    out = np.zeros_like(xn)
    for t, row in enumerate(chosen):
        for e, weight in zip(row, weights[t], strict=True):
            gate, up = (of[f"mlp.{name}_experts"][e] @ xn[t] for name in ("gate", "up"))
            out[t] += weight * (of["mlp.down_experts"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out.reshape(x.shape), np.bincount(chosen.reshape(-1), minlength=len(bias))


def forward(run: TrainingRun, biases: Biases, tokens: npt.NDArray[Any]) -> tuple[dict[Block, Any], Values]:
    """Counts of each layer, and logits of each token, of sequences [b, S]."""
    model, counts = run.program.model, {}
    ends = masters(run, 0)
    x = ends["table"][tokens] * model.embedding_scale
    for layer in range(model.layers):
        of, unit = masters(run, layer), block("mlp", layer)
        x = x + model.residual_scale * attended(model, x, of)
        out, counts[unit] = routed(model, x, of, biases[unit].astype(np.float64))
        x = x + model.residual_scale * out
    return counts, normed(model, x, ends["head.norm"]) @ ends["head.table"].T * model.logit_scale


def tokens_of(run: TrainingRun, step: int) -> npt.NDArray[Any]:
    """All sequences of a step."""
    plan, found = run.program.plan, []
    for replica in range(plan.dp):
        for micro_batch in range(plan.micro_batches):
            out = np.empty(plan.micro_batch_size * plan.seq_len, np.int32)
            run.engine.batches.fill(step, replica, micro_batch, Part.TOKENS, out)
            found.append(out.reshape(-1, plan.seq_len))
    return np.concatenate(found)


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize("model", [MIXTRAL, SCALED_EXPERTS], ids=["mixtral", "granitemoe"])
def test_biases_follow_the_formula_for_three_steps(model: ModelConfig, kernels: str) -> None:
    run = start(make_program(model, **F32, router=BIASED), 3, kernels=kernels)
    expected = {block("mlp", layer): np.zeros(model.experts or 0, np.float32) for layer in range(model.layers)}
    steps, signs = run.steps(), set()
    for step in range(3):
        counts, _ = forward(run, expected, tokens_of(run, step))
        for unit, count in counts.items():
            sign = np.sign(count.mean() - count)
            signs |= set(sign.tolist())
            expected[unit] = expected[unit] + np.float32(STEP) * sign.astype(np.float32)
        next(steps)
        same_biases(biases_of(run), expected)
    assert {-1.0, 1.0} <= signs


# The same in every layout


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"pp": 3, "cuts": (1, 2)},
    "replicas": {"dp": 2, "micro_batches": 2},
    "one-micro-batch-each": {"dp": 4, "micro_batches": 1},
    "small-micro-batches": {"micro_batch_size": 1, "micro_batches": 8},
    "zero-0": {"pp": 2, "cuts": (1,), "dp": 2, "micro_batches": 2, "zero": 0},
    "zero-2-each": {"dp": 2, "micro_batches": 2, "zero": 2, "reduce": "each-micro-batch"},
    "zero-3": {"dp": 4, "micro_batches": 1, "zero": 3},
    "experts": {"dp": 2, "micro_batches": 2, "ep": 2},
    "experts-of-half": {"dp": 4, "micro_batches": 1, "ep": 2, "zero": 3},
    "all-experts": {"dp": 4, "micro_batches": 1, "ep": 4, "zero": 2},
    "tensor": {"dp": 2, "micro_batches": 2, "tp": 2},
    "whole-rows": {"tp": 2, "sequence_sharding": False, "zero": 0},
    "context": {"cp": 2},
    "heads": {"cp": 2, "dp": 2, "micro_batches": 2, "context_exchange": "heads"},
    "slices": {"slices": (4, 8), "pp": 2, "cuts": (1,)},
    "clipped": {"optimizer": evolve(OPTIMIZER, clip="global", max_norm=1e9), "dp": 2, "micro_batches": 2},
}
"""Plans with the batch of `ONE`; the norm that one takes of gradients clips nothing."""


@pytest.fixture(scope="module")
def of_one_rank() -> Biases:
    biases = biases_of(train(make_program(MIXTRAL, **ONE, seq_len=12), 3))
    assert all(bias.any() for bias in biases.values())
    return biases


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_are_alike_in_every_layout(layout: str, of_one_rank: Biases) -> None:
    """Counts are integers, so that biases are equal in every bit while routers choose alike."""
    program = make_program(MIXTRAL, **{**ONE, "seq_len": 12, **LAYOUTS[layout]})
    same_biases(biases_of(train(program, 3, check_memory=True, poison=True)), of_one_rank)


@pytest.mark.parametrize("name", ["baseline-1f1b", "full-save", "zb-h1", "ratrain-no-layerwise"])
def test_strategies_do_not_change_biases(name: str, of_one_rank: Biases) -> None:
    keys = {**ONE, "seq_len": 12, "pp": 3, "cuts": (1, 2), "dp": 2, "micro_batches": 2}
    same_biases(biases_of(train(make_program(MIXTRAL, name, **keys), 3, poison=True)), of_one_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_and_the_order_of_instructions_do_not_change_bits(ranks: int) -> None:
    """Choose again with the same bias in what is recomputed, and do not count it again."""
    keys: dict[str, Any] = {"pp": 2, "dp": 2, "ep": ranks, "router": evolve(BIASED, balance_loss=0.1)}
    program = make_program(SIX_EXPERTS, **keys)
    expected = train(program, 2)
    for policy in POLICIES.values():
        module = api.compile(SIX_EXPERTS, make_plan(SIX_EXPERTS, **keys), passes=f"place-1f1b,{policy}")
        same_bits(expected, train(api.emit(module), 2, poison=True, check_memory=True))
    orders: list[dict[str, Any]] = [{"threads": 2}, {"interleave_seed": 1}, {"interleave_seed": 2, "poison": True}]
    for settings in orders:
        same_bits(expected, train(program, 2, **settings))


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_and_programs_come_back_the_same(ranks: int) -> None:
    plan = make_plan(EXPERTS, ep=ranks, router=BIASED)
    module = api.compile(EXPERTS, plan)
    text = print_module(module)
    assert print_module(parse_module(text)) == text
    written = program_bytes(api.emit(module))
    program = parse_program(written, "made.rtx")
    check_program(program)
    assert program_bytes(program) == written


def line_of(text: str, words: str) -> str:
    """The first line of a schedule that has some words."""
    return next(line for line in text.splitlines() if words in line)


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "no-counts": ("all_reduce_scalar counts", r".*", "", "RT030"),
    "counts-twice": ("all_reduce_scalar counts", r"(.*)", r"\1\n\1", "RT030"),
    "of-all-ranks": ("all_reduce_scalar counts", "counts replicas", "counts all", "RT026"),
    "of-no-block": ("all_reduce_scalar counts", "replicas [^ ]+ ", "replicas ", "RT026"),
    "of-one-block-less": ("all_reduce_scalar counts", r"(, %[a-z]+\.mlp\.2|\+mlp\.2)", "", "RT031"),
    "counts-of-others": ("all_reduce_scalar counts", r"(%load\.mlp\.0), (%load\.mlp\.1)", r"\2, \1", "RT031"),
    "biases-of-others": ("all_reduce_scalar counts", r"(%bias\.mlp\.0), (%bias\.mlp\.1)", r"\2, \1", "RT031"),
    "a-micro-batch-uncounted": (" backward mlp.1 m1 ", r", %load\.mlp\.1", "", "RT025"),
    "counted-for-others": (" backward mlp.1 m1 ", r"%load\.mlp\.1", "%load.mlp.0", "RT031"),
    "chosen-without": (" forward mlp.1 m0 ", r", %bias\.mlp\.1", "", "RT025"),
    "chosen-with-others": (" forward mlp.1 m0 ", r"%bias\.mlp\.1", "%bias.mlp.0", "RT030"),
    "recomputed-with-others": (" recompute mlp.1 m0 ", r"%bias\.mlp\.1", "%bias.mlp.0", "RT030"),
}
"""Words of a line, what is replaced in it by what, and the code that is reported."""


@pytest.fixture(scope="module")
def schedule() -> str:
    plan = make_plan(MIXTRAL, pp=1, cuts=(), micro_batches=2, router=BIASED)
    return print_module(api.compile(MIXTRAL, plan, passes="place-1f1b,recompute{policy=mlp},allocate-ddr"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_schedule_that_miscounts_is_refused(fault: str, schedule: str) -> None:
    words, old, new, code = FAULTS[fault]
    line = line_of(schedule, words)
    changed = re.sub(old, new, line, count=0 if fault == "of-one-block-less" else 1)
    assert changed != line
    with pytest.raises(DiagnosticError) as raised:
        check(parse_module(schedule.replace(line, changed)))
    assert code in {each.code for each in raised.value.diagnostics}


def test_without_the_key_nothing_of_a_text_says_a_bias() -> None:
    module = api.compile(EXPERTS, make_plan(EXPERTS))
    assert "bias" not in print_module(module).replace("_bias", "")
    assert "counts" not in print_module(module)


# A run that goes on


@pytest.mark.parametrize("series", [False, True], ids=["one", "series"])
@pytest.mark.parametrize("layout", ["stages", "zero-3", "experts", "tensor"])
def test_a_run_goes_on_in_another_layout(layout: str, series: bool, of_one_rank: Biases, tmp_path: Path) -> None:
    saving = {"save": str(tmp_path / "kept"), **({"save_every": 2} if series else {})}
    keys = {**ONE, "seq_len": 12}
    begun = train(make_program(MIXTRAL, **{**keys, "dp": 2, "micro_batches": 2, "zero": 2}), 2, **saving)
    assert any(bias.any() for bias in biases_of(begun).values())
    resumed = start(make_program(MIXTRAL, **{**keys, **LAYOUTS[layout]}), 1, resume=saving["save"])
    same_biases(biases_of(resumed), biases_of(begun))
    same_biases(latest_biases(saving["save"]), biases_of(begun))
    list(resumed.steps())
    same_biases(biases_of(resumed), of_one_rank)


def test_a_plan_without_the_key_does_not_go_on_with_biases(tmp_path: Path) -> None:
    place, plain = str(tmp_path / "kept"), {**ONE, "router": RouterLosses()}
    train(make_program(MIXTRAL, **ONE), 1, save=place)
    with pytest.raises(DiagnosticError, match="the routers of the checkpoint choose with biases"):
        start(make_program(MIXTRAL, **plain), 1, resume=place)
    other = str(tmp_path / "other")
    train(make_program(MIXTRAL, **plain), 1, save=other)
    assert not any(bias.any() for bias in biases_of(start(make_program(MIXTRAL, **ONE), 1, resume=other)).values())


@pytest.mark.parametrize(
    "changed",
    [{}, {"mlp.0": [0.0]}, {"mlp.0": [0.0] * 3 + [float("nan")]}, {"mlp.0": [1e39] * 4}, {"mlp.0": ["0"] * 4}],
)
def test_a_manifest_with_unsound_biases_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "kept"
    train(make_program(MIXTRAL, **ONE), 1, save=str(place))
    manifest = json.loads((place / MANIFEST_FILE).read_text())
    entry = manifest["biases"] | changed if changed else {"mlp.0": manifest["biases"]["mlp.0"]}
    with pytest.raises(DiagnosticError, match="has no sound entry 'biases'"):
        read_biases(str(place), {"biases": entry}, MIXTRAL)


# What they do, and where they are used


def hot_router() -> dict[str, Any]:
    """Weights with which most tokens of each layer want the first two experts, some more than others."""
    values = drawn(MIXTRAL)
    (table,) = (each for each in parameters(MIXTRAL, block("embed")) if each.weight == "table")
    values[table.name][:, 0] = 0.05
    for layer in range(MIXTRAL.layers):
        (router,) = (each for each in parameters(MIXTRAL, block("mlp", layer)) if each.weight == "router_proj")
        values[router.name] *= 20
        values[router.name][:2, 0] = 0.5
    return values


def test_a_hot_router_is_balanced() -> None:
    """The busiest expert of all layers has nearly twice its share at first; 2 is all tokens."""
    keys: dict[str, Any] = {**ONE, "optimizer": evolve(OPTIMIZER, lr=1e-6)}
    found = []
    for router in (BIASED, RouterLosses()):
        run = trained(make_program(MIXTRAL, **{**keys, "router": router}), hot_router(), 30)
        busiest = [step.report.experts.busiest for step in run.done if step.report.experts is not None]
        found.append((np.mean(busiest[:5]), np.mean(busiest[-10:])))
    (hot, balanced), (_, still_hot) = found
    assert hot > 1.65
    assert balanced < 1.45
    assert still_hot > 1.7


def test_a_skipped_update_moves_no_bias() -> None:
    run = start(make_program(EXPERTS, router=BIASED), 1)
    for ranks in run.engine.ranks:
        for rank in ranks:
            rank.fill("scale", "", (2.0**40, 0.0))
    (step,) = run.steps()
    assert step.report.skipped_blocks
    assert not any(bias.any() for bias in biases_of(run).values())


def test_an_evaluation_chooses_with_biases_and_changes_no_bit() -> None:
    program = make_program(MIXTRAL, **ONE)
    run = start(program, 2)
    steps = run.steps()
    next(steps)
    before, batches = biases_of(run), run.engine.batches
    ahead = run.engine.run_forward(batches, 1)
    same_biases(biases_of(run), before)
    assert next(steps).report.loss == ahead


def test_a_model_of_a_checkpoint_chooses_with_its_biases(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    run = train(make_program(MIXTRAL, **{**ONE, "router": RouterLosses(bias_update=0.5)}), 3, save=place)
    tokens, biases = tokens_of(run, 0)[:1], latest_biases(place)
    model, source = whole_weights(place)
    _, exact = forward(run, biases, tokens)
    made, without = (
        ForwardModel(model, source, Dtype.F32, kernel_set("reference"), given)
        .reading(len(tokens[0]))
        .read(tokens[0].tolist())
        .copy()
        for given in (biases, {})
    )
    assert np.allclose(made, exact[0, -1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(without, exact[0, -1], rtol=1e-4, atol=1e-5)


def test_weights_whose_routers_need_biases_are_not_exported(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    train(make_program(MIXTRAL, **ONE), 1, save=place)
    with pytest.raises(DiagnosticError, match="choose with biases"):
        export_weights(place, str(tmp_path / "weights"))
    even = str(tmp_path / "even")
    start(make_program(MIXTRAL, **ONE), 1, save=even)._save_whole(even)
    export_weights(even, str(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (MODEL, {}, "bias_update is for routers of experts, which toy has not"),
        (EXPERTS, {"training": Training(method="lora")}, "this plan trains less than the whole model"),
        (EXPERTS, {"dp": 1 << 16, "micro_batches": 1 << 12}, "bias_update counts tokens in 32 bits"),
    ],
)
def test_what_biases_do_not_follow_is_refused(model: ModelConfig, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DiagnosticError, match=words):
        make_plan(model, router=BIASED, **keys)
