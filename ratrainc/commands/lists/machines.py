"""`ratrainc machines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands.words.options import InputFile, json_option
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

_EPILOG = """\b
Examples:
  ratrainc machines
  ratrainc machines h100-node
  ratrainc machines my-machine.toml --json
"""


@click.command(epilog=_EPILOG)
@click.argument("machine", type=InputFile("machine"), metavar="[NAME|FILE.toml]", required=False)
@json_option
def command(machine: str | None, as_json: bool) -> None:
    """List the built-in machines, or the figures of one machine with their certainty and source.

    A machine of your own is a file, read here as --machine reads it: docs/machine.md.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, table

    if machine is not None:
        _show(api.machine(machine), as_json=as_json)
        return
    found = api.machines()
    if as_json:
        print_json({"machines": [_summary(each) for each in found]})
        return
    table("built-in machines", _COLUMNS, [_row(each) for each in found])
    echo("'ratrainc machines NAME' lists the figures of one; --machine takes a name of these or a file")


_COLUMNS = ("machine", "target", "memory", "bandwidth", "peak", "links, each way", "figures", "assumed")


def _row(machine: Machine) -> list[str]:
    links = ", ".join(
        f"{_text(group.link.bandwidth, 'bytes/s')} in a {group.name}{f' of {group.clusters}' if group.clusters else ''}"
        for group in machine.link_groups
    )
    figures = [_text(machine[key], unit) for key, unit in _SUMMARY.items()]
    return [machine.name, machine.target, *figures, links, str(len(machine.constants)), str(len(_assumed(machine)))]


_SUMMARY = {"ddr_capacity": "bytes", "ddr_bandwidth": "bytes/s", "fp16_peak": "flop/s"}


def _summary(machine: Machine) -> dict[str, Any]:
    figures = {key: machine[key] for key in _SUMMARY}
    counts = {"constants": len(machine.constants), "assumed": _assumed(machine)}
    return {"name": machine.name, "target": machine.target, "cost": machine.cost} | figures | counts


def _assumed(machine: Machine) -> list[str]:
    return [name for name, constant in machine.constants.items() if constant.certainty == "assumed"]


def _text(value: float, unit: str) -> str:
    """Return a figure with its unit, in the form of machine files."""
    from ratrain.ratrain_ir.support.quantities import SCALES, quantity_text

    return quantity_text(value, unit) if unit in SCALES else f"{value:.12g} {unit}"


def _show(machine: Machine, *, as_json: bool) -> None:
    """Print the figures of one machine."""
    from ratrain.ratrainc.console.console import print_json

    if as_json:
        constants = [
            {"name": name, "value": c.value, "unit": c.unit, "certainty": c.certainty, "source": c.source}
            for name, c in machine.constants.items()
        ]
        print_json(_summary(machine) | {"constants": constants, "without_certainty": list(machine.unsaid)})
        return
    echo(
        f"{machine.name}: target {machine.target}, times by {machine.cost}, updates on the "
        f"{machine.update_engine.value} engine"
    )
    rows = [
        (name, _text(c.value, c.unit), f"{c.certainty}{'*' * (name in machine.unsaid)}", c.source)
        for name, c in machine.constants.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        echo(f"  {'  '.join(cells)}  {row[3]}")
    if machine.unsaid:
        echo("* the file says no certainty, which counts as assumed")
