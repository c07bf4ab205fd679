"""Routines of context ranks: between them they attend to every pair of a query and a key once."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_flops import visible_pairs
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.compute import BackwardHeads, Forward
from ratrain.targets.codegen.routines import routine_of
from ratrain.targets.machine.cost import routine_flops, routine_work
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import MODEL, make_plan

SEQ_LEN = 48


def pairs(options: dict[str, Any], window: int | None) -> int:
    """The pairs of a step, one by one."""
    queries = range(options["first_query"], options["first_query"] + options["queries"])
    keys = range(options["first_key"], options["first_key"] + options["keys"])
    return sum(1 for q in queries for k in keys if k <= q and (window is None or k > q - window))


@pytest.mark.parametrize("window", [None, 1, 5, 13, 30])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_ranks_attend_to_every_pair_once(cp: int, layout: str, window: int | None) -> None:
    model = MODEL if window is None else evolve(MODEL, family="mistral", sliding_window=window)
    plan = make_plan(model, pp=1, dp=1, cp=cp, context_layout=layout, seq_len=SEQ_LEN, micro_batches=1)
    stage = lower(model, plan).stages[0]
    for kind in (Forward, BackwardHeads):
        op = next(op for op in stage.ops if type(op) is kind and op.block.kind == "attention")
        routine = routine_of(op, model, plan)
        assert routine.context_ranks == cp
        found = [
            [pairs(step.options, window) for step in routine.on_rank(rank).steps if "first_key" in step.options]
            for rank in range(cp)
        ]
        assert all(count > 0 for steps in found for count in steps)  # what a rank sees nothing of, it leaves out
        assert sum(map(sum, found)) == visible_pairs(SEQ_LEN, window)
        if layout == "zigzag" and window is None:
            assert len(set(map(sum, found))) == 1


def test_the_rank_with_the_most_work_counts() -> None:
    plan = make_plan(MODEL, pp=1, dp=1, cp=4, context_layout="contiguous", seq_len=SEQ_LEN, micro_batches=1)
    stage = lower(MODEL, plan).stages[0]
    op = next(op for op in stage.ops if type(op) is Forward and op.block.kind == "attention")
    routine, machine = routine_of(op, MODEL, plan), load_machine("mt3000")
    seconds = [routine_work(routine.on_rank(rank), machine).seconds for rank in range(4)]
    assert seconds == sorted(seconds)
    assert routine_work(routine, machine).seconds == seconds[-1]
    assert routine_flops(routine) == routine_flops(routine.on_rank(3)) > routine_flops(routine.on_rank(0))
