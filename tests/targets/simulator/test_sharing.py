"""Shared bandwidth: against a second simulator, and by what must be conserved."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.testing.strategies import Case, cases
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.resource_work import Bandwidths, Flow, LinkLevel, ResourceWork
from ratrain.targets.program.program import Program
from ratrain.targets.simulator import interpreted_loop
from ratrain.targets.simulator.bubbles import Bubbles
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.live_curve import live_curve
from tests.end_to_end.tiny_runs import MODEL, make_program
from tests.targets.simulator.fluid_oracle import Oracle, max_min
from tests.targets.simulator.given_works import WorkOf, simulate_work
from tests.targets.simulator.idle_pieces import idle_pieces
from tests.targets.simulator.test_simulator import check_messages, check_order, compiled, pipeline

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.simulator.timeline import Timeline

SECONDS = (0.0, 0.5, 1.0, 3.0)
BYTES = (0.0, 0.0, 1.0, 2.5, 8.0)
LINKED = ("send", "reduce_scatter", "all_gather", "all_reduce")


UNIFORM = (LinkLevel(1.0),)
LINKS = (
    UNIFORM,
    (LinkLevel(2.0), LinkLevel(1.0)),
    (LinkLevel(4.0, stages=2, uplink=1.5), LinkLevel(1.0)),
    (LinkLevel(4.0, uplink=1.5), LinkLevel(2.0, stages=2, uplink=0.5), LinkLevel(1.0)),
)


def drawn_works(program: Program, seed: int, levels: int = 1) -> WorkOf:
    """Few different works, so that many events fall together."""
    source = random.Random(seed)
    drawn: dict[int, ResourceWork] = {}
    for stage in program.stages:
        for stream in stage.streams.values():
            for item in stream:
                flows = drawn_flows(source, item.keyword, levels) if item.keyword in LINKED else ()
                sent = sum(flow.nbytes for flow in flows if flow.link is not None)
                drawn[id(item)] = ResourceWork(source.choice(SECONDS), source.choice(BYTES), sent, flows)
    return lambda _stage, _engine, item: drawn[id(item)]


def drawn_flows(source: random.Random, keyword: str, levels: int) -> tuple[Flow, ...]:
    """Of a message one, through all it passes; of a collective what it has on the links and uplinks of every level."""
    level = source.randrange(levels)
    if keyword == "send":
        flows = [Flow(source.choice(BYTES), level, tuple(range(level)))]
    else:
        flows = [Flow(source.choice(BYTES), at) for at in range(level + 1)]
        flows += [Flow(source.choice(BYTES), None, (at,)) for at in range(level)]
    return tuple(flow for flow in flows if flow.nbytes)


def total_bytes(found: Timeline) -> dict[str, float]:
    return {name: found.steps * float(found.works[name].sum()) for name in ("ddr_bytes", "link_bytes")}


@frozen
class Run:
    """Arguments of a simulation of two steps."""

    program: Program
    works: WorkOf
    bandwidths: Bandwidths
    rendezvous: bool


@st.composite
def runs(draw: st.DrawFn) -> Run:
    program = compiled(draw(cases(max_layers=4, max_micro_batches=3)))
    links = draw(st.sampled_from(LINKS))
    works = drawn_works(program, draw(st.integers(0, 1 << 20)), len(links))
    bandwidths = Bandwidths(ddr=2.0, links=links, host=draw(st.sampled_from([0.3, 1.0, 9.0])))
    return Run(program, works, bandwidths, draw(st.booleans()))


def two_steps(run: Run) -> Timeline:
    return simulate_work(run.program, run.works, run.bandwidths, rendezvous=run.rendezvous, steps=2)


@given(runs())
@settings(max_examples=40)
def test_the_compiled_loop_agrees_with_a_plain_simulator(run: Run) -> None:
    found = two_steps(run)
    oracle = Oracle(run.program, run.works, run.bandwidths, rendezvous=run.rendezvous, steps=2)
    oracle.run()
    for (stage, engine), times in oracle.times.items():
        mine = [(span.start, span.end) for span in found.spans[stage][engine]]
        assert np.allclose(np.reshape(mine, (-1, 2)), np.reshape(times, (-1, 2)), rtol=1e-9, atol=1e-9)


@given(runs())
@settings(max_examples=25)
def test_the_compiled_loop_is_the_interpreted_one_to_the_last_bit(run: Run) -> None:
    found = []
    for allowed in (0, 1 << 20):
        allowance = Allowance(allowed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreted_loop, "ALLOWANCE", allowance)
            found.append(two_steps(run))
        assert allowance.ops == max(0, allowed - 2 * found[-1].ops)  # the one was compiled, the other not
    one, other = found
    assert one.events == other.events
    for name in ("starts", "ends", "moved_bytes"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_many_small_runs_are_compiled_in_the_end() -> None:
    allowance = Allowance(10)
    assert [allowance.take(ops) for ops in (6, 6, 4, 1)] == [True, False, True, False]


@given(cases(max_layers=4), st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=25)
def test_what_must_be_conserved_is(case: Case, seed: int, rendezvous: bool) -> None:
    """Bytes that flowed are the program's bytes, no resource gave more than it has, busy and idle make the step."""
    program = compiled(case)
    bandwidths = Bandwidths(ddr=3.0, links=(LinkLevel(0.7),), host=1.0)
    found = simulate_work(program, drawn_works(program, seed), bandwidths, rendezvous=rendezvous)
    check_order(found)
    check_messages(found)
    wanted = total_bytes(found)
    ddr, out, into = found.moved_bytes.sum(axis=0)
    assert [ddr, out, into] == pytest.approx([wanted["ddr_bytes"], wanted["link_bytes"], wanted["link_bytes"]])
    end = float(found.ends.max(initial=0.0))
    assert (found.moved_bytes <= np.array([3.0, 0.7, 0.7]) * end * (1 + 1e-9)).all()
    assert ((found.ends - found.starts).reshape(found.steps, -1) >= found.works["seconds"] - 1e-9).all()
    for bubbles in (Bubbles(found), Bubbles(found, cold=True)):
        for stage, held in enumerate(program.stages):
            for engine in ENGINES:
                if held.streams[engine]:
                    idle = bubbles.idle_seconds(stage, engine)
                    assert min(idle.values(), default=0.0) >= 0
                    whole = bubbles.busy_seconds(stage, engine) + sum(idle.values())
                    assert whole == pytest.approx(bubbles.window_seconds, rel=1e-9)
        check_pieces(found, bubbles.cold)
        path = bubbles.critical_path()
        assert sum(op.end - op.start for op in path) == pytest.approx(bubbles.window_seconds, rel=1e-9)
        assert all(one.end == other.start for one, other in pairwise(path))


