"""Functions about runs: train, launch, generate, export weights, watch, and check this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.files import is_directory
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Generation, Outputs, Prompt, Ranks
from ratrain.ratrainc.compiling.proving import sound_program
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.console.progress import OnProgress, Progress, unheard
from ratrain.ratrainc.facts.machine_facts import MachineFact
from ratrain.targets.runtime.settings import RunSettings, available_threads

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.finetune_choice import FinetuneChoice
    from ratrain.ratrainc.running.finetuning import Finetuned
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
    """Train: execute a program, or the program in a file, with all its ranks in this process.

    `settings` are the run's settings, or just its number of steps. `data` is a file, a folder or a `DataChoice`; None
    is the English text that ships with Python. `each_step` is called after every step. Ctrl-C ends the run after the
    current step. Raises `DiagnosticError` if something cannot be used, or settings contradict each other.
    """
    from ratrain.ratrainc.running.run_checks import for_program, refuse_contradictions
    from ratrain.ratrainc.running.training import check_outputs, run_training

    told = RunSettings(settings) if isinstance(settings, int) else settings
    chosen = DataChoice((data,)) if isinstance(data, str) else data or DataChoice()
    written = outputs or Outputs()
    refuse_contradictions(told, chosen, Ranks(), threads, written)
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


def finetune(choice: FinetuneChoice) -> Finetuned:
    """Fine-tune a model on data: plan for the memory, compile, train, evaluate, and write the best weights.

    Raises `DiagnosticError` if something cannot be used or does not fit, options contradict each other, or the folder
    holds another run.
    """
    from ratrain.ratrainc.running.finetuning import finetune as tuned
    from ratrain.ratrainc.running.finetuning import refuse_idle_choices

    refuse_idle_choices(choice)
    return tuned(choice, Display(quiet=True))


def launch(
    program: str,
    ranks: int | None = None,
    words: Sequence[str] = (),
    *,
    engine: Literal["mpi", "torch"] = "mpi",
    mpirun: str | None = None,
) -> int:
    """Start `ratrainc run` with one process a rank, by mpirun or torchrun, watch over it, and return its exit code.

    `ranks` are as many as the program has, and None says so. `words` are further options of `ratrainc run`. `mpirun` is
    the program to start MPI with. Raises `DiagnosticError` if the processes cannot be started.
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
    progress: OnProgress | None = None,
) -> Generated:
    """Continue a prompt, words or token numbers, with the model of a checkpoint or of a Hugging Face directory.

    `asked` sets everything about the generation; without it, `tokens` is the most to add. Raises `DiagnosticError`
    RT094 if the prompt does not fit the model, and another if the model cannot be read.
    """
    from ratrain.ratrainc.running.generation import generate as made

    if isinstance(prompt, str):
        prompt = Prompt(text=prompt)
    given = prompt if isinstance(prompt, Prompt) else Prompt(tokens=tuple(prompt))
    return made(
        path, given, evolve(asked or Generation(tokens), threads=threads or available_threads()), progress or unheard
    )


def export_weights(
    checkpoint: str,
    output: str,
    *,
    max_shard_bytes: int | None = None,
    dtype: Literal["f32", "bf16"] = "f32",
    init: str | None = None,
    adapter: bool = False,
) -> Export:
    """Write the master weights of a checkpoint as a Hugging Face model that transformers loads.

    `max_shard_bytes` limits the size of a file. Of a run that trained adapters they are merged into the weights that it
    began with, `init`; with `adapter` they are written alone, as a folder that PEFT loads, and `init` is named in it as
    their model. Raises `DiagnosticError` if the checkpoint is not sound, or the
    directory holds something else.
    """
    from ratrain.ratrainc.running.weight_export import MOST_SHARD_BYTES, export_adapter
    from ratrain.ratrainc.running.weight_export import export_weights as write

    if max_shard_bytes == 0:
        misuse("--max-shard-size 0 leaves no room for a tensor")
    if adapter:
        if max_shard_bytes is not None or dtype != "f32":
            misuse("--adapter writes one file in f32: --max-shard-size and --dtype are for whole models")
        return export_adapter(checkpoint, output, init)
    return write(
        checkpoint, output, init=init, most_shard_bytes=max_shard_bytes or MOST_SHARD_BYTES, dtype=Dtype(dtype)
    )


