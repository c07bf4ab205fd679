"""Compiling loops ahead of time: all that a first compilation and a first run need, kept on disk for later processes.

It covers plans like `examples/tiny.toml`, and kernels of expert blocks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ratrain.passes.memory.allocation import AllocationProblem, allocate
from ratrain.passes.memory.allocation.portfolio import COMPILED_FROM
from ratrain.ratrain_ir.config.plan import DTYPE_KEYS
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Dtype
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.loops import WAY_OUT, at_any_size, compiled_anew, kept_in
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.console.progress import OnProgress, Progress
from ratrain.ratrainc.running.examples import example_path


@frozen(repr=False)
class Precompiled(Shown):
    """The result of compiling ahead: loops, CPU seconds and cache folders."""

    loops: int
    cpu_seconds: float
    folders: tuple[str, ...]
    """folders of the cache; empty if nothing can be kept"""

    def parts(self) -> Iterator[Part]:
        """Yield sentences."""
        if not self.loops:
            yield "nothing to do: all loops are compiled"
        else:
            yield f"{self.loops} loops compiled in {self.cpu_seconds:.1f} s of CPU"
        if self.folders:
            yield f"kept in {os.path.commonpath(self.folders)}"
        else:
            yield f"they cannot be kept: {WAY_OUT}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {"loops": self.loops, "cpu_seconds": self.cpu_seconds, "folders": list(self.folders)}


def precompile(dtypes: Sequence[Dtype], progress: OnProgress) -> Precompiled:
    """Compile the loops of passes, verifiers, simulator and `fast` kernels, with views and gradients of some types.

    A small plan goes through all of them but those of expert blocks and of one replica, whose kernels are called by
    themselves. Loops that small inputs would skip are compiled too. Raises `DiagnosticError` RT002 if numba is set to
    compile nothing.
    """
    import numba

    if vars(numba.config)["DISABLE_JIT"]:
        fail("RT002", "NUMBA_DISABLE_JIT is set: nothing is compiled, and nothing kept", help="unset NUMBA_DISABLE_JIT")
    before, start = compiled_anew(), time.process_time()
    progress(Progress(0, len(dtypes), "addresses"))
    _place_many()
    with at_any_size(), tempfile.TemporaryDirectory(prefix="ratrain-") as folder:
        for number, dtype in enumerate(dtypes):
            progress(Progress(number, len(dtypes), dtype.value))
            _go_through(dtype, Path(folder))
    return Precompiled(compiled_anew() - before, time.process_time() - start, kept_in())


def _place_many() -> None:
    """Place enough buffers that compiled loops are used, with sizes and lives that no first order places well."""
    count = COMPILED_FROM + 100
    sizes = [(7919 * buffer % 97 + 1) * ALIGNMENT_BYTES for buffer in range(count)]
    lives: list[tuple[tuple[int, int], ...]] = [((buffer, buffer + 3 + 31 * buffer % 50),) for buffer in range(count)]
    allocate(AllocationProblem(sizes, lives, count + 53))


def _go_through(dtype: Dtype, folder: Path) -> None:
    from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
    from ratrain.ratrainc.compiling import building, proving
    from ratrain.ratrainc.compiling.opening import machine_of
    from ratrain.ratrainc.report.time_report import TimeReport
    from ratrain.ratrainc.running.training import run_training
    from ratrain.targets.runtime.kernels.fast.ahead import end_step, run_experts
    from ratrain.targets.runtime.settings import Evaluation, Execution, RunSettings
    from ratrain.targets.simulator.figures import simulated

    run_experts(dtype)
    end_step(dtype)
    model, plan = building.resolved(str(example_path("tiny.json")), str(example_path("tiny.toml")))
    of_type: dict[str, Any] = dict.fromkeys(DTYPE_KEYS, dtype.value)
    module = building.compile(model, evolve(plan, **of_type, loss_scale=None if dtype is Dtype.F16 else 1.0))
    path = str(folder / f"{dtype.value}.rtx")
    program = building.emit(module)
    building.save(program, path)
    schedule = str(folder / f"{dtype.value}.rtir")
    building.save(module, schedule)
    for saved in (schedule, path):
        proving.verify(saved)
    # the walk through idle time runs only when its parts are taken
    figures, timeline = simulated(program, machine_of(program))
    list(TimeReport(timeline, figures, stage=None, cold=False).parts())
    settings = RunSettings(steps=1, evaluation=Evaluation(every=1, batches=1), execution=Execution(kernels="fast"))
    run_training(program, DataChoice(), settings, Outputs(), Display(quiet=True))
