"""Routers of any kind, in models and plans of any kind: the bytes of a step are those that its program says.

Rows of experts are as many as choices of tokens, whatever the router chooses, so no address and no size depends on it.
A draw that the compiler refuses with a diagnostic shows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.data.data import TokenStream
from tests.end_to_end.test_experts import ONE_RANK, ROUTERS, drawn, trained, with_router
from tests.end_to_end.tiny_runs import losses, make_program, packed, same_state_of_blocks, train
from tests.end_to_end.toys import EXPERTS, SHARED_EXPERT
from tests.whole_cases import MACHINES, WholeCase, whole_cases

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program

WITH_EXPERTS = tuple(family for family in FAMILIES if "experts" in FAMILY[family].free)
STREAMS = ("drawn", "rotating", "burst")
"""Tokens at random; one token a sequence, another in each; one sequence in four of one token."""
KERNELS = ("reference", "fast")


@frozen
class Routed:
    """A configuration, the router of its experts, and what it is trained on."""

    case: WholeCase
    router: str
    stream: str
    kernels: str


@st.composite
def routed(draw: st.DrawFn) -> Routed:
    """Draw a configuration with experts."""
    case = draw(whole_cases(WITH_EXPERTS))
    router, stream = draw(st.sampled_from(ROUTERS)), draw(st.sampled_from(STREAMS))
    return Routed(case, router, stream, draw(st.sampled_from(KERNELS)))


def stream_of(kind: str, program: Program) -> TokenStream:
    """Return tokens for some steps of a program; the tokens of a sequence decide which experts it is sent to."""
    plan, random = program.plan, np.random.default_rng(3)
    sequences = 1 + 3 * plan.dp * plan.micro_batches * plan.micro_batch_size
    tokens = random.integers(0, program.model.vocab_size, (sequences, plan.seq_len)).astype(np.uint16)
    if kind != "drawn":
        every = 1 if kind == "rotating" else 4
        tokens[::every] = tokens[::every, :1]
    stream = TokenStream("generated", tokens.reshape(-1), kind)
    return packed(stream) if plan.keeps_documents_apart else stream


def fits(given_case: Routed) -> None:
    """Compile and train two steps out of the file; fail unless the bytes in use are those of the program."""
    case = given_case.case
    try:
        module = api.compile(case.model, case.plan, passes=case.passes, machine=MACHINES[case.machine])
    except DiagnosticError:
        return
    program = api.emit(module, machine=MACHINES[case.machine])
    peaks = []
    for router in (given_case.router, "drawn"):
        values, stream = with_router(case.model, router), stream_of(given_case.stream, program)
        run = trained(program, values, 2, stream, kernels=given_case.kernels, poison=True)
        assert np.isfinite(losses(run)).all()
        assert run.engine.monitor is not None
        peaks.append({rank: live.peak_bytes for rank, live in run.engine.monitor.live.items()})
        for (stage, _), peak in peaks[-1].items():
            assert peak <= program.stages[stage].arena_bytes
    assert peaks[0] == peaks[1], "bytes in use depend on the router"


@given(routed())
@settings(max_examples=3)
def test_any_router_fits_any_program(given_case: Routed) -> None:
    fits(given_case)


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_any_router_fits_any_program_more_often(part: int) -> None:
    """200 configurations, in parts: one test has three minutes."""

    @seed(part)
    @given(routed())
    @settings(max_examples=40, derandomize=False, database=None)
    def drawn_anew(given_case: Routed) -> None:
        fits(given_case)

    drawn_anew()


# Numbers that are none


def with_number(model: ModelConfig, weight: str, number: float) -> dict[str, Any]:
    """Return drawn weights, with one number of a parameter of the first layer's experts replaced."""
    values = drawn(model)
    (found,) = (each for each in parameters(model, block("mlp", 0)) if each.weight == weight)
    values[found.name].reshape(-1)[3] = number
    return values


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("weight", ["norm", "router_proj", "gate_experts", "down_experts", "shared_router_proj"])
@pytest.mark.sampled(7)
def test_a_number_that_is_none_is_reported_and_reads_nothing_outside(weight: str, number: float, kernels: str) -> None:
    """The loss is no number, or gradients overflow and their blocks are skipped, as in a dense model."""
    program = make_program(SHARED_EXPERT, **ONE_RANK)
    said = ""
    try:
        run = trained(program, with_number(SHARED_EXPERT, weight, number), 2, kernels=kernels, poison=True)
    except DiagnosticError as error:
        said = str(error)
    assert "RT093]: the loss of step" in said if said else np.isfinite(losses(run)).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_that_are_no_numbers_choose_as_all_sets_do(kernels: str) -> None:
    """An expert whose logit is NaN is below all others, so the loss is a number; its gradients are skipped."""
    program = make_program(SHARED_EXPERT, **ONE_RANK)
    run = trained(program, with_number(SHARED_EXPERT, "router_proj", np.nan), 2, kernels=kernels, poison=True)
    assert np.isfinite(losses(run)).all()
    assert all(step.report.skipped_blocks for step in run.done)


@pytest.mark.parametrize("model", [EXPERTS, SHARED_EXPERT], ids=["experts", "shared-expert"])
def test_gradients_of_experts_that_overflow_are_skipped_and_reported(model: ModelConfig) -> None:
    """With dynamic loss scaling, as for a dense model: the scale falls, and training goes on."""
    program = make_program(model, loss_scale=2.0**24, router=RouterLosses(0.1, 0.01))
    one, other = (train(program, 3, kernels=kernels, poison=True) for kernels in KERNELS)
    for run in (one, other):
        assert run.done[0].report.skipped_blocks > 0
        assert np.isfinite(losses(run)).all()


# Order of work


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled(17)
def test_any_order_that_the_waits_allow_gives_the_same_bits(seed: int) -> None:
    keys = {"zero": 3, "reduce": "each-micro-batch", "router": RouterLosses(0.1, 0.01)}
    program = make_program(SHARED_EXPERT, **keys)
    same_state_of_blocks(train(program, 2, interleave_seed=seed, poison=True), train(program, 2))


@pytest.mark.parametrize("name", ["ratrain", "full-save", "zb-h1"])
def test_threads_give_the_same_bits(name: str) -> None:
    program = make_program(evolve(SHARED_EXPERT, hidden_size=24), name, router=RouterLosses(0.1), micro_batch_size=8)
    one, two = (train(program, 2, threads=threads) for threads in (1, 2))
    assert losses(one) == losses(two)
    same_state_of_blocks(one, two)


@pytest.mark.parametrize("policy", ["none", "full", "attention", "mlp", "auto budget=170KiB", "auto budget=285KiB"])
def test_policies_of_recovery_give_the_same_bits(policy: str) -> None:
    expected = train(make_program(SHARED_EXPERT, "full-save", micro_batches=4), 2)
    plan = make_program(SHARED_EXPERT, micro_batches=4).plan
    passes = f"place-1f1b,recompute{{policy={policy}}},allocate-ddr"
    machine = MACHINES["small staging"]
    program = api.emit(api.compile(SHARED_EXPERT, plan, passes=passes, machine=machine), machine=machine)
    found = train(program, 2, poison=True)
    assert losses(found) == losses(expected)
    same_state_of_blocks(found, expected)
