"""`ratrainc plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrain_ir.frontend.plan import ATTENTION_MASKS, ATTENTIONS, LOGITS
from ratrain.ratrainc.commands.options import (
    Result,
    TokenCount,
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
from ratrain.ratrainc.plan_choices import PlanChoice, Questions, SearchEffort, StepSize
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.answer import Answer, Request
    from ratrain.ratrainc.planner.robust_links import RobustLinks
    from ratrain.ratrainc.planner.scenarios import Scenario
    from ratrain.ratrainc.planner.smallest import Smallest

_EPILOG = """\b
Examples:
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --seq-len 2048 -o best.toml
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --quick
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --robust-links
  ratrainc plan --model llama-2-7b --clusters 256 --global-batch 2048 --what-if ddr=16GiB --what-if link=7.4GB/s
  ratrainc plan --model llama-2-7b --clusters 64 --global-batch 512 --what-if ddr=16GiB -o P.toml    and P.machine.toml
  ratrainc plan --model llama-2-7b --clusters 16 --global-batch 128 --machine h100-node -o P.toml
  ratrainc plan --model qwen2.5-32b --clusters 256 --global-batch 4096 --tokens 1e12 --json
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
    "--attention",
    "plans_attention",
    type=click.Choice(ATTENTIONS),
    help="What all plans do with scores. Default: as --like says, else fused.",
)
@click.option(
    "--attention-mask",
    "plans_attention_mask",
    type=click.Choice(ATTENTION_MASKS),
    help="What tokens see in all plans: their sequence so far, or their document alone. Default: as --like says, else causal.",
)
@click.option(
    "--logits",
    "plans_logits",
    type=click.Choice(LOGITS),
    help="What all plans hold of the head's logits. Default: as --like says, else chunked.",
)
@click.option("--quick", is_flag=True, help="Closed forms only: an estimate and its gap within seconds.")
@click.option("--smallest", is_flag=True, help="Find the fewest clusters, up to N, on which a plan fits, and the plan.")
@exhaustive_option
@seconds_option(25.0, "Time for the search.", "effort_seconds")
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
    help="Say what each constant of the links does to the plan, and whether another is best where clusters share a port.",
)
@click.option(
    "--what-if",
    "questions_what_ifs",
    multiple=True,
    metavar="ddr=16GiB,link=7.4GB/s",
    help="Plan again for a machine changed like this; may be repeated. With -o once: that plan is written, and the changed machine beside it.",
)
@click.option(
    "-o",
    "--output",
    type=Result("plan", ".toml"),
    callback=output_file,
    metavar="P.toml",
    help="Write the best plan; with --what-if, the best of the changed machine.",
)
@target_options
@json_option
@in_groups(target=MachineChoice, size=StepSize, plans=PlanChoice, effort=SearchEffort, questions=Questions)
def command(
    model: str,
    size: StepSize,
    quick: bool,
    smallest: bool,
    plans: PlanChoice,
    effort: SearchEffort,
    questions: Questions,
    output: str | None,
    target: MachineChoice,
    as_json: bool,
) -> None:
    """Find the plan to run on so many clusters, and say how far it can be from the best possible.

    Bounds rule plans out; what is left is compiled, placed under the capacity and simulated. All times are simulated.
    """
    if quick + smallest + effort.exhaustive > 1:
        raise click.UsageError("--quick, --smallest and --exhaustive exclude one another")
    if quick:
        refuse_idle(
            "is for a search: it does not go with --quick",
            "effort_seconds",
            "effort_jobs",
            "questions_robust",
            "questions_robust_links",
        )
    if effort.exhaustive:
        refuse_idle("ends a search that --exhaustive does not end", "effort_seconds")
    if smallest:
        asked = ("questions_tokens", "questions_robust", "questions_robust_links", "questions_what_ifs")
        idle = ("size_global_batch", *asked, "effort_seconds", "effort_jobs")
        refuse_idle("does not go with --smallest, which looks for bytes alone", *idle)
    if size.global_batch is None and not smallest:
        raise click.UsageError("--global-batch is missing")
    if output is not None and len(questions.what_ifs) > 1:
        raise click.UsageError(
            "-o writes one plan: give one --what-if with it, or none for the plan of the machine as it is"
        )
    from ratrain.ratrain_ir.files import check_writable
    from ratrain.ratrain_ir.frontend.model_files import load_model
    from ratrain.ratrainc.console import print_json
    from ratrain.ratrainc.planner.machines import parse_changes
    from ratrain.ratrainc.planner.report import answer_json, no_plan, show_answer
    from ratrain.ratrainc.planner.requests import planning_request
    from ratrain.ratrainc.planner.robust_links import robust_links_json, show_robust_links
    from ratrain.ratrainc.planner.scenarios import scenario_json, show_scenarios

    changed_file = _machine_beside(output) if output is not None and questions.what_ifs else None
    if changed_file is not None:
        check_writable(changed_file)
    request = planning_request(
        load_model(model),
        size.clusters,
        size.global_batch or size.clusters,
        size.seq_len,
        machine=target.load(),
        plans=plans,
        effort=effort,
        robust=questions.robust,
    )
    refuse_idle_levels(request.strategy)
    if smallest:
        _smallest(request, model, output, target, as_json=as_json)
        return
    changes = [(text, parse_changes(text, request.machine)) for text in questions.what_ifs]
    answer = _answer(request, quick=quick)
    if answer.best is None:
        no_plan(answer)
    links = _robust_links(answer) if questions.robust_links else None
    scenarios = [_scenario(answer, text, values, quick=quick) for text, values in changes]
    written = scenarios[0].answer if scenarios else answer
    if output is not None:
        _write(written, model, output, target if changed_file is None else MachineChoice(changed_file), changed_file)
    if as_json:
        what_if = {"what_if": [scenario_json(s, questions.tokens) for s in scenarios]} if scenarios else {}
        outputs = {"output": output} | ({"machine_output": changed_file} if changed_file is not None else {})
        robust = {} if links is None else {"robust_links": robust_links_json(links, questions.tokens)}
        print_json(answer_json(answer, questions.tokens) | robust | what_if | outputs)
        return
    show_answer(answer, questions.tokens)
    if links is not None:
        show_robust_links(answer, links)
    if scenarios:
        show_scenarios(answer, scenarios, questions.tokens)
    if output is not None:
        echo(
            f"wrote {output}"
            + (f", the plan of {questions.what_ifs[0]}, and {changed_file}, that machine" if changed_file else "")
        )


