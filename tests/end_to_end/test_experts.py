"""Models with experts: one expert is a dense MLP, layouts do not change bits, routers of any kind fit their addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.model_flops import model_flops_per_token
from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.model.blocks import block, block_chain, parameters
from ratrain.ratrain_ir.model.slots import saved_slots
from ratrain.ratrain_ir.model.trained_flops import block_flops
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.runtime.checkpoint.state import start_from_weights, training_state
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights
from tests.end_to_end.test_completions import stream_of_pairs
from tests.end_to_end.tiny_runs import (
    MODEL,
    losses,
    make_plan,
    make_program,
    run_settings,
    same_state_of_blocks,
    start,
    stream_for,
    train,
)
from tests.end_to_end.toys import EXPERTS, SHARED_EXPERT, SIX_EXPERTS, SOME_EXPERTS, UNEVEN
from tests.program_files import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import TokenStream
    from ratrain.targets.runtime.training.training import TrainingRun

F32 = {"view_dtype": "f32", "grad_dtype": "f32", "grad_shard_dtype": "f32", "loss_scale": 1.0}
ONE_RANK: dict[str, Any] = {"pp": 1, "dp": 1, "micro_batches": 2, **F32}


@frozen(eq=False)
class Given(WeightSource):
    """Weights that a test made, by name."""

    values: dict[str, npt.NDArray[np.float32]] = field(factory=dict)

    def pieces(self, name: str, start: int, stop: int) -> Iterator[npt.NDArray[np.float32]]:
        yield self.values[name].reshape(-1)[start:stop].copy()


def drawn(model: ModelConfig, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights by name."""
    source = random_weights(model, seed)
    return {name: source(name) for name in named_parameters(model)}


def trained(
    program: Program,
    values: dict[str, npt.NDArray[np.float32]],
    steps: int,
    stream: TokenStream | None = None,
    **settings: Any,
) -> TrainingRun:
    """A run from given weights, on a stream or the usual one, after its steps."""
    chosen = run_settings(steps, **settings)
    kernels = kernel_set(chosen.execution.kernels)
    run = prepare(program, stream or stream_for(program), chosen, kernels, verified=True)
    start_from_weights(run.engine, Given(named_parameters(program.model), values))
    list(run.steps())
    return run


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize("view_dtype", ["f32", "f16"])
def test_one_expert_is_a_dense_mlp_bit_for_bit(kernels: str, view_dtype: str) -> None:
    """Of 64 rows, which a product of experts takes at a time, so that both multiply matrices of the same shape."""
    sparse = evolve(MODEL, family="mixtral", experts=1, experts_per_token=1)
    keys = {"pp": 1, "dp": 1, "micro_batches": 2, "micro_batch_size": 4, "seq_len": 16, "view_dtype": view_dtype}
    values = drawn(sparse)
    dense: dict[str, npt.NDArray[np.float32]] = {}
    for unit in block_chain(MODEL):
        held = {each.weight.replace("_experts", "_proj"): each for each in parameters(sparse, unit)}
        dense |= {each.name: values[held[each.weight].name].reshape(each.shape) for each in parameters(MODEL, unit)}
    one = trained(make_program(sparse, **keys), values, 3, kernels=kernels)
    other = trained(make_program(MODEL, **keys), dense, 3, kernels=kernels)
    assert losses(one) == losses(other)
    mine, theirs = (training_state(run.engine, 3).blocks for run in (one, other))
    for layer in range(MODEL.layers):
        unit = block("mlp", layer)
        held = {each.weight.replace("_experts", "_proj"): each for each in parameters(sparse, unit)}
        for each in parameters(MODEL, unit):
            at, there = held[each.weight], mine[unit]
            for kind in ("p", "m1", "m2"):
                found = getattr(there, kind)[at.offset : at.offset + at.elements]
                wanted = getattr(theirs[unit], kind)[each.offset : each.offset + each.elements]
                assert found.tobytes() == wanted.tobytes(), f"{kind} of {each.name}"


ROUTERS = ("drawn", "one-hot", "hot-pair", "ragged", "idle", "equal")
"""Rows of the router's matrix: as drawn; all tokens to the same experts; ...; all logits equal."""


