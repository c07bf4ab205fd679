"""What replicas share out, block by block, changes where bytes are and never what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.sharded_blocks import frozen_elements, frozen_parts, packed_frozen_bytes
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.program.rtx import parse_program, program_bytes
from tests.end_to_end.tiny_runs import (
    MODEL,
    OPTIMIZER,
    losses,
    make_plan,
    reports_of,
    same_bits,
    same_state_of_blocks,
    train,
)
from tests.end_to_end.toys import SHARED_EXPERT
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

LORA = Training(method="lora", rank=4, alpha=8.0)
LEVELS = ("embed 3", "attention.* 3, head 0", "mlp.* 0, mlp.1 3", "attention.0-1 2, mlp.0 3, embed 0, head 3")
PLANS: dict[str, dict[str, Any]] = {
    "two stages": {"dp": 2},
    "one stage, clipped": {"pp": 1, "dp": 4},
    "peers": {"tp": 2},
    "slices": {"slices": (4, 3, 3)},
    "split": {"schedule": "zb-h1"},
    "narrow gradients": {"view_dtype": "f32", "grad_dtype": "bf16", "grad_shard_dtype": "bf16"},
    "tied": {"tied": True},
    "experts": {"model": SHARED_EXPERT, "router": RouterLosses(0.1, 0.01)},
}
PASSES = (
    "{place},recompute{{policy=full}},allocate-ddr",
    "{place},recompute{{policy=attention}},bucket-grad-sync{{bytes=1KiB}},schedule-update,insert-prefetch,allocate-ddr",
    "{place},bucket-grad-sync{{unit=stage blocking=true}},insert-prefetch{{depth-blocks=0 blocking=true}},allocate-ddr",
)
JOINT = "joint-order,allocate-ddr"


def program_of(given: dict[str, Any], passes: str, **keys: Any) -> Program:
    words = {**given, **keys}
    model = evolve(words.pop("model", MODEL), tied_embeddings=words.pop("tied", False))
    plan = make_plan(model, **words)
    place = "place-schedule" if plan.slices else "place-zb-h1" if plan.schedule == "zb-h1" else "place-1f1b"
    pipeline = without_idle_options(passes.format(place=place), plan, model)
    module = api.compile(model, plan, passes=pipeline)
    assert first_difference(module, parse_module(print_module(module), file="again.rtir")) is None
    return api.emit(module)


def trained(given: dict[str, Any], passes: str, **keys: Any) -> TrainingRun:
    return train(program_of(given, passes, **keys), 3, check_memory=True, poison=True)


def levels_of(given: dict[str, Any], text: str) -> ZeroLevels:
    """The levels of a text; of a model with one table for both ends, those of the embedding for both."""
    levels = ZeroLevels.parse(text)
    assert levels is not None
    if given.get("tied"):
        kept = [str(entry) for entry in levels if entry.kind not in ("embed", "head")]
        levels = ZeroLevels.parse(", ".join(["embed 3, head 3", *kept]))
        assert levels is not None
    return levels


@pytest.mark.parametrize("passes", [*PASSES, JOINT], ids=("recovered", "buckets", "blocking", "joint"))
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("given", PLANS)
@pytest.mark.sampled(13)
def test_levels_of_blocks_train_the_same_bits(given: str, levels: str, passes: str) -> None:
    plan = PLANS[given]
    expected = trained(plan, PASSES[0], zero=1)
    found = trained(plan, passes, zero=1, zero_blocks=levels_of(plan, levels))
    assert losses(found) == losses(expected)
    same_state_of_blocks(found, expected)


GROUPS: dict[str, dict[str, Any]] = {
    "optimizer state": {"zero": 1},
    "views too, clipped": {"zero": 3, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)},
    "gradients": {"zero": 2, "reduce": "each-micro-batch"},
    "all, each micro-batch": {"zero": 3, "reduce": "each-micro-batch", "schedule": "zb-h1"},
    "some blocks": {"zero": 0, "zero_blocks": ZeroLevels.parse("attention.* 1, mlp.1 3")},
    "peers": {"zero": 3, "tp": 2},
    "tied": {"zero": 1, "tied": True},
    "overflows": {"zero": 3, "loss_scale": 2.0**24},
}


@pytest.mark.parametrize("passes", [*PASSES, JOINT], ids=("recovered", "buckets", "blocking", "joint"))
@pytest.mark.parametrize(("replicas", "group"), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("given", GROUPS)
@pytest.mark.sampled(13)
def test_shard_groups_train_the_same_bits(given: str, replicas: int, group: int, passes: str) -> None:
    plan = {**GROUPS[given], "dp": replicas, "micro_batches": 2, "micro_batch_size": 1}
    expected = trained(plan, PASSES[0])
    found = trained(plan, passes, shard_group=group)
    assert losses(found) == losses(expected)
    same_state_of_blocks(found, expected)


def test_a_replica_of_a_shard_group_has_more_state() -> None:
    whole, grouped = (program_of({"zero": 3, "dp": 4}, PASSES[1], shard_group=group) for group in (None, 2))
    for one, other in zip(whole.stages, grouped.stages, strict=True):
        masters = [sum(t.type.nbytes for t in stage.tensors if t.kind is StateKind.MASTER) for stage in (one, other)]
        assert masters[1] == 2 * masters[0]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("views too, clipped", "shard_group"),
        ("some blocks", "shard_group"),
        ("peers", "shard_group"),
        ("views too, clipped", "view_group"),
    ],
)
def test_a_run_goes_on_whoever_holds_the_state(given: str, key: str, tmp_path: Path) -> None:
    plan = {**GROUPS[given], "dp": 4, "micro_batches": 2, "micro_batch_size": 1}
    whole, grouped = (program_of(plan, PASSES[1], **{key: group}) for group in (None, 2))
    expected = train(whole, 4)
    for number, (first, then) in enumerate(((whole, grouped), (grouped, whole), (grouped, grouped))):
        place = str(tmp_path / str(number))
        train(first, 2, save=place)
        same_state_of_blocks(train(then, 2, resume=place), expected)


VIEWS: dict[str, dict[str, Any]] = {
    "clipped": {"zero": 3, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)},
    "each micro-batch": {"zero": 3, "reduce": "each-micro-batch", "schedule": "zb-h1"},
    "some blocks": {"zero": 1, "zero_blocks": ZeroLevels.parse("attention.* 3, mlp.1 3, head 0")},
    "peers": {"zero": 3, "tp": 2},
    "tied": {"zero": 3, "tied": True},
    "overflows": {"zero": 3, "loss_scale": 2.0**24},
    "slices": {"zero": 3, "slices": (4, 3, 3)},
}


@pytest.mark.parametrize("passes", [*PASSES, JOINT], ids=("recovered", "buckets", "blocking", "joint"))
@pytest.mark.parametrize(("replicas", "shards", "views"), [(4, None, 2), (6, None, 3), (8, 4, 2)])
@pytest.mark.parametrize("given", VIEWS)
@pytest.mark.sampled(13)
def test_view_groups_train_the_same_bits(
    given: str, replicas: int, shards: int | None, views: int, passes: str
) -> None:
    plan = {**VIEWS[given], "dp": replicas, "micro_batches": 2, "micro_batch_size": 1}
    expected = trained(plan, PASSES[0])
    found = trained(plan, passes, shard_group=shards, view_group=views)
    assert losses(found) == losses(expected)
    same_state_of_blocks(found, expected)


def test_a_replica_of_a_view_group_has_its_part_of_views_more() -> None:
    for stage in program_of({"zero": 3, "dp": 4}, PASSES[1], view_group=2).stages:
        held = {kind: sum(t.type.elements for t in stage.tensors if t.kind is kind) for kind in StateKind}
        assert held[StateKind.VIEW_SHARD] == 2 * held[StateKind.MASTER]
        assert all(t.type.dtype.value == "f16" for t in stage.tensors if t.kind is StateKind.VIEW_SHARD)


SHARED: dict[str, dict[str, Any]] = {
    "adapters": {"training": LORA},
    "packed": {"training": evolve(LORA, base="nf4"), "reduce": "each-micro-batch"},
    "blocks of which nothing trains": {"training": Training(freeze="model.embed_tokens.*, *.mlp.*", base="int8-block")},
    "view groups": {"training": evolve(LORA, base="int4-block"), "dp": 4, "view_group": 2},
    "nothing trains in view groups": {"training": Training(freeze="*.mlp.*"), "dp": 4, "view_group": 2},
    "shard groups": {"training": evolve(LORA, base="nf4"), "dp": 4, "shard_group": 2},
    "tensor ranks": {"training": LORA, "tp": 2},
    "slices": {"training": LORA, "slices": (4, 3, 3)},
    "some blocks": {"training": LORA, "zero": 1, "zero_blocks": ZeroLevels.parse("attention.* 3, mlp.1 3")},
}


def shared_program(plan: dict[str, Any], **keys: Any) -> Program:
    """The program of a plan with its frozen parameters in parts, unless `keys` give another level."""
    place = "place-schedule" if "slices" in plan else "place-1f1b"
    passes = f"{place},recompute{{policy=full}},bucket-grad-sync,insert-prefetch,allocate-ddr"
    return api.emit(api.compile(MODEL, make_plan(**{"zero": 3, **plan, **keys}), passes=passes))


def carried_frozen(program: Program) -> int:
    """Bytes of frozen parameters that a replica of all stages holds from step to step."""
    kinds = (StateKind.FROZEN, StateKind.VIEW_SHARD)
    tensors = [tensor for stage in program.stages for tensor in stage.tensors if tensor.carried]
    return sum(each.type.nbytes for each in tensors if each.kind in kinds and each.name[0] == "f")


@pytest.mark.parametrize("plan", SHARED)
def test_frozen_parameters_in_parts_train_the_same_bits(plan: str) -> None:
    keys = SHARED[plan]
    whole = {"zero": 2, "view_group": None, "zero_blocks": None}
    kept, shared = shared_program(keys, **whole), shared_program(keys)
    plain, found = (
        train(kept, 3),
        train(parse_program(program_bytes(shared), "m.rtx"), 3, check_memory=True, poison=True),
    )
    assert losses(found) == losses(plain)
    same_state_of_blocks(found, plain)
    model, made = shared.model, shared.plan
    wanted = 0
    for owner in block_chain(model):
        size = frozen_elements(model, made, owner) * 2 + packed_frozen_bytes(model, made, owner)
        wanted += size // frozen_parts(model, made, owner)
    assert carried_frozen(shared) == wanted < carried_frozen(kept)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(3)
def test_parts_are_gathered_in_any_order_that_the_waits_allow(seed: int, tmp_path: Path) -> None:
    program = shared_program(SHARED["packed"])
    whole = train(program, 3)
    same_bits(train(program, 3, interleave_seed=seed, poison=True), whole)
    same_bits(train(program, 3, threads=2), whole)
    train(program, 2, save=str(tmp_path / "kept"))
    same_bits(train(program, 1, resume=str(tmp_path / "kept")), whole)


def test_gathers_that_round_leave_frozen_parameters_whole() -> None:
    keys = {"training": LORA, "gather_quantised": "int8-block"}
    assert carried_frozen(shared_program(keys)) == carried_frozen(shared_program(keys, zero=2))


@pytest.mark.parametrize("plan", ["packed", "nothing trains in view groups"])
def test_ranks_of_their_own_gather_the_same_parts(plan: str) -> None:
    program = shared_program(SHARED[plan])
    alone = train(program, 2)
    for run in trained_by_threads(program, 2, poison=True):
        assert reports_of(run) == reports_of(alone)
