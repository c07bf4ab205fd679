"""`ratrainc examples`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import Result, json_option, output_directory
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc examples
  ratrainc examples examples                                   then all that help pages say of examples/ can be typed
"""

_NAMED = 5
"""So many files that are there already are named; more are counted."""


@click.command(epilog=_EPILOG)
@click.argument("folder", type=Result("examples"), callback=output_directory, metavar="[DIR]", required=False)
@json_option
def command(folder: str | None, as_json: bool) -> None:
    """List the example models, plans and machines that come with the package, or copy them into a folder.

    Files that are there already are left as they are.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json

    if folder is None:
        found = api.examples()
        if as_json:
            print_json({"examples": [{"name": name, "summary": summary} for name, summary in found.items()]})
            return
        for name, summary in found.items():
            echo(f"{name}\n    {summary}")
        echo("'ratrainc examples DIR' copies them into a folder")
        return
    copied, kept = api.copy_examples(folder)
    if as_json:
        print_json({"output": folder, "copied": copied, "kept": kept})
        return
    if kept:
        named = ", ".join(kept) if len(kept) <= _NAMED else f"{len(kept)} files"
        echo(f"there already, left untouched: {named}")
    echo(f"copied {len(copied)} files into {folder}")
