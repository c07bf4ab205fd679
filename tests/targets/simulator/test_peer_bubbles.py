"""Compute that waits for tensor-parallel ranks: its idle seconds against closed forms, and where they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.report.report_page import write_report
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.timed_run import simulate
from tests.end_to_end.tiny_runs import MODEL, make_program

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

EXCHANGES = {op.keyword for op in TENSOR_OPS}
F, B, C = 1.0, 2.0, 0.125


def program_of(*, sharding: bool, stages: int = 1, micro_batches: int = 2, peers: int = 2) -> Program:
    """Two layers a stage, nothing recovered, one replica."""
    model = evolve(MODEL, layers=2 * stages)
    cuts = tuple(range(2, 2 * stages, 2))
    keys = {"pp": stages, "dp": 1, "cuts": cuts, "micro_batches": micro_batches, "tp": peers}
    return make_program(model, "full-save", sequence_sharding=sharding, **keys)


def seconds(_stage: int, instruction: Instruction) -> float:
    """Blocks and exchanges of rows take time, nothing else does."""
    if instruction.keyword in ("gather_rows", "reduce_rows"):
        return C
    return {"forward": F, "backward": B}.get(instruction.keyword, 0.0)


@pytest.mark.parametrize("sharding", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_compute_waits_for_every_exchange_that_nothing_hides(sharding: bool, micro_batches: int) -> None:
    """Five blocks read rows: sums of their inputs and of the gradients; sharded, gathers of both, and again of the inputs backward."""
    found = simulate(program_of(sharding=sharding, micro_batches=micro_batches), seconds)
    bubbles = Bubbles(found, cold=True)
    exchanged = (25 if sharding else 10) * micro_batches * C
    waited = bubbles.idle_seconds(0, Engine.COMPUTE)
    assert waited == pytest.approx({Cause.PEERS: exchanged}, rel=1e-9)
    assert found.makespan_seconds == pytest.approx(6 * (F + B) * micro_batches + exchanged, rel=1e-9)
    assert bubbles.busy_seconds(0, Engine.TENSOR) == pytest.approx(exchanged, rel=1e-9)
    on_path = sum(op.end - op.start for op in bubbles.critical_path() if op.engine is Engine.TENSOR)
    assert on_path == pytest.approx(exchanged, rel=1e-9)


def test_another_stage_waits_for_the_stage_not_for_its_peers() -> None:
    """What a stage waits for while another one's peers exchange is that stage."""
    program = program_of(sharding=True, stages=2, micro_batches=1)
    found = simulate(program, seconds)
    bubbles = Bubbles(found, cold=True)
    first, last = (bubbles.idle_seconds(stage, Engine.COMPUTE) for stage in (0, 1))
    assert bubbles.waited_for(0, Engine.COMPUTE)[1] == first[Cause.STAGE]
    assert first[Cause.STAGE] == pytest.approx(5 * (F + B) + bubbles.busy_seconds(1, Engine.TENSOR), rel=1e-9)
    assert last[Cause.PEERS] == pytest.approx(bubbles.busy_seconds(1, Engine.TENSOR), rel=1e-9)
    assert first[Cause.PEERS] == pytest.approx(bubbles.busy_seconds(0, Engine.TENSOR), rel=1e-9)


def test_they_are_named_wherever_engines_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_of(sharding=True, stages=2)
    write_program(program, str(tmp_path / "x.rtx"))
    assert main(["explain", str(tmp_path / "x.rtx"), "--time", "--stage", "0"]) == 0
    shown = capsys.readouterr().out
    assert "tensor-parallel ranks" in shown
    assert "@0 tensor" in shown
    assert main(["simulate", str(tmp_path / "x.rtx"), "--trace", str(tmp_path / "t.json")]) == 0
    trace = (tmp_path / "t.json").read_text()
    assert '"tensor"' in trace
    assert "reduce_rows" in trace
    machine = load_machine(None)
    figures, timeline = simulated(program, machine)
    write_report(timeline, figures, machine, str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert '"tensor"' in page
    for keyword in EXCHANGES:
        assert f"{keyword}:" in page, "the chart has a colour for it"
    assert "partial:" in page
