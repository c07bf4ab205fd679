"""Masters, moments and frozen parameters in another memory: the same training, bit for bit, with less in DDR."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import STORES, Home, StateKind
from ratrain.ratrain_ir.model.blocks import block_chain, has_backward
from ratrain.ratrain_ir.model.sharded_blocks import frozen_elements
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import Release, Update
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.program.instruction import Access, ProgramTensor
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Execution, RunSettings
from ratrain.targets.simulator.figures import simulated
from tests.end_to_end.tiny_runs import MODEL, instructions, losses, make_plan, same_bits, start, stream_for, train
from tests.end_to_end.toys import SHARED_EXPERT
from tests.mutation.subjects import DEEPER, GEMMA2, WITH_STORES
from tests.program_files import prepare
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

LORA = Training(method="lora", rank=4)
PLANS: dict[str, dict[str, Any]] = {
    "sharded": {"zero": 1},
    "whole": {"zero": 0, "dp": 1},
    "gathered for each use, one replica": {"zero": 3, "dp": 1},
    "gathered for each use": {"zero": 3, "reduce": "each-micro-batch"},
    "peers": {"tp": 2},
    "peers, one replica": {"tp": 2, "zero": 3, "dp": 1},
    "slices": {"slices": (4, 3, 3), "zero": 3, "dp": 1},
    "split": {"schedule": "zb-h1", "zero": 3, "dp": 1},
    "overflows": {"loss_scale": 2.0**24, "zero": 3, "dp": 1},
    "adapters": {"training": LORA, "zero": 1},
    "partly frozen": {"training": Training(freeze="model.embed_tokens.*, *.mlp.*"), "zero": 3, "dp": 1},
    "experts": {"model": SHARED_EXPERT, "router": RouterLosses(0.1, 0.01), "zero": 3},
}
ORDER = "recompute{policy=attention},bucket-grad-sync,schedule-update,insert-prefetch,allocate-ddr"


def module_of(plan: dict[str, Any], offload: str, machine: Machine = WITH_STORES) -> Module:
    place = "place-schedule" if "slices" in plan else "place-zb-h1" if "schedule" in plan else "place-1f1b"
    passes = f"{place},{offload}{ORDER}"
    return api.compile(plan.get("model", MODEL), make_plan(**plan), passes=passes, machine=machine)


def program_of(plan: dict[str, Any], offload: str, machine: Machine = WITH_STORES) -> Program:
    return api.emit(module_of(plan, offload, machine), machine=machine)


@pytest.mark.parametrize("home", [home.value for home in STORES])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(6)
def test_offloaded_state_trains_the_same_bits(plan: str, home: str) -> None:
    plain = train(program_of(PLANS[plan], ""), 3)
    for what in ("all", "moments"):
        program = program_of(PLANS[plan], f"offload-state{{home={home} what={what}}},")
        watched = train(parse_program(program_bytes(program), "state.rtx"), 3, check_memory=True, poison=True)
        assert losses(watched) == losses(plain)
        same_bits(watched, plain)


def test_views_gathered_for_each_use_of_one_replica_train_the_same_bits() -> None:
    whole, gathered = (train(program_of({"zero": zero, "dp": 1}, ""), 3) for zero in (0, 3))
    assert losses(whole) == losses(gathered)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled(25)
def test_any_order_that_the_waits_allow_gives_the_same_bits(seed: int) -> None:
    program = program_of(PLANS["gathered for each use, one replica"], "offload-state{home=file},")
    same_bits(train(program, 2, interleave_seed=seed, poison=True), train(program, 2))


def test_threads_give_the_same_bits() -> None:
    program = program_of(PLANS["gathered for each use"], "offload-state{home=file},")
    same_bits(train(program, 2, threads=2), train(program, 2))


@pytest.mark.parametrize("home", [home.value for home in STORES])
def test_a_run_goes_on_from_its_checkpoint_whatever_holds_the_state(home: str, tmp_path: Path) -> None:
    plan = PLANS["gathered for each use, one replica"]
    plain, offloaded = program_of(plan, ""), program_of(plan, f"offload-state{{home={home}}},")
    whole = train(plain, 4)
    train(offloaded, 2, save=str(tmp_path / "run"))
    for program in (plain, offloaded):
        same_bits(train(program, 2, resume=str(tmp_path / "run")), whole)


def test_of_state_nothing_is_left_in_ddr() -> None:
    plan = PLANS["gathered for each use, one replica"]
    kept, moved = program_of(plan, ""), program_of(plan, "offload-state{home=file},")
    for before, after in zip(kept.stages, moved.stages, strict=True):
        state = sum(t.type.nbytes for t in before.tensors if t.kind in (StateKind.MASTER, StateKind.MOMENT))
        assert after.bytes_in(Home.FILE) >= state
        assert after.arena_bytes < before.arena_bytes - state // 2


def test_updates_that_stream_are_the_hosts_and_begin_as_soon_as_gradients_are_final() -> None:
    plan = make_plan(zero=3, dp=1, pp=1, micro_batches=1)
    passes = "place-1f1b,offload-state{home=file},bucket-grad-sync{bytes=1},schedule-update,allocate-ddr"
    (stage,) = api.compile(MODEL, plan, passes=passes, machine=WITH_STORES).stages
    updates = [place for place, op in enumerate(stage.ops) if type(op) is Update]
    assert {op.engine for op in stage.ops if type(op) is Update} == {Engine.HOST}
    last = max(place for place, op in enumerate(stage.ops) if op.engine is Engine.COMPUTE)
    assert updates[0] < last


def test_texts_say_where_the_state_is() -> None:
    module = module_of(PLANS["sharded"], "offload-state{home=file},")
    assert first_difference(module, parse_module(print_module(module), file="state.rtir")) is None


def test_state_in_a_file_needs_a_workspace_to_stream_through() -> None:
    module = module_of(PLANS["whole"], "offload-state{home=file},")
    update = next(op for op in module.stages[0].ops if type(op) is Update)
    update.scratch = ()
    with pytest.raises(DiagnosticError, match=r"streams %p\.\S+ through a workspace of 0 bytes"):
        check(module)


def test_streams_share_the_way_to_their_memory() -> None:
    """Through a narrow way no step is shorter than all bytes that pass through it."""
    constants = WITH_STORES.constants
    narrow = evolve(WITH_STORES, constants=constants | {"file_fetch": evolve(constants["file_fetch"], value=1e4)})
    program = program_of({"zero": 3, "dp": 1, "pp": 1}, "offload-state{home=file},", narrow)
    figures, _ = simulated(program, narrow)
    read, _ = program.stages[0].moved_bytes(Home.FILE)
    assert read / 1e4 <= figures.step_seconds < 1.2 * read / 1e4


def test_a_machine_without_the_memory_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="the machine has none of it"):
        api.compile(MODEL, make_plan(), passes="offload-state{home=host},allocate-ddr")


def test_a_step_moves_the_bytes_that_its_program_says() -> None:
    program = program_of(
        PLANS["gathered for each use, one replica"] | {"loss_scale": 1024.0}, "offload-state{home=file},"
    )
    run = train(program, 3)
    memory = run.engine.memory_use()
    state = 4 * sum(
        tensor.type.elements for stage in program.stages for tensor in stage.tensors if tensor.kind is StateKind.MASTER
    )
    assert memory.files_a_step.written == 3 * state
    assert (memory.files.read, memory.files.written) == (
        3 * memory.files_a_step.read,
        3 * memory.files_a_step.written,
    )


def test_more_than_a_process_may_hold_is_refused() -> None:
    program = program_of(PLANS["whole"], "offload-state{home=file},")
    with pytest.raises(DiagnosticError, match=r"more than the 1\.00 MiB of --ram"):
        prepare(
            program, stream_for(program), RunSettings(1, execution=Execution(ram_bytes=1 << 20)), kernel_set("fast")
        )


FROZEN: dict[str, dict[str, Any]] = {
    "adapters": {"training": LORA, "zero": 1},
    "adapters, packed base": {"training": evolve(LORA, base="nf4"), "zero": 2, "reduce": "each-micro-batch"},
    "adapters, gathered for each use": {"training": evolve(LORA, base="int8-block"), "zero": 3, "dp": 1},
    "adapters, between replicas": {"training": evolve(LORA, base="nf4"), "zero": 3},
    "partly frozen, between replicas": {
        "training": Training(freeze="model.embed_tokens.*, *.mlp.*"),
        "zero": 3,
        "reduce": "each-micro-batch",
    },
    "adapters, peers": {"training": evolve(LORA, base="int4-block"), "tp": 2},
    "adapters, slices": {"training": LORA, "slices": (4, 3, 3)},
    "adapters, chunks": {
        "model": DEEPER,
        "training": LORA,
        "chunks": 2,
        "cuts": (1, 2, 3),
        "schedule": "interleaved",
    },
    "adapters of experts": {
        "model": SHARED_EXPERT,
        "training": evolve(LORA, targets="q_proj, experts.down_proj"),
        "zero": 1,
    },
    "partly frozen": {"training": Training(freeze="model.embed_tokens.*, *.mlp.*"), "zero": 1},
    "frozen below": {"training": Training(freeze="model.embed_tokens.*, model.layers.0.*"), "pp": 1, "dp": 1},
    "norms after blocks, peers": {"model": GEMMA2, "training": evolve(LORA, targets="q_proj"), "tp": 2, "dp": 1},
}
FETCHED = (
    "recompute{policy=full},insert-prefetch{depth-blocks=2},allocate-ddr",
    "insert-prefetch{depth-bytes=1},recompute{policy=attention},allocate-ddr",
    "recompute{policy=none},bucket-grad-sync,schedule-update,allocate-ddr",
    "joint-order,allocate-ddr",
)
"""Pipelines behind `offload-state`: fetches two blocks ahead, one block's at a time, right before the use, chosen."""


