"""Plan files: the TOML text of a plan, with what the search knows of it and how to compile it in comments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.idle_options import without_idle_options
from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placed_by import is_placement, placed_by
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.toml_text import toml_comment
from ratrain.ratrain_ir.text.plan_file import checked_plan_text
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, hiding_exchanges, strategy
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.planner.answer.crossings import crossings
from ratrain.ratrainc.planner.space.objective import TIME

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.answer import Answer, Candidate


def numbered(path: str, number: int) -> list[str]:
    """Return the names of `number` plan files in place of one: `P-1.toml` and so on for `P.toml`."""
    return [f"{path.removesuffix('.toml')}-{at}.toml" for at in range(1, number + 1)]


def plan_file(
    answer: Answer, candidate: Candidate, model: str, target: MachineChoice | None = None, path: str | None = None
) -> str:
    """Return the text of a plan of an answer, with its prediction and the bounds on all other plans in comments.

    `model` and `target` are named as commands name them; without `target` the plan is for the default machine. `path`
    is the file that the text is for.
    """
    request = answer.request
    sequences = f"{number_of(request.global_batch, 'sequence')} of {number_of(request.seq_len, 'token')} a step"
    rate = f"{candidate.tokens_per_second:,.0f} tokens/s ({candidate.how})"
    peak = f"{'' if candidate.evaluation else 'at least '}{size_text(candidate.peak_bytes)}"
    head = [
        f"Planned for {request.model.name} on {request.clusters} x {request.machine.name}: {sequences}.",
        f"Predicted: {seconds_text(candidate.seconds)} a step, {rate}, highest peak {peak}.",
        *(["The search was interrupted: to its end it may find a better plan."] if answer.interrupted else []),
        *_bounds_lines(answer),
        *(_mapping_lines(answer, candidate) if candidate.plan.mapping is not None else ()),
    ]
    return plan_text(candidate.plan, candidate.pipeline, request.model, model, head, target, path)


def _bounds_lines(answer: Answer) -> Iterator[str]:
    """Yield the bounds on all other plans."""
    objective, tokens = answer.request.objective, answer.request.global_batch * answer.request.seq_len
    if objective is not TIME:
        yield f"Looked for: {objective.name}."
    least = objective.text(answer.bound[0], tokens)
    yield f"No plan that was considered {objective.none_better} {least} with these passes,"
    than = objective.none_better.split(" ", 1)[1]
    yield f"or {than} {objective.text(answer.relaxed_bound[0], tokens)} (closed form) with any."


def _mapping_lines(answer: Answer, candidate: Candidate) -> Iterator[str]:
    """Yield the traffic that a mapping keeps near, and the time of the next best mapping of the same shape."""
    request = answer.request
    yield f"Mapped to the groups of {request.machine.name}:"
    yield from (f"  {crossing}" for crossing in crossings(candidate.plan, request.model, request.machine))
    alike = evolve(candidate.shape, tiles=())
    others = [c for c in answer.candidates if evolve(c.shape, tiles=()) == alike and c.shape != candidate.shape]
    if others:
        other = min(others, key=lambda c: c.seconds)
        yield f"  Next best mapping of this shape: {other.plan.mapping}, {seconds_text(other.seconds)} ({other.how})."
    else:
        yield "  No other mapping of this shape was simulated: it has none, or bounds ruled them out."


def plan_text(
    plan: Plan,
    pipeline: str,
    config: ModelConfig,
    model: str,
    head: Sequence[str],
    target: MachineChoice | None = None,
    path: str | None = None,
) -> str:
    """Return the text of a plan for a pipeline, with its machine, under comment lines `head` and how to compile it.

    `config` is the model, `model` its name in commands, `path` the file that the text is for. A machine that is neither
    built in nor a file stands only in the command. Raises `DiagnosticError` RT011 if the text would not be read as the
    plan.
    """
    file = path or "THIS.toml"
    chosen = target or MachineChoice()
    known = chosen.made_for
    said_there = chosen.text if known is None else ""
    words = f"  ratrainc compile --model {shlex.quote(model)} --plan {shlex.quote(file)}{said_there}"
    passes = without_idle_options(pipeline, plan, config)
    compiling = ["Compile it with:", words]
    if not _is_default(passes, plan, config):
        compiling = ["Compile it with:", f"{words} \\", f'    --passes "{passes}"']
    table = "" if known is None else f"{known.text(file)}\n"
    said = evolve(plan, schedule=placed_by(pipeline))
    text = "".join(f"{toml_comment(line)}\n" for line in [*head, *compiling]) + f"\n{table}{plan_to_toml(said)}"
    lines = text.split("\n")
    for key, comment in _COMMENTS.items():
        lines = [f"{line}  # {comment}" if line.startswith(f"{key} = ") else line for line in lines]
    return checked_plan_text("\n".join(lines), said)


def _is_default(passes: str, plan: Plan, config: ModelConfig) -> bool:
    """Tell whether `compile` runs these passes unasked, for a plan that names the schedule that they place."""
    usual = hiding_exchanges(strategy(DEFAULT_STRATEGY).passes, plan)
    ordered = [item for item in parse_pipeline(passes) if not (is_placement(item) and item.schedule is not None)]
    return pipeline_text(ordered) == without_idle_options(usual, plan, config)


_COMMENTS = {
    "pp": "pipeline stages",
    "dp": "replicas of the whole pipeline",
    "cp": "context ranks, which share the tokens of every sequence",
    "tp": "tensor-parallel ranks, which share out every block of a stage",
    "ep": "replicas that share out the experts of every layer",
    "sequence_sharding": "whether they share out the rows of activations between blocks too",
    "mapping": "stages x replicas (x tensor-parallel ranks) that share a group; start ranks with --rank-order mapping",
    "cuts": "the layer where each later stage starts",
    "micro_batch_size": "sequences that go through a stage together",
    "micro_batches": "of each replica in a step",
    "zero": "what the replicas share out: 1 optimizer state, 2 gradients too, 3 parameter views too",
    "reduce": "when gradients are reduced over replicas",
}
"""Comments behind the keys of a plan file."""