def check_pieces(found: Timeline, cold: bool) -> None:
    """Idle pieces of a stream lie between its instructions, one after the other; what is next done after the first step is not of it."""
    bubbles = Bubbles(found, cold=cold)
    pieces = idle_pieces(bubbles)
    for one, other in pairwise(pieces):
        if (one.stage, one.engine) == (other.stage, other.engine):
            assert one.end <= other.start
    busy = {
        (stage, engine): [(span.start, span.end) for span in spans[: len(spans) // found.steps if cold else None]]
        for stage, engines in enumerate(found.spans)
        for engine, spans in engines.items()
    }
    for piece in pieces[:200]:
        middle = (piece.start + piece.end) / 2
        inside = [(start, end) for start, end in busy[piece.stage, piece.engine] if start < middle < end]
        assert not inside, (piece, inside)


@given(
    st.dictionaries(
        st.integers(0, 6),
        st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3), st.sampled_from([0.1, 0.5, float("inf")])),
        min_size=1,
    )
)
def test_the_oracle_shares_fairly(drawn: dict[int, tuple[int, int | None, float]]) -> None:
    """Max-min: every flow is at its limit, or passes a full resource on which no other flow has more."""
    flows = {
        name: ((("r", a),) if b is None or a == b else (("r", a), ("r", b)), limit)
        for name, (a, b, limit) in drawn.items()
    }
    rates = max_min(flows, {"r": 1.0})
    used = {r: [rates[f] for f in flows if r in flows[f][0]] for f in flows for r in flows[f][0]}
    assert all(sum(of) <= 1 + 1e-9 for of in used.values())
    for name, (through, limit) in flows.items():
        held = [r for r in through if sum(used[r]) >= 1 - 1e-9 and rates[name] >= max(used[r]) - 1e-9]
        assert held or rates[name] == pytest.approx(limit)


def on(keyword: str, work: ResourceWork, other: WorkOf) -> WorkOf:
    def works(stage: int, engine: Engine, item: Instruction) -> ResourceWork:
        return work if item.keyword == keyword else other(stage, engine, item)

    return works


def nothing(_stage: int, _engine: Engine, _item: Instruction) -> ResourceWork:
    return ResourceWork(0.0)


def test_two_that_overlap_halve_the_bandwidth_and_one_alone_has_it_all() -> None:
    """Stage 0 sends while it computes the next micro-batch: both move DDR bytes."""
    program = pipeline(2, 2)

    def works(stage: int, _engine: Engine, item: Instruction) -> ResourceWork:
        if item.keyword == "forward" and item.blocks[0].startswith("attention") and stage == 0:
            return ResourceWork(0.0, ddr_bytes=4.0)
        return ResourceWork(0.0, ddr_bytes=2.0) if item.keyword == "send" and stage == 0 else ResourceWork(0.0)

    found = simulate_work(program, works, Bandwidths(1.0, UNIFORM, 1.0), steps=1)
    forwards = [s for s in found.spans[0][Engine.COMPUTE] if s.end > s.start]
    sends = found.spans[0][Engine.SEND]
    assert [(s.start, s.end) for s in forwards] == [(0.0, 4.0), (4.0, 10.0)]
    assert [(s.start, s.end) for s in sends] == [(4.0, 8.0), (10.0, 12.0)]


