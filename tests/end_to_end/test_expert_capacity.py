"""Replicas that share out experts and drop rows above a capacity: what is computed, what it costs, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve, field, frozen

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.blocks import block, trained_parameters
from ratrain.ratrain_ir.model.expert_ranks import capacity_of, is_stack, rows_of_rank
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.machine.cost import routine_flops
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.routing import dropped_share, named_routing
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.checkpoint.state import start_from_weights
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.weights.weights import named_parameters
from ratrain.targets.simulator.figures import one_core_step_seconds
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.expert_oracle import Oracle
from tests.end_to_end.test_expert_ranks import FOUR, SCALED_EXPERTS, placed
from tests.end_to_end.test_experts import F32, ROUTERS, Given, trained, with_router
from tests.end_to_end.tiny_runs import (
    losses,
    make_plan,
    make_program,
    make_stream,
    run_settings,
    same_bits,
    same_state_of_blocks,
    start,
    stream_for,
    train,
)
from tests.end_to_end.toys import EXPERTS, SIX_EXPERTS
from tests.program_files import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.model.blocks import Parameter
    from ratrain.targets.program.program import Program

F64 = npt.NDArray[np.float64]
NORMALISED = evolve(EXPERTS, router_normalised=True)
MODELS = {"experts": EXPERTS, "normalised": NORMALISED, "scaled": SCALED_EXPERTS}


def dropping(factor: float | None = 1.0) -> dict[str, Any]:
    """Keys of a plan whose ranks drop rows."""
    return {"experts": ExpertDispatch("capacity", factor)}


# What is computed


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize(("model", "ranks"), [(EXPERTS, 2), (EXPERTS, 4), (SIX_EXPERTS, 2), (SCALED_EXPERTS, 4)])
@pytest.mark.sampled(4)
def test_room_for_all_rows_trains_like_balanced_ranks(model: ModelConfig, ranks: int, kernels: str) -> None:
    """Gradients of experts are sums in another order where balanced ranks copy some."""
    assert model.experts is not None
    assert model.experts_per_token is not None
    keys = {**FOUR, **F32, "ep": ranks, "router": RouterLosses(0.1, 0.01)}
    room = dropping(model.experts / model.experts_per_token)
    all_sent = train(make_program(model, **keys, **room), 4, kernels=kernels, poison=True, check_memory=True)
    balanced = train(make_program(model, **keys), 4, kernels=kernels)
    assert losses(all_sent)[0] == losses(balanced)[0]
    assert np.allclose(losses(all_sent), losses(balanced), rtol=2e-6)
    assert all(step.to_json()["dropped_rows"] == 0 for step in all_sent.done)


@frozen
class Seen:
    """Operands of an mlp's forward and backward on one rank, once they have run."""

    forward: dict[str, F64] = field(factory=dict)
    backward: dict[str, F64] = field(factory=dict)


def seen(program: Program, router: str) -> list[Seen]:
    """Run one step, and return what the first mlp reads and makes, by rank."""
    kernels, chosen = kernel_set("reference"), run_settings(1, kernels="reference", poison=True)
    run = prepare(program, stream_for(program), chosen, kernels, verified=True)
    start_from_weights(run.engine, Given(named_parameters(program.model), with_router(program.model, router)))
    found = []

    def note(into: dict[str, F64], views: dict[str, Any]) -> None:
        into |= {name: np.array(view, np.float64) for name, view in views.items() if view.dtype == np.float32}

    for rank in (rank for ranks in run.engine.ranks for rank in ranks):
        found.append(Seen())
        for instruction in (each for stream in rank.stage.streams.values() for each in stream):
            if instruction.keyword in ("forward", "backward") and instruction.blocks == ("mlp.0",):
                bound = run.engine.bound[rank.place, id(instruction)]
                bound.then(note, {"into": getattr(found[-1], instruction.keyword), "views": rank.by_role(instruction)})
    run.engine.run_step(0)
    return found


