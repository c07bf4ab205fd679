"""`ratrainc compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands.options import (
    Source,
    in_groups,
    jobs_option,
    json_option,
    model_option,
    refuse_idle,
    seconds_option,
    target_options,
)
from ratrain.ratrainc.machine_choice import MachineChoice
from ratrain.ratrainc.plan_choices import SearchEffort
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.ratrainc.levers import Outcome
    from ratrain.ratrainc.strategies import Strategy
    from ratrain.targets.machine.machine import Machine

_EPILOG = """\b
Examples:
  ratrainc compare --model llama-2-7b --plan examples/llama-2-7b-256.toml
  ratrainc compare --model llama-2-7b --plan P.toml --strategies baseline-1f1b,ratrain --json
  ratrainc compare --model qwen2.5-32b --plan auto --clusters 256 --global-batch 4096 --strategies tuned-1f1b,ratrain
"""


@click.command(epilog=_EPILOG)
@model_option(required=True)
@click.option(
    "--plan",
    type=Source("plan"),
    required=True,
    metavar="P.toml|auto",
    help="The parallel plan, in TOML; auto: the best for each strategy.",
)
@click.option("--clusters", type=click.IntRange(1, 1 << 16), metavar="N", help="With --plan auto: clusters there are.")
@click.option(
    "--global-batch", type=click.IntRange(1, 1 << 20), metavar="G", help="With --plan auto: sequences of a step."
)
@click.option("--seq-len", type=click.IntRange(1, 1 << 20), default=2048, show_default=True, help="With --plan auto.")
@seconds_option(20.0, "With --plan auto: search time of each.", "effort_seconds")
@jobs_option("With --plan auto: processes.", "effort_jobs")
@click.option(
    "--strategies", "names", metavar="a,b,...", help="Strategies to compare, the first is the yardstick. Default: all."
)
@target_options
@json_option
@in_groups(target=MachineChoice, effort=SearchEffort)
def command(
    model: str,
    plan: str,
    clusters: int | None,
    global_batch: int | None,
    seq_len: int,
    effort: SearchEffort,
    names: str | None,
    target: MachineChoice,
    as_json: bool,
) -> None:
    """Compile and simulate one plan under several strategies, or each strategy on its own best plan.

    They train the same; they differ in bytes and time. All times are simulated. A strategy that does not fit is shown with what it lacks,
    and has no speed-up. Where the plan names a schedule, strategies that are named after another are left out, or refused if they are asked for.
    """
    automatic = plan == "auto"
    if automatic and (clusters is None or global_batch is None):
        raise click.UsageError("--plan auto needs --clusters and --global-batch")
    if not automatic and (clusters is not None or global_batch is not None):
        raise click.UsageError("--clusters and --global-batch go with --plan auto; a plan file says both")
    if not automatic:
        refuse_idle("goes with --plan auto: a plan file says it", "seq_len")
        refuse_idle("is for a search: it goes with --plan auto", "effort_seconds", "effort_jobs")
    from ratrain import api
    from ratrain.ratrainc.console import print_json
    from ratrain.ratrainc.strategies import STRATEGIES, strategy

    chosen = [strategy(name.strip()) for name in names.split(",")] if names else _yardstick_first(STRATEGIES)
    machine = target.load()
    if automatic:
        assert clusters is not None
        assert global_batch is not None
        rows = _each_on_its_best(model, chosen, machine, clusters, global_batch, seq_len, effort)
    else:
        config, resolved = api.resolved(model, plan)
        chosen = _of_one_schedule(resolved, plan, chosen, named=names is not None)
        rows = _on_one_plan(config, resolved, chosen, machine)
    if as_json:
        print_json({"strategies": rows, "capacity_bytes": machine.whole("ddr_capacity")})
        return
    _show(rows, machine.whole("ddr_capacity"), "each on its best plan" if automatic else "on one plan")
    if not automatic:
        for item in chosen:
            if item.note:
                echo(item.note)


def _of_one_schedule(plan: Plan, path: str, chosen: Sequence[Strategy], *, named: bool) -> list[Strategy]:
    """The strategies that go with the schedule a plan says.

    Raises `DiagnosticError` RT064 for one that was asked for and does not.
    """
    from ratrain.ratrain_ir.frontend.plan_text import place_in_plan

    if named:
        for item in chosen:
            item.check_schedule(plan, lambda: place_in_plan(path, "schedule"))
    fitting = [item for item in chosen if plan.schedule is None or item.schedule in (None, plan.schedule)]
    others = ", ".join(item.name for item in chosen if item not in fitting)
    if others:
        echo(f'left out, as the plan says schedule = "{plan.schedule}": {others}', err=True)
    return fitting


def _on_one_plan(
    config: ModelConfig, resolved: Plan, chosen: Sequence[Strategy], target: Machine
) -> list[dict[str, Any]]:
    from ratrain.ratrainc.console import progress
    from ratrain.ratrainc.levers import Setting, try_setting

    outcomes = []
    with progress(len(chosen), "comparing") as (bar, task):
        for item in chosen:
            adapted = item.adapted(resolved)
            outcome = try_setting(Setting(config, adapted, item.passes, target), item.name)
            assert outcome is not None, "the plan was checked, and ZeRO 3 goes with every plan"
            outcomes.append(outcome)
            bar.update(task, advance=1)
    return [_row(outcome, outcomes[0], resolved.tokens_per_step) for outcome in outcomes]


def _each_on_its_best(
    model: str,
    chosen: Sequence[Strategy],
    target: Machine,
    clusters: int,
    global_batch: int,
    seq_len: int,
    effort: SearchEffort,
) -> list[dict[str, Any]]:
    from ratrain.ratrain_ir.frontend.model_config import load_model
    from ratrain.ratrainc.console import progress
    from ratrain.ratrainc.planner.comparison import best_of_each, comparison_rows
    from ratrain.ratrainc.planner.requests import planning_request

    request = planning_request(
        load_model(model),
        clusters,
        global_batch,
        seq_len,
        machine=target,
        effort=effort,
    )
    with progress(None, "planning") as (bar, task):
        answers = best_of_each(request, chosen, lambda text: bar.update(task, advance=1, status=text))
    return comparison_rows(chosen, answers)


def _yardstick_first(strategies: Sequence[Strategy]) -> list[Strategy]:
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


def _show(rows: list[dict[str, Any]], capacity: int, where: str) -> None:
    from ratrain.ratrainc.console import seconds_text, size_text, table

    planned = any("plan" in row for row in rows)
    shown = []
    for row in rows:
        if row["fits"]:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
            tail = seconds_text(row["exposed_tail_seconds"])
            times = [seconds_text(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", tail, speedup]
        else:
            lacking = row["peak_bytes"] - capacity
            # what is live may fit where no placement of it was found
            times = [f"lacks {size_text(lacking)}" if lacking > 0 else "not placed", "-", "-", "-"]
        plan = [_plan_text(row["plan"])] if planned else []
        shown.append([row["name"], *plan, size_text(row["peak_bytes"]), *times])
    columns = (
        "strategy",
        *(["plan"] if planned else []),
        "highest peak",
        "step",
        "tokens/s",
        "exposed tail",
        "speed-up",
    )
    table(f"strategies {where} (simulated; speed-up over the first that is named)", columns, shown)


def _plan_text(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "-"
    each = " each" if plan["reduce"] == "each-micro-batch" else ""
    sizes = f"P{plan['pp']} D{plan['dp']} b{plan['micro_batch_size']} M{plan['micro_batches']}"
    return f"{sizes} Z{plan['zero']}{each}"