def fetched_program(plan: dict[str, Any], order: str, offload: str) -> Program:
    """The program of a plan with frozen parameters, with them in another memory or, where `offload` is empty, in DDR."""
    keys = {name: value for name, value in plan.items() if name != "model"}
    model = plan.get("model", MODEL)
    place = "" if "schedule" in plan else "place-schedule," if "slices" in plan else "place-1f1b,"
    depths = "{depth-blocks=2}", "{depth-bytes=1}"
    for depth in () if offload or plan.get("zero") == 3 else depths:  # they would change nothing
        order = order.replace(f"insert-prefetch{depth}", "insert-prefetch")
    module = api.compile(model, make_plan(model, **keys), passes=f"{place}{offload}{order}", machine=WITH_STORES)
    return api.emit(module, machine=WITH_STORES)


def of_kind(program: Program, kind: StateKind) -> list[list[ProgramTensor]]:
    """Tensors of a kind, by stage."""
    return [[tensor for tensor in stage.tensors if tensor.kind is kind] for stage in program.stages]


@pytest.mark.parametrize("home", [home.value for home in STORES])
@pytest.mark.parametrize("order", FETCHED)
@pytest.mark.parametrize("plan", FROZEN)
@pytest.mark.sampled(8)
def test_frozen_parameters_elsewhere_train_the_same_bits(plan: str, order: str, home: str) -> None:
    kept, moved = (
        fetched_program(FROZEN[plan], order, offload) for offload in ("", f"offload-state{{home={home} what=views}},")
    )
    plain, found = (
        train(kept, 3),
        train(parse_program(program_bytes(moved), "m.rtx"), 3, check_memory=True, poison=True),
    )
    assert losses(found) == losses(plain)
    same_bits(found, plain)
    for before, after in zip(of_kind(kept, StateKind.FROZEN), of_kind(moved, StateKind.FROZEN), strict=True):
        ours, theirs = ([tensor for tensor in tensors if tensor.carried] for tensors in (after, before))
        assert {tensor.home for tensor in ours} <= {Home(home)}
        assert sum(tensor.type.nbytes for tensor in ours) == sum(tensor.type.nbytes for tensor in theirs)


