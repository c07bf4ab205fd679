"""Stages below the lowest parameter that trains only go forward, and change no bit of what trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.analysis.actions import actions_of_module, parse_torch_csv
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.ops.collectives import AllReduceScalar
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import parse_program, program_bytes
from tests.end_to_end.chunk_runs import Outcome, outcome, outcome_of
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, make_plan, start, train
from tests.end_to_end.toys import EXPERTS
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program

DEEP = evolve(MODEL, layers=4)
CLIPPED = evolve(OPTIMIZER, clip="global", max_norm=0.05)
LOWER = "model.embed_tokens.*, model.layers.0.*, model.layers.1.*"
TRAININGS = {
    "upper half": Training(freeze=LOWER),
    "adapters above": Training(method="lora", rank=4, targets=r"re:.*\.[23]\.self_attn\.(q|v)_proj"),
    "packed below": Training(method="lora", rank=4, targets=r"re:.*\.3\..*_proj", base="int4-block"),
    "the head alone": Training(freeze="model.embed_tokens.*, model.layers.*"),
    "one layer": Training(freeze=f"{LOWER}, model.layers.3.*, model.norm.*, lm_head.*"),
}
ONE: dict[str, Any] = {"pp": 1, "dp": 1, "zero": 0, "micro_batches": 6, "view_dtype": "f32"}
FOUR: dict[str, Any] = {"pp": 4, "cuts": (1, 2, 3)}
CHUNKS: dict[str, Any] = {"pp": 2, "chunks": 2, "cuts": (1, 2, 3)}
REPLICAS: dict[str, Any] = {"dp": 2, "micro_batches": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two stages": {"pp": 2, "cuts": (2,)},
    "four stages": FOUR,
    "gpipe": {**FOUR, "schedule": "gpipe"},
    "interleaved": {**CHUNKS, "schedule": "interleaved"},
    "breadth-first in a vee": {**CHUNKS, "layout": "vee", "schedule": "breadth-first"},
    "slices": {**FOUR, "slices": (4, 3, 3)},
    "interleaved slices": {**CHUNKS, "slices": (5, 5)},
    "tensor ranks": {"pp": 2, "cuts": (2,), "tp": 2},
    "zero 0": {**FOUR, **REPLICAS},
    "zero 1": {**FOUR, **REPLICAS, "zero": 1},
    "zero 2": {**FOUR, **REPLICAS, "zero": 2, "reduce": "each-micro-batch"},
    "zero 3": {**FOUR, **REPLICAS, "zero": 3},
    "zero 3 with flags": {**FOUR, **REPLICAS, "zero": 3, "view_dtype": "f16"},
    "zero 3, prefetched": {**FOUR, **REPLICAS, "zero": 3, "view_dtype": "f16", "name": "tuned-1f1b"},
    "clipped": {**FOUR, "optimizer": CLIPPED},
    "dynamic scale": {**FOUR, "view_dtype": "f16", "optimizer": CLIPPED},
    "recovered": {**FOUR, "name": "baseline-1f1b"},
    "everything kept": {**FOUR, "name": "full-save"},
    "documents": {**FOUR, "attention_mask": "document"},
}
SAME = ("dp", "micro_batches", "reduce", "slices", "tp", "view_dtype", "optimizer", "attention_mask")
"""Keys that change a bit: the run on one stage has them too."""


def module_of(training: Training, model: ModelConfig = DEEP, name: str = "ratrain", **keys: Any) -> Module:
    return api.compile(model, make_plan(model, **{**ONE, **keys, "training": training}), passes=strategy(name).passes)


def on_one_stage(training: Training, layout: dict[str, Any], model: ModelConfig = DEEP) -> Program:
    keys = {key: layout[key] for key in SAME if key in layout}
    if keys.get("reduce") == "each-micro-batch":
        keys["zero"] = 2
    return api.emit(module_of(training, model, **keys))


def same(mine: Outcome, theirs: Outcome) -> bool:
    """Tell whether losses, master weights and moments are equal, whichever stage has them."""
    return mine[0] == theirs[0] and mine[1] == theirs[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.sampled(4)
def test_a_layout_changes_no_bit(training: str, layout: str) -> None:
    trained, keys = TRAININGS[training], LAYOUTS[layout]
    module = module_of(trained, **keys)
    assert module.topology.forward_only > 0
    expected = outcome(on_one_stage(trained, keys), 3)
    assert same(outcome(api.emit(module), 3, check_memory=True), expected)
    assert len({*expected[0]}) == 3


@pytest.mark.parametrize("settings", [{"threads": 2}, {"interleave_seed": 1}, {"interleave_seed": 7}], ids=str)
@pytest.mark.parametrize("layout", ["four stages", "breadth-first in a vee", "dynamic scale"])
def test_threads_and_orders_change_no_bit(layout: str, settings: dict[str, int]) -> None:
    program = api.emit(module_of(TRAININGS["upper half"], **LAYOUTS[layout]))
    assert same(outcome(program, 3, **settings), outcome(program, 3))


@pytest.mark.parametrize("keys", [{"view_dtype": "f16", "optimizer": CLIPPED}, {"optimizer": CLIPPED}, {}], ids=str)
@pytest.mark.sampled(2)
def test_ranks_of_processes_have_the_losses_and_the_state_of_one_process(keys: dict[str, Any], tmp_path: Path) -> None:
    """Each rank knows its own stage alone: norm, flags, totals of a step and checkpoints are of all of them."""
    program = api.emit(module_of(TRAININGS["upper half"], **FOUR, **REPLICAS, zero=1, **keys))
    alone = train(program, 3)
    folder = str(tmp_path / "c")
    ranks = trained_by_threads(program, 3, save=folder)
    reports = [[(step.report.loss, step.report.gradient_norm) for step in run.done] for run in (alone, *ranks)]
    assert all(each == reports[0] for each in reports)
    for run in ranks:
        run.close()
    assert same(outcome_of(start(program, 0, resume=folder)), ([], outcome_of(alone)[1]))


def test_the_last_norm_trains_alone_beside_a_frozen_tied_table() -> None:
    """The head's backward then makes no gradient of its table; that of the norm has the bits of full training's."""
    tied = evolve(DEEP, tied_embeddings=True)
    norm = Training(freeze="model.embed_tokens.*, model.layers.*")
    alone = outcome(api.emit(module_of(norm, tied, **FOUR)), 1)
    assert same(alone, outcome(on_one_stage(norm, {}, tied), 1))
    whole = outcome(on_one_stage(Training(), {}, tied), 1)
    assert alone[0] == whole[0]
    where = 4 * parameters(tied, block("head"))[-1].offset
    for name in ("p", "m1", "m2"):
        mine, theirs = alone[1][f"head {name}"], whole[1][f"head {name}"]
        assert mine[: 4 * tied.hidden_size] == theirs[where : where + 4 * tied.hidden_size]


def test_experts_with_router_losses_go_forward_only_below() -> None:
    model = evolve(EXPERTS, layers=4)
    training = Training(freeze=LOWER)
    module = module_of(training, model, **FOUR)
    assert module.topology.forward_only == 2
    assert same(outcome(api.emit(module), 2), outcome(on_one_stage(training, FOUR, model), 2))


def test_a_text_and_a_program_are_read_back() -> None:
    module = module_of(TRAININGS["upper half"], **LAYOUTS["dynamic scale"])
    text = print_module(module)
    assert print_module(parse_module(text)) == text
    assert "%norm = all_reduce_scalar norm all\n" in text.replace("    ", "")
    read = parse_program(program_bytes(api.emit(module)), "m.rtx")
    assert same(outcome(read, 2), outcome(api.emit(parse_module(text)), 2))


def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    training, folder = TRAININGS["adapters above"], str(tmp_path / "c")
    whole = train(api.emit(module_of(training, **FOUR)), 4)
    train(api.emit(module_of(training, **FOUR)), 2, save=folder)
    rest = train(api.emit(module_of(training, **LAYOUTS["interleaved"])), 2, resume=folder)
    assert [step.report.loss for step in rest.done] == [step.report.loss for step in whole.done][2:]


def test_ranks_of_such_a_stage_meet_the_others_with_nothing() -> None:
    """Norm and flags are of all ranks: these bring none, and hold frozen parameters and the loss scale alone."""
    module = module_of(TRAININGS["upper half"], **LAYOUTS["dynamic scale"])
    for stage in module.stages[:2]:
        scalars = [op for op in stage.ops if isinstance(op, AllReduceScalar)]
        assert [op.quantity.value for op in scalars] == ["norm", "flags"]
        assert not any(op.reads or op.blocks for op in scalars)
        carried = {each.kind for each in stage.tensors.values() if each.carried}
        assert carried == {StateKind.FROZEN, StateKind.SCALAR}
    fixed = module_of(TRAININGS["upper half"], **FOUR)
    assert {each.kind for each in fixed.stages[0].tensors.values() if each.carried} == {StateKind.FROZEN}
    text = print_module(module)
    with pytest.raises(DiagnosticError, match=r"no parameter of mlp\.0 trains"):
        api.check(parse_module(text.replace("all_reduce_scalar norm all", "all_reduce_scalar norm all mlp.0", 1)))


@pytest.mark.parametrize("layout", ["four stages", "gpipe", "interleaved", "zero 1"])
def test_a_step_is_shorter_than_with_a_backward_through_all_stages(layout: str) -> None:
    """Add to the adapters one norm of the first layer, whose gradient comes back through every stage."""
    above = evolve(TRAININGS["upper half"], freeze="model.embed_tokens.*, model.layers.0.*, model.layers.1.*")
    below = evolve(
        above,
        freeze="model.embed_tokens.*, model.layers.0.*_proj.*, model.layers.0.post*, model.layers.1.*",
    )
    steps = [api.simulate(api.emit(module_of(each, **LAYOUTS[layout]))) for each in (above, below)]
    assert steps[0].step_seconds < 0.95 * steps[1].step_seconds


def test_schedules_with_halves_are_refused_by_name() -> None:
    with pytest.raises(DiagnosticError, match="backwards in halves"):
        module_of(TRAININGS["the head alone"], **{**CHUNKS, "layout": "vee", "schedule": "zb-v"})
    with pytest.raises(DiagnosticError, match="backwards in halves"):
        module_of(TRAININGS["the head alone"], name="zb-h1", **FOUR)


def table_rows(module: Module) -> list[list[str]]:
    return [[str(each) for each in row] for row in actions_of_module(module).rows]


@pytest.mark.parametrize("lowered", [False, True])
def test_a_table_is_exported_and_placed_as_it_stands(lowered: bool, tmp_path: Path) -> None:
    module = module_of(TRAININGS["upper half"], **LAYOUTS["zero 1"])
    place = tmp_path / "s.csv"
    place.write_text(api.export(module, lowered=lowered).text)
    plan = make_plan(DEEP, **{**ONE, **LAYOUTS["zero 1"], "training": TRAININGS["upper half"]})
    placed = api.lowered(DEEP, plan)
    api.run_passes(placed, f"place-from-file{{path={place}}}")
    assert placed.plan.schedule == "1f1b"
    kinds = [[text for text in row if "RED" not in text] for row in table_rows(placed)]
    if lowered:
        assert kinds == [[text for text in row if "RED" not in text] for row in table_rows(module)]
    assert api.lint(str(place), forward_only=2).to_json()["worth"]["in_flight"] == [0, 0, 2, 1]
    assert main(["lint", str(place), "--forward-only", "2"]) == 0
    assert main(["lint", str(place)]) == 1


WHOLE = "0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0,3B0\n"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (WHOLE, "'0B0': nothing below stage 2 trains"),
        (WHOLE.replace(",0B0", ""), "'1B0': nothing below stage 2 trains"),
        ("0F0\n1F0\n2F0\n3F0,3B0\n", "'2F0' has no backward"),
    ],
)
def test_a_table_with_other_backwards_than_the_plan_is_refused(table: str, text: str, tmp_path: Path) -> None:
    place = tmp_path / "s.csv"
    place.write_text(table)
    parse_torch_csv(table, "s.csv")
    plan = make_plan(DEEP, **{**ONE, **FOUR, "micro_batches": 1, "training": TRAININGS["upper half"]})
    module = api.lowered(DEEP, plan)
    with pytest.raises(DiagnosticError, match=text):
        api.run_passes(module, f"place-from-file{{path={place}}}")


@pytest.mark.parametrize("layout", ["four stages", "interleaved", "recovered"])
def test_explanations_know_stages_that_only_go_forward(layout: str) -> None:
    module = module_of(TRAININGS["upper half"], **LAYOUTS[layout])
    for stage in module.stages:
        blocks = {row["block"] for row in api.explain(module, stage=stage.index).to_json()["recovery"]}
        assert blocks.isdisjoint({"attention.0", "mlp.0", "attention.1", "mlp.1"})


# A layer takes longer than its launches, so that steps show what stages compute.
SLOW = {"fp16_peak": 1e8, "ddr_bandwidth": 1e10, "link_bandwidth": 1e9, "collective_chunk": 4096.0}


def step_seconds(model: ModelConfig, plan: Plan) -> float:
    found = evaluate(Task(model, plan, strategy("full-save").passes, with_constants(load_machine(None), SLOW)))
    assert found.step_seconds is not None
    return found.step_seconds


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", TRAININGS)
def test_cuts_that_count_what_trains_are_no_slower(name: str, stages: int) -> None:
    """Than those that count all layers alike, on a machine whose time is that of products."""
    deep = evolve(MODEL, layers=8, ffn_size=64)
    training, seconds = TRAININGS[name], {}
    for counted in (Training(), training):
        cuts = balance_cuts(deep, stages, 16, counted)
        plan = make_plan(deep, pp=stages, dp=1, cuts=cuts, micro_batches=8, seq_len=16, zero=0, training=training)
        seconds[counted] = step_seconds(deep, plan)
    assert seconds[training] <= 1.01 * seconds[Training()]
