"""Replicas that share out experts: they train like replicas with all experts, whatever the routers say.

Sums of gradients have another order, and rows are rounded where they travel: trainings agree within rounding. Among
plans with as many expert ranks every bit is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.model.blocks import block, block_chain
from ratrain.ratrain_ir.model.sharded_blocks import shard_count
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.ops.collectives import AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Backward, Recompute
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Combine, Dispatch, ForwardExperts, Route
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.test_experts import F32, ROUTERS, trained, with_router
from tests.end_to_end.test_slices import POLICIES
from tests.end_to_end.tiny_runs import (
    MODEL,
    losses,
    make_plan,
    make_program,
    make_stream,
    same_bits,
    same_state_of_blocks,
    start,
    train,
)
from tests.end_to_end.toys import EXPERTS, SIX_EXPERTS, SOME_EXPERTS

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program

FOUR: dict[str, Any] = {"pp": 1, "cuts": (), "dp": 4, "micro_batches": 2}
"""Four replicas, of which two or four share out the experts."""
LOSS = 2e-6
"""Largest relative difference of losses in f32 over a few steps."""


SCALED_EXPERTS = evolve(
    MODEL,
    family="granitemoe",
    experts=8,
    experts_per_token=3,
    embedding_scale=3.0,
    residual_scale=0.5,
    logit_scale=0.25,
    attention_scale=0.2,
)
"""A tiny model with scaled embeddings, branches, scores and logits, and experts."""
MODELS = {"experts": EXPERTS, "shared-expert": SIX_EXPERTS, "granite": SCALED_EXPERTS, "some-layers": SOME_EXPERTS}
SHARED_OUT = [(name, ranks) for name, of in MODELS.items() for ranks in (2, 4) if (of.experts or 0) % ranks == 0]
"""Models, and numbers of ranks that share out their experts evenly."""


def placed(policy: str, model: ModelConfig = EXPERTS, **keys: Any) -> Program:
    """A program under a policy of recovery."""
    module = api.compile(model, make_plan(model, **{**FOUR, **keys}), passes=f"place-1f1b,{POLICIES[policy]}")
    return api.emit(module)


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize(("model", "ranks"), SHARED_OUT)
@pytest.mark.sampled(5)
def test_ranks_train_like_replicas_with_all_experts(model: str, ranks: int, kernels: str) -> None:
    """Allow masters 4 % of a step: where a gradient is near 0, Adam makes of its rounding a part of one."""
    chosen = MODELS[model]
    keys = {**FOUR, **F32, "router": RouterLosses(0.1, 0.01)}
    shared = train(make_program(chosen, **keys, ep=ranks), 4, kernels=kernels, poison=True, check_memory=True)
    whole = train(make_program(chosen, **keys), 4, kernels=kernels)
    assert losses(shared)[0] == losses(whole)[0]
    assert np.allclose(losses(shared), losses(whole), rtol=LOSS)
    mine, theirs = (training_state(run.engine, 4).blocks for run in (shared, whole))
    for unit in theirs:
        assert np.allclose(mine[unit].m1, theirs[unit].m1, rtol=2e-3, atol=2e-7), f"first moment of {unit}"
        assert np.allclose(mine[unit].p, theirs[unit].p, rtol=1e-3, atol=2e-4), f"master of {unit}"


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("keys", [{"ep": 2}, {"ep": 4, "zero": 3}, {"ep": 2, "pp": 2, "dp": 2, "cuts": (1,)}], ids=str)
@pytest.mark.sampled(6)
def test_any_router_fits_the_addresses_of_the_program(router: str, keys: dict[str, Any]) -> None:
    """Released bytes are poisoned and reads are checked: every rank computes as many rows whatever the router says."""
    values, common = with_router(EXPERTS, router), {**FOUR, **F32, **keys}
    shared = trained(make_program(EXPERTS, **common), values, 2, kernels="fast", check_memory=True, poison=True)
    whole = trained(make_program(EXPERTS, **{**common, "ep": 1}), values, 2, kernels="reference")
    assert np.allclose(losses(shared), losses(whole), rtol=5e-6)


def test_half_precision_rounds_rows_where_they_travel() -> None:
    whole, shared = (train(make_program(EXPERTS, **FOUR, ep=ranks), 4) for ranks in (1, 4))
    assert np.allclose(losses(shared), losses(whole), rtol=1e-4)
    assert losses(shared) != losses(whole)


@pytest.mark.parametrize("policy", ["joint", "none", "full", "attention", "mlp", "auto", "forward-side"])
@pytest.mark.parametrize("model", [SIX_EXPERTS, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_passes_do_not_change_bits(model: ModelConfig, policy: str) -> None:
    keys: dict[str, Any] = {"pp": 3, "cuts": (1, 2), "ep": 2, "zero": 2}
    expected = train(make_program(model, **{**FOUR, **keys}), 2)
    same_bits(expected, train(placed(policy, model, **keys), 2, poison=True, check_memory=True))


@pytest.mark.parametrize(
    "keys",
    [
        {"zero": 0},
        {"zero": 3},
        {"zero": 2},
        {"pp": 3, "cuts": (1, 2), "zero": 1},
        {"pp": 3, "cuts": (1, 2), "zero": 3, "name": "full-save"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [EXPERTS, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_stages_and_levels_do_not_change_bits(model: ModelConfig, keys: dict[str, Any]) -> None:
    common = {**FOUR, **F32, "router": RouterLosses(0.5, 0.1), "ep": 2}
    expected = train(make_program(model, **common, zero=1), 3)
    other = train(make_program(model, **{**common, **keys}), 3)
    assert losses(expected) == losses(other)
    same_state_of_blocks(expected, other)


@pytest.mark.parametrize("model", MODELS)
def test_slices_are_shared_out_each_by_itself(model: str) -> None:
    """A slice is balanced alone: the first loss is that of slices without expert ranks, bit for bit."""
    chosen = MODELS[model]
    common: dict[str, Any] = {**FOUR, **F32, "seq_len": 12, "slices": (5, 7), "pp": 2, "cuts": (1,)}
    shared = train(make_program(chosen, **common, ep=2, zero=2), 3, poison=True, check_memory=True)
    whole = train(make_program(chosen, **common), 3)
    assert losses(shared)[0] == losses(whole)[0]
    assert np.allclose(losses(shared), losses(whole), rtol=LOSS)


def test_exchanges_behind_another_micro_batch_do_not_change_bits() -> None:
    """A forward merged with the backward of the micro-batch before it."""
    keys: dict[str, Any] = {**FOUR, **F32, "micro_batches": 3, "ep": 2, "zero": 2}
    plan = make_plan(SIX_EXPERTS, **keys)
    passes = "place-schedule{kind=1f1b-ahead},overlap-tensor{pieces=merged},joint-order,allocate-ddr"
    merged = api.emit(api.compile(SIX_EXPERTS, plan, passes=passes))
    same_bits(train(make_program(SIX_EXPERTS, **keys), 3), train(merged, 3, poison=True, check_memory=True))


def test_the_order_of_instructions_does_not_change_bits() -> None:
    program = make_program(EXPERTS, **{**FOUR, "pp": 2, "dp": 2, "cuts": (1,)}, ep=2, zero=2)
    expected = train(program, 2)
    for seed in range(50):
        same_bits(expected, train(program, 2, interleave_seed=seed))


def test_only_layers_with_experts_exchange_rows_and_learn_losses_of_routers() -> None:
    """The state of a dense mlp is among all replicas, as that of an attention."""
    plan = make_plan(SOME_EXPERTS, **FOUR, ep=2, zero=2, router=RouterLosses(0.1))
    stage = api.compile(SOME_EXPERTS, plan).stages[0]
    with_experts = {block("mlp", layer) for layer, kind in enumerate(SOME_EXPERTS.mlp_kinds) if kind == "e"}
    routed = [
        op.block for op in stage.ops if isinstance(op, Route | Dispatch | ForwardExperts | BackwardExperts | Combine)
    ]
    assert {*routed} == with_experts
    assert {op.block for op in stage.ops if type(op) is Backward and any(t.name == "scale" for t in op.reads)} == {
        block("head"),
        *with_experts,
    }
    averaged = {(each, op.group) for op in stage.ops if type(op) is ReduceScatter for each in op.blocks}
    expected = {each: Group.COPIES if each in with_experts else Group.REPLICAS for each in block_chain(SOME_EXPERTS)}
    assert averaged == {*expected.items()}
    summed = {each for op in stage.ops if type(op) is AllReduce and op.group is Group.EXPERTS for each in op.blocks}
    assert summed == with_experts
    shards = {each: shard_count(SOME_EXPERTS, plan, each) for each in block_chain(SOME_EXPERTS)}
    assert shards == {each: 2 if each in with_experts else 4 for each in shards}


def test_recovery_of_a_dense_layer_is_as_without_expert_ranks() -> None:
    """Make its mlp again under `full`; of layers with experts nothing is."""
    plan = make_plan(SOME_EXPERTS, **FOUR, ep=2)
    module = api.compile(SOME_EXPERTS, plan, passes=f"place-1f1b,{POLICIES['full']}")
    again = {str(op.block) for stage in module.stages for op in stage.ops if type(op) is Recompute}
    assert again == {"attention.0", "mlp.0", "attention.1", "attention.2"}


@pytest.mark.parametrize("kernels", ["reference", "fast"])
def test_threads_do_not_change_bits(kernels: str) -> None:
    """Each engine of a rank has scratch of its own, also for the sums of gradients of copied experts."""
    program = make_program(SIX_EXPERTS, **{**FOUR, "pp": 2, "dp": 2, "cuts": (1,)}, ep=2)
    same_bits(train(program, 2, kernels=kernels), train(program, 2, kernels=kernels, threads=2))


@pytest.mark.parametrize("model", [SIX_EXPERTS, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_a_program_is_the_same_from_its_file(model: ModelConfig) -> None:
    program = make_program(model, **FOUR, ep=2, zero=3)
    data = program_bytes(program)
    again = parse_program(data, "experts.rtx")
    check_program(again)
    assert program_bytes(again) == data
    same_bits(train(program, 2), train(again, 2))


@pytest.mark.parametrize("keys", [{"ep": 1}, {"ep": 3, "dp": 3}, {"ep": 2, "zero": 3}, {"pp": 3, "dp": 2}], ids=str)
@pytest.mark.parametrize("model", [SIX_EXPERTS, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_a_run_goes_on_under_other_expert_ranks(model: ModelConfig, keys: dict[str, Any], tmp_path: Path) -> None:
    """The state that is read is equal in every bit."""
    given = {**FOUR, **F32, "ep": 2, "zero": 2}
    place = str(tmp_path / "checkpoint")
    written = train(make_program(model, **given), 2, save=place)
    changed = {**given, **keys}
    changed["cuts"] = tuple(range(1, changed["pp"]))
    run = start(make_program(model, **changed), 2, resume=place, new_data="dp" in keys)
    same_state_of_blocks(written, run)
    list(run.steps())
    back = str(tmp_path / "back")
    other = train(make_program(model, **{**given, "ep": 1}), 2, save=back)
    again = start(make_program(model, **given), 2, resume=back)
    same_state_of_blocks(other, again)


def test_an_evaluation_gives_the_loss_of_all_experts_and_changes_no_bit() -> None:
    keys, found = {**FOUR, **F32, "zero": 3}, []
    for ranks in (2, 1):
        program = make_program(SIX_EXPERTS, **keys, ep=ranks)
        run = start(program, 3, poison=True)
        held = held_out(make_stream(program.model, 900), program.plan)
        found.append([held.loss(run.engine) for _ in run.steps()])
        same_bits(run, train(program, 3))
    assert found[0] == pytest.approx(found[1], rel=LOSS)


def test_what_a_program_holds_is_explained() -> None:
    """Nothing of its mlps is made again, so that no price of that is given."""
    module = api.compile(SIX_EXPERTS, make_plan(SIX_EXPERTS, **FOUR, ep=2))
    told = api.explain(module, levers=False).to_json()
    assert {row["block"] for row in told["recovery"]} >= {"attention.0"}
    assert not {row["block"] for row in told["recovery"]} & {"mlp.0", "mlp.1"}


def test_exported_weights_are_of_all_experts(tmp_path: Path) -> None:
    place, folder = str(tmp_path / "checkpoint"), str(tmp_path / "weights")
    written = train(make_program(SIX_EXPERTS, **FOUR, **F32, ep=2), 2, save=place)
    export_weights(place, folder)
    assert load_model(folder) == evolve(SIX_EXPERTS, name=load_model(folder).name)
    state = training_state(written.engine, 2).blocks
    for ranks in (1, 2):
        begun = start(make_program(SIX_EXPERTS, **FOUR, **F32, ep=ranks), 1, init=folder)
        found = training_state(begun.engine, 0).blocks
        for unit in state:
            assert found[unit].p.tobytes() == state[unit].p.tobytes()


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (MODEL, {"ep": 2}, "ep = 2 shares out experts, which"),
        (EXPERTS, {"ep": 3, "dp": 3}, "3 expert ranks do not share out 4 experts evenly"),
        (EXPERTS, {"ep": 2, "dp": 3}, "groups of 2 replicas that share out experts do not make up dp = 3"),
        (EXPERTS, {"ep": 2, "dp": 4, "shard_group": 2}, "shard_group = 2 is not built for replicas"),
        (EXPERTS, {"ep": 2, "cp": 2, "seq_len": 12}, "cp = 2 is not built for replicas"),
    ],
)
def test_what_expert_ranks_do_not_follow_is_refused(model: ModelConfig, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DiagnosticError, match=words):
        make_plan(model, **{"pp": 1, "cuts": (), "dp": 2, **keys})


def test_halves_of_backwards_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="whose experts replicas share out"):
        make_program(EXPERTS, "zb-h1", pp=3, cuts=(1, 2), dp=2, ep=2)
