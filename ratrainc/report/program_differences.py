"""The differences of a program from a baseline: figures of step, bytes and idle time, and, if comparable, its ops.

Every change is the program's figure minus the baseline's: a negative one means that the program has less. In the
differences of ops and tensors the baseline comes before, the program after.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, frozen

from ratrain.ratrain_ir.analysis.module_diff import StageDiff, diff_modules
from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import seconds_text
from ratrain.targets.machine.machine import Machine
from ratrain.targets.program.lifting import lift
from ratrain.targets.simulator.bubbles import Bubbles
from ratrain.targets.simulator.figures import Figures
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program


_MOST_SHARE = 1000
"""Multiple of a baseline's figure up to which a change is said as its share: beyond it the baseline is nothing."""


@define(eq=False, slots=False)
class Side:
    """The program or the baseline of a comparison, with its timeline."""

    name: str
    """the shortest end of its file's path that tells it from the other"""
    timeline: Timeline
    figures: Figures
    machine: Machine

    @property
    def program(self) -> Program:
        """The simulated program."""
        return self.timeline.program

    @cached_property
    def bubbles(self) -> Bubbles:
        """Idle time in the steady step."""
        return Bubbles(self.timeline)


@frozen
class Pair:
    """A figure of the program and of the baseline; None for one that has no such figure."""

    program: float | None
    baseline: float | None
    comparable: bool = True
    """False if the two are figures of different things"""

    @property
    def change(self) -> float | None:
        """The program's figure minus the baseline's; 0 within the rounding of sums.

        None if a figure is missing, or the two are of different things.
        """
        if self.program is None or self.baseline is None or not self.comparable:
            return None
        same = isclose(self.program, self.baseline, rel_tol=1e-9, abs_tol=1e-9)
        return 0 if same else self.program - self.baseline

    @property
    def share(self) -> float | None:
        """The change as a part of the baseline's figure; None without one, or where that figure is next to none."""
        if not self.change or not self.baseline or abs(self.change) > _MOST_SHARE * abs(self.baseline):
            return None
        return self.change / self.baseline

    def to_json(self) -> dict[str, float | None]:
        """Return both figures and the change as plain data."""
        return {"program": self.program, "baseline": self.baseline, "change": self.change}


@frozen
class Differences:
    """The differences; seconds are simulated, of the steady step."""

    names: tuple[str, str]
    """of the program, and of the baseline"""
    verdict: str
    """which of the two is faster, and by how much, in a sentence"""
    cannot: tuple[str, ...]
    """sentences: what cannot be compared, and why"""
    settings: dict[str, tuple[str | None, str | None]]
    """differing keys of plan and model, passes and machine, with the texts of program and baseline"""
    figures: dict[str, Pair]
    causes: dict[str, Pair]
    """idle seconds of all compute engines by cause"""
    stages: tuple[dict[str, Pair], ...]
    """figures of each stage that either program has, with the idle seconds of its compute engine by cause"""
    ops: tuple[StageDiff, ...]
    """differences of ops and tensors by stage, from baseline to program; empty if they cannot be compared"""

    def to_json(self) -> dict[str, Any]:
        """Return the differences as plain data."""
        return {
            "program": self.names[0],
            "baseline": self.names[1],
            "verdict": self.verdict,
            "cannot_compare": list(self.cannot),
            "settings": {key: {"program": a, "baseline": b} for key, (a, b) in self.settings.items()},
            "figures": {key: pair.to_json() for key, pair in self.figures.items()},
            "idle_by_cause": {key: pair.to_json() for key, pair in self.causes.items()},
            "stages": [{key: pair.to_json() for key, pair in stage.items()} for stage in self.stages],
            "ops": [asdict(stage) for stage in self.ops],
        }


def names_of(one: str, other: str) -> tuple[str, str]:
    """Return the shortest ends of two paths that differ; equal paths become `name (first)` and `name (second)`."""
    parts = [Path(path).parts for path in (one, other)]
    longest = max(map(len, parts))
    length = next((n for n in range(1, longest + 1) if parts[0][-n:] != parts[1][-n:]), None)
    if length is None:
        return f"{Path(one).name} (first)", f"{Path(other).name} (second)"
    return "/".join(parts[0][-length:]), "/".join(parts[1][-length:])


