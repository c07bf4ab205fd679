"""`ratrainc validate`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    jobs_option,
    json_option,
    refuse_idle,
    result_option,
)
from ratrain.ratrainc.console.terminal import echo, echo_document

_EPILOG = """\b
Examples:
  ratrainc validate measured.csv
  ratrainc validate measured.csv --json
  ratrainc validate measured.csv --results rows.jsonl --jobs 2
  ratrainc validate measured.csv --machine mine.toml             would another machine file predict it better?
  ratrainc validate benchmarks/published/*.csv --markdown -o docs/validation.md        with the tables of the repository

\b
A row says what one step took, or held, or that it did not fit:
  id,class,split,model,machine,plan,dp,strategy,tokens_per_second,group
  7b-256,scaling,fit,llama-2-7b,mt3000,p.toml,128,ratrain,29069.73,weak
  7b-512,scaling,held-out,llama-2-7b,mt3000,p.toml,256,ratrain,57558.07,weak

\b
class: bubble (bubble_fraction), step-time, scaling, zero3-micro-batch (step_seconds or tokens_per_second), memory
(peak_bytes), out-of-memory (fits: yes or no). Any key of a plan can be a column. times gives T_F,T_B,T_W,T_comm for a
bubble. A row whose column needs names a feature that is not built is left out. docs/validation-tables.md has all
columns.
"""


@click.command(epilog=_EPILOG)
@click.argument("tables", type=InputFile("validation table"), nargs=-1, required=True, metavar="TABLE.csv...")
@click.option(
    "--machine",
    type=InputFile("machine"),
    metavar="FILE",
    help="A machine file (TOML), or the name of a built-in machine, in place of those that rows name.",
)
@click.option("--markdown", is_flag=True, help="Print a page in Markdown; its prose is the comments above the headers.")
@result_option("-o --output", Result("page", ".md"), "FILE.md", "With --markdown: write the page there.")
@click.option(
    "--whole", is_flag=True, help="Simulate every micro-batch of long steps, which otherwise are folded to a few (~)."
)
@result_option(
    "--results",
    Result("results", ".jsonl"),
    "FILE.jsonl",
    "Append each row's result as it is found; rows that are there already, of the same machine and code, are not "
    "simulated again. So a run that was stopped goes on.",
)
@jobs_option("Processes that compile and simulate rows.")
@json_option
def command(
    tables: tuple[str, ...],
    machine: str | None,
    markdown: bool,
    output: str | None,
    whole: bool,
    results: str | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Compile and simulate published measurements, and report the errors of the simulation.

    Errors are given by class of rows, separately for rows that constants of a machine were fitted to (split fit) and
    for held-out rows. Nothing is fitted here: 'ratrainc calibrate' does that.
    """
    if as_json:
        refuse_idle("is another form of the result than --json", "markdown", "output")
    if not markdown:
        refuse_idle("goes with --markdown: it names the page", "output")
    from ratrain import api
    from ratrain.ratrain_ir.support.files import write_text
    from ratrain.ratrainc.commands.words.loading import machine_of_option
    from ratrain.ratrainc.console.console import bar, print_json
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.validation.markdown import page
    from ratrain.ratrainc.validation.validation_tables import validation_parts

    chosen = machine_of_option(machine)
    with bar(None, "validating") as progress:
        validation = api.validate(*tables, machine=chosen, whole=whole, jobs=jobs, results=results, progress=progress)
    if as_json:
        print_json(validation.to_json())
    elif output is not None:
        write_text(output, page(validation))
        echo(f"wrote {output}")
    elif markdown:
        echo_document(page(validation))
    else:
        show(validation_parts(validation))
