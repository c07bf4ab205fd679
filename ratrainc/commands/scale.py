"""`ratrainc scale`."""

from __future__ import annotations

import click

from ratrain.ratrainc.choices.machine_choice import MachineChoice, stated
from ratrain.ratrainc.choices.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    exhaustive_option,
    in_groups,
    jobs_option,
    json_option,
    model_option,
    plan_choice_options,
    refuse_idle,
    refuse_idle_levels,
    result_option,
    seconds_option,
    target_options,
)
from ratrain.ratrainc.console.terminal import echo

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
    metavar="N",
    help="Sequences of each cluster in a step: weak scaling. Default: as many as --plan has, else 8.",
)
@click.option(
    "--seq-len", type=click.IntRange(1, 1 << 20), default=2048, show_default=True, help="Tokens of a sequence."
)
@click.option(
    "--plan",
    type=InputFile("plan"),
    metavar="P.toml",
    help="Keep this plan's stages and only add replicas. Default: plan anew each time.",
)
@plan_choice_options
@exhaustive_option
@seconds_option(20.0, "Search time of each point.", "effort_seconds")
@jobs_option(parameter="effort_jobs")
@result_option(
    "--plot", Result("picture", ".svg", ".png"), "OUT.png|OUT.svg", "Draw the curve (needs the extra 'plot')."
)
@target_options
@json_option
@in_groups(target=MachineChoice, plans=PlanChoice, effort=SearchEffort)
def command(
    model: str,
    clusters: list[int],
    sequences_per_cluster: int | None,
    seq_len: int,
    plan: str | None,
    plans: PlanChoice,
    effort: SearchEffort,
    plot: str | None,
    target: MachineChoice,
    as_json: bool,
) -> None:
    """Show how throughput grows with the number of clusters when each has as much to do. All times are simulated."""
    from ratrain import api
    from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy
    from ratrain.ratrainc.console.console import bar, print_json
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.console.pictures import picture_kind

    if plan is not None:
        refuse_idle("does not go with --plan: the plan says it", "seq_len")
        idle = (
            "plans_zero_levels",
            "plans_peers",
            "plans_contexts",
            "plans_expert_ranks",
            "plans_dtype",
            "plans_like",
            "effort_seconds",
            "effort_jobs",
            "effort_exhaustive",
        )
        refuse_idle("is for a search: with --plan there is none", *idle)
    if effort.exhaustive:
        refuse_idle("ends a search that --exhaustive does not end", "effort_seconds")
    if plot is not None:
        picture_kind(plot)
    refuse_idle_levels(strategy(plans.strategy or DEFAULT_STRATEGY))
    target = target.for_plan(plan or plans.like, stated)
    with bar(None, "scaling") as progress:
        scaling = api.scale(
            model,
            clusters,
            plan=plan,
            sequences_per_cluster=sequences_per_cluster,
            seq_len=seq_len,
            machine=target,
            plans=plans,
            effort=effort,
            progress=progress,
        )
    if plot is not None:
        scaling.plot(plot)
    if as_json:
        print_json(scaling.to_json() | {"plot": plot})
        return
    show(scaling.parts())
    if plot is not None:
        echo(f"wrote {plot}")
