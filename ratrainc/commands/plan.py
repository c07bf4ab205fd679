"""`ratrainc plan`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve

from ratrain.ratrain_ir.config.plan import ATTENTION_MASKS, ATTENTIONS, LOGITS
from ratrain.ratrainc.choices.machine_choice import MachineChoice, stated
from ratrain.ratrainc.choices.plan_choices import FrontChoice, Goal, PlanChoice, Questions, SearchEffort, StepSize
from ratrain.ratrainc.commands.words.options import (
    Result,
    TokenCount,
    exhaustive_option,
    in_groups,
    jobs_option,
    json_option,
    model_option,
    plan_choice_options,
    refuse_idle,
    refuse_idle_levels,
    result_option,
    schedule_names,
    seconds_option,
    target_options,
)
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrainc.console.parts import Shown
    from ratrain.ratrainc.planner.answer.fewest_clusters import FewestClusters
    from ratrain.ratrainc.planner.answer.pareto_front import ParetoFront
    from ratrain.ratrainc.planner.answer.planned import Planned
    from ratrain.ratrainc.planner.answer.robust_links import RobustLinks
    from ratrain.ratrainc.planner.answer.what_if import WhatIf

_EPILOG = """\b
Examples:
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --seq-len 2048 -o best.toml
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --quick
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --robust-links
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --what-if ddr=16GiB --what-if link=7.4GB/s
  ratrainc plan --model llama-2-7b --clusters 64 --global-batch 512 --what-if ddr=16GiB -o P.toml    and P.machine.toml
  ratrainc plan --model llama-2-7b --clusters 16 --global-batch 128 --machine h100-node -o P.toml
  ratrainc plan --model qwen2.5-32b --clusters 256 --global-batch 4096 --tokens 1e12 --json
  ratrainc plan --model llama-2-7b --clusters 64 --global-batch 512 --schedules 1f1b,zb-v --explain-rejected
  ratrainc plan --model llama-2-7b --clusters 64 --global-batch 512 --objective tokens-per-cluster-hour --keep 3
  ratrainc plan --model llama-2-7b --clusters 64 --global-batch 512 --pareto clusters --quick --plot front.svg
