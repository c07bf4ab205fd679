"""The simulator against closed forms, and against the rules every timeline must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.strategies import Case, cases
from ratrain.targets.codegen.emitter import emit
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.mt3000.mt3000_target import Mt3000Target
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.timed_run import simulate
from tests.end_to_end.tiny_runs import MODEL, make_program

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Timeline

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (3, 3), (4, 2), (4, 8), (6, 9)]


def pipeline(stages: int, micro_batches: int) -> Program:
    """One layer a stage, nothing recovered, one replica: embedding and head take no time below."""
    model = evolve(MODEL, layers=stages)
    return make_program(model, "full-save", pp=stages, dp=1, micro_batches=micro_batches)


def layers_only(
    forward: Callable[[int], float], backward: Callable[[int], float]
) -> Callable[[int, Instruction], float]:
    """Durations: the attention of a stage's layer takes all of its time, everything else none."""

    def seconds(stage: int, instruction: Instruction) -> float:
        if not instruction.blocks or not instruction.blocks[0].startswith("attention"):
            return 0.0
        return {"forward": forward, "backward": backward}.get(instruction.keyword, lambda _stage: 0.0)(stage)

    return seconds


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_equal_stages_take_the_time_of_the_closed_form(stages: int, micro_batches: int, rendezvous: bool) -> None:
    """(M + P - 1)(F + B): Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2."""
    forward, backward = 1.0, 2.0
    program = pipeline(stages, micro_batches)
    found = simulate(program, layers_only(lambda _: forward, lambda _: backward), rendezvous=rendezvous)
    expected = (micro_batches + stages - 1) * (forward + backward)
    if rendezvous:  # a sender waits for its receiver, and may then be late for its own next block
        assert expected <= found.makespan_seconds <= expected + stages * (forward + backward)
    else:
        assert found.makespan_seconds == expected
    assert found.busy_seconds(0, Engine.COMPUTE) == micro_batches * (forward + backward)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_the_steady_period_is_the_step_from_cold(stages: int, micro_batches: int) -> None:
    """Stage 0 ends the step and starts the next: without overlap across steps the period is the makespan."""
    found = simulate(pipeline(stages, micro_batches), layers_only(lambda _: 1.0, lambda _: 2.0))
    assert found.step_seconds == found.makespan_seconds


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_unequal_stages_wait_for_the_slowest(slow: int) -> None:
    stages, micro_batches = 3, 6
    times = [(4.0, 7.0) if stage == slow else (1.0, 2.0) for stage in range(stages)]
    program = pipeline(stages, micro_batches)
    found = simulate(program, layers_only(lambda s: times[s][0], lambda s: times[s][1]))
    before = sum(f + b for f, b in times[:slow])
    slowest = sum(times[slow])
    # the slowest stage works without a gap, after the first forward's way to it, before the last backward's way back
    assert found.makespan_seconds == before + micro_batches * slowest
    assert found.busy_seconds(slow, Engine.COMPUTE) == micro_batches * slowest


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8))
@settings(max_examples=25)
def test_the_makespan_has_its_bounds(stages: int, micro_batches: int, times: list[float]) -> None:
    forward, backward = times[:4], times[4:]
    found = simulate(pipeline(stages, micro_batches), layers_only(forward.__getitem__, backward.__getitem__))
    whole = [f + b for f, b in zip(forward[:stages], backward[:stages], strict=True)]
    least = max(
        micro_batches * whole[s] + sum(whole[:s]) for s in range(stages)
    )  # the way to a stage and back, and all of its work
    assert least * (1 - 1e-12) <= found.makespan_seconds <= micro_batches * sum(whole) * (1 + 1e-12)


def test_message_time_delays_the_receiver_only() -> None:
    program = pipeline(2, 1)

    def seconds(stage: int, instruction: Instruction) -> float:
        return 10.0 if instruction.keyword == "send" else layers_only(lambda _: 1.0, lambda _: 2.0)(stage, instruction)

    found = simulate(program, seconds)
    assert found.makespan_seconds == 1.0 + 10.0 + 1.0 + 2.0 + 10.0 + 2.0
    assert [found.busy_seconds(s, Engine.COMPUTE) for s in (0, 1)] == [3.0, 3.0]


# Any program


def compiled(case: Case) -> Program:
    """The program of a generated case."""
    target = Mt3000Target(load_machine(None))
    module = case.module()
    PassManager(target).run(module, "insert-prefetch,recompute,bucket-grad-sync,allocate-ddr")
    return emit(module, target)