def with_router(model: ModelConfig, kind: str) -> dict[str, npt.NDArray[np.float32]]:
    """Weights whose routers send tokens as `kind` says."""
    values = drawn(model)
    for unit in (block("mlp", layer) for layer in range(model.layers) if model.has_experts(layer)):
        norm, router = (each for each in parameters(model, unit) if each.weight in ("norm", "router_proj"))
        matrix = values[router.name]
        if kind in ("one-hot", "hot-pair"):  # an input that is always large, and experts that want it
            values[norm.name][0] = 30
            matrix[: 1 if kind == "one-hot" else 2] = 0
            matrix[: 1 if kind == "one-hot" else 2, 0] = np.sign(matrix[0, 0] or 1)
        elif kind == "ragged":
            matrix *= np.geomspace(0.01, 100, len(matrix), dtype=np.float32)[:, None]
        elif kind == "idle":
            matrix[-1] = 0
        elif kind == "equal":
            matrix[:] = 0
    return values


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "model", [EXPERTS, SHARED_EXPERT, SOME_EXPERTS], ids=["experts", "shared-expert", "some-layers"]
)
@pytest.mark.sampled(6)
def test_any_router_fits_the_addresses_of_the_program(model: ModelConfig, router: str) -> None:
    """Released bytes are poisoned and reads are checked; `fast` and `reference` agree, so nothing is lost."""
    program, values = make_program(model, **{**ONE_RANK, "pp": 2}), with_router(model, router)
    checked = trained(program, values, 2, kernels="fast", check_memory=True, poison=True)
    plain = trained(program, values, 2, kernels="reference")
    assert np.allclose(losses(checked), losses(plain), rtol=2e-6)
    assert np.isfinite(losses(checked)).all()


@pytest.mark.parametrize(
    "keys",
    [
        {"pp": 3, "dp": 2, "zero": 3},
        {"pp": 1, "dp": 2, "zero": 2},
        {"pp": 3, "dp": 2, "name": "zb-h1"},
        {"pp": 2, "dp": 2, "zero": 1, "name": "full-save"},
    ],
    ids=lambda keys: "-".join(f"{name}{value}" for name, value in keys.items()),
)
@pytest.mark.parametrize("model", [SHARED_EXPERT, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_stages_and_levels_do_not_change_bits(model: ModelConfig, keys: dict[str, Any]) -> None:
    """With both losses of routers, which are taken of micro-batches and not of what a rank has."""
    common = {"micro_batches": 3, "router": RouterLosses(0.5, 0.1), **F32, "dp": keys["dp"]}
    one = train(make_program(model, **{**common, "pp": 1, "zero": 0, "grad_shard_dtype": "f32"}), 3)
    other = train(make_program(model, **{**common, **keys}), 3)
    assert losses(one) == losses(other)
    same_state_of_blocks(one, other)


def test_losses_of_routers_train_them() -> None:
    """A router whose first expert is favoured loses its preference; without the loss it keeps it."""
    values = with_router(EXPERTS, "one-hot")
    shares = []
    for factor in (0.0, 10.0):
        program = make_program(EXPERTS, **ONE_RANK, router=RouterLosses(factor))
        run = trained(program, values, 30)
        state = training_state(run.engine, 30).blocks
        router = next(each for each in parameters(EXPERTS, block("mlp", 0)) if each.weight == "router_proj")
        flat = state[block("mlp", 0)].p[router.offset : router.offset + router.elements]
        matrix = flat.reshape(router.shape)
        shares.append(matrix[0, 0] / np.abs(values[router.name][0, 0]) - np.abs(matrix[1:, 0]).mean())
    assert shares[1] < shares[0] - 0.05


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (EXPERTS, {"mlp_chunk": 5}, "mlp_chunk cuts the rows of dense MLPs"),
        (EXPERTS, {"accumulate": "f16-runs"}, "is not built for the products of experts"),
        (EXPERTS, {"slices": (5, 5), "router": RouterLosses(0.1)}, "balance_loss is taken of whole micro-batches"),
        (MODEL, {"router": RouterLosses(0.0, 0.1)}, "z_loss is for routers of experts"),
        (SOME_EXPERTS, {"mlp_chunk": 5}, "but some of those of"),
    ],
)
def test_what_experts_do_not_follow_is_refused(model: ModelConfig, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DiagnosticError, match=words):
        make_plan(model, **keys)


@pytest.mark.parametrize("slices", [(4, 6), (3, 3, 4)])
def test_slices_add_up_to_whole_micro_batches(slices: tuple[int, ...]) -> None:
    whole = train(make_program(EXPERTS, **ONE_RANK), 3)
    cut = train(make_program(EXPERTS, "seq1f1b", **ONE_RANK, slices=slices), 3)
    assert np.allclose(losses(whole), losses(cut), rtol=2e-6)


@pytest.mark.parametrize(
    "keys", [{"pp": 1}, {"zero": 3}, {"dp": 1, "micro_batches": 6}, {"name": "zb-h1", "pp": 3}], ids=str
)
def test_a_run_goes_on_under_another_layout(keys: dict[str, Any], tmp_path: Path) -> None:
    """The state that is read is equal in every bit; only replicas change the order of later sums."""
    given = {"pp": 2, "dp": 2, "zero": 2, "router": RouterLosses(0.5, 0.1), **F32}
    place = str(tmp_path / "checkpoint")
    written = train(make_program(SHARED_EXPERT, **given), 2, save=place)
    run = start(make_program(SHARED_EXPERT, **{**given, **keys}), 2, resume=place)
    same_state_of_blocks(written, run)
    list(run.steps())
    whole = train(make_program(SHARED_EXPERT, **given), 4)
    if "dp" in keys:
        assert np.allclose(losses(run), losses(whole)[2:], rtol=1e-6)
    else:
        assert losses(run) == losses(whole)[2:]
        same_state_of_blocks(run, whole)


