"""`ratrainc diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import Source, json_option

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.module_diff import StageDiff
    from ratrain.ratrain_ir.module import Module

_EPILOG = """\b
Examples:
  ratrainc diff before.rtir after.rtir
  ratrainc opt a.rtir --passes "place-1f1b,recompute" --dump-dir steps -o /dev/null
  ratrainc diff steps/001-place-1f1b.rtir steps/002-recompute.rtir
"""

_SHOWN = 12


@click.command(epilog=_EPILOG)
@click.argument("before", type=Source("schedule"), metavar="A.rtir")
@click.argument("after", type=Source("schedule"), metavar="B.rtir")
@json_option
def command(before: str, after: str, as_json: bool) -> None:
    """Show what differs between two schedules, in schedule terms: ops added, dropped, moved; tensors; peaks."""
    from ratrain import api
    from ratrain.ratrain_ir.analysis.module_diff import diff_modules
    from ratrain.ratrainc.console import print_json, say, status

    with status(f"comparing {before} and {after}"):
        modules = api.load_schedule(before), api.load_schedule(after)
        stages = diff_modules(*modules)
    machines = [_machine_text(module) for module in modules]
    if as_json:
        from attrs import asdict

        print_json({"machines": machines, "stages": [asdict(stage) for stage in stages]})
        return
    if machines[0] != machines[1]:
        say(f"compiled for: {machines[0] or 'no machine'} -> {machines[1] or 'no machine'}")
    elif all(stage.is_empty for stage in stages):
        say("no difference")
    for stage in stages:
        if not stage.is_empty:
            for line in _lines(stage):
                say(line)


def _machine_text(module: Module) -> str | None:
    """The machine a module is for, told apart from others by its digest."""
    target = module.target
    if target is None:
        return None
    digest = f" ({target.digest[:12]})" if target.digest else ""
    return f"{target.name}{digest}, {target.capacity_bytes} bytes a stage"


def _lines(stage: StageDiff) -> list[str]:
    lines = [f"stage @{stage.stage}: peak live {stage.peak_before} -> {stage.peak_after} bytes"]
    lines += _some("+ op", stage.added) + _some("- op", stage.dropped)
    lines += _some("~ moved", [f"{move.op}: {move.before} -> {move.after}" for move in stage.moved])
    lines += _some("~ operands of", stage.changed)
    lines += _some("+ tensor", stage.new_tensors) + _some("- tensor", stage.gone_tensors)
    if stage.readdressed:
        lines.append(f"  ~ {stage.readdressed} tensors have another address")
    return lines


def _some(mark: str, items: list[str] | tuple[str, ...]) -> list[str]:
    lines = [f"  {mark} {item}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"  {mark} ... and {len(items) - _SHOWN} more")
    return lines
