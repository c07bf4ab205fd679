"""`ratrainc compare`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands import completing
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
    from collections.abc import Callable, Sequence

    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
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
    help="The parallel plan, in TOML; auto: the best for ratrain, then the best for each strategy.",
)
@click.option("--clusters", type=click.IntRange(1, 1 << 16), metavar="N", help="With --plan auto: clusters there are.")
@click.option(
    "--global-batch", type=click.IntRange(1, 1 << 20), metavar="G", help="With --plan auto: sequences of a step."
)
@click.option("--seq-len", type=click.IntRange(1, 1 << 20), default=2048, show_default=True, help="With --plan auto.")
@seconds_option(20.0, "With --plan auto: search time of each.", "effort_seconds")
@jobs_option("With --plan auto: processes.", "effort_jobs")
@click.option(
    "--strategies",
    "names",
    metavar="a,b,...",
    shell_complete=completing.strategies,
    help="Strategies to compare, the first is the yardstick. Default: all.",
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
    """Compile and simulate one plan under several strategies; with --plan auto on the best plan of ratrain, then each on its own best plan.

    They train the same; they differ in bytes and time. All times are simulated. A strategy that does not fit is shown with what it lacks,
    and has no speed-up. On one plan a speed-up is that of the strategy; each on its best, that of the plans too. Where a plan file names a
    schedule, strategies that are named after another are left out, or refused if they are asked for.
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
    from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, STRATEGIES, strategy

    chosen = [strategy(name.strip()) for name in names.split(",")] if names else _yardstick_first(STRATEGIES)
    machine = target.load()
    if automatic:
        assert clusters is not None
        assert global_batch is not None
        common, rows = _planned(
            model, chosen, machine, clusters, global_batch, seq_len, effort, named=names is not None
        )
        facts: dict[str, Any] = {"strategies": rows, "on_one_plan": common}
        notes = (
            [] if common else [f"no plan was found that fits {DEFAULT_STRATEGY}: there is no comparison on one plan"]
        )
    else:
        config, resolved = api.resolved(model, plan)
        chosen = _of_one_schedule(resolved, plan, chosen, named=names is not None)
        chosen = _possible(config, resolved, chosen, machine, named=names is not None)
        common, rows = None, _on_one_plan(config, resolved, chosen, machine)
        facts = {"strategies": rows}
        notes = [item.note for item in chosen if item.note]
    if as_json:
        print_json(facts | {"capacity_bytes": min(row["capacity_bytes"] for row in rows)})
        return
    if common:
        where = f"all on the best plan of {common['best_for']}, {_plan_text(common['plan'])}"
        _show(common["strategies"], where)
    _show(rows, "each on its best plan" if automatic else "on one plan")
    for note in notes:
        echo(note)


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


def _possible(
    config: ModelConfig, plan: Plan, chosen: Sequence[Strategy], target: Machine, *, named: bool
) -> list[Strategy]:
    """The strategies that can have a plan.

    Raises `DiagnosticError` RT064 for one that was asked for and cannot.
    """
    return _where(chosen, lambda item: item.adapted(plan, config, target), named=named)


def _where(chosen: Sequence[Strategy], attempt: Callable[[Strategy], object], *, named: bool) -> list[Strategy]:
    """The strategies for which an attempt is not refused; where they were asked for by name, the refusal stands."""
    from ratrain.ratrain_ir.diagnostics import DiagnosticError

    possible = []
    for item in chosen:
        try:
            attempt(item)
        except DiagnosticError as error:
            if named:
                raise
            echo(f"left out: {item.name}: {error.diagnostics[0].message}", err=True)
        else:
            possible.append(item)
    return possible


def _on_one_plan(config: ModelConfig, plan: Plan, chosen: Sequence[Strategy], target: Machine) -> list[dict[str, Any]]:
    from ratrain.ratrainc.console import progress
    from ratrain.ratrainc.planner.comparison import rows_on_one_plan

    with progress(len(chosen), "comparing") as (bar, task):
        return rows_on_one_plan(config, plan, chosen, target, lambda: bar.update(task, advance=1))


def _planned(
    model: str,
    chosen: Sequence[Strategy],
    target: Machine,
    clusters: int,
    global_batch: int,
    seq_len: int,
    effort: SearchEffort,
    *,
    named: bool,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """What all came to on the best plan of the default strategy, None where it has none; and what each came to on its own."""
    from attrs import evolve

    from ratrain.ratrain_ir.frontend.model_files import load_model
    from ratrain.ratrainc.console import progress
    from ratrain.ratrainc.planner.comparison import best_of_each, comparison_rows
    from ratrain.ratrainc.planner.report import candidate_json
    from ratrain.ratrainc.planner.requests import planning_request

    config = load_model(model)
    request = planning_request(config, clusters, global_batch, seq_len, machine=target, effort=effort)
    chosen = _where(chosen, lambda item: evolve(request, strategy=item).shapes(), named=named)
    with progress(None, "planning") as (bar, task):
        tick = partial(bar.update, task, advance=1)
        best, *answers = best_of_each(request, [request.strategy, *chosen], lambda text: tick(status=text))
    common = None
    if best.best is not None:
        possible = _possible(config, best.best.plan, chosen, target, named=False)
        common = {
            "best_for": request.strategy.name,
            "plan": candidate_json(best.best, clusters, None),
            "strategies": _on_one_plan(config, best.best.plan, possible, target),
        }
    return common, comparison_rows(chosen, answers)


def _yardstick_first(strategies: Sequence[Strategy]) -> list[Strategy]:
    return sorted(strategies, key=lambda item: item.name != "baseline-1f1b")


def _show(rows: list[dict[str, Any]], where: str) -> None:
    from ratrain.ratrainc.console import seconds_text, size_text, table

    planned = any("plan" in row for row in rows)
    shown = []
    for row in rows:
        if row["fits"]:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
            tail = seconds_text(row["exposed_tail_seconds"])
            times = [seconds_text(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", tail, speedup]
        else:
            lacking = row["peak_bytes"] - row["capacity_bytes"]
            # what is live may fit where no placement of it was found
            times = [f"lacks {size_text(lacking)}" if lacking > 0 else "not placed", "-", "-", "-"]
        plan = [_plan_text(row["plan"]) if row["plan"] else "-"] if planned else []
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
    for row in rows:
        if "changes" in row:
            echo(f"{row['name']} gives the plan {row['changes']}")
    if len(rows) > 1 and not rows[0]["fits"]:
        echo(f"{rows[0]['name']} does not fit, so there is nothing to be faster than")


def _plan_text(plan: dict[str, Any]) -> str:
    each = " each" if plan["reduce"] == "each-micro-batch" else ""
    sizes = f"P{plan['pp']} D{plan['dp']} b{plan['micro_batch_size']} M{plan['micro_batches']}"
    chunks = "" if plan["chunks"] == 1 else f" V{plan['chunks']}"
    slices = f" k{len(plan['slices'])}" if plan["slices"] else ""
    return f"{sizes}{chunks}{slices} Z{plan['zero']}{each}"
