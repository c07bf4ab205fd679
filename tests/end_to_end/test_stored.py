"""What is stored in other memories comes back as it was: the same training, bit for bit, whatever waits where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.types import STORES, Home
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import Forward
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.races import stage_races
from tests.end_to_end.tiny_runs import MODEL, instructions, losses, make_plan, same_bits, train
from tests.end_to_end.toys import SHARED_EXPERT
from tests.mutation.subjects import GEMMA2, WITH_STORES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

PLANS: dict[str, dict[str, Any]] = {
    "two stages": {},
    "zero 3 each": {"zero": 3, "reduce": "each-micro-batch"},
    "slices": {"slices": (4, 3, 3), "zero": 0, "dp": 1},
    "split": {"schedule": "zb-h1"},
    "peers": {"tp": 2, "sequence_sharding": False},
    "bf16": {"view_dtype": "bf16"},
    "experts, split": {"model": SHARED_EXPERT, "router": RouterLosses(0.1, 0.01), "schedule": "zb-h1"},
}
POLICIES = ("none", "attention", "mlp", "full")


def module_of(plan: dict[str, Any], recovery: str, machine: Machine = WITH_STORES) -> Module:
    model = plan.get("model", MODEL)
    return api.compile(model, make_plan(**plan), passes=f"{recovery},allocate-ddr", machine=machine)


def program_of(plan: dict[str, Any], recovery: str, machine: Machine = WITH_STORES) -> Program:
    return api.emit(module_of(plan, recovery, machine), machine=machine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(7)
def test_what_is_stored_trains_the_same_bits(plan: str, policy: str) -> None:
    kept = program_of(PLANS[plan], f"recompute{{policy={policy}}}")
    plain = train(kept, 3)
    for home in STORES:
        stored = program_of(PLANS[plan], f"recompute{{policy={policy} store={home.value}}}")
        assert any(instructions(stored, "store")), "something is stored"
        watched = train(parse_program(program_bytes(stored), "stored.rtx"), 3, check_memory=True, poison=True)
        assert losses(watched) == losses(plain)
        same_bits(watched, plain)


def test_nothing_is_stored_that_its_own_forward_pass_still_needs() -> None:
    """With whole rows on tensor-parallel ranks the stream goes around each block: storing it would fetch it back at once."""
    for model in (MODEL, GEMMA2):
        plan = make_plan(model, tp=2, sequence_sharding=False, pp=1)
        module = api.compile(model, plan, passes="place-gpipe,recompute{policy=none store=host}", machine=WITH_STORES)
        ops = module.stages[0].ops
        last_forward = max(place for place, op in enumerate(ops) if type(op) is Forward)
        assert any(type(op) is Store for op in ops)
        assert not any(type(op) is Fetch for op in ops[:last_forward])


def test_what_is_stored_leaves_its_bytes() -> None:
    plan = {"micro_batches": 4}
    kept, stored = (program_of(plan, f"recompute{{policy=none{store}}}") for store in ("", " store=host"))
    assert stored.stages[0].arena_bytes < kept.stages[0].arena_bytes
    assert stored.stages[0].bytes_in(Home.HOST) > kept.stages[0].arena_bytes - stored.stages[0].arena_bytes


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled(25)
def test_any_order_that_the_waits_allow_gives_the_same_bits(seed: int) -> None:
    stored = program_of(PLANS["two stages"], "recompute{policy=none store=host}")
    same_bits(train(stored, 2, interleave_seed=seed, poison=True), train(stored, 2))


@pytest.mark.parametrize("level", ["placed", "allocated"])
def test_texts_and_programs_say_where_tensors_are(level: str) -> None:
    passes = "place-1f1b,recompute{policy=none store=file}"
    module = api.compile(
        MODEL, make_plan(), passes=passes if level == "placed" else f"{passes},allocate-ddr", machine=WITH_STORES
    )
    again = parse_module(print_module(module), file="stored.rtir")
    assert first_difference(module, again) is None
    assert {tensor.home for stage in again.stages for tensor in stage.tensors.values()} == {Home.DDR, Home.FILE}


def test_a_memory_that_is_too_small_is_refused_with_its_number() -> None:
    constants = WITH_STORES.constants
    small = evolve(
        WITH_STORES, constants=constants | {"host_capacity": evolve(constants["host_capacity"], value=4096.0)}
    )
    with pytest.raises(DiagnosticError, match=r"stores \d+ bytes in the memory 'host': the machine's 4096 of it"):
        module_of({}, "recompute{policy=none store=host}", small)


def test_a_machine_without_the_memory_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="has no memory 'host'"):
        api.compile(MODEL, make_plan(), passes="joint-order{store=host},allocate-ddr")


def test_storing_is_chosen_where_it_makes_the_step_shorter() -> None:
    """With a fast memory layers are stored that had to be recovered; with a slow one none, and the step is what it was."""
    plan = {"micro_batches": 6}
    least = max(stage.arena_bytes for stage in program_of(plan, "recompute{policy=full}").stages)
    tight = f"budget={least + 2000}"
    plain = program_of(plan, f"joint-order{{{tight}}}")
    fast = with_bandwidth(1e12)
    stored = program_of(plan, f"joint-order{{{tight} store=host}}", fast)
    assert any(instructions(stored, "store"))
    assert seconds(stored, fast) < seconds(plain, fast)
    same_bits(train(stored, 2), train(plain, 2))
    slow = with_bandwidth(1e3)
    assert not any(instructions(program_of(plan, f"joint-order{{{tight} store=host}}", slow), "store"))


def with_bandwidth(value: float) -> Machine:
    """A machine whose host memory takes and gives so many bytes a second."""
    constants = WITH_STORES.constants
    both = {f"host_{way}": evolve(constants[f"host_{way}"], value=value) for way in ("store", "fetch")}
    return evolve(WITH_STORES, constants=constants | both)


def seconds(program: Program, machine: Machine) -> float:
    return api.simulate(program, machine=machine).step_seconds


def test_a_store_that_is_not_waited_for_is_a_race() -> None:
    stage = program_of({}, "recompute{policy=none store=host}").stages[0]
    assert not stage_races(stage)
    for item in stage.streams[Engine.FETCH]:
        item.waits = tuple(wait for wait in item.waits if wait.engine is not Engine.STORE)
    races = stage_races(stage)
    assert races
    assert Home.HOST in {race.home for race in races}


WORKSPACES = ("u8[1, {n}]", "u8[{n}, 1]", "u8[{n} / 64, 64]", "bf16[{n} / 2]", "f32[2, {n} / 8]", "f64[{n} / 8]")


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.sampled(3)
def test_a_workspace_of_streamed_state_is_bytes_whatever_its_type(workspace: str) -> None:
    """Updates and gathers of state in a file take pieces through it; only its bytes are promised by the verifier."""
    passes = "place-1f1b,offload-state{home=file},allocate-ddr"
    module = api.compile(MODEL, make_plan(dp=2, zero=1), passes=passes, machine=WITH_STORES)
    text = print_module(module)
    names = set(re.findall(r"(?:update|all_gather) .* using (%\S+)", text))
    assert names

    def other(match: re.Match[str]) -> str:
        n = int(match[2])
        shape = re.sub(r"(\d+) / (\d+)", lambda each: str(int(each[1]) // int(each[2])), workspace.format(n=n))
        return f"{match[1]}{shape}"

    changed = text
    for name in names:
        changed = re.sub(rf"({re.escape(name)} : )u8\[(\d+)\]", other, changed)
    assert changed != text
    usual = train(api.emit(module, machine=WITH_STORES), 3)
    run = train(api.emit(parse_module(changed), machine=WITH_STORES), 3, poison=True)
    assert losses(run) == losses(usual)
    same_bits(run, usual)
