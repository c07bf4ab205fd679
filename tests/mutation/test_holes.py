"""Holes that mutants have found, or that were found while they were written: each stays closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.ops.base import Group, Op, Quantity
from ratrain.ratrain_ir.ops.collectives import AllReduce, AllReduceScalar, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.verifier import verify
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import instructions
from tests.mutation.judge import Verdict, judge_module
from tests.mutation.subjects import SUBJECTS, copy_program

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage


def module_of(name: str) -> Module:
    return copy_module(SUBJECTS[name].module())


def errors(module: Module) -> list[str]:
    found = Diagnostics()
    verify(module, found)
    return [f"{item.code} {item.message}" for item in found.errors]


def is_flags(op: Op) -> bool:
    return isinstance(op, AllReduceScalar) and op.quantity is Quantity.FLAGS


def with_scratch(module: Module, at: int, count: int) -> None:
    """Let an op of the first stage use `count` workspaces, each of them free there."""
    stage = module.stages[0]
    end = stage.arena_bytes
    like = next(t for op in stage.ops for t in op.scratch)
    added = tuple(
        stage.add(evolve(like, name=f"ws.added.{index}", offset=end + index * like.type.nbytes))
        for index in range(count)
    )
    stage.ops[at] = evolve(stage.ops[at], scratch=added)


@pytest.mark.parametrize("keyword", ["load_input", "send", "recv", "update", "all_gather", "scale_update"])
def test_what_is_no_block_op_calls_no_routine(keyword: str) -> None:
    program = copy_program(SUBJECTS["p2-d2-zero1-host"].program())
    stage, engine, at, item = next(instructions(program, keyword))
    program.stages[stage].streams[engine][at] = evolve(item, routine=0)
    with pytest.raises(DiagnosticError, match=r"RT080.*it cannot call a routine"):
        check_program(program)


def test_an_op_has_one_workspace_at_most() -> None:
    for count in (1, 2):
        module = module_of("p2-d2-zero1")
        with_scratch(module, next(at for at, op in enumerate(module.stages[0].ops) if op.scratch), count)
        found = errors(module)
        assert bool(found) == (count == 2)
        assert all("RT025" in text and "more than one workspace" in text for text in found)


def test_workspace_is_never_taken_for_a_flag() -> None:
    """Its bytes are what the last op left in them."""
    subject = SUBJECTS["p3-d2-zero2-each-tied"]
    module = module_of(subject.name)
    stage = module.stages[0]
    at = next(at for at, op in enumerate(stage.ops) if is_flags(op))
    used = next(t for op in stage.ops for t in op.scratch)
    stage.ops[at] = evolve(stage.ops[at], scratch=(used,))
    assert judge_module(module, subject).verdict is Verdict.EQUIVALENT


def test_flags_meet_after_the_tied_gradients_are_summed() -> None:
    """The sum of both ends may overflow where neither does; the loss scale must hear of it."""
    module = module_of("p2-d2-zero2-placed-tied")
    for stage in module.stages:
        flags = next(op for op in stage.ops if is_flags(op))
        sums = next(op for op in stage.ops if isinstance(op, AllReduce) and op.group is Group.ENDS)
        stage.ops.remove(flags)
        stage.ops.insert(stage.ops.index(sums), flags)
    found = errors(module)
    assert len(found) == len(module.stages)
    assert all("RT031 the overflow flag of" in text and "is left out" in text for text in found)


def test_a_flag_collects_all_micro_batches_of_its_own_block() -> None:
    """Two blocks exchange their flags for one micro-batch, and have their own again for the next."""
    module = module_of("p2-d2-zero2-placed-tied")
    stage = module.stages[0]
    one, other = [op for op in stage.ops if isinstance(op, ReduceScatter) and op.micro_batch == 1][:2]
    (shard, flag), (other_shard, other_flag) = one.updates, other.updates
    _replace(stage, one, updates=(shard, other_flag))
    _replace(stage, other, updates=(other_shard, flag))
    assert not any(isinstance(op, Release) for op in stage.ops)
    assert any("RT031" in text and f"%{other_flag.name}" in text for text in errors(module))


def _replace(stage: Stage, op: Op, **changes: object) -> None:
    stage.ops[stage.ops.index(op)] = evolve(op, **changes)
