"""Programs with experts whose routines are not those of their model: each fault is found, and says what it is.

`found` is what the routine verifier says of the steps alone; where they are sound, the derivation says what they should
be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.ops.compute import Backward, Release
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.mutation.subjects import SUBJECTS, copy_program
from tests.targets.verifier.test_broken_programs import (
    change_operands,
    change_options,
    change_routine,
    move_intermediate,
    put_routine,
    routine_of,
    step_of,
    without_steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.program.program import Program

SPLIT, WHOLE = "p2-d1-zb-h1-shared-expert", "p2-d2-zero2-each-experts"
FORWARD, INPUT, WEIGHT, BACKWARD = "mlp.forward", "mlp.backward_input", "mlp.backward_weight", "mlp.backward"


def over(program: Program, start: str, name: str, other: str) -> None:
    """Place one intermediate where another lies."""
    places = {item.name: item.offset for item in routine_of(program, start).intermediates}
    move_intermediate(program, start, name, places[other])


def step_behind(program: Program, start: str, kernel: str, other: str) -> None:
    """Move the first call of a kernel behind the first call of another."""
    old = routine_of(program, start)
    moved = step_of(program, start, kernel)
    steps = [step for step in old.steps if step is not moved]
    steps.insert(next(at for at, step in enumerate(steps) if step.kernel == other) + 1, moved)
    put_routine(program, old, evolve(old, steps=tuple(steps)))


def more_experts(program: Program) -> None:
    """Let the choice have more columns than the router has experts."""
    old = routine_of(program, FORWARD)
    slots = {"chosen": (16, 6), "weights": (16, 6)}
    formals = tuple(evolve(item, shape=slots.get(item.name, item.shape)) for item in old.formals)
    put_routine(program, old, evolve(old, formals=formals))


def without_bias(program: Program) -> None:
    """Let the router choose by its logits alone."""
    old, step = routine_of(program, FORWARD), step_of(program, FORWARD, "route_forward")
    plain = evolve(step, operands={name: each for name, each in step.operands.items() if name != "bias"})
    put_routine(program, old, evolve(old, steps=tuple(plain if each is step else each for each in old.steps)))


DERIVED = "the model and the plan make it"
FAULTS: dict[str, tuple[Callable[[Program], object], str]] = {
    "gate for up": (lambda p: change_operands(p, FORWARD, "expert_rows", b="w.up_experts"), DERIVED),
    "gradients of gate for up": (
        lambda p: change_operands(p, WEIGHT, "expert_gradients", out="g.gate_experts"),
        "do not fit|does not fit|is \\[",
    ),
    "no order": (lambda p: without_steps(p, FORWARD, "group_rows"), "'expert_rows' reads 'bounds' before anything"),
    "no order of the backward": (
        lambda p: without_steps(p, INPUT, "group_rows"),
        "'expert_rows' reads 'bounds' before anything",
    ),
    "the order behind its first reader": (
        lambda p: step_behind(p, FORWARD, "group_rows", "expert_rows"),
        "'expert_rows' reads 'bounds' before anything",
    ),
    "the choice behind its first reader": (
        lambda p: step_behind(p, FORWARD, "route_forward", "group_rows"),
        "'group_rows' reads 'chosen' before anything",
    ),
    "other weights": (lambda p: change_options(p, FORWARD, "route_forward", normalise=False), DERIVED),
    "other weights in the backward": (lambda p: change_options(p, INPUT, "route_backward", normalise=False), DERIVED),
    "another balance": (lambda p: change_options(p, INPUT, "route_backward", balance=0.2), DERIVED),
    "no finite balance": (lambda p: change_options(p, INPUT, "route_backward", balance=float("nan")), "cannot be"),
    "a vast z": (lambda p: change_options(p, INPUT, "route_backward", z=float("inf")), "cannot be"),
    "a negative z": (lambda p: change_options(p, INPUT, "route_backward", z=-1.0), "cannot be"),
    "gradients of weights read before they are there": (
        lambda p: step_behind(p, INPUT, "weighted_swiglu_backward", "route_backward"),
        "reads '(dgate|dweights)' before anything",
    ),
    "no gradients of weights": (
        lambda p: change_operands(p, INPUT, "route_backward", dweights="weights"),
        DERIVED,
    ),
    "sums over the order": (lambda p: over(p, FORWARD, "sums", "order"), "does not lie in|share bytes"),
    "the bounds over the order": (lambda p: over(p, FORWARD, "bounds", "order"), "'order' and 'bounds' .*share bytes"),
    "gradients of inputs over the order": (
        lambda p: over(p, INPUT, "order", "dprod"),
        "'(out|order)' and '(out|order)' of 'expert_rows' share bytes",
    ),
    "the bounds over products": (
        lambda p: over(p, INPUT, "bounds", "dprod"),
        "'(out|bounds)' and '(out|bounds)' of 'expert_rows' share bytes",
    ),
    "logits over the gradient of the input": (
        lambda p: over(p, INPUT, "logits", "dxn"),
        "reads 'dxn' before anything",
    ),
    "logits over the gradients of weights": (
        lambda p: over(p, INPUT, "logits", "dweights"),
        "reads 'dweights' before anything",
    ),
    "an order of floats": (
        lambda p: change_operands(p, FORWARD, "expert_rows", order="logits"),
        "does not fit|is f32",
    ),
    "a choice of floats": (lambda p: change_operands(p, FORWARD, "group_rows", chosen="weights"), "is f32"),
    "a dense step in place of experts": (
        lambda p: change_operands(p, FORWARD, "gemm", b="w.gate_experts"),
        "dimensions are expected",
    ),
    "rows of no token": (
        lambda p: change_operands(p, FORWARD, "expert_rows", a="prod"),
        "does not fit|do not fit",
    ),
    "more choices than experts": (more_experts, "is not|cannot be chosen"),
    "a choice without the bias": (without_bias, DERIVED),
    "a bias of tokens": (lambda p: change_operands(p, FORWARD, "route_forward", bias="rstd"), "does not fit"),
    "no counts of tokens": (lambda p: without_steps(p, WEIGHT, "add_rows"), DERIVED),
    "counts of what is not there yet": (
        lambda p: step_behind(p, WEIGHT, "group_rows", "add_rows"),
        "'add_rows' reads 'bounds' before anything",
    ),
    "counts of bounds": (lambda p: change_operands(p, WEIGHT, "add_rows", counts="bounds"), "does not fit"),
    "too little workspace": (lambda p: change_routine(p, INPUT, workspace_bytes=64), "does not lie in"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_routines_of_experts_are_found(name: str) -> None:
    fault, words = FAULTS[name]
    program = copy_program(SUBJECTS[SPLIT].program())
    fault(program)
    with pytest.raises(DiagnosticError, match=words) as raised:
        check_program(parse_program(program_bytes(program), "broken.rtx"))
    assert {item.code for item in raised.value.diagnostics} == {"RT080"}


@pytest.mark.parametrize("slot", ["chosen", "weights", "prod"])
@pytest.mark.parametrize("subject", [SPLIT, WHOLE])
def test_what_a_backward_needs_of_a_router_is_not_released_before(subject: str, slot: str) -> None:
    module = copy_module(SUBJECTS[subject].module())
    ops = module.stages[0].ops
    at, tensor = next(
        (at, tensor)
        for at, op in enumerate(ops)
        if isinstance(op, Release)
        for tensor in op.reads
        if tensor.name.split(".")[-1] == slot
    )
    user = next(number for number, op in enumerate(ops) if isinstance(op, Backward) and tensor in op.reads)
    ops.insert(user, ops.pop(at))
    with pytest.raises(DiagnosticError, match=tensor.name):
        check(module)


def test_options_that_experts_do_not_have_are_refused() -> None:
    program = copy_program(SUBJECTS[WHOLE].program())
    options: dict[str, Any] = {"accumulate": True}
    change_options(program, FORWARD, "expert_sums", **options)
    with pytest.raises(DiagnosticError, match="'expert_sums' reads 'y' before anything is written to it"):
        check_program(parse_program(program_bytes(program), "broken.rtx"))


@pytest.mark.parametrize("subject", [SPLIT, WHOLE])
def test_the_bounds_of_experts_hold_until_a_forward_ends(subject: str) -> None:
    """The counts of rows are read from them when the routine is over, so no later intermediate may take their bytes."""
    routine = routine_of(SUBJECTS[subject].program(), FORWARD)
    last = max(number for number, step in enumerate(routine.steps) if "bounds" in step.operands.values())
    names = {item.name for item in routine.intermediates}
    before, after = (
        names & {reference for step in steps for reference in step.operands.values()}
        for steps in (routine.steps[: last + 1], routine.steps[last + 1 :])
    )
    assert "bounds" in before
    assert after <= before