@pytest.mark.parametrize(
    "model", [EXPERTS, SHARED_EXPERT, SOME_EXPERTS], ids=["experts", "shared-expert", "some-layers"]
)
def test_exported_weights_start_a_run_of_any_layout(model: ModelConfig, tmp_path: Path) -> None:
    place, folder = str(tmp_path / "checkpoint"), str(tmp_path / "weights")
    train(make_program(model, **F32), 2, save=place)
    export_weights(place, folder)
    assert load_model(folder) == evolve(model, name=load_model(folder).name)
    resumed = start(make_program(model, **F32), 1, resume=place)
    state = training_state(resumed.engine, 2).blocks
    for keys in ({}, {"pp": 1}, {"pp": 3, "zero": 3}):
        begun = start(make_program(model, **F32, **keys), 1, init=folder)
        found = training_state(begun.engine, 0).blocks
        for unit in state:
            assert found[unit].p.tobytes() == state[unit].p.tobytes()


def test_layers_of_both_kinds_are_those_of_models_of_one() -> None:
    """A model of which no router is asked, and one of which all are, have the same parameters layer by layer."""
    dense = in_family(UNEVEN, "qwen2", qkv_bias=True)
    for layer, kind in enumerate(SOME_EXPERTS.mlp_kinds):
        for alike in ("attention", "mlp"):
            unit, other = block(alike, layer), SIX_EXPERTS if kind == "e" else dense
            assert parameters(SOME_EXPERTS, unit) == parameters(other, unit)
            plans = [make_plan(model, **ONE_RANK) for model in (SOME_EXPERTS, other)]
            assert saved_slots(SOME_EXPERTS, plans[0], unit) == saved_slots(other, plans[1], unit)
    held = {each.name: each.elements for unit in block_chain(SOME_EXPERTS) for each in parameters(SOME_EXPERTS, unit)}
    assert SOME_EXPERTS.parameters == sum(held.values())
    idle = sum(count for name, count in held.items() if ".experts." in name) * 3 // 6
    assert SOME_EXPERTS.active_parameters == SOME_EXPERTS.parameters - idle
    assert [model_flops_per_token(model, 8) for model in (SOME_EXPERTS, dense)] == [
        sum(block_flops(model, 8, WHOLE).values()) / 8 for model in (SOME_EXPERTS, dense)
    ]


def test_a_step_starts_again_where_it_stopped(tmp_path: Any) -> None:
    program = make_program(SHARED_EXPERT, dp=2, zero=2)
    whole = train(program, 4)
    train(program, 2, save=str(tmp_path / "checkpoint"))
    run = start(program, 2, resume=str(tmp_path / "checkpoint"))
    list(run.steps())
    assert losses(whole)[2:] == losses(run)
    same_state_of_blocks(whole, run)


def test_losses_of_routers_do_not_depend_on_which_labels_count() -> None:
    """A router sees all tokens: its losses add the same gradient where half of the labels are left out of the mean."""
    added = []
    for all_counted in (False, True):
        moments = []
        for router in (RouterLosses(), RouterLosses(0.5, 0.2)):
            program = make_program(EXPERTS, **ONE_RANK, router=router)
            chosen = run_settings(1, kernels="reference")
            run = prepare(program, stream_of_pairs(all_counted=all_counted), chosen, kernel_set("reference"))
            list(run.steps())
            moments.append(training_state(run.engine, 1).blocks[block("mlp", 2)].m1)
        added.append(moments[1] - moments[0])
    assert np.abs(added[0]).max() > 1e-6
    assert np.allclose(added[0], added[1], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("router", "busiest", "idle"), [("equal", 2.0, 2), ("one-hot", None, 0)])
def test_a_step_tells_how_unequal_its_experts_are(router: str, busiest: float | None, idle: int) -> None:
    """With equal logits all rows are those of the two experts with the lowest numbers, of four."""
    for keys in (ONE_RANK, {**ONE_RANK, "pp": 2, "dp": 2, "cuts": (1,)}):
        run = trained(make_program(EXPERTS, **keys), with_router(EXPERTS, router), 1, kernels="reference")
        load = run.done[0].report.experts
        assert load is not None
        assert load.busiest == pytest.approx(busiest) if busiest else 1 < load.busiest <= 2
        assert load.idle == idle or router != "equal"
        assert run.done[0].to_json()["busiest_expert"] == load.busiest
    assert train(make_program(MODEL), 1).done[0].report.experts is None