"""


@click.command(epilog=_EPILOG)
@model_option(required=True)
@click.option(
    "--clusters",
    "size_clusters",
    type=click.IntRange(1, 1 << 16),
    required=True,
    metavar="N",
    help="Clusters there are.",
)
@click.option(
    "--global-batch",
    "size_global_batch",
    type=click.IntRange(1, 1 << 20),
    metavar="SEQS",
    help="Sequences of a step; only --smallest needs none.",
)
@click.option(
    "--seq-len",
    "size_seq_len",
    type=click.IntRange(1, 1 << 20),
    default=2048,
    show_default=True,
    metavar="S",
    help="Tokens of each.",
)
@plan_choice_options
@click.option(
    "--schedules",
    "plans_schedules",
    metavar="S,S,...",
    callback=schedule_names,
    help="Schedules to choose from, or 'all'; 1f1b+host, +file and +peer use that memory in addition to DDR. Default: "
    "the strategy's; without --strategy 1f1b, 1f1b-ahead, zb-h1, interleaved, zb-v, v-half, v-min and seq1f1b, alone "
    "and with each memory that the machine has.",
)
@click.option(
    "--objective",
    "goal_objective",
    type=click.Choice(("time", "tokens-per-cluster-hour", "clusters", "memory")),
    default="time",
    show_default=True,
    help="What is best; of equal ones the fastest.",
)
@click.option(
    "--keep",
    "goal_keep",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Find the N best plans; with -o P.toml: P-1.toml and so on.",
)
@click.option(
    "--explain-rejected", "goal_explain", is_flag=True, help="Say for each rejected plan what makes it slower."
)
@click.option(
    "--pareto",
    "front_pareto",
    type=click.Choice(("clusters", "memory")),
    help="Show the step time against the clusters, or the bytes of a rank; with -o P.toml: P-1.toml and so on.",
)
@result_option(
    "--plot front_plot", Result("picture", ".svg", ".png"), "OUT.png|OUT.svg", "Draw that (needs the extra 'plot')."
)
@click.option(
    "--attention",
    "plans_attention",
    type=click.Choice(ATTENTIONS),
    help="What all plans do with scores. Default: as --like says, else fused.",
)
@click.option(
    "--attention-mask",
    "plans_attention_mask",
    type=click.Choice(ATTENTION_MASKS),
    help="What tokens see in all plans: their sequence so far, or their document alone. Default: as --like "
    "says, else causal.",
)
@click.option(
    "--logits",
    "plans_logits",
    type=click.Choice(LOGITS),
    help="What all plans hold of the head's logits. Default: as --like says, else chunked.",
)
@click.option("--quick", is_flag=True, help="Simulate only the few plans that closed forms put first.")
@click.option("--smallest", is_flag=True, help="Find the fewest clusters, up to N, on which a plan fits, and the plan.")
@exhaustive_option
@seconds_option(
    25.0,
    "Time to try plans, for all searches of the command: when it is over, the best so far is shown. The bounds of each "
    "search and its last evaluation come on top. Three times as long while nothing fits.",
    "effort_seconds",
)
@jobs_option(parameter="effort_jobs")
@click.option(
    "--tokens",
    "questions_tokens",
    type=TokenCount(),
    metavar="N",
    help="Say what training on N tokens takes, like 1e12 or 1T.",
)
@click.option(
    "--robust",
    "questions_robust",
    is_flag=True,
    help="Say how well the best plans withstand a slow stage and jitter.",
)
@click.option(
    "--robust-links",
    "questions_robust_links",
    is_flag=True,
    help="Say what each constant of the links does to the plan, and whether another is best where clusters "
    "share a port.",
)
@click.option(
    "--what-if",
    "questions_what_ifs",
    multiple=True,
    metavar="ddr=16GiB,link=7.4GB/s",
    help="Plan again for a machine changed like this; may be repeated. With -o once: that plan is written, and "
    "the changed machine next to it.",
)
@result_option(
    "-o --output",
    Result("plan", ".toml"),
    "P.toml",
    "Write the best plan; with --what-if, the best of the changed machine.",
)
@target_options
@json_option
@in_groups(
    target=MachineChoice,
    size=StepSize,
    plans=PlanChoice,
    effort=SearchEffort,
    questions=Questions,
    goal=Goal,
    front=FrontChoice,
)
def command(
    model: str,
    size: StepSize,
    quick: bool,
    smallest: bool,
    plans: PlanChoice,
    effort: SearchEffort,
    questions: Questions,
    goal: Goal,
    front: FrontChoice,
    output: str | None,
    target: MachineChoice,
    as_json: bool,
) -> int:
    """Find the best plan for a number of clusters, and bound its distance from the best possible one.

    Bounds rule plans out; the rest is compiled, placed under the capacity and simulated. All times are simulated.
    Ctrl-C ends the search with the best so far, which is shown and written; a second one stops at once.
    """
    if quick + smallest + effort.exhaustive > 1:
        raise click.UsageError("--quick, --smallest and --exhaustive exclude one another")
    if quick:
        refuse_idle(
            "is for a search: it does not go with --quick",
            "effort_seconds",
            "questions_robust",
            "questions_robust_links",
        )
    if effort.exhaustive:
        refuse_idle("ends a search that --exhaustive does not end", "effort_seconds")
    if smallest:
        asked = ("questions_tokens", "questions_robust", "questions_robust_links", "questions_what_ifs")
        idle = ("size_global_batch", *asked, "effort_seconds", "effort_jobs")
        refuse_idle("does not go with --smallest, which looks for bytes alone", *idle)
        refuse_idle("does not go with --smallest, which finds one plan", *_OF_GOAL, "front_pareto", "front_plot")
    _check_goal(goal, front, quick=quick)
    if size.global_batch is None and not smallest:
        raise click.UsageError("--global-batch is missing")
    if output is not None and len(questions.what_ifs) > 1:
        raise click.UsageError(
            "-o writes one plan: give one --what-if with it, or none for the plan of the unchanged machine"
        )
    from ratrain import api
    from ratrain.ratrain_ir.support.files import check_writable
    from ratrain.ratrain_ir.support.time_limit import OutOfTime, is_ended
    from ratrain.ratrainc.choices.machine_changes import parse_changes
    from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy
    from ratrain.ratrainc.console.console import bar
    from ratrain.ratrainc.console.failures import EXIT_INTERRUPTED
    from ratrain.ratrainc.console.pictures import picture_kind
    from ratrain.ratrainc.console.signals import ending_search
    from ratrain.ratrainc.planner.answer.what_if import machine_path

    refuse_idle_levels(strategy(plans.strategy or DEFAULT_STRATEGY))
    target = target.for_plan(plans.like, stated)
    if front.plot is not None:
        picture_kind(front.plot)
    if smallest:
        with ending_search() as stop, bar(size.clusters, "fewest clusters") as progress:
            fewest = api.smallest(
                model, size.clusters, seq_len=size.seq_len, machine=target, plans=plans, progress=progress
            )
        _show_smallest(fewest, output, as_json=as_json)
        return EXIT_INTERRUPTED if stop.signal else 0
    if output is not None and questions.what_ifs:
        check_writable(machine_path(output))
    for text in questions.what_ifs:
        parse_changes(text, target.load())
    assert size.global_batch is not None
    if front.pareto is not None:
        with ending_search() as stop, bar(None, "planning") as progress:
            found = api.pareto(
                model,
                size.clusters,
                size.global_batch,
                against=front.pareto,
                seq_len=size.seq_len,
                machine=target,
                plans=plans,
                effort=effort,
                quick=quick,
                tokens=questions.tokens,
                progress=progress,
            )
        _show_front(found, output, front.plot, as_json=as_json)
        return EXIT_INTERRUPTED if stop.signal else 0
    # one limit for all searches of the command; of links there are up to two
    searches = 1 + len(questions.what_ifs) + 2 * questions.robust_links
    effort = evolve(effort, seconds=effort.seconds / searches)
    with ending_search() as stop, bar(None, "planning") as progress:
        planned = api.plan(
            model,
            size.clusters,
            size.global_batch,
            seq_len=size.seq_len,
            machine=target,
            plans=plans,
            effort=effort,
            quick=quick,
            robust=questions.robust,
            tokens=questions.tokens,
            goal=goal,
            progress=progress,
        )
        links = None
        if questions.robust_links and not is_ended():
            with suppress(OutOfTime):  # interrupted: the plan is shown without them
                links = api.robust_links(planned, progress=progress)
        scenarios = api.what_if(planned, *questions.what_ifs, progress=progress) if questions.what_ifs else None
    _show(planned, links, scenarios, output, keep=goal.keep is not None, as_json=as_json)
    return EXIT_INTERRUPTED if stop.signal else 0


def _show(
    planned: Planned,
    links: RobustLinks | None,
    scenarios: WhatIf | None,
    output: str | None,
    *,
    keep: bool,
    as_json: bool,
) -> None:
    """Write the plan or plans, and show the answer."""
    files: dict[str, Any] = {"output": output}
    written: list[str] = [] if output is None else [output]
    if output is not None and keep:
        files["outputs"] = written = planned.save_kept(output)
    elif output is not None and scenarios is not None:
        files["machine_output"] = scenarios.save(output)
        change = scenarios.scenarios[0].change
        written = [f"{output}, the plan of {change}, and {files['machine_output']}, that machine"]
    elif output is not None:
        planned.save(output)
    elif keep:
        files["outputs"] = []
    robust = {} if links is None else {"robust_links": links.to_json()}
    what_ifs = {} if scenarios is None else {"what_if": scenarios.to_json()}
    others = [found for found in (links, scenarios) if found is not None]
    _print(planned, robust | what_ifs | files, written, others, as_json=as_json)


_OF_GOAL = ("goal_objective", "goal_keep", "goal_explain")


def _show_smallest(fewest: FewestClusters, output: str | None, *, as_json: bool) -> None:
    if output is not None:
        fewest.save(output)
    _print(fewest, {"output": output}, [] if output is None else [output], as_json=as_json)


def _check_goal(goal: Goal, front: FrontChoice, *, quick: bool) -> None:
    """Raise `click.UsageError` for questions that contradict each other."""
    asked = ("questions_robust", "questions_robust_links", "questions_what_ifs")
    if front.pareto is not None:
        refuse_idle("is for one search: it does not go with --pareto", *_OF_GOAL, "effort_exhaustive", *asked)
        if quick or front.pareto != "clusters":
            refuse_idle(
                "is for plans tried side by side: of fronts, --pareto clusters does, without --quick", "effort_jobs"
            )
    else:
        refuse_idle("draws what --pareto shows: give it too", "front_plot")
    if goal.objective != "time":
        refuse_idle("is about the fastest plan: it goes with --objective time", *asked)
    if goal.keep is not None:
        refuse_idle("is about one plan: it does not go with --keep", "questions_what_ifs", "questions_robust_links")


def _show_front(found: ParetoFront, output: str | None, plot: str | None, *, as_json: bool) -> None:
    """Write a front's plans and its picture, and show it."""
    names = [] if output is None else found.save(output)
    if plot is not None:
        found.draw(plot)
    _print(found, {"outputs": names, "plot": plot}, [*names, *([] if plot is None else [plot])], as_json=as_json)


def _print(
    answer: Planned | FewestClusters | ParetoFront,
    more: dict[str, Any],
    written: Sequence[str],
    others: Sequence[Shown] = (),
    *,
    as_json: bool,
) -> None:
    """Print an answer with `more` keys as JSON, or else show it with others and name the written files."""
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show

    if as_json:
        print_json(answer.to_json() | more)
        return
    for each in (answer, *others):
        show(each.parts())
    for name in written:
        echo(f"wrote {name}")
