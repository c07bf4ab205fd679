"""No engine waits behind an op it does not need: what stands in the way of what others wait for is named, and strategies leave none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.figures import simulated
from tests.end_to_end.tiny_runs import WITHOUT_PEERS
from tests.targets.simulator.idle_pieces import idle_pieces

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.targets.simulator.timeline import Timeline

TINY = load_model(str(example_path("tiny.json")))
SLOW_LINK = {"link_bandwidth": 2e8, "link_latency": 1e-6, "launch": 1e-7, "host_handover": 1e-7}
"""Links so slow that gathers take as long as forwards do, and little else that costs time."""
BASE = attrs.evolve(load_plan(str(example_path("tiny.toml")), TINY), micro_batches=6)
PLANS = {
    "dynamic scale": attrs.evolve(BASE, loss_scale=None),
    "clipped": attrs.evolve(BASE, optimizer=Optimizer(clip="global")),
    "one stage": attrs.evolve(BASE, pp=1, cuts=(), dp=4),
    "four stages": attrs.evolve(BASE, pp=4, cuts=(1, 2, 3)),
    "each micro-batch": attrs.evolve(BASE, zero=2, reduce="each-micro-batch"),
    "nothing sharded": attrs.evolve(BASE, zero=0),
}
WORTH = 2e-3
"""Of a step: what is queued for less is not looked for."""


def compiled(model: ModelConfig, plan: Plan, passes: str, machine: Machine) -> Module:
    module = api.lowered(model, plan)
    api.run_passes(module, passes, machine=machine)
    return module


def timed(module: Module, machine: Machine) -> Timeline:
    return simulated(api.emit(module, machine=machine), machine)[1]


def queued_seconds(timeline: Timeline) -> Iterator[float]:
    bubbles = Bubbles(timeline)
    for stage in range(len(timeline.program.stages)):
        yield bubbles.idle_seconds(stage, Engine.COMPUTE).get(Cause.QUEUE, 0.0)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(each, name, id=f"{each.name}-{name}", marks=[pytest.mark.full] * ((i + j) % 2))
        for i, each in enumerate(each for each in WITHOUT_PEERS if each.zero is None)
        for j, name in enumerate(PLANS)
    ],
)
@pytest.mark.sampled(10)
def test_no_strategy_lets_compute_wait_behind_what_it_does_not_need(strategy: Strategy, name: str) -> None:
    machine = with_constants(load_machine(None), SLOW_LINK)
    try:
        plan = strategy.adapted(PLANS[name], TINY, machine)
    except DiagnosticError:
        pytest.skip("there are no two chunks for each stage")
    timeline = timed(compiled(TINY, plan, strategy.passes, machine), machine)
    assert max(queued_seconds(timeline)) <= WORTH * timeline.step_seconds


def test_what_stands_behind_another_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO 3, every micro-batch reduced: the view that the next forward needs is gathered behind the last gradient's reduction."""
    machine = with_constants(load_machine(None), SLOW_LINK)
    plan = attrs.evolve(PLANS["one stage"], zero=3, reduce="each-micro-batch")
    timeline = timed(compiled(TINY, plan, "place-1f1b,bucket-grad-sync{bytes=1},insert-prefetch", machine), machine)
    bubbles = Bubbles(timeline)
    pieces = [p for p in idle_pieces(bubbles) if p.engine is Engine.COMPUTE and p.cause is Cause.QUEUE]
    kinds = set()
    spans = timeline.spans[0][Engine.COLLECTIVE]
    for piece in pieces:
        (at,) = (n for n, s in enumerate(spans) if s.start <= piece.start and piece.end <= s.end)
        before, behind = spans[at].instruction, spans[at + 1].instruction
        kinds.add((before.keyword, behind.keyword))
        assert not {o.tensor for o in before.operands} & {o.tensor for o in behind.operands}
    assert ("reduce_scatter", "all_gather") in kinds
    assert all(before != behind for before, behind in kinds)
    idle = bubbles.idle_seconds(0, Engine.COMPUTE)
    assert idle[Cause.QUEUE] == pytest.approx(sum(p.end - p.start for p in pieces))
    assert bubbles.exposed_tail_seconds(0) >= idle[Cause.QUEUE]
    write_program(timeline.program, str(tmp_path / "x.rtx"))
    (tmp_path / "slow.toml").write_text("\n".join(machine_lines(attrs.evolve(machine, name="slow"))))
    assert main(["explain", str(tmp_path / "x.rtx"), "--time", "--machine", str(tmp_path / "slow.toml")]) == 0
    assert "queued behind" in capsys.readouterr().out
