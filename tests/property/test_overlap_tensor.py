"""Exchanges of ranks during other products: plans verify, train to the same bits, and hide them."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import PassContext
from ratrain.passes.placement.overlap_tensor import OverlapTensorPass
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.machine_choice import resized
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.timed_run import simulate
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, same_bits, train
from tests.end_to_end.toys import EXPERTS, GEMMA3, NEOX, OLMO2

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

PLACED = {
    "1f1b": "place-1f1b",
    "gpipe": "place-gpipe",
    "1f1b-ahead": "place-schedule{kind=1f1b-ahead}",
    "zb-h1": "place-zb-h1",
    "seq1f1b": "place-schedule{kind=seq1f1b}",
    "interleaved": "place-schedule{kind=interleaved}",
}
WIDE = evolve(MODEL, layers=6, heads=4, kv_heads=2, head_dim=64, hidden_size=256, ffn_size=704, vocab_size=1000)
BEHIND = (
    "recompute{policy=full}",
    "joint-order",
    "bucket-grad-sync{unit=stage blocking=true},insert-prefetch{depth-blocks=0 blocking=true},recompute{policy=mlp}",
)


@st.composite
def overlapped(draw: st.DrawFn) -> tuple[dict[str, Any], str, str]:
    """Keys of a plan with tensor-parallel, context or expert ranks, and the passes before and after."""
    ranks = draw(st.sampled_from(["tp", "tp", "cp", "ep"]))
    schedule = draw(st.sampled_from([each for each in sorted(PLACED) if ranks != "ep" or each != "zb-h1"]))
    pp = draw(st.integers(2 if schedule == "interleaved" else 1, 2))
    zero, reduce = draw(st.sampled_from([(0, "last"), (1, "last"), (2, "each-micro-batch"), (3, "last")]))
    keys: dict[str, Any] = {"pp": pp, "dp": 2, "zero": zero, "reduce": reduce, ranks: 2, "schedule": schedule}
    keys["micro_batches"] = 2 * draw(st.integers(1, 2)) if schedule == "interleaved" else draw(st.integers(1, 3))
    if ranks == "tp":
        keys["sequence_sharding"] = draw(st.booleans())
    if ranks == "cp":
        keys["seq_len"] = 12
    if schedule == "seq1f1b":
        keys["slices"] = (4, 8 if ranks == "cp" else 6)
    if schedule == "interleaved":
        keys |= {"chunks": 2, "cuts": (1, 2, 3)}
    models = (MODEL, GEMMA3, NEOX, OLMO2) if ranks == "tp" else (MODEL, GEMMA3) if ranks == "cp" else (EXPERTS,)
    keys["model"] = draw(st.sampled_from(models))
    pieces, halves = (
        draw(st.sampled_from(["auto", "apart", "merged"])),
        draw(st.sampled_from(["auto", "whole"] if ranks == "ep" else ["auto", "whole", "split"])),
    )
    before = draw(st.booleans())
    own, behind = f"overlap-tensor{{pieces={pieces} halves={halves}}}", draw(st.sampled_from(BEHIND))
    order = [own, behind] if before else [behind, own]
    return keys, f"{PLACED[schedule]},{behind},allocate-ddr", f"{PLACED[schedule]},{','.join(order)},allocate-ddr"


def program(keys: dict[str, Any], passes: str) -> Program:
    """Every pass verified."""
    keys = {"model": MODEL, **keys}
    model = keys.pop("model")
    if "chunks" in keys:
        model = evolve(model, layers=4, layer_kinds="wfwf" if model.layer_kinds else "")
    plan = make_plan(model, **keys)
    module = api.lowered(model, plan)
    try:
        api.run_passes(module, without_idle_options(passes, plan, model), verify_each=True)
    except DiagnosticError as error:
        if error.diagnostics[0].code == "RT073":  # passes are to be merged that cannot be
            reject()
        raise
    return api.emit(module)


def check(case: tuple[dict[str, Any], str, str]) -> None:
    keys, without, passes = case
    one, other = (train(program(keys, each), 2) for each in (without, passes))
    assert losses(one) == losses(other)
    same_bits(one, other)


@given(overlapped())
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_verifies_and_trains_to_the_same_bits(case: tuple[dict[str, Any], str, str]) -> None:
    check(case)


@pytest.mark.full
@given(overlapped())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_many_plans_verify_and_train_to_the_same_bits(case: tuple[dict[str, Any], str, str]) -> None:
    check(case)


F, C = 1.0, 0.125


def seconds(_stage: int, instruction: Instruction) -> float:
    """Whole backwards take as long as their halves; two exchanges and a gather are shorter than any product."""
    if instruction.keyword in ("gather_rows", "reduce_rows"):
        return C
    return {"forward": F, "backward": 2 * F, "backward_input": F, "backward_weight": F}.get(instruction.keyword, 0.0)


def exposed(passes: str, **keys: Any) -> float:
    """Seconds of one cold step of one stage in which compute waits for peers."""
    plan = {"pp": 1, "dp": 1, "tp": 2, "sequence_sharding": True, "micro_batches": 4, **keys}
    found = simulate(program(plan, f"{passes},recompute{{policy=none}},allocate-ddr"), seconds)
    return Bubbles(found, cold=True).idle_seconds(0, Engine.COMPUTE).get(Cause.PEERS, 0.0)


def test_what_is_hidden_in_closed_form() -> None:
    """Of L layers and M micro-batches, 2L + 1 blocks read rows: in each pass a sum and a gather, backward another gather."""
    count, micro_batches = 2 * MODEL.layers + 1, 4
    each = micro_batches * C
    assert exposed("place-1f1b") == pytest.approx(5 * count * each)
    # the head's own input alone is gathered behind the loss; all others beside the block above
    assert exposed("place-1f1b,overlap-tensor{pieces=apart halves=whole}") == pytest.approx((4 * count + 1) * each)
    # no weight half is left to the head and to the first attention, which the embedding's backward follows
    left = 2 * count + 1 + 2 * 2
    assert exposed("place-1f1b,overlap-tensor{pieces=apart halves=split}") == pytest.approx(left * each)


@pytest.mark.parametrize("halves", ["whole", "split"])
def test_merged_passes_hide_nearly_all(halves: str) -> None:
    """Under GPipe every pass has a partner: what is left are the ends of the pairs, and the losses between forward and backward."""
    pairs = exposed(f"place-gpipe,overlap-tensor{{pieces=merged halves={halves}}}", schedule="gpipe")
    assert pairs < 0.35 * exposed("place-gpipe,overlap-tensor{pieces=apart halves=whole}", schedule="gpipe")


@pytest.mark.parametrize(("peak", "sequences"), [(3e11, 4), (1e12, 1)])
def test_gathers_of_views_do_not_hide_what_split_backwards_are_worth(peak: float, sequences: int) -> None:
    """Views that are gathered where they are used (ZeRO 3) hide all exchanges; behind `joint-order`, which gathers ahead, halves may pay."""
    constants = {"collective_chunk": 4096.0, "launch": 0.0, "link_latency": 0.0, "link_bandwidth": 1e9}
    machine = with_constants(load_machine(None), constants | {"fp16_peak": peak})
    keys = {"tp": 2, "zero": 3, "reduce": "each-micro-batch", "seq_len": 128, "micro_batch_size": sequences}
    plan = make_plan(WIDE, pp=1, dp=8, micro_batches=3, **keys)
    steps = {}
    for halves in ("auto", "whole", "split"):
        passes = f"overlap-tensor{{pieces=apart halves={halves}}},joint-order,allocate-ddr"
        steps[halves] = evaluate(Task(WIDE, plan, passes, machine)).step_seconds or math.inf
    assert steps["auto"] == min(steps["whole"], steps["split"])
    assert steps["whole"] != pytest.approx(steps["split"], rel=5e-4)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_forward_at_the_pace_of_a_backward_holds_fewer_bytes(pp: int, zero: int) -> None:
    """The ops stay; what both passes keep is about what one does."""
    plan = make_plan(WIDE, pp=pp, dp=2, tp=2, seq_len=128, zero=zero, micro_batches=5, schedule="1f1b-ahead")
    module, context = api.lowered(WIDE, plan), PassContext(target_of(load_machine(None)))
    api.run_passes(module, PLACED["1f1b-ahead"])
    peaks, works = [], []
    for merging in ("all", "paced"):
        draft = OverlapTensorPass().rewritten(module, context, "split", merging).module
        peaks.append([lifetimes(stage).peak_bytes for stage in draft.stages])
        works.append([sorted(map(str, stage.ops)) for stage in draft.stages])
    assert works[0] == works[1]
    assert all(paced <= unpaced for unpaced, paced in zip(*peaks, strict=True))
    assert max(peaks[1]) < (0.95 if pp == 1 else 0.97) * max(peaks[0])


@pytest.mark.parametrize("schedule", ["1f1b-ahead", "1f1b"])
def test_forwards_keep_pace_where_not_all_fits_and_train_to_the_same_bits(schedule: str) -> None:
    plan = make_plan(MODEL, pp=2 if schedule == "1f1b" else 1, dp=2, tp=2, micro_batches=5, schedule=schedule)
    roomy = api.lowered(MODEL, plan)
    api.run_passes(roomy, f"{PLACED[schedule]},overlap-tensor{{pieces=merged halves=split}}")
    most = max(lifetimes(stage).peak_bytes for stage in roomy.stages)
    machine = resized(load_machine(None), most - 1)
    module = api.lowered(MODEL, plan)
    small = PassManager(target_of(machine), verify_each=True)
    small.run(module, f"{PLACED[schedule]},overlap-tensor{{pieces=merged halves=split}}")
    assert "at the pace of backwards" in str(small.runs[-1].statistics["chosen"])
    api.run_passes(module, "recompute{policy=full},allocate-ddr", verify_each=True)
    keys = {"pp": plan.pp, "dp": 2, "tp": 2, "micro_batches": 5, "schedule": schedule}
    one = train(program(keys, f"{PLACED[schedule]},recompute{{policy=full}},allocate-ddr"), 2)
    other = train(api.emit(module), 2)
    assert losses(one) == losses(other)
    same_bits(one, other)


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 1), ("gpipe", 2), ("seq1f1b", 1), ("interleaved", 1)])
@pytest.mark.sampled(3)
def test_a_way_that_fits_is_taken_where_there_is_one(schedule: str, micro_batches: int) -> None:
    """Where everything has to be recovered: of ways some of which hold fewer bytes, merged ones that of two pieces, one that fits."""
    keys: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 2, "schedule": schedule, "micro_batches": micro_batches}
    if schedule == "interleaved":
        keys |= {"pp": 2, "chunks": 2, "cuts": (1, 2, 3), "micro_batches": 2 * micro_batches}
    if schedule == "seq1f1b":
        keys["slices"] = (64, 64)
    plan = make_plan(WIDE, seq_len=128, **keys)
    machine = with_constants(load_machine(None), {"launch": 0.0, "link_latency": 0.0, "link_bandwidth": 1e9})

    def recovered_peak(way: str, capacity: int | None = None) -> int:
        module, there = api.lowered(WIDE, plan), machine if capacity is None else resized(machine, capacity)
        api.run_passes(module, f"{PLACED[schedule]}{way},recompute{{policy=full}}", machine=there)
        trials = Trials(module, PassContext(target_of(there)))
        return max(lifetimes(trials.with_workspace(stage)).peak_bytes for stage in module.stages)

    ways = [
        f",overlap-tensor{{pieces={pieces} halves={halves}}}"
        for pieces, halves in product(("apart", "merged"), ("whole", "split"))
    ]
    peaks = set()
    for way in ("", *ways):
        try:
            peaks.add(recovered_peak(way))
        except DiagnosticError as error:
            if error.diagnostics[0].code != "RT073":  # nothing can be merged there
                raise
    for capacity in peaks:
        assert recovered_peak(",overlap-tensor", capacity) <= capacity