def test_works_of_one_instruction_proceed_side_by_side() -> None:
    program = pipeline(1, 1)
    for work, seconds in (
        (ResourceWork(3.0, 2.0), 3.0),
        (ResourceWork(1.0, 2.0), 2.0),
        (ResourceWork(1.0, 2.0, 5.0, (Flow(5.0, 0),)), 5.0),
        (ResourceWork(1.0, 2.0, 5.0, (Flow(3.0, 0), Flow(2.0, 1), Flow(4.0, None, (0,)))), 8.0),
    ):
        found = simulate_work(
            program,
            on("update", work, nothing),
            Bandwidths(1.0, (LinkLevel(1.0, uplink=0.5), LinkLevel(1.0)), 1.0),
            steps=1,
        )
        assert {s.end - s.start for s in found.spans[0][Engine.COMPUTE] if s.instruction.keyword == "update"} == {
            seconds
        }


def test_the_host_has_its_own_share_of_the_bandwidth() -> None:
    machine = load_machine(None)
    program = make_program()
    host = evolve(machine, update_engine=Engine.HOST)
    from ratrain import api
    from ratrain.ratrainc.choices.strategies import strategy
    from tests.end_to_end.tiny_runs import make_plan

    plan = make_plan(MODEL)
    other = api.emit(api.compile(MODEL, plan, machine=host, passes=strategy("ratrain").passes), machine=host)
    assert any(item.keyword == "update" for item in other.stages[0].streams[Engine.HOST])
    _, on_compute = simulated(program, machine)
    _, on_host = simulated(other, host)
    times = [
        {
            (s.instruction.blocks, round(s.end - s.start, 12))
            for e in t.spans[0].values()
            for s in e
            if s.instruction.keyword == "update"
        }
        for t in (on_compute, on_host)
    ]
    assert len(times[0]) == len(times[1])
    for (name, fast), (same, slow) in zip(sorted(times[0]), sorted(times[1]), strict=True):
        assert name == same
        assert slow >= (fast - machine["launch"]) * 2 * (1 - 1e-9) + machine.host_handover
    assert Bubbles(on_host).idle_seconds(0, Engine.HOST)


@pytest.mark.parametrize(
    ("plan", "bytes_a_parameter"),
    [
        ({"zero": 0}, 24 + 2 + 2),
        ({"zero": 1}, 24 + 2),
        ({"zero": 2, "reduce": "each-micro-batch", "grad_shard_dtype": "f32"}, 24 + 4),
        ({"zero": 3}, 24 + 2),
        ({"zero": 0, "view_dtype": "f32"}, 24 + 4 + 4),
    ],
)
def test_an_update_moves_what_it_reads_and_writes(plan: dict[str, object], bytes_a_parameter: int) -> None:
    """Master and both moments, f32, twice; the gradient once; the view only where no gather writes it."""
    program = make_program(**plan)
    _, found = simulated(program, load_machine(None))
    seen = 0
    for item, work in zip(found.instructions, found.works, strict=True):
        if item.keyword == "update" and item.blocks == ("attention.0",):
            masters = [o.tensor for o in item.operands if o.role == "p"]
            parameters = sum(program.stages[0].tensors[number].type.elements for number in masters)
            assert work["ddr_bytes"] == bytes_a_parameter * parameters > 0
            seen += 1
    assert seen == 1


@given(cases(max_layers=4), st.booleans())
@settings(max_examples=12)
def test_sharing_never_makes_a_step_shorter(case: Case, rendezvous: bool) -> None:
    program = compiled(case)
    shared, alone = (
        simulated(program, load_machine(None), rendezvous=rendezvous, sharing=sharing)[0] for sharing in (True, False)
    )
    assert shared.makespan_seconds >= alone.makespan_seconds * (1 - 1e-9)


def test_equal_programs_give_equal_bits() -> None:
    program = make_program()
    works, bandwidths = drawn_works(program, 3), Bandwidths(2.0, UNIFORM, 0.5)
    one, other = (simulate_work(program, works, bandwidths) for _ in range(2))
    assert one.ends.tobytes() == other.ends.tobytes()


@given(cases(max_layers=4), st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=15)
def test_live_bytes_stay_within_the_arena(case: Case, seed: int, rendezvous: bool) -> None:
    """Whoever takes bytes waits for whoever had them, so that at no time more is live than the arena has."""
    program = compiled(case)
    bandwidths = Bandwidths(ddr=3.0, links=(LinkLevel(0.7),), host=1.0)
    found = simulate_work(program, drawn_works(program, seed), bandwidths, rendezvous=rendezvous)
    for index, stage in enumerate(program.stages):
        times, live = live_curve(found, index)
        assert (np.diff(times) > 0).all()
        assert live.min() >= 0
        assert 0 < live.max() <= stage.arena_bytes
        assert live[-1] == 0, "all that is taken is given back at the end of the last step"
