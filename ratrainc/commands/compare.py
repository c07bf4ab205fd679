"""`ratrainc compare`."""

from __future__ import annotations

import click

from ratrain.ratrainc.choices.machine_choice import MachineChoice, stated
from ratrain.ratrainc.choices.plan_choices import SearchEffort
from ratrain.ratrainc.commands.words import completing
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    in_groups,
    jobs_option,
    json_option,
    like_option,
    model_option,
    refuse_idle,
    result_option,
    seconds_option,
    target_options,
)
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc compare --model llama-2-7b --plan examples/llama-2-7b-256.toml
  ratrainc compare --model llama-2-7b --plan P.toml --strategies baseline-1f1b,ratrain --json
  ratrainc compare --model llama-2-7b --plan P.toml --strategies 1f1b,v-min,dualpipe-v,mine.csv
  ratrainc compare --model llama-2-7b --plan P.toml --results compared.jsonl
  ratrainc compare --model qwen2.5-32b --plan auto --clusters 256 --global-batch 4096 --strategies tuned-1f1b,ratrain
  ratrainc compare --model llama-2-7b --plan auto --like lora.toml --clusters 8 --global-batch 64
"""


@click.command(epilog=_EPILOG)
@model_option(required=True)
@click.option(
    "--plan",
    type=InputFile("plan"),
    required=True,
    metavar="P.toml|auto",
    help="The parallel plan, in TOML; auto: the best for ratrain, then the best for each strategy.",
)
@click.option("--clusters", type=click.IntRange(1, 1 << 16), metavar="N", help="With --plan auto: clusters there are.")
@click.option(
    "--global-batch", type=click.IntRange(1, 1 << 20), metavar="G", help="With --plan auto: sequences of a step."
)
@click.option("--seq-len", type=click.IntRange(1, 1 << 20), default=2048, show_default=True, help="With --plan auto.")
@like_option(
    "With --plan auto: take types, sums, chunks, [train], the optimizer and several tensor-parallel or context ranks "
    "from this plan."
)
@seconds_option(20.0, "With --plan auto: search time of each strategy.", "effort_seconds")
@jobs_option("With --plan auto: processes.", "effort_jobs")
@click.option(
    "--strategies",
    "names",
    metavar="a,b,...",
    shell_complete=completing.strategies,
    help="Strategies to compare, the first is the yardstick; the name of a schedule, or a table of one (F.csv), is "
    "ratrain in its order. Default: all strategies.",
)
@result_option(
    "--results",
    Result("results", ".jsonl"),
    "FILE.jsonl",
    "With a plan file: append each strategy's result as it is found; those that are there already, of the same "
    "plan, machine and code, are not simulated again. So a run that was stopped goes on.",
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
    like: str | None,
    effort: SearchEffort,
    names: str | None,
    results: str | None,
    target: MachineChoice,
    as_json: bool,
) -> int:
    """Compile and simulate one plan under several strategies; with --plan auto, each on its own best plan too.

    They train the same bits; they differ in bytes and time. All times are simulated. A strategy that does not fit is
    shown with the bytes that it lacks, and has no speed-up. On one plan a speed-up is due to the strategy; each on its
    best plan, to the plans too. If a plan file, or that of --like, names a schedule, strategies named after another one
    are left out, or refused if named. What is found of each is said at once on stderr; Ctrl-C ends with the table of
    those that are there.
    """
    automatic = plan == "auto"
    if automatic and (clusters is None or global_batch is None):
        raise click.UsageError("--plan auto needs --clusters and --global-batch")
    if automatic:
        refuse_idle("goes with a plan file: a search begins anew", "results")
    if not automatic and (clusters is not None or global_batch is not None):
        raise click.UsageError("--clusters and --global-batch go with --plan auto; a plan file says both")
    if not automatic:
        refuse_idle("goes with --plan auto: a plan file says it", "seq_len", "like")
        refuse_idle("is for a search: it goes with --plan auto", "effort_seconds", "effort_jobs")
    from ratrain import api
    from ratrain.ratrainc.console.console import bar, print_json
    from ratrain.ratrainc.console.failures import EXIT_INTERRUPTED
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.console.signals import ending_search

    target = target.for_plan(like if automatic else plan, stated)
    chosen = [name.strip() for name in names.split(",")] if names else None
    with ending_search() as stop, bar(None, "planning" if automatic else "comparing") as progress:
        if automatic:
            assert clusters is not None
            assert global_batch is not None
            found = api.compare_best(
                model,
                clusters,
                global_batch,
                seq_len=seq_len,
                strategies=chosen,
                like=like,
                machine=target,
                effort=effort,
                progress=progress,
            )
        else:
            found = api.compare(model, plan, strategies=chosen, machine=target, results=results, progress=progress)
    for each in found.left_out:
        echo(each, err=True)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
    return EXIT_INTERRUPTED if stop.signal else 0
