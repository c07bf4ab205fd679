"""`ratrainc passes`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import json_option

_EPILOG = """\b
Examples:
  ratrainc passes
  ratrainc passes --json
  ratrainc passes --plugin mine.py
"""


@click.command(epilog=_EPILOG)
@json_option
def command(as_json: bool) -> None:
    """List the passes and their options."""
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show

    if as_json:
        print_json(api.passes().to_json())
    else:
        show(api.passes().parts())
