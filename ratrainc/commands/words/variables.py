"""`NAME=VALUE` words of an option that may be repeated."""

from __future__ import annotations

import click


def variables(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the values of `NAME=VALUE` words by name; refuse a bad name, and two values for one name."""
    found: dict[str, str] = {}
    for each in values:
        name, sign, value = each.partition("=")
        if not sign or not (name.isidentifier() or (name.isdecimal() and name[0] != "0")):
            raise click.BadParameter(f"expected NAME=VALUE, got '{each}'", context, parameter)
        if found.get(name, value) != value:
            raise click.BadParameter(f"{name} is set twice, to '{found[name]}' and '{value}'", context, parameter)
        found[name] = value
    return found