def differences_of(program: Side, baseline: Side) -> Differences:
    """Compare a program with a baseline: figures of both timelines, settings, ops and tensors."""
    sides = (program, baseline)
    disowned = _disowned(program, baseline)
    of_stages = disowned | (_ALL if program.program.plan.pp != baseline.program.plan.pp else frozenset())
    comparable = program.program.model == baseline.program.model and program.program.plan.pp == baseline.program.plan.pp
    ops = diff_modules(_module(baseline.program), _module(program.program)) if comparable else []
    stages = [[_stage(side, index) for index in range(len(side.program.stages))] for side in sides]
    count = max(map(len, stages))
    return Differences(
        (program.name, baseline.name),
        _verdict(program, baseline),
        tuple(_cannot(program, baseline)),
        _settings(program, baseline),
        _pairs(_figures(program), _figures(baseline), disowned),
        _pairs(_idle(program), _idle(baseline), disowned, absent=0.0),
        tuple(_pairs(_of(stages[0], index), _of(stages[1], index), of_stages) for index in range(count)),
        tuple(ops),
    )


def _verdict(one: Side, other: Side) -> str:
    """Say which is faster: by the seconds of a step, or by tokens a second where steps have different tokens."""
    a, b = one.program, other.program
    names = f"{one.name} is {{}} {other.name} (the baseline): "
    if a.model != b.model:
        return f"{one.name} and {other.name} (the baseline) train different models, so neither is called faster"
    if a.plan.tokens_per_step != b.plan.tokens_per_step and a.plan.clusters != b.plan.clusters:
        return (
            f"a step of {one.name} and one of {other.name} (the baseline) differ in tokens and in clusters, so neither "
            "is called faster"
        )
    if a.plan.tokens_per_step == b.plan.tokens_per_step:
        pair, what = Pair(one.figures.step_seconds, other.figures.step_seconds), "its step takes {} time"
        own, its = (seconds_text(side.figures.step_seconds) for side in (one, other))
    else:
        pair, what = Pair(one.figures.tokens_per_second, other.figures.tokens_per_second), "it trains {} tokens/s"
        own, its = (f"{side.figures.tokens_per_second:,.0f}" for side in (one, other))
    if not pair.change:
        return names.format("as fast as") + what.format("the same") + f", {own}"
    more = pair.change > 0
    share = ("" if pair.share is None else f"{100 * abs(pair.share):.1f} % ") + ("more" if more else "less")
    faster = more == what.endswith("tokens/s")
    return names.format("faster than" if faster else "slower than") + f"{what.format(share)}, {own} instead of {its}"


_OF_STEPS = frozenset({"step_seconds", "makespan_seconds", "busy_seconds", "idle_seconds", "exposed_tail_seconds"})
_OF_OPS = frozenset({"ops", "tensors"})
_ALL = frozenset({*_OF_STEPS, *_OF_OPS, "tokens_per_second", "peak_bytes", "arena_bytes"})
"""Figures that depend on how much work is done; utilisation does not."""


def _disowned(one: Side, other: Side) -> frozenset[str]:
    """Return the figures that `_cannot` says cannot be compared: of these no difference is given."""
    a, b = one.program, other.program
    if a.model != b.model:
        return _ALL
    found = _OF_OPS if a.plan.pp != b.plan.pp else frozenset[str]()
    if a.plan.tokens_per_step != b.plan.tokens_per_step:
        found |= _OF_STEPS
    return found | {"tokens_per_second"} if a.plan.clusters != b.plan.clusters else found


def _cannot(one: Side, other: Side) -> list[str]:
    """Say which figures of the two cannot be compared, and why."""
    words = []
    a, b = one.program, other.program
    if a.model != b.model:
        words.append(
            "they train different models: ops and tensors are not compared, seconds and bytes are of different work"
        )
    if a.plan.pp != b.plan.pp:
        words.append(
            f"{one.name} has {number_of(a.plan.pp, 'stage')} and {other.name} {b.plan.pp}: ops and "
            f"tensors are not compared, "
            "as a stage of one number holds other layers"
        )
    if a.plan.tokens_per_step != b.plan.tokens_per_step:
        words.append(
            f"a step is {number_of(a.plan.tokens_per_step, 'token', ',')} and "
            f"{b.plan.tokens_per_step:,}: seconds of a step are "
            "of different work" + (", tokens/s can be compared" if a.model == b.model else "")
        )
    if a.plan.clusters != b.plan.clusters:
        words.append(
            f"{number_of(a.plan.clusters, 'cluster', ',')} and {b.plan.clusters:,}: tokens/s are of different hardware"
        )
    if one.machine != other.machine:
        words.append("they are timed on different machines")
    return words


