"""`ratrainc opt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrainc.commands.options import machine_option

if TYPE_CHECKING:
    from passes.manager import PassRun
    from ratrain_ir.module import Module

_EPILOG = """\b
Examples:
  ratrainc opt tiny.rtir --passes "place-1f1b,lifetime,recompute{policy=full},allocate-ddr" -o out.rtir
  ratrainc opt tiny.rtir --passes "place-1f1b,allocate-ddr" --print-ir-after place-1f1b --time-passes

'ratrainc passes' lists the passes and their options. What a pass needs and is missing is inserted and reported.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", metavar="FILE.rtir")
@click.option(
    "--passes", "pipeline", required=True, metavar="PIPELINE", help="Passes with options, separated by commas."
)
@click.option("-o", "--output", metavar="F.rtir", help="Write the result; without it the text goes to stdout.")
@click.option("--print-ir-after", metavar="all|PASS", help="Print the module after every pass, or after this one.")
@click.option("--verify-each", is_flag=True, help="Verify after every pass and name the one that broke the module.")
@click.option("--time-passes", is_flag=True, help="Show the seconds of each pass.")
@click.option("--stats", is_flag=True, help="Show what each pass reports.")
@machine_option
def command(
    file: str,
    pipeline: str,
    output: str | None,
    print_ir_after: str | None,
    verify_each: bool,
    time_passes: bool,
    stats: bool,
    machine: str | None,
) -> None:
    """Run passes over a schedule and write the result."""
    from passes.registry import pass_class
    from ratrain_ir.files import write_lines
    from ratrain_ir.printer import module_lines, print_module
    from ratrainc import api

    if print_ir_after not in (None, "all"):
        pass_class(print_ir_after)

    def after(module: Module, run: PassRun) -> None:
        if print_ir_after in ("all", run.text.partition("{")[0]):
            click.echo(f"// after {run.text}", err=True)
            click.echo(print_module(module), err=True, nl=False)

    module = api.load_schedule(file)
    api.check(module)
    runs = api.run_passes(module, pipeline, machine=machine, verify_each=verify_each, after_pass=after)
    for run in runs:
        if run.inserted_for:
            click.echo(f"inserted pass '{run.text}', which '{run.inserted_for}' needs", err=True)
        if time_passes:
            click.echo(f"{run.seconds:10.4f} s  {run.text}", err=True)
        if stats or run.text == "lifetime":
            for key, value in run.statistics.items():
                click.echo(f"  {run.text}: {key}: {value}", err=True)
    if output is None:
        click.echo(print_module(module), nl=False)
    else:
        write_lines(output, module_lines(module))
        click.echo(f"wrote {output}", err=True)
