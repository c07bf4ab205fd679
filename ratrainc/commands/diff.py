"""`ratrainc diff`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import InputFile, json_option

_EPILOG = """\b
Examples:
  ratrainc diff before.rtir after.rtir
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --passes place-1f1b -o a.rtir
  ratrainc opt a.rtir --passes "recompute{policy=full},insert-release" --dump-dir steps -o /dev/null
  ratrainc diff steps/001-recompute.rtir steps/002-insert-release.rtir
"""


@click.command(epilog=_EPILOG)
@click.argument("before", type=InputFile("schedule"), metavar="A.rtir")
@click.argument("after", type=InputFile("schedule"), metavar="B.rtir")
@json_option
def command(before: str, after: str, as_json: bool) -> None:
    """Show what differs between two schedules, in schedule terms: ops added, dropped, moved; tensors; peaks."""
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, status
    from ratrain.ratrainc.console.parts import show

    with status(f"comparing {before} and {after}"):
        found = api.diff(before, after)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