def near(found: F64, exact: F64, what: str) -> None:
    """Fail unless two arrays differ by no more than rounding: logits of hot experts are 150, known to 1e-5 in f32."""
    assert np.abs(found - exact.reshape(found.shape)).max() <= 1e-4 * np.abs(exact).max(), what


@pytest.mark.parametrize("router", ["drawn", "one-hot", "hot-pair", "ragged", "equal"])
@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize(("name", "ranks"), [("experts", 4), ("normalised", 2), ("scaled", 2)])
@pytest.mark.sampled(6)
def test_forward_and_gradients_are_those_of_plain_loops(name: str, ranks: int, factor: float, router: str) -> None:
    """Losses of routers are of all choices, also of dropped ones."""
    keys = {**FOUR, **F32, "micro_batches": 1, "ep": ranks, "zero": 0, "router": RouterLosses(0.1, 0.01)}
    program = make_program(MODELS[name], **keys, **dropping(factor))
    model, own = program.model, rank_model(program.model, program.plan)
    parameters = trained_parameters(own, block("mlp", 0))
    found = seen(program, router)
    dropped = False
    for first in range(0, 4, ranks):
        group = found[first : first + ranks]
        held = [{each.weight: part(rank.forward["w"], each) for each in parameters} for rank in group]
        weights = held[0] | {name: np.concatenate([each[name] for each in held]) for name in held[0] if is_stack(name)}
        assert model.experts_per_token is not None
        oracle = Oracle(
            *(weights, model.experts_per_token, factor, model.router_normalised, model.norm_eps),
            *(model.residual_scale, 0.1, 0.01),
        )
        made = [oracle.forward(rank.forward["x"]) for rank in group]
        dropped |= any(not kept for _, each in made for *_, kept in each["rows"])
        back = [oracle.backward(each, rank.backward["dy"]) for (_, each), rank in zip(made, group, strict=True)]
        for number, rank in enumerate(group):
            near(rank.forward["y"], made[number][0], "y")
            near(rank.backward["dx"], back[number][0], "dx")
            for each in parameters:
                exact = back[number][1][each.weight]
                if is_stack(each.weight):
                    exact = np.split(sum(of_rank[1][each.weight] for of_rank in back), ranks)[number]
                near(part(rank.backward["g"], each), exact, each.weight)
    assert dropped or router == "drawn"


def part(flat: F64, parameter: Parameter) -> F64:
    """A parameter of a block's flat tensor."""
    return flat[parameter.offset : parameter.offset + parameter.elements].reshape(parameter.shape)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("keys", [{"ep": 2}, {"ep": 4, "zero": 3}, {"ep": 2, "pp": 2, "dp": 2, "cuts": (1,)}], ids=str)
@pytest.mark.sampled(6)
def test_any_router_fits_the_addresses_of_the_program(router: str, factor: float, keys: dict[str, Any]) -> None:
    """Released bytes are poisoned and reads are checked: `fast` and `reference` agree, so nothing else is read."""
    program, values = make_program(EXPERTS, **{**FOUR, **F32, **keys}, **dropping(factor)), with_router(EXPERTS, router)
    checked = trained(program, values, 2, kernels="fast", check_memory=True, poison=True)
    plain = trained(program, values, 2, kernels="reference")
    assert np.allclose(losses(checked), losses(plain), rtol=5e-6)
    assert np.isfinite(losses(checked)).all()


@pytest.mark.parametrize("policy", ["joint", "full", "attention", "auto"])
def test_passes_do_not_change_bits(policy: str) -> None:
    keys: dict[str, Any] = {"pp": 3, "cuts": (1, 2), "ep": 2, "zero": 2, **dropping()}
    expected = train(make_program(SIX_EXPERTS, **{**FOUR, **keys}), 2)
    same_bits(expected, train(placed(policy, SIX_EXPERTS, **keys), 2, poison=True, check_memory=True))