@pytest.mark.parametrize("plan", FROZEN)
@pytest.mark.sampled(3)
def test_a_step_reads_frozen_parameters_once_a_pass_and_writes_none(plan: str) -> None:
    program = fetched_program(FROZEN[plan], FETCHED[0], "offload-state{home=file what=views},")
    run = train(program, 3)
    memory, shape = run.engine.memory_use(), program.plan
    model = program.model
    fetched = 0
    for stage, tensors in enumerate(of_kind(program, StateKind.FROZEN)):
        for owner in program.topology.stage_blocks[stage]:
            size = sum(t.type.nbytes for t in tensors if t.carried and t.name.partition(".")[2] == str(owner))
            passes = 1 + has_backward(model, shape, owner)
            fetched += size * passes * shape.micro_batches * max(1, len(shape.slices)) * shape.dp * shape.tp
    assert (memory.files_a_step.read, memory.files_a_step.written) == (fetched, 0)
    filled = (
        sum(t.type.nbytes for ts in of_kind(program, StateKind.FROZEN) for t in ts if t.carried) * shape.dp * shape.tp
    )
    assert memory.files.read == 3 * fetched
    assert memory.files.written <= 2 * filled


def test_frozen_parameters_in_ddr_are_those_of_the_blocks_ahead() -> None:
    """Of 8 layers no more than the present block's and the next one's are there at once."""
    model = evolve(MODEL, layers=8)
    plan = make_plan(model, pp=1, dp=1, training=LORA)
    passes = "place-1f1b,offload-state{what=views},recompute{policy=full},insert-prefetch,allocate-ddr"
    (stage,) = api.compile(model, plan, passes=passes, machine=WITH_STORES).stages
    live: dict[Tensor, int] = {}
    most = 0
    for op in stage.ops:
        live |= {each: each.type.nbytes for each in op.writes if each.kind is StateKind.FROZEN}
        most = max(most, sum(live.values()))
        for each in op.reads if type(op) is Release else ():
            live.pop(each, None)
    sizes = [frozen_elements(model, plan, each) * 2 for each in block_chain(model)]
    assert (
        max(map(sum, pairwise(sizes)))
        <= most
        <= max(a + b + c for a, b, c in zip(sizes, sizes[1:], sizes[2:], strict=False))
    )
    assert not live


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(5)
def test_any_order_that_the_waits_allow_fetches_the_same_bits(seed: int) -> None:
    program = fetched_program(FROZEN["adapters, packed base"], FETCHED[0], "offload-state{home=file what=views},")
    same_bits(train(program, 2, interleave_seed=seed, poison=True), train(program, 2))
    same_bits(train(program, 2, threads=2), train(program, 2))


