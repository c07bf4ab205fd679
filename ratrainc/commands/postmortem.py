"""`ratrainc postmortem`."""

from __future__ import annotations

from pathlib import Path

import click

from ratrain.ratrainc.commands.options import Source, json_option
from ratrain.ratrainc.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc postmortem run1          the --save DIR of a run, or its --run-dir
  ratrainc postmortem run1 --json
"""


@click.command(epilog=_EPILOG)
@click.argument("directory", type=Source("run"), metavar="DIR")
@json_option
def command(directory: str, as_json: bool) -> int:
    """Say where the ranks of a run were, who waits for whom, and why it ended or makes no progress.

    Also of a run that goes on. Exit code 1 where it was lost or cannot go on.
    """
    from ratrain.ratrain_ir.files import is_directory
    from ratrain.ratrainc.console import print_json
    from ratrain.ratrainc.supervisor import describe
    from ratrain.targets.runtime.checkpoint_series import RUN_FOLDER
    from ratrain.targets.runtime.positions import RunFolder

    inside = Path(directory) / RUN_FOLDER
    report, well = describe(RunFolder(str(inside if is_directory(inside) else directory)))
    text = report if isinstance(report, str) else report.render()
    if as_json:
        print_json({"report": text, "well": well})
    else:
        echo(text)
    return 0 if well else 1
