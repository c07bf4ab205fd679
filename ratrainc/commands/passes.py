"""`ratrainc passes`."""

from __future__ import annotations

import click

from ratrain.ratrainc.terminal import echo


@click.command()
def command() -> None:
    """List the passes and their options."""
    list_passes()


def list_passes() -> None:
    """Print every pass with its summary and options."""
    import attrs

    from ratrain.passes.pass_base import default_text, values_text
    from ratrain.passes.registry import PASSES, pass_class

    for name in PASSES.names():
        cls = pass_class(name)
        echo(f"{name}\n    {(cls.__doc__ or 'It does not say what it does.').strip().splitlines()[0]}")
        for attribute in attrs.fields(cls):
            option = attribute.name.replace("_", "-")
            echo(f"    {{{option}={values_text(attribute)}}}, default {default_text(attribute)}")
