"""`ratrainc passes`."""

from __future__ import annotations

from typing import Any

import click

from ratrain.ratrainc.commands.options import json_option
from ratrain.ratrainc.terminal import echo


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List the passes and their options."""
    if as_json:
        from ratrain.ratrainc.console import print_json

        print_json({"passes": _passes()})
    else:
        list_passes()


def _passes() -> list[dict[str, Any]]:
    """Every pass with its summary and options, as data."""
    import attrs

    from ratrain.passes.pass_base import default_text, values_text
    from ratrain.passes.registry import PASSES, pass_class

    found = []
    for name in PASSES.names():
        cls = pass_class(name)
        options = [
            {
                "name": attribute.name.replace("_", "-"),
                "values": values_text(attribute),
                "default": default_text(attribute),
                "required": attribute.default is attrs.NOTHING,
            }
            for attribute in attrs.fields(cls)
        ]
        summary = (cls.__doc__ or "It does not say what it does.").strip().splitlines()[0]
        found.append({"name": name, "summary": summary, "options": options})
    return found


def list_passes() -> None:
    """Print every pass with its summary and options."""
    for each in _passes():
        echo(f"{each['name']}\n    {each['summary']}")
        for option in each["options"]:
            echo(f"    {{{option['name']}={option['values']}}}, default {option['default']}")
