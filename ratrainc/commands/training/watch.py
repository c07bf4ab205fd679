"""`ratrainc watch`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    Result,
    json_option,
    refuse_idle,
    result_option,
)

_EPILOG = """\b
Examples:
  ratrainc watch losses.jsonl                                  writes losses.html until the run has ended
  ratrainc watch losses.jsonl --once -o page.html              once, of a finished run or of one in progress
  ratrainc watch first.jsonl second.jsonl -o both.html         two runs in the same charts
  ratrainc watch kept/                                         the logs (.jsonl) in a folder
"""


@click.command(epilog=_EPILOG)
@click.argument("runs", type=InputFile("log"), nargs=-1, required=True, metavar="LOG.jsonl|DIR...")
@result_option(
    "-o --output",
    Result("page", ".html", ".htm"),
    "PAGE.html",
    "The page to write. Default: next to the first log, with its name and .html.",
)
@click.option("--once", is_flag=True, help="Write the page once and end, also while a run goes on.")
@click.option(
    "--every",
    type=FiniteRange(0.5, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How often the page is written, and loads itself again, while a run goes on.",
)
@json_option
def command(runs: tuple[str, ...], output: str | None, once: bool, every: float, as_json: bool) -> int:
    """Draw the logs of runs as one HTML page that needs no network.

    It shows loss and held-out loss, tokens per second, gradient norm, loss scale, memory used against planned, and slow
    ranks. While a run on this machine writes to a log, the page is rewritten as the log grows; Ctrl-C ends that, and
    the page stays.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show

    if once:
        refuse_idle("is for a page that is written again and again: leave --once out", "every")
    watched = api.watch(runs, output, every=None if once else every)
    if as_json:
        print_json(watched.to_json())
    else:
        show(watched.parts())
    return watched.exit_code
