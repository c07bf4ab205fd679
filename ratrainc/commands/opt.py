"""`ratrainc opt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words import completing
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    machine_option,
    output_directory,
    processes_option,
    refuse_idle,
    result_option,
    verbose_option,
)
from ratrain.ratrainc.console.terminal import echo, echo_document

if TYPE_CHECKING:
    from ratrain.passes.manager import PassRun
    from ratrain.ratrain_ir.module import Module

_EPILOG = """\b
Examples:
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --passes place-1f1b -o placed.rtir
  ratrainc opt placed.rtir --passes "lifetime,recompute{policy=full},allocate-ddr" -o out.rtir
  ratrainc opt placed.rtir --passes "recompute,allocate-ddr" --print-ir-after recompute --time-passes
  ratrainc opt placed.rtir --passes "recompute,allocate-ddr" --dump-dir steps --stats -o /dev/null

placed.rtir is a schedule without addresses yet, such as 'compile ... --passes place-1f1b -o placed.rtir' writes.

'ratrainc passes' lists the passes and their options. What a pass needs and is missing is inserted; -v says so.
"""


def _list_passes(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ratrain import api
        from ratrain.ratrainc.console.parts import show

        show(api.passes().parts())
        context.exit()


class _Observer:
    """Output of the module between passes, on stderr or in files."""

    def __init__(self, module: Module, after: str | None, after_change: bool, folder: str | None) -> None:
        from ratrain.ratrain_ir.support.files import made_directory

        self.wanted = after
        self.after_change = after_change
        self.folder = made_directory(folder) if folder else None
        self.before = _schedule_text(module) if after_change else ""
        self.count = 0

    def after(self, module: Module, run: PassRun) -> None:
        """Handle the end of a pass: print or dump the module as asked."""
        self.count += 1
        name = run.text.partition("{")[0]
        changed = False
        if self.after_change:
            text = _schedule_text(module)
            changed, self.before = text != self.before, text
        if changed or self.wanted in ("all", name):
            echo(f"// after {run.text}", err=True)
            echo(_text(module), err=True, nl=False, wrap=False)
        if self.folder is not None:
            from ratrain.ratrain_ir.text.printer import write_module

            write_module(module, str(self.folder / f"{self.count:03d}-{name}.rtir"))


def _text(module: Module) -> str:
    from ratrain.ratrain_ir.text.printer import print_module

    return print_module(module)


def _schedule_text(module: Module) -> str:
    """Return the module's text without its list of passes, which grows even if nothing else changes."""
    from ratrain.ratrain_ir.text.printer import module_texts

    return "\n".join(line for line in module_texts(module) if not line.startswith("  pipeline "))


def _write_reproducer(file: str, pipeline: str) -> str:
    """Write the input to a file whose first line is the failed command, so that the file can be run."""
    from ratrain.ratrain_ir.support.files import read_text, write_text

    path, words = (
        f"{file}.reproducer.rtir",
        " ".join(pipeline.split()),
    )  # one line, whatever blanks stand between passes
    write_text(path, f'// ratrainc opt THIS --passes "{words}"\n{read_text(file, "schedule")}')
    return path


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("schedule"), metavar="FILE.rtir")
@click.option(
    "--passes",
    "pipeline",
    required=True,
    metavar="PIPELINE",
    shell_complete=completing.passes,
    help="Passes with options, separated by commas.",
)
@result_option(
    "-o --output", Result("schedule", ".rtir"), "F.rtir", "Write the result; without it the text goes to stdout."
)
@click.option(
    "--print-ir-after",
    metavar="all|PASS",
    shell_complete=completing.pass_name,
    help="Print the module after every pass, or after this one.",
)
@click.option("--print-ir-after-change", is_flag=True, help="Print the module after every pass that changed it.")
@click.option(
    "--dump-dir",
    type=Result("schedules"),
    callback=output_directory,
    metavar="DIR",
    help="Write the module after every pass as DIR/NNN-pass.rtir.",
)
@click.option(
    "--list-passes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_passes,
    help="List the passes and their options, and exit.",
)
@click.option("--verify-each", is_flag=True, help="Verify after every pass and name the one that broke the module.")
@click.option("--time-passes", is_flag=True, help="Show the seconds of each pass.")
@processes_option()
@verbose_option
@click.option("--stats", is_flag=True, help="Show what each pass reports.")
@machine_option
def command(
    file: str,
    pipeline: str,
    output: str | None,
    print_ir_after: str | None,
    print_ir_after_change: bool,
    dump_dir: str | None,
    verify_each: bool,
    time_passes: bool,
    stats: bool,
    verbose: bool,
    machine: str | None,
) -> None:
    """Run passes over a schedule and write the result."""
    from ratrain import api
    from ratrain.passes.manager import names_that_run
    from ratrain.passes.pipeline_text import parse_pipeline
    from ratrain.passes.registry import pass_class
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
    from ratrain.ratrain_ir.text.printer import print_module, write_module
    from ratrain.ratrainc.commands.words.loading import checked_schedule
    from ratrain.ratrainc.console.console import spinner

    if print_ir_after not in (None, "all"):
        pass_class(print_ir_after)
    items = parse_pipeline(pipeline)
    if not items:
        follows = ("print_ir_after", "print_ir_after_change", "dump_dir", "verify_each", "time_passes", "stats")
        refuse_idle("has no pass to follow: --passes names none", *follows)
    if print_ir_after == "all":
        refuse_idle("prints what --print-ir-after all prints already", "print_ir_after_change")
    module, chosen = checked_schedule(file, machine)
    if print_ir_after not in (None, "all", *(names := names_that_run(module, items))):
        refuse_idle(
            f"{print_ir_after} prints nothing: name one of the passes that run, {', '.join(names)}", "print_ir_after"
        )
    observer = _Observer(module, print_ir_after, print_ir_after_change, dump_dir)
    try:
        with spinner(file, "running passes over it") as progress:
            runs = api.run_passes(
                module,
                pipeline,
                machine=chosen,
                verify_each=verify_each,
                after_pass=observer.after,
                progress=progress,
            )
    except DiagnosticError:
        raise
    except Exception as error:
        reproducer = _write_reproducer(file, pipeline)
        text = f"a pass failed with {type(error).__name__}: {error}; '{reproducer}' holds the input and the pipeline"
        raise RuntimeError(text) from error
    for run in runs:
        if verbose and run.inserted_for:
            echo(f"inserted pass '{run.text}', which '{run.inserted_for}' needs", err=True)
        if time_passes:
            echo(f"{run.seconds:10.4f} s  {run.text}", err=True)
        if stats or run.text == "lifetime":
            for key, value in run.statistics.items():
                echo(f"  {run.text}: {key}: {value}", err=True)
    if output is None:
        echo_document(print_module(module))
    else:
        write_module(module, output)
        echo(f"wrote {output}", err=True)
