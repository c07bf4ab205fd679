"""Small programs timed on a device: seconds of ops without a routine, of whole steps, and of gaps between ops.

A GPU is done with a small op sooner than its host issues the next one. There an op is timed by marks on its own
stream, around work that begins when all of it is issued, and a whole step is one that was recorded as a graph, as with
`ratrainc run --graph`; a step whose ops are issued one by one is timed beside it.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrainc.calibration.profiled_ops import read_profile
from ratrain.ratrainc.running.run_profile import write_profile
from ratrain.targets.machine.op_table import MeasuredOp
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS, Float32
from ratrain.targets.runtime.checkpoint.state import start_from_weights
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.engine.local import WARM_UP_STEPS, LocalEngine
from ratrain.targets.runtime.engine.profile import Profile
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import named_parameters

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.runtime.arena.stopwatch import Stopwatch
    from ratrain.targets.runtime.engine.collectives import Member
    from ratrain.targets.runtime.kernels import KernelSet

_PROFILED, _PLAIN = 5, 5
"""Steps whose ops are timed (the first two warm up), and steps that are timed as a whole."""
_MARGIN = 1.5
"""Seconds that a device waits before an op, by those in which the host issued the op before."""
_SEED = 0
_SPREAD = 0.02
"""Standard deviation of stand-ins for weights, about that of weights at the start of a training."""
_SEQUENCES = 64


@frozen(eq=False)
class _StandIns(WeightSource):
    """Weights that are one random piece again and again: to draw all of them takes longer than the steps."""

    piece: Float32

    @classmethod
    def of(cls, model: ModelConfig) -> _StandIns:
        """Draw the piece for the weights of a model."""
        piece = np.random.default_rng(_SEED).standard_normal(PIECE_ELEMENTS, np.float32) * np.float32(_SPREAD)
        return cls(named_parameters(model), piece)

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:  # noqa: ARG002  all have the same numbers
        """Yield elements [start, stop), each piece with the same numbers."""
        for first in range(start, stop, PIECE_ELEMENTS):
            yield self.piece[: min(stop - first, PIECE_ELEMENTS)].copy()


class _MarkedEngine(LocalEngine):
    """Local engine that times each op of a profiled step where the device executes it."""

    def __init__(self, program: Program, kernels: KernelSet, batches: Batches) -> None:
        super().__init__(program, kernels, batches)
        self._watch = kernels.memory.stopwatch()
        self._issued: dict[int, float] = {}
        """Seconds in which the host issued an op the last time, by its instruction."""
        self._marks: list[tuple[Any, Any]] = []
        self._passed = 0.0

    def clock(self) -> float:
        """Wait for the device; return the seconds that all marked ops have taken so far."""
        for marks in self._marks:
            self._passed += sum(self._watch.seconds(marks))
        self._marks.clear()
        return self._passed

    def execute(self, members: list[Member], step: int) -> None:
        """Run an instruction on its stream, between two marks if its step is profiled."""
        if self.profile is None:
            super().execute(members, step)
            return
        key = id(members[0][1])
        self._watch.hold(_MARGIN * self._issued.get(key, 0.0))
        begin = self._watch.mark()
        moment = perf_counter()
        super().execute(members, step)
        self._issued[key] = perf_counter() - moment
        self._marks.append((begin, self._watch.mark()))


@frozen
class RunProgram:
    """A program that ran: its ops without a routine, the gap between ops, and the seconds of an unprofiled step."""

    program: Program
    ops: dict[tuple[str, float], float]
    gap_seconds: float
    step_seconds: float
    """as a graph where the device records one"""
    issued_seconds: float | None
    """issued op by op, where `step_seconds` is a graph's; else None"""


def run_programs(programs: Sequence[Program], kernels: KernelSet) -> Iterator[RunProgram]:
    """Run a few steps of each program on the device of a kernel set, from random weights and tokens."""
    for program in programs:
        yield _run(program, kernels)


def other_ops(runs: Sequence[RunProgram]) -> list[MeasuredOp]:
    """Return the ops of several runs by key and size, each with its median seconds."""
    seconds: dict[tuple[str, float], list[float]] = defaultdict(list)
    for run in runs:
        for op, taken in run.ops.items():
            seconds[op].append(taken)
    return [MeasuredOp(key, size, median(taken)) for (key, size), taken in seconds.items()]


def _run(program: Program, kernels: KernelSet) -> RunProgram:
    plan, watch = program.plan, kernels.memory.stopwatch()
    tokens = np.random.default_rng(_SEED).integers(0, program.model.vocab_size, _SEQUENCES * plan.seq_len + 1)
    stream = TokenStream("random tokens", tokens.astype(np.uint32), "")
    engine = _MarkedEngine(program, kernels, Batches(stream, plan, "sequential", _SEED))
    start_from_weights(engine, _StandIns.of(program.model))
    engine.profile = Profile(engine.clock if kernels.memory.overlaps else watch.now)
    for step in range(_PROFILED):
        engine.run_step(step)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "profile.json")
        write_profile(program, engine.profile, path)
        profiled = read_profile(path)
    engine.profile = None
    ops = {(op.key, op.size): seconds for op, seconds in profiled.ops.items() if op.routine is None}
    steps = count(_PROFILED)
    issued = _step_seconds(engine, steps, watch)
    if not engine.order.captures:
        return RunProgram(program, ops, profiled.gap_seconds, issued, None)
    engine.capture_steps()
    for _ in range(WARM_UP_STEPS + 1):
        engine.run_step(next(steps))
    return RunProgram(program, ops, profiled.gap_seconds, _step_seconds(engine, steps, watch), issued)


def _step_seconds(engine: LocalEngine, steps: Iterator[int], watch: Stopwatch) -> float:
    """Return the median seconds of a few steps."""
    taken = []
    for step in islice(steps, _PLAIN):
        start = watch.now()
        engine.run_step(step)
        taken.append(watch.now() - start)
    return median(taken)
