"""Rows that expert ranks exchanged, and their gate and up, kept for the backward: every bit is as if made again."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.passes.recovery.keep_gathered import all_made_twice, with_kept
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.ops.base import Payload
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Dispatch, ForwardExperts
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.test_expert_ranks import FOUR, MODELS
from tests.end_to_end.test_experts import F32, ROUTERS, trained, with_router
from tests.end_to_end.tiny_runs import make_plan, reports_of, same_bits, train
from tests.end_to_end.toys import EXPERTS, SOME_EXPERTS
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.base import Op

KINDS: dict[str, tuple[type[Op], ...]] = {
    "rows": (Dispatch,),
    "products": (ForwardExperts,),
    "both": (Dispatch, ForwardExperts),
}
PLANS: dict[str, dict[str, Any]] = {
    "two-ranks": {"ep": 2, "router": RouterLosses(0.1, 0.01)},
    "four-ranks-zero3": {"ep": 4, "zero": 3, "reduce": "each-micro-batch"},
    "stages": {"ep": 2, "zero": 2, "pp": 2, "dp": 2, "cuts": (1,)},
    "capacity": {"ep": 2, "zero": 1, "experts": ExpertDispatch("capacity", 0.75)},
    "slices": {"ep": 2, "seq_len": 12, "slices": (5, 7)},
}


def kept(model: ModelConfig, kinds: tuple[type[Op], ...], *, every: int = 1, **keys: Any) -> Module:
    """Compile a module that keeps, of some kinds of what is made twice, each of which `every` counts."""
    plan = make_plan(model, **{**FOUR, **keys})
    module = api.compile(model, plan, passes="place-schedule,insert-prefetch,recompute{policy=none}")
    for stage in module.stages:
        some = [twice for kind in kinds for twice in all_made_twice(stage, module, kind)[::every]]
        draft = with_kept(stage, module, some)
        draft.prune()
        stage.ops, stage.tensors = draft.ops, draft.tensors
    api.run_passes(module, "allocate-ddr")
    return module


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [*MODELS])
@pytest.mark.sampled(5)
def test_what_is_kept_does_not_change_bits(model: str, plan: str, kinds: str) -> None:
    """From files too; released bytes are poisoned, and every read is checked."""
    chosen, keys = MODELS[model], PLANS[plan]
    if keys["ep"] > 2 and (chosen.experts or 0) % keys["ep"]:
        keys = {**keys, "ep": 2}
    module = kept(chosen, KINDS[kinds], **keys)
    again = parse_module(print_module(module), file="kept.rtir")
    check(again)
    assert print_module(again) == print_module(module)
    program = parse_program(program_bytes(api.emit(module)), "kept.rtx")
    check_program(program)
    expected = train(api.emit(kept(chosen, (), **keys)), 2)
    same_bits(expected, train(program, 2, poison=True, check_memory=True))


@pytest.mark.parametrize("kernels", ["reference", "fast"])
def test_a_stage_may_keep_some_and_make_others_again(kernels: str) -> None:
    """Routines of both forms stand beside one another, each with its own workspace."""
    keys: dict[str, Any] = {**PLANS["two-ranks"], "micro_batches": 3}
    module = kept(EXPERTS, KINDS["both"], every=2, **keys)
    names = {tensor.name for op in module.stages[0].ops for tensor in op.scratch}
    assert {"ws.mlp.backward_experts", "ws.mlp.backward_experts-products"} <= names
    expected = train(api.emit(kept(EXPERTS, (), **keys)), 2, kernels=kernels)
    same_bits(expected, train(api.emit(module), 2, kernels=kernels, poison=True, check_memory=True))


@pytest.mark.parametrize("router", ROUTERS)
def test_any_router_fits_the_addresses_of_what_is_kept(router: str) -> None:
    values, keys = with_router(EXPERTS, router), {**F32, **PLANS["four-ranks-zero3"]}
    found = [
        trained(api.emit(kept(EXPERTS, kinds, **keys)), values, 2, check_memory=True, poison=True)
        for kinds in ((), KINDS["both"])
    ]
    same_bits(*found)


@pytest.mark.parametrize("plan", ["two-ranks", "capacity"])
def test_ranks_send_gradients_alone_where_rows_were_kept(plan: str) -> None:
    """Over a communicator too: the bits are those of one process."""
    program = api.emit(kept(EXPERTS, KINDS["both"], **PLANS[plan]))
    alone = train(program, 2)
    held = {rank.name: rank for ranks in alone.engine.ranks for rank in ranks}
    for run in trained_by_threads(program, 2, poison=True):
        assert reports_of(run) == reports_of(alone)
        (mine,) = (rank for ranks in run.engine.ranks for rank in ranks)
        carried = [number for number, tensor in enumerate(mine.stage.tensors) if tensor.carried]
        assert all(mine.views[each].tobytes() == held[mine.name].views[each].tobytes() for each in carried)


def expert_ops(module: Module) -> Counter[str]:
    """Count what a module makes again for backwards, and what it keeps."""
    found: Counter[str] = Counter()
    for stage in module.stages:
        for op in stage.ops:
            if isinstance(op, Dispatch) and op.payload is Payload.GRADIENT:
                found["rows again" if any(t.slot == "rows" for t in op.writes) else "rows kept"] += 1
            if isinstance(op, BackwardExperts):
                found["products kept" if any(t.slot == "gate" for t in op.reads) else "products again"] += 1
    return found


@pytest.mark.parametrize("model", [EXPERTS, SOME_EXPERTS], ids=["all-layers", "some-layers"])
def test_what_is_kept_depends_on_the_bytes_that_are_left(model: ModelConfig) -> None:
    keys: dict[str, Any] = {"micro_batches": 3, "ep": 2, "zero": 3, "seq_len": 64, "reduce": "each-micro-batch"}
    plan = make_plan(model, **{**FOUR, **keys})

    def under(options: str) -> Module:
        passes = f"place-1f1b,insert-prefetch,recompute{{{options}}},allocate-ddr"
        return api.compile(model, plan, passes=passes)

    least, most = (under(f"policy={policy}").stages[0].arena_bytes for policy in ("full", "auto"))
    budgets = [(least * (8 - eighths) + most * eighths) // 8 for eighths in (0, 7, 8)]
    few, more, all_kept = (expert_ops(under(f"policy=auto budget={budget}B")) for budget in budgets)
    assert sum(few.values()) == sum(more.values()) == sum(all_kept.values())
    assert few["products kept"] < more["products kept"]
    assert more["rows again"]
    assert not {"rows again", "products again"} & {*all_kept}
    assert not {"rows kept", "products kept"} & {*expert_ops(under("policy=auto gathered=again"))}


SWAPS = {
    "rows of another layer": (r"(backward_experts mlp\.0 m0 [^\n]*)%e\.mlp\.0\.m0\.rows", r"\1%e.mlp.1.m0.rows"),
    "bounds of another layer": (r"(backward_experts mlp\.0 m0 [^\n]*)%e\.mlp\.0\.m0\.bounds", r"\1%e.mlp.1.m0.bounds"),
    "counts of another layer": (r"(dispatch gradient mlp\.0 m0 [^\n]*)%e\.mlp\.0\.m0\.counts", r"\1%e.mlp.1.m0.counts"),
    "gate of another micro-batch": (r"(backward_experts mlp\.0 m1 [^\n]*)%e\.mlp\.0\.m1\.gate", r"\1%e.mlp.0.m0.gate"),
    "gate for up": (r"(backward_experts mlp\.0 m0 [^\n]*)%e\.mlp\.0\.m0\.up", r"\1%e.mlp.0.m0.gate"),
    "no rows": (r"(backward_experts mlp\.0 m0 [^\n]*)%e\.mlp\.0\.m0\.rows, ", r"\1"),
    "gate alone": (r"(backward_experts mlp\.0 m0 [^\n]*), %e\.mlp\.0\.m0\.up", r"\1"),
    "no counts": (r"(dispatch gradient mlp\.0 m0 [^\n]*), %e\.mlp\.0\.m0\.counts", r"\1"),
    "products that nobody made": (r"(%e\.mlp\.0\.m0\.made), %e\.mlp\.0\.m0\.gate, %e\.mlp\.0\.m0\.up =", r"\1 ="),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_what_was_kept_of_something_else_is_refused(swap: str) -> None:
    text = print_module(kept(EXPERTS, KINDS["both"], **PLANS["two-ranks"]))
    changed, count = re.subn(*SWAPS[swap], text, count=1)
    assert count == 1
    with pytest.raises(DiagnosticError):
        check(parse_module(changed, file="swapped.rtir"))
