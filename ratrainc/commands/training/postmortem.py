"""`ratrainc postmortem`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import InputFile, json_option
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc postmortem run1          the --save DIR of a run, or its --run-dir
  ratrainc postmortem run1 --json
"""


@click.command(epilog=_EPILOG)
@click.argument("directory", type=InputFile("run"), metavar="DIR")
@json_option
def command(directory: str, as_json: bool) -> int:
    """Report where the ranks of a run were, who waits for whom, and why it ended or makes no progress.

    The run may still be going on. Exit code 1 if it was lost or cannot go on.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json

    found = api.postmortem(directory)
    if as_json:
        print_json(found.to_json())
    else:
        echo(found.report)
    return 0 if found.well else 1