@frozen(repr=False)
class WatchedRuns(Shown):
    """A page that draws the logs of runs, and the last figures of each run."""

    path: str
    size: int
    """bytes of the page"""
    runs: tuple[dict[str, Any], ...]
    exit_code: int
    """130 after Ctrl-C, else 0"""

    def parts(self) -> Iterator[Part]:
        """Yield a sentence."""
        from ratrain.ratrainc.console.console import size_text

        steps, runs = sum(run["steps"] for run in self.runs), number_of(len(self.runs), "run")
        yield f"wrote {Path(self.path)}, {size_text(self.size)}: {number_of(steps, 'step', ',')} of {runs}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {"output": self.path, "bytes": self.size, "runs": list(self.runs)}


def watch(runs: Sequence[str], output: str | None = None, *, every: float | None = None) -> WatchedRuns:
    """Draw the logs of runs as one HTML page: once, or every `every` seconds while runs write to them.

    `runs` are log files or folders of them. The page is written next to the first log unless `output` names it. Raises
    `DiagnosticError` if there is no log, or the page cannot be written.
    """
    from ratrain.ratrainc.watch.watch_page import summary
    from ratrain.ratrainc.watch.watching import logs_of, page_path
    from ratrain.ratrainc.watch.watching import watch as write

    logs = logs_of(runs)
    path = output or page_path(logs[0].path)
    size, code = write(logs, path, every)
    return WatchedRuns(path, size, tuple(summary(log) for log in logs), code)


@frozen(repr=False)
class Postmortem(Shown):
    """The last positions of a run's ranks, and why it ended or makes no progress."""

    report: str
    well: bool
    """True if it ended well, or makes progress"""

    def parts(self) -> Iterator[Part]:
        """Yield the report."""
        yield self.report

    def to_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        return {"report": self.report, "well": self.well}


def postmortem(directory: str) -> Postmortem:
    """Report the end, or the present state, of a run from its `--save` or `--run-dir` directory.

    Raises `DiagnosticError` if no rank has recorded its position there.
    """
    from ratrain.ratrainc.running.supervisor import describe
    from ratrain.targets.runtime.checkpoint.checkpoint_series import RUN_FOLDER
    from ratrain.targets.runtime.watch.positions import RunFolder

    inside = Path(directory) / RUN_FOLDER
    report, well = describe(RunFolder(str(inside if is_directory(inside) else directory)))
    return Postmortem(report if isinstance(report, str) else report.render(), well)


@frozen(repr=False)
class Offer(Shown):
    """Facts about this machine that matter to a run."""

    facts: dict[str, MachineFact]

    @property
    def problems(self) -> list[str]:
        """The facts that would stop a run."""
        return [name for name, fact in self.facts.items() if fact.stops_a_run]

    def parts(self) -> Iterator[Part]:
        """Yield a line for each fact."""
        for name, fact in self.facts.items():
            mark = "!!" if fact.stops_a_run else "ok"
            yield f"{mark}  {name}: {fact.found}" + (f"\n      {fact.remark}" if fact.remark else "")

    def to_json(self) -> dict[str, Any]:
        """Return the facts as `--json` prints them."""
        return {"facts": {name: fact.to_json() for name, fact in self.facts.items()}, "problems": self.problems}


def precompile(dtypes: Sequence[str] = ("f16",), *, progress: OnProgress | None = None) -> Precompiled:
    """Compile ahead the loops that first compilations and first runs would compile.

    `dtypes` are the types of weights, activations and gradients to compile for: f16, bf16, f32.
    """
    from ratrain.ratrainc.running.precompiling import precompile as compile_ahead

    return compile_ahead([Dtype(each) for each in dict.fromkeys(dtypes)], progress or unheard)


def doctor(program: Program | str | None = None, *, machine: str | Machine | None = None) -> Offer:
    """Check this machine for runs: BLAS, threads, bf16, kernel cache, MPI, torch.distributed and free memory.

    With a program, its needs are checked too. Raises `DiagnosticError` if the program or its file is not sound.
    """
    from ratrain.ratrainc.facts.machine_facts import machine_facts, program_fact

    known = (
        None if program is None else sound_program(program, machine=machine)
    )  # only a sound program's needs can be trusted
    facts = machine_facts()
    return Offer(facts if known is None else facts | {"program": program_fact(known)})
