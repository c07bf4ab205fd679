"""`ratrainc quickstart`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.commands.words.options import Result, output_directory, steps_option

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

_EPILOG = """\b
Examples:
  ratrainc quickstart
  ratrainc quickstart --steps 300 --keep quickstart-out
"""
_EVAL_BATCHES = 4


@click.command(epilog=_EPILOG)
@steps_option(120, "Training steps.")
@click.option(
    "--keep",
    type=Result("run"),
    callback=output_directory,
    metavar="DIR",
    help="Keep schedule, program and log in this directory; with the extra 'plot' a picture of the losses too.",
)
def command(steps: int, keep: str | None) -> int:
    """Plan, compile, verify, time and train a small LLaMA on real text: 2 stages x 2 replicas, all on this machine.

    Nothing is downloaded: the text is the English help that ships inside every Python.
    """
    import tempfile

    if keep is not None:
        from ratrain.ratrain_ir.support.files import made_directory
        from ratrain.ratrainc.console.extras import is_installed

        return _quickstart(steps, made_directory(keep), is_drawn=is_installed("matplotlib"))
    with tempfile.TemporaryDirectory(prefix="ratrain-") as folder:
        return _quickstart(steps, Path(folder), is_drawn=False)


def _quickstart(steps: int, folder: Path, *, is_drawn: bool) -> int:
    from tomllib import loads

    with paused_gc():  # what is imported stays
        from ratrain.ratrain_ir.config.types import Dtype
        from ratrain.ratrainc.console.console import say
        from ratrain.ratrainc.running.examples import example_path
        from ratrain.targets.runtime.kernels.fast.ahead import step_compiling

    say("1. compile: examples/tiny.json under examples/tiny.toml")
    view_dtype = loads(example_path("tiny.toml").read_text())["state"]["view_dtype"]
    # before all else: compiling takes longer than planning
    with step_compiling(Dtype(view_dtype)):
        with paused_gc():
            program = _program(folder)
            gc.freeze()  # what is planned stays: each collection would look through it
        return _trained(program, steps, folder, is_drawn=is_drawn)


def _program(folder: Path) -> Program:
    """Plan, compile, verify, emit and simulate the example; say what each gave."""
    from ratrain import api
    from ratrain.ratrain_ir.text.printer import write_module
    from ratrain.ratrainc.console.console import say
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.report.summary_tables import module_parts
    from ratrain.ratrainc.running.examples import example_path
    from ratrain.targets.verifier.program_verifier import check_program

    module = api.compile(str(example_path("tiny.json")), str(example_path("tiny.toml")), verify_each=True)
    write_module(module, str(folder / "tiny.rtir"))
    show(module_parts(module, api.machine_for(module, None)))
    say("")
    say("2. verify and emit: the schedule is read back from its text, proved sound, and becomes a program")
    again = api.load_schedule(str(folder / "tiny.rtir"))
    api.check(again)
    program = api.emit(again)
    from ratrain.targets.program.rtx import read_program, write_program

    write_program(program, str(folder / "tiny.rtx"))
    program = read_program(str(folder / "tiny.rtx"))
    check_program(program)
    counts = f"{sum(stage.instructions for stage in program.stages)} instructions, {len(program.routines)} routines"
    say(f"sound: {counts}; waits are explicit, and every byte has its place")
    say("")
    say("3. simulate: the same program on four clusters of an MT-3000")
    show(api.simulate(program).parts())
    say("")
    return program


def _trained(program: Program, steps: int, folder: Path, *, is_drawn: bool) -> int:
    from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs, Ranks
    from ratrain.ratrainc.console.console import say
    from ratrain.ratrainc.running.run_checks import for_program
    from ratrain.ratrainc.running.run_result import show_run
    from ratrain.ratrainc.running.training import run_training
    from ratrain.targets.runtime.settings import Evaluation, RunSettings

    say("4. train: the same program, executed here")
    settings = RunSettings(
        steps=steps,
        evaluation=Evaluation(every=max(1, steps // 3), batches=_EVAL_BATCHES),
    )
    settings = for_program(program, settings, Ranks(), None)
    outputs = Outputs(log=str(folder / "losses.jsonl"), plot=str(folder / "loss.svg") if is_drawn else None)
    result = run_training(program, DataChoice(), settings, outputs, Display())
    say("")
    say("report")
    show_run(result)
    say("next: docs/start-here.md")
    return result.exit_code