@pytest.mark.parametrize(
    "keys",
    [{"zero": 0}, {"zero": 3}, {"pp": 3, "cuts": (1, 2)}, {"pp": 3, "cuts": (1, 2), "name": "full-save"}],
    ids=str,
)
def test_stages_and_levels_do_not_change_bits(keys: dict[str, Any]) -> None:
    common = {**FOUR, **F32, "router": RouterLosses(0.5, 0.1), "ep": 2, **dropping(0.75)}
    expected = train(make_program(EXPERTS, **common, zero=1), 3)
    other = train(make_program(EXPERTS, **{**common, **keys}), 3)
    assert losses(expected) == losses(other)
    same_state_of_blocks(expected, other)


def test_the_order_of_instructions_does_not_change_bits() -> None:
    program = make_program(EXPERTS, **{**FOUR, "pp": 2, "dp": 2, "cuts": (1,)}, ep=2, zero=2, **dropping())
    expected = train(program, 2)
    for seed in range(20):
        same_bits(expected, train(program, 2, interleave_seed=seed))


# What is told


@pytest.mark.parametrize(("factor", "share"), [(0.5, 0.75), (1.0, 0.5), (2.0, 0.0), (None, 0.5)])
def test_a_step_tells_which_part_of_its_rows_is_dropped(factor: float | None, share: float) -> None:
    """With equal logits all 20 tokens go to the same two of four experts, which have room for 10 of them each."""
    program = make_program(EXPERTS, **{**FOUR, **F32}, ep=2, **dropping(factor))
    run = trained(program, with_router(EXPERTS, "equal"), 1, kernels="fast")
    assert run.done[0].to_json()["dropped_rows"] == share
    assert dropped_share(named_routing("one-hot", 4, 2, 2), EXPERTS, program.plan) == share
    balanced = train(make_program(EXPERTS, **FOUR, ep=2), 1)
    assert "dropped_rows" not in balanced.done[0].to_json()


def test_an_evaluation_drops_rows_too_and_changes_no_bit() -> None:
    program = make_program(SIX_EXPERTS, **{**FOUR, **F32, "zero": 3}, ep=2, **dropping())
    run = start(program, 3, poison=True)
    held = held_out(make_stream(program.model, 900), program.plan)
    assert all(np.isfinite(held.loss(run.engine)) for _ in run.steps())
    other = train(program, 3)
    same_bits(run, other)
    assert [step.to_json()["dropped_rows"] for step in run.done] == [
        each.to_json()["dropped_rows"] for each in other.done
    ]


# What there is room for, and what it costs


@pytest.mark.parametrize(
    ("factor", "most"), [(0.5, 5), (1.0, 10), (1.01, 11), (1.1, 11), (1.7, 17), (2.0, 20), (9, 20)]
)
def test_a_factor_counts_as_it_is_written(factor: float, most: int) -> None:
    """1.1 times 10 is a little above 11 in binary."""
    plan = make_plan(EXPERTS, **FOUR, ep=2, **dropping(factor))
    assert capacity_of(EXPERTS, plan) == most
    assert rows_of_rank(EXPERTS, plan) == min(4 * most, 2 * 40)


def test_ranks_hold_no_copies_and_room_for_what_may_come() -> None:
    held = {}
    for name, keys in {"balanced": {}, "0.5": dropping(0.5), "1": dropping(1.0), "2": dropping(2.0)}.items():
        (stage,) = make_program(EXPERTS, **{**FOUR, "zero": 0}, ep=2, **keys).stages
        roles = {operand.role for stream in stage.streams.values() for each in stream for operand in each.operands}
        assert {"pool", "dpool"} <= roles if name == "balanced" else not {"pool", "dpool"} & roles
        held[name] = stage.arena_bytes
    assert held["0.5"] < held["1"] < held["balanced"]
    assert held["1"] < held["2"]