def _module(program: Program) -> Module:
    """Return the schedule of a program, with its addresses."""
    module = lift(program, Diagnostics())
    for stage, source in zip(module.stages, program.stages, strict=True):
        for tensor, held in zip(stage.tensors.values(), source.tensors, strict=True):
            tensor.offset = held.offset
    return module


def _settings(one: Side, other: Side) -> dict[str, tuple[str | None, str | None]]:
    found = [_words(side) for side in (one, other)]
    return {
        key: (found[0].get(key), found[1].get(key))
        for key in {**found[0], **found[1]}
        if found[0].get(key) != found[1].get(key)
    }


def _words(side: Side) -> dict[str, str]:
    model = {f"model {key}": str(value) for key, value in side.program.model.to_fields().items()}
    named = {"passes": side.program.pipeline, "machine": side.machine.name}
    return {**named, **{f"plan {key}": value for key, value in plan_words(side.program.plan).items()}, **model}


def _figures(side: Side) -> dict[str, float]:
    figures, stages = side.figures, side.program.stages
    return {
        "step_seconds": figures.step_seconds,
        "makespan_seconds": figures.makespan_seconds,
        "tokens_per_second": figures.tokens_per_second,
        "mfu": figures.mfu,
        "peak_bytes": max(stage.peak_bytes for stage in figures.stages),
        "arena_bytes": max(stage.arena_bytes for stage in figures.stages),
        "busy_seconds": sum(stage.busy_seconds for stage in figures.stages),
        "idle_seconds": sum(stage.idle_seconds for stage in figures.stages),
        "exposed_tail_seconds": sum(stage.exposed_tail_seconds for stage in figures.stages),
        "ops": sum(stage.instructions for stage in stages),
        "tensors": int(side.timeline.columns.tensor_counts.sum()),
    }


def _idle(side: Side, only: int | None = None) -> dict[str, float]:
    """Return the idle seconds of the compute engine of stage `only`, or of all stages together, by cause."""
    bubbles, total = side.bubbles, dict[str, float]()
    for stage in range(len(side.program.stages)) if only is None else (only,):
        for cause, seconds in bubbles.idle_seconds(stage, Engine.COMPUTE).items():
            total[cause.value] = total.get(cause.value, 0.0) + seconds
    return total


def _stage(side: Side, index: int) -> dict[str, float]:
    figures, stage = side.figures.stages[index], side.program.stages[index]
    return {
        "busy_seconds": figures.busy_seconds,
        "idle_seconds": figures.idle_seconds,
        "exposed_tail_seconds": figures.exposed_tail_seconds,
        "peak_bytes": figures.peak_bytes,
        "arena_bytes": figures.arena_bytes,
        "ops": stage.instructions,
        "tensors": int(side.timeline.columns.tensor_counts[index]),
        **{f"idle: {cause}": seconds for cause, seconds in _idle(side, index).items()},
    }


def _of(stages: list[dict[str, float]], index: int) -> dict[str, float]:
    """Return the figures of a stage; empty if there is no such stage."""
    return stages[index] if index < len(stages) else {}


def _pairs(
    program: dict[str, float], baseline: dict[str, float], disowned: Collection[str], absent: float | None = None
) -> dict[str, Pair]:
    """Pair the figures of both by name; a cause of idle time that only one of them has counts 0 s for the other.

    `disowned` are figures without a difference; idle seconds by cause are among them if a step's idle seconds are.
    """
    found = {}
    for key in {**program, **baseline}:
        # an empty dictionary is a stage that one of them does not have: its figures are missing, not zero
        missing = 0.0 if key.startswith("idle: ") and program and baseline else absent
        is_cause = key.startswith("idle: ") or absent is not None
        comparable = ("idle_seconds" if is_cause else key) not in disowned
        found[key] = Pair(program.get(key, missing), baseline.get(key, missing), comparable)
    return found
