"""`ratrainc strategies`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import json_option
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc strategies
  ratrainc strategies --json
"""


@click.command(epilog=_EPILOG)
@json_option
def command(as_json: bool) -> None:
    """List the named pass pipelines. Under one plan all of them compute the same training."""
    from ratrain import api
    from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY
    from ratrain.ratrainc.console.console import print_json

    if as_json:
        items = [{"name": s.name, "passes": s.passes, "summary": s.summary} for s in api.strategies()]
        print_json({"strategies": items, "default": DEFAULT_STRATEGY})
        return
    for item in api.strategies():
        mark = " (default)" if item.name == DEFAULT_STRATEGY else ""
        echo(f"{item.name}{mark}\n    {item.summary}\n    {item.passes}")