def test_times_assume_balanced_routers() -> None:
    """Above the mean no more rows travel, and no more are computed; below it the others do not."""
    seconds, flops, machine = {}, {}, load_machine(None)
    for factor in (0.5, 1.0, 2.0):
        program = make_program(EXPERTS, **FOUR, ep=2, **dropping(factor))
        seconds[factor] = one_core_step_seconds(program, machine)
        (routine,) = {
            instruction.routine
            for instruction in program.stages[0].streams[Engine.COMPUTE]
            if instruction.keyword == "forward_experts"
        }
        flops[factor] = routine_flops(program.routines[routine])
        assert program.routines[routine].expected_rows == ((80, 40) if factor == 2.0 else None)
    assert flops[0.5] * 2 == flops[1.0] == flops[2.0]
    assert seconds[0.5] < seconds[1.0] == pytest.approx(seconds[2.0])


@pytest.mark.parametrize("expected", [None, (80, 39), (81, 40)])
def test_a_routine_that_expects_other_rows_is_rejected(expected: tuple[int, int] | None) -> None:
    program = make_program(EXPERTS, **FOUR, ep=2, **dropping(2.0))
    program.routines = tuple(
        evolve(each, expected_rows=expected) if each.expected_rows is not None else each for each in program.routines
    )
    with pytest.raises(DiagnosticError, match="it expects rows"):
        check_program(program)


@pytest.mark.parametrize("name", ["rows", "row_weights", "bounds", "counts", "made", "drows", "dsent", "drow_weights"])
def test_a_schedule_with_less_room_is_rejected(name: str) -> None:
    """Or with as much as if experts were copied."""
    module = api.compile(EXPERTS, make_plan(EXPERTS, **FOUR, ep=2, **dropping()))
    (stage,) = module.stages
    tensor = next(each for each in stage.tensors.values() if each.slot == name)
    rows, *rest = tensor.type.shape
    tensor.type = evolve(tensor.type, shape=(rows - 1, *rest))
    with pytest.raises(DiagnosticError):
        check(module)


# Files, and what is refused


@pytest.mark.parametrize("factor", [0.5, 2.0, None])
def test_a_program_is_the_same_from_its_files(factor: float | None) -> None:
    program = make_program(SIX_EXPERTS, **FOUR, ep=2, zero=3, **dropping(factor))
    data = program_bytes(program)
    again = parse_program(data, "experts.rtx")
    check_program(again)
    assert program_bytes(again) == data
    same_bits(train(program, 2), train(again, 2))
    module = api.compile(SIX_EXPERTS, make_plan(SIX_EXPERTS, **FOUR, ep=2, **dropping(factor)))
    text = print_module(module)
    assert print_module(parse_module(text)) == text


@pytest.mark.parametrize("dispatch", [ExpertDispatch(), ExpertDispatch("capacity", 0.5)])
def test_a_run_goes_on_with_another_dispatch(dispatch: ExpertDispatch, tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoint")
    written = train(make_program(SIX_EXPERTS, **FOUR, **F32, ep=2, **dropping()), 2, save=place)
    run = start(make_program(SIX_EXPERTS, **FOUR, **F32, ep=2, experts=dispatch), 4, resume=place)
    same_state_of_blocks(written, run)
    list(run.steps())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ep": 1, **dropping()}, 'dispatch = "capacity" changes nothing with one expert rank'),
        (
            {"ep": 1, "experts": ExpertDispatch("balanced", 1.5)},
            "capacity_factor = 1.5 changes nothing with one expert",
        ),
        ({"ep": 2, "experts": ExpertDispatch("balanced", 1.5)}, 'changes nothing with dispatch = "balanced"'),
        ({"ep": 2, **dropping(0.0)}, "a number above 0"),
        ({"ep": 2, "experts": ExpertDispatch("drop")}, "dispatch"),
    ],
)
def test_what_a_capacity_does_not_follow_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DiagnosticError, match=words):
        make_plan(EXPERTS, **{"pp": 1, "cuts": (), "dp": 2, **keys})
