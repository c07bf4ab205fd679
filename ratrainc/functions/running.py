"""Runs: training, what it leaves behind, and what this machine offers one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.files import is_directory
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Generation, Outputs, Prompt, Ranks
from ratrain.ratrainc.compiling.proving import sound_program
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.console.progress import OnProgress, Progress, unheard
from ratrain.ratrainc.facts.machine_facts import MachineFact
from ratrain.targets.runtime.settings import RunSettings, available_threads

if TYPE_CHECKING:
    from ratrain.ratrainc.running.generation import Generated
    from ratrain.ratrainc.running.precompiling import Precompiled
    from ratrain.ratrainc.running.run_result import RunResult
    from ratrain.ratrainc.running.weight_export import Export
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TimedStep


def run(
    program: Program | str,
    settings: RunSettings | int,
    *,
    data: DataChoice | str | None = None,
    outputs: Outputs | None = None,
    threads: int | None = None,
    machine: str | Machine | None = None,
    each_step: Callable[[TimedStep], None] | None = None,
    progress: OnProgress | None = None,
) -> RunResult:
    """Train: execute a program, or the file of one, with all its ranks in this process.

    `settings` is all that a run is told, or its steps alone; `data` a file or folder, or what is told of data, by default the English text
    that ships inside Python. `each_step` hears of every step when it is done. Ctrl-C ends the run after the step it is in. Raises
    `DiagnosticError` where something cannot be used or does not go together.
    """
    from ratrain.ratrainc.running.run_checks import for_program, refuse_contradictions
    from ratrain.ratrainc.running.training import check_outputs, run_training

    told = RunSettings(settings) if isinstance(settings, int) else settings
    chosen = DataChoice((data,)) if isinstance(data, str) else data or DataChoice()
    written = outputs or Outputs()
    refuse_contradictions(told, Ranks(), threads, written)
    check_outputs(told, written, 1)
    known = sound_program(program, machine=machine)
    told = for_program(known, told, Ranks(), threads)

    def hear(timed: TimedStep) -> None:
        if progress is not None:
            done = timed.report.step + 1
            progress(Progress(done, max(done, told.steps), f"loss {timed.report.loss:.4f}"))
        if each_step is not None:
            each_step(timed)

    return run_training(known, chosen, told, written, Display(quiet=True, each_step=hear))


def launch(
    program: str,
    ranks: int,
    words: Sequence[str] = (),
    *,
    engine: Literal["mpi", "torch"] = "mpi",
    mpirun: str | None = None,
) -> int:
    """Start `ratrainc run` with a process a rank, by mpirun or torchrun, watch over it, and return its exit code.

    `words` are options of `ratrainc run`. Raises `DiagnosticError` where the processes cannot be started.
    """
    from ratrain.ratrainc.running.launching import launch as start

    if engine == "torch" and mpirun is not None:
        misuse("--mpirun is for --engine mpi: with --engine torch torchrun starts the ranks")
    return start(program, ranks, tuple(words), engine, mpirun)


def generate(
    path: str,
    prompt: str | Sequence[int] | Prompt,
    *,
    tokens: int = 64,
    asked: Generation | None = None,
    threads: int | None = None,
) -> Generated:
    """What the model of a checkpoint, or of a Hugging Face directory, says behind a prompt: words, or numbers of tokens.

    `asked` says all of how the text is made, `tokens` only how many are added at most. Raises `DiagnosticError` RT094 where the prompt does
    not fit the model, and where the model cannot be read.
    """
    from ratrain.ratrainc.running.generation import generate as made

    if isinstance(prompt, str):
        prompt = Prompt(text=prompt)
    given = prompt if isinstance(prompt, Prompt) else Prompt(tokens=tuple(prompt))
    return made(path, given, evolve(asked or Generation(tokens), threads=threads or available_threads()))


def export_weights(
    checkpoint: str, output: str, *, max_shard_bytes: int | None = None, dtype: Literal["f32", "bf16"] = "f32"
) -> Export:
    """Write the master weights of a checkpoint as a Hugging Face model that transformers loads.

    Raises `DiagnosticError` where the checkpoint is not sound, or the directory holds something else.
    """
    from ratrain.ratrainc.running.weight_export import MOST_SHARD_BYTES
    from ratrain.ratrainc.running.weight_export import export_weights as write

    if max_shard_bytes == 0:
        misuse("--max-shard-size 0 leaves no room for a tensor")
    return write(checkpoint, output, most_shard_bytes=max_shard_bytes or MOST_SHARD_BYTES, dtype=Dtype(dtype))


@frozen(repr=False)
class WatchedRuns(Shown):
    """A page of what runs have logged, and the last figures of each."""

    path: str
    size: int
    """bytes of the page"""
    runs: tuple[dict[str, Any], ...]
    exit_code: int
    """130 where Ctrl-C ended it"""

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        from ratrain.ratrainc.console.console import size_text

        steps, several = sum(run["steps"] for run in self.runs), "s" * (len(self.runs) > 1)
        yield f"wrote {Path(self.path)}, {size_text(self.size)}: {steps:,} steps of {len(self.runs)} run{several}"

    def to_json(self) -> dict[str, Any]:
        """The figures as `--json` prints them."""
        return {"output": self.path, "bytes": self.size, "runs": list(self.runs)}


def watch(runs: Sequence[str], output: str | None = None, *, every: float | None = None) -> WatchedRuns:
    """Draw the logs of runs, or those in folders, as one HTML page: once, or every so many seconds while runs write to them.

    The page is by default beside the first log. Raises `DiagnosticError` where there is no log, or the page cannot be written.
    """
    from ratrain.ratrainc.watch.page import summary
    from ratrain.ratrainc.watch.watching import logs_of, page_beside
    from ratrain.ratrainc.watch.watching import watch as write

    logs = logs_of(runs)
    path = output or page_beside(logs[0].path)
    size, code = write(logs, path, every)
    return WatchedRuns(path, size, tuple(summary(log) for log in logs), code)


@frozen(repr=False)
class Postmortem(Shown):
    """Where the ranks of a run were, and why it ended or makes no progress."""

    report: str
    well: bool
    """whether it ended well, or gets on"""

    def parts(self) -> Iterator[Part]:
        """The report."""
        yield self.report

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {"report": self.report, "well": self.well}


def postmortem(directory: str) -> Postmortem:
    """What became of a run, of its --save or --run-dir directory; also of one that goes on.

    Raises `DiagnosticError` where no ranks have said there where they are.
    """
    from ratrain.ratrainc.running.supervisor import describe
    from ratrain.targets.runtime.checkpoint.checkpoint_series import RUN_FOLDER
    from ratrain.targets.runtime.watch.positions import RunFolder

    inside = Path(directory) / RUN_FOLDER
    report, well = describe(RunFolder(str(inside if is_directory(inside) else directory)))
    return Postmortem(report if isinstance(report, str) else report.render(), well)


@frozen(repr=False)
class Offer(Shown):
    """What this machine offers a run."""

    facts: dict[str, MachineFact]

    @property
    def problems(self) -> list[str]:
        """The facts that would stop a run."""
        return [name for name, fact in self.facts.items() if fact.stops_a_run]

    def parts(self) -> Iterator[Part]:
        """A line a fact."""
        for name, fact in self.facts.items():
            mark = "!!" if fact.stops_a_run else "ok"
            yield f"{mark}  {name}: {fact.found}" + (f"\n      {fact.remark}" if fact.remark else "")

    def to_json(self) -> dict[str, Any]:
        """The facts as `--json` prints them."""
        return {"facts": {name: fact.to_json() for name, fact in self.facts.items()}, "problems": self.problems}


def precompile(dtypes: Sequence[str] = ("f16",), *, progress: OnProgress | None = None) -> Precompiled:
    """Compile the loops that first compilations and first runs would compile, for weights, activations and gradients of some types: f16, bf16, f32."""
    from ratrain.ratrainc.running.precompiling import precompile as compile_ahead

    return compile_ahead([Dtype(each) for each in dict.fromkeys(dtypes)], progress or unheard)


def doctor(program: Program | str | None = None, *, machine: str | Machine | None = None) -> Offer:
    """What this machine offers a run: BLAS, threads, bf16, the kernels' cache, MPI, torch.distributed, free memory; and to a program.

    Raises `DiagnosticError` where the program, or its file, is not sound.
    """
    from ratrain.ratrainc.facts.machine_facts import machine_facts, program_fact

    known = (
        None if program is None else sound_program(program, machine=machine)
    )  # what it takes is told of a sound program only
    facts = machine_facts()
    return Offer(facts if known is None else facts | {"program": program_fact(known)})
