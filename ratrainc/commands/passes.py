"""`ratrainc passes`."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """List the passes and their options."""
    list_passes()


def list_passes() -> None:
    """Print every pass with its summary and options."""
    import attrs

    from passes.registry import PASSES, pass_class

    for name in PASSES:
        cls = pass_class(name)
        click.echo(f"{name}\n    {(cls.__doc__ or '').splitlines()[0]}")
        for attribute in attrs.fields(cls):
            choices = attribute.metadata.get("choices")
            kind = "|".join(choices) if choices else attribute.metadata.get("unit", "")
            default = "what the machine has" if attribute.default is None else attribute.default
            click.echo(f"    {{{attribute.name.replace('_', '-')}={kind}}}, default {default}")