def test_an_evaluation_fetches_for_forwards_alone(tmp_path: Path) -> None:
    kept, moved = (
        fetched_program(FROZEN["partly frozen"], FETCHED[0], offload)
        for offload in ("", "offload-state{home=file what=views},")
    )
    found = []
    for program in (kept, moved):
        run = start(program, 1, poison=True)
        found.append(run.engine.run_forward(run.engine.batches, 0))
        read = sum(rank.file_traffic.read for ranks in run.engine.ranks for rank in ranks)
    forwards = sum(
        program.stages[stage].tensors[operand.tensor].type.nbytes
        for stage, _, _, item in instructions(program, "fetch")
        for operand in item.operands
        if item.variant == "forward" and operand.access is Access.READ
    )
    assert found[0] == found[1]
    assert read == forwards * program.plan.dp > 0


@pytest.mark.parametrize("home", [home.value for home in STORES])
def test_adapters_go_on_from_a_checkpoint_whatever_holds_what_is_frozen(home: str, tmp_path: Path) -> None:
    plan = FROZEN["adapters, packed base"]
    plain = fetched_program(plan, FETCHED[0], "")
    moved = fetched_program(plan, FETCHED[0], f"offload-state{{home={home} what=views}},")
    whole = train(plain, 4)
    train(moved, 2, save=str(tmp_path / "run"))
    for program in (plain, moved):
        same_bits(train(program, 2, resume=str(tmp_path / "run")), whole)


def test_fetches_take_the_seconds_of_their_bytes() -> None:
    """Through a narrow way a step takes its fetches, and no more than a pass beside them."""
    constants = WITH_STORES.constants
    narrow = evolve(WITH_STORES, constants=constants | {"host_fetch": evolve(constants["host_fetch"], value=1e5)})
    plan = make_plan(pp=1, dp=1, training=LORA)
    passes = "place-1f1b,offload-state{what=views},recompute{policy=full},insert-prefetch,allocate-ddr"
    program = api.emit(api.compile(MODEL, plan, passes=passes, machine=narrow), machine=narrow)
    figures, _ = simulated(program, narrow)
    read, written = program.stages[0].moved_bytes(Home.HOST)
    assert not written
    assert read / 1e5 <= figures.step_seconds < 1.05 * read / 1e5


def test_ranks_of_processes_gather_frozen_parts_from_where_they_are() -> None:
    program = fetched_program(FROZEN["adapters, between replicas"], FETCHED[0], "offload-state{home=file what=views},")
    alone = losses(train(program, 2))
    for run in trained_by_threads(program, 2):
        assert [step.report.loss for step in run.done] == alone
        run.close()


def test_a_gather_reads_from_one_memory() -> None:
    """Masters and frozen parts of a block, between replicas: in one file, but not one of them in the host's memory."""
    plan = FROZEN["partly frozen, between replicas"]
    state, views = (f"offload-state{{home=file what={what}}}," for what in ("all", "views"))
    same_bits(
        train(fetched_program(plan, FETCHED[0], state + views), 2), train(fetched_program(plan, FETCHED[0], ""), 2)
    )
    for both in (f"offload-state,{views}", f"{views}offload-state,"):
        with pytest.raises(DiagnosticError, match=r"would read %\S+ in '(file|host)' and %\S+ in '(host|file)'"):
            fetched_program(plan, FETCHED[0], both)


def test_masters_and_frozen_parameters_may_both_be_elsewhere() -> None:
    plan = FROZEN["partly frozen"]
    both = "offload-state{home=file},offload-state{home=host what=views},"
    kept, moved = (fetched_program(plan, FETCHED[0], offload) for offload in ("", both))
    plain, found = train(kept, 3), train(moved, 3, check_memory=True, poison=True)
    same_bits(found, plain)
