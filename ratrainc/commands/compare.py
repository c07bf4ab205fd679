"""`ratrainc compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratrainc.commands.options import json_option, machine_option, model_option, plan_option

if TYPE_CHECKING:
    from ratrainc.levers import Outcome

_EPILOG = """\b
Examples:
  ratrainc compare --model llama-2-7b --plan examples/llama-2-7b-256.toml
  ratrainc compare --model llama-2-7b --plan P.toml --strategies baseline-1f1b,ratrain --json
"""


@click.command(epilog=_EPILOG)
@model_option(required=True)
@plan_option(required=True)
@click.option(
    "--strategies", "names", metavar="a,b,...", help="Strategies to compare, the first is the yardstick. Default: all."
)
@machine_option
@json_option
def command(model: str, plan: str, names: str | None, machine: str | None, as_json: bool) -> None:
    """Compile and simulate one plan under several strategies. They train the same; they differ in bytes and time.

    All times are simulated. A strategy that does not fit is shown with what it lacks, and has no speed-up.
    """
    from ratrainc import api
    from ratrainc.console import print_json, progress
    from ratrainc.levers import Setting, try_setting
    from ratrainc.strategies import STRATEGIES, strategy
    from targets.mt3000.machine import load_machine

    chosen = [strategy(name.strip()) for name in names.split(",")] if names else list(_yardstick_first(STRATEGIES))
    config, resolved = api.resolved(model, plan)
    target = load_machine(machine)
    found = []
    with progress(len(chosen), "comparing") as (bar, task):
        for item in chosen:
            adapted = item.adapted(resolved)
            outcome = try_setting(Setting(config, adapted, item.passes, target), item.name)
            assert outcome is not None, "the plan was checked, and ZeRO 3 goes with every plan"
            found.append(outcome)
            bar.update(task, advance=1)
    rows = [_row(outcome, found[0], resolved.tokens_per_step) for outcome in found]
    if as_json:
        print_json({"strategies": rows, "capacity_bytes": target.whole("ddr_capacity")})
    else:
        _show(rows, target.whole("ddr_capacity"))


def _yardstick_first(strategies: Any) -> Any:
    return sorted(strategies, key=lambda item: item.name != "baseline-1f1b")


def _row(outcome: Outcome, yardstick: Outcome, tokens: int) -> dict[str, Any]:
    seconds, reference = outcome.step_seconds, yardstick.step_seconds
    return {
        "name": outcome.name,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "peak_bytes": max(outcome.peak_bytes),
        "exposed_tail_seconds": outcome.exposed_tail_seconds,
        "speedup": reference / seconds if seconds and reference else None,
        "fits": outcome.fits,
    }


def _show(rows: list[dict[str, Any]], capacity: int) -> None:
    from ratrainc.console import seconds_text, size_text, table

    shown = []
    for row in rows:
        if row["fits"]:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
            tail = seconds_text(row["exposed_tail_seconds"])
            times = [seconds_text(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", tail, speedup]
        else:
            times = [f"lacks {size_text(row['peak_bytes'] - capacity)}", "-", "-", "-"]
        shown.append([row["name"], size_text(row["peak_bytes"]), *times])
    columns = ("strategy", "highest peak", "step", "tokens/s", "exposed tail", "speed-up")
    table("strategies on one plan (simulated; speed-up over the first that is named)", columns, shown)
