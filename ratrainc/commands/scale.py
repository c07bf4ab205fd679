"""`ratrainc scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import (
    Result,
    Source,
    exhaustive_option,
    in_groups,
    jobs_option,
    json_option,
    model_option,
    output_file,
    plan_choice_options,
    refuse_idle,
    refuse_idle_levels,
    seconds_option,
    target_options,
)
from ratrain.ratrainc.machine_choice import MachineChoice
from ratrain.ratrainc.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrainc.planner.scaling import Point

_EPILOG = """\b
Examples:
  ratrainc scale --model llama-2-7b --clusters 256,512,768,1024
  ratrainc scale --model llama-2-7b --clusters 256,512 --zero 3
  ratrainc scale --model llama-2-7b --clusters 256,512,1024 --plan examples/llama-2-7b-256.toml --plot 7b.svg
"""


def _counts(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{text}' is not a list of numbers like 256,512") from None
    if any(not 1 <= count <= 1 << 16 for count in counts):
        raise click.BadParameter("numbers of clusters are from 1 to 65536")
    if len({*counts}) < len(counts):
        raise click.BadParameter("a number of clusters is given twice")
    return counts


@click.command(epilog=_EPILOG)
@model_option(required=True)
@click.option("--clusters", required=True, callback=_counts, metavar="N,N,...", help="Numbers of clusters.")
@click.option(
    "--sequences-per-cluster",
    type=click.IntRange(1, 1 << 16),
    default=8,
    show_default=True,
    help="In a step: weak scaling.",
)
@click.option(
    "--seq-len", type=click.IntRange(1, 1 << 20), default=2048, show_default=True, help="Tokens of a sequence."
)
@click.option(
    "--plan",
    type=Source("plan"),
    metavar="P.toml",
    help="Keep this plan's stages and only add replicas. Default: plan anew each time.",
)
@plan_choice_options
@exhaustive_option
@seconds_option(20.0, "Search time of each point.", "effort_seconds")
@jobs_option(parameter="effort_jobs")
@click.option(
    "--plot",
    type=Result("picture", ".svg", ".png"),
    callback=output_file,
    metavar="OUT.png|OUT.svg",
    help="Draw the curve (needs the extra 'plot').",
)
@target_options
@json_option
@in_groups(target=MachineChoice, plans=PlanChoice, effort=SearchEffort)
def command(
    model: str,
    clusters: list[int],
    sequences_per_cluster: int,
    seq_len: int,
    plan: str | None,
    plans: PlanChoice,
    effort: SearchEffort,
    plot: str | None,
    target: MachineChoice,
    as_json: bool,
) -> None:
    """Show how throughput grows with the number of clusters when each has as much to do. All times are simulated."""
    from ratrain.ratrain_ir.frontend.model_files import load_model
    from ratrain.ratrain_ir.frontend.plan_text import load_plan, place_in_plan
    from ratrain.ratrainc.console import print_json, progress
    from ratrain.ratrainc.pictures import picture_kind
    from ratrain.ratrainc.planner.requests import planning_request
    from ratrain.ratrainc.planner.scaling import draw, fixed_points, planned_points, point_json

    if plan is not None:
        refuse_idle("does not go with --plan: the plan says it", "seq_len")
        idle = ("plans_zero_levels", "plans_peers", "plans_like", "effort_seconds", "effort_jobs", "effort_exhaustive")
        refuse_idle("is for a search: with --plan there is none", *idle)
    if effort.exhaustive:
        refuse_idle("ends a search that --exhaustive does not end", "effort_seconds")
    if plot is not None:
        picture_kind(plot)
    config = load_model(model)
    request = planning_request(
        config,
        clusters[0],
        clusters[0] * sequences_per_cluster,
        seq_len,
        machine=target.load(),
        plans=plans,
        effort=effort,
    )
    refuse_idle_levels(request.strategy)
    fixed = load_plan(plan, config) if plan is not None else None
    if plan is not None and fixed is not None:
        request.strategy.check_schedule(fixed, lambda: place_in_plan(plan, "schedule"))
        fixed = request.strategy.adapted(fixed, config, request.machine)
    with progress(None, "scaling") as (bar, task):

        def tick(text: str) -> None:
            bar.update(task, advance=1, status=text)

        if fixed is None:
            points = planned_points(request, clusters, sequences_per_cluster, tick)
        else:
            points = fixed_points(request, fixed, clusters, sequences_per_cluster, tick)
    if plot is not None:
        draw(points, plot, f"{config.name} on {request.machine.name}, {request.strategy.name} (simulated)")
    if as_json:
        print_json(
            {
                "model": config.name,
                "strategy": request.strategy.name,
                "points": [point_json(p) for p in points],
                "plot": plot,
            }
        )
        return
    _show(points, config.name)
    if plot is not None:
        echo(f"wrote {plot}")


def _show(points: Sequence[Point], model: str) -> None:
    from ratrain.ratrainc.console import seconds_text, table

    rows = []
    for point in points:
        plan = point.plan
        if plan is None or point.step_seconds is None:
            nothing = "none was found" if plan is None else "does not fit"
            rows.append([str(point.clusters), nothing, "-", "-", "-"])
            continue
        times = [
            seconds_text(point.step_seconds),
            f"{point.tokens_per_second:,.0f}",
            f"{100 * (point.efficiency or 0.0):.1f} %",
        ]
        rows.append([str(point.clusters), plan.summary, *times])
    columns = ("clusters", "plan", "step", "tokens/s", "efficiency")
    table(f"{model}: weak scaling (simulated; efficiency over the first row)", columns, rows)