def check_order(found: Timeline) -> None:
    """Engines run their streams in order, one instruction at a time, each after all it waits for."""
    for stage, engines in enumerate(found.spans):
        streams = found.program.stages[stage].streams
        for engine, spans in engines.items():
            count = len(streams[engine])
            assert len(spans) == found.steps * count
            reached = 0.0
            for number, span in enumerate(spans):
                step, position = divmod(number, count)
                assert span.instruction is streams[engine][position]
                assert reached <= span.start <= span.end
                reached = span.end
                for wait in span.instruction.waits:
                    at = step - wait.previous_step
                    if at >= 0:
                        others = engines[wait.engine]
                        assert others[at * len(streams[wait.engine]) + wait.count - 1].end <= span.start


def check_messages(found: Timeline) -> None:
    """No message arrives before it is sent; members of a collective start and end together."""
    sent: dict[tuple[int, int, str, int | None], list[float]] = {}
    arrived: dict[tuple[int, int, str, int | None], list[float]] = {}
    together: dict[tuple[str, int], set[tuple[float, float]]] = {}
    for stage, engines in enumerate(found.spans):
        seen: dict[str, int] = {}
        for span in (span for engine in ENGINES for span in engines[engine]):
            instruction = span.instruction
            if instruction.keyword == "send":
                assert instruction.peer is not None
                sent.setdefault((stage, instruction.peer, instruction.variant, instruction.chunk), []).append(span.end)
            elif instruction.keyword == "recv":
                assert instruction.peer is not None
                arrived.setdefault((instruction.peer, stage, instruction.variant, instruction.chunk), []).append(
                    span.end
                )
            elif instruction.group in ("ends", "all"):
                title = instruction.title_without_blocks
                seen[title] = seen.get(title, 0) + 1
                together.setdefault((title, seen[title]), set()).add((span.start, span.end))
    assert sent.keys() == arrived.keys()
    for channel, times in sent.items():
        assert len(times) == len(arrived[channel])
        assert all(one <= other for one, other in zip(times, arrived[channel], strict=True))
    assert all(len(spans) == 1 for spans in together.values())


@given(cases(max_layers=4), st.booleans(), st.booleans(), st.sampled_from([2, 3, 4]))
@settings(max_examples=25)
def test_timelines_keep_the_order_of_engines_waits_and_messages(
    case: Case, rendezvous: bool, sharing: bool, steps: int
) -> None:
    program = compiled(case)
    _, found = simulated(program, load_machine(None), rendezvous=rendezvous, sharing=sharing, steps=steps)
    check_order(found)
    check_messages(found)


@given(cases(max_layers=4), st.booleans())
@settings(max_examples=25)
def test_busy_and_idle_make_the_step(case: Case, rendezvous: bool) -> None:
    program = compiled(case)
    figures, timeline = simulated(program, load_machine(None), rendezvous=rendezvous)
    assert len(figures.stages) == case.plan.pp
    for index, stage in enumerate(figures.stages):
        assert stage.busy_seconds + stage.idle_seconds == pytest.approx(figures.step_seconds, rel=1e-12)
        assert stage.busy_seconds > 0
        assert stage.idle_seconds >= -1e-12 * figures.step_seconds
        assert stage.busy_seconds == timeline.busy_seconds(index, Engine.COMPUTE)
        assert 0 < stage.peak_bytes <= stage.arena_bytes
    assert 0 < figures.step_seconds <= figures.makespan_seconds * (1 + 1e-9)
    assert figures.tokens_per_second == pytest.approx(case.plan.tokens_per_step / figures.step_seconds)
    assert 0 < figures.mfu < 1


@pytest.mark.parametrize("rendezvous", [False, True])
def test_equal_programs_have_equal_timelines(rendezvous: bool) -> None:
    machine = load_machine(None)
    one, other = (api.simulate(make_program(), machine=machine, rendezvous=rendezvous) for _ in range(2))
    assert one == other


def test_a_program_that_waits_for_ever_is_refused_and_says_who_waits() -> None:
    program = make_program()
    stream = program.stages[1].streams[Engine.SEND]
    position = next(i for i, item in enumerate(stream) if item.keyword == "send")
    del stream[position:]  # stage 0 waits for gradients that nobody sends
    with pytest.raises(DiagnosticError) as raised:
        simulate(program, lambda _stage, _instruction: 1.0)
    first = raised.value.diagnostics[0]
    assert first.code == "RT042"
    assert "stage @0 recv engine at 'recv gradient m0 @1'" in first.message


def test_a_faster_machine_takes_less_time() -> None:
    program = make_program()
    machine = load_machine(None)
    constants: dict[str, Any] = dict(machine.constants)
    for name in ("ddr_bandwidth", "fp16_peak", "clock", "gsm_bandwidth", "link_bandwidth", "host_bandwidth"):
        constants[name] = evolve(constants[name], value=constants[name].value * 2)
    for name in ("link_latency", "launch", "host_handover"):
        constants[name] = evolve(constants[name], value=constants[name].value / 2)
    slow, fast = (simulated(program, chosen)[0] for chosen in (machine, evolve(machine, constants=constants)))
    assert fast.step_seconds == pytest.approx(slow.step_seconds / 2, rel=1e-9)