def _machine_beside(output: str) -> str:
    """Where the machine of a plan that is for a changed one is written."""
    return f"{output.removesuffix('.toml')}.machine.toml"


def _write(answer: Answer, model: str, output: str, target: MachineChoice, changed_file: str | None) -> None:
    """Write the best plan, and, where it is for a changed machine, that machine.

    Raises `DiagnosticError` RT053 where the changed machine has none, RT065 where its constants contradict each other.
    """
    from ratrain.ratrain_ir.files import write_lines
    from ratrain.ratrainc.planner.report import no_plan, plan_file
    from ratrain.targets.machine.writer import write_machine

    if answer.best is None:
        no_plan(answer)
    if changed_file is not None:
        write_machine(answer.request.machine, changed_file)
    write_lines(output, plan_file(answer, answer.best, model, target).splitlines())


def _answer(request: Request, *, quick: bool) -> Answer:
    if quick:
        from ratrain.ratrainc.planner.quick import quick_answer

        return quick_answer(request)
    from ratrain.ratrainc.console import progress
    from ratrain.ratrainc.planner.search import Search

    with progress(None, "planning") as (bar, task):
        return Search(request, lambda text: bar.update(task, advance=1, status=text)).run()


def _scenario(answer: Answer, text: str, values: dict[str, float], *, quick: bool) -> Scenario:
    from attrs import evolve

    from ratrain.ratrainc.planner.machines import changed_machine
    from ratrain.ratrainc.planner.scenarios import Scenario, kept_plan

    machine = changed_machine(answer.request.machine, values)
    changed = _answer(evolve(answer.request, machine=machine), quick=quick)
    return Scenario(text, changed, None if quick else kept_plan(answer, machine))


def _robust_links(answer: Answer) -> RobustLinks:
    from attrs import evolve

    from ratrain.ratrainc.planner.robust_links import robust_links

    return robust_links(answer, lambda machine: _answer(evolve(answer.request, machine=machine), quick=False))


def _smallest(request: Request, model: str, output: str | None, target: MachineChoice, *, as_json: bool) -> None:
    from ratrain.ratrain_ir.diagnostics import Note, fail
    from ratrain.ratrainc.console import print_json, progress, say, size_text
    from ratrain.ratrainc.model_facts import model_facts, summary
    from ratrain.ratrainc.planner.report import candidate_json, plan_text, shape_text
    from ratrain.ratrainc.planner.smallest import SEQUENCES, smallest_clusters

    with progress(request.clusters, "fewest clusters") as (bar, task):
        fewest = smallest_clusters(request, lambda text: bar.update(task, advance=1, status=text))
    clusters, best = fewest.clusters, fewest.candidate
    if clusters is None or best is None:
        known = "fits" if not fewest.unproven else "was found that fits"
        fail(
            "RT053",
            f"no plan of {request.model.name} {known} {request.clusters} clusters or fewer, at {SEQUENCES} sequences each",
            notes=[Note(_of_fewer(fewest))],
            help="allow more clusters",
        )
    if output is not None:
        from ratrain.ratrain_ir.files import write_lines

        head = [
            f"The fewest clusters on which {request.model.name} was found to fit {request.machine.name}: {clusters}."
        ]
        head += [f"{_of_fewer(fewest)}."] if _of_fewer(fewest) else []
        write_lines(output, plan_text(best, model, head, target).splitlines())
    if as_json:
        print_json(
            {
                "model": request.model.name,
                "clusters": clusters,
                "unproven_clusters": list(fewest.unproven),
                "plan": candidate_json(best, clusters, None),
                "output": output,
            }
        )
        return
    for line in summary(model_facts(request.model, request.seq_len)):
        say(line)
    say(
        f"{request.model.name} fits {clusters} clusters: {shape_text(best)}, cuts {list(best.plan.cuts)}, highest peak {size_text(best.peak_bytes)}"
    )
    if _of_fewer(fewest):
        say(_of_fewer(fewest))
    if output is not None:
        echo(f"wrote {output}")


def _of_fewer(fewest: Smallest) -> str:
    """What is known of the numbers of clusters that were passed over; empty where there are none."""
    if fewest.unproven:
        numbers = ", ".join(map(str, fewest.unproven))
        return f"On {numbers} the roomiest shapes could not be placed and others were not tried: that none fits is not proved"
    return "" if fewest.clusters == 1 else "On all fewer, bounds on bytes rule out every plan"
