"""What a search found, for people, for scripts and as a plan file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import asdict, evolve

from ratrain.passes.idle_options import without_idle_options
from ratrain.passes.placed_by import placed_by
from ratrain.ratrain_ir.config.plan_text import checked_plan_text, plan_to_toml
from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.toml_text import toml_comment
from ratrain.ratrainc.console.console import capacity_text, seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.facts.model_facts import model_facts, summary
from ratrain.ratrainc.facts.slices_note import slices_note
from ratrain.ratrainc.planner.answer.crossings import Crossing, crossings
from ratrain.ratrainc.planner.space.objective import TIME
from ratrain.targets.machine.link_groups import are_uniform

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.choices.machine_choice import MachineChoice
    from ratrain.ratrainc.planner.search.answer import Answer, Candidate, Request
    from ratrain.ratrainc.planner.space.families import Family

_SHOWN = 5
_SECONDS_OF_DAY = 86400.0


def best_plans(answer: Answer) -> list[Candidate]:
    """The candidates, each plan once with its best pipeline, best first."""
    fastest: dict[Any, Candidate] = {}
    for candidate in answer.candidates:
        fastest.setdefault(candidate.identity, candidate)
    return list(fastest.values())


def tokens_per_second(candidate: Candidate) -> float:
    """Tokens of a step over its seconds."""
    return candidate.plan.tokens_per_step / candidate.seconds


def training_cost(candidate: Candidate, clusters: int, tokens: float) -> tuple[float, float]:
    """Days, and hours of all clusters together (idle ones too), that so many tokens take."""
    seconds = tokens / tokens_per_second(candidate)
    return seconds / _SECONDS_OF_DAY, seconds * clusters / 3600.0


def candidate_json(candidate: Candidate, clusters: int, tokens: float | None) -> dict[str, Any]:
    """One plan as `--json` prints it."""
    plan = candidate.plan
    data: dict[str, Any] = {
        "pp": plan.pp,
        "dp": plan.dp,
        "tp": plan.tp,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches": plan.micro_batches,
        "zero": plan.zero,
        "reduce": plan.reduce,
        "zero_blocks": None if plan.zero_blocks is None else str(plan.zero_blocks),
        "shard_group": plan.shard_group,
        "view_group": plan.view_group,
        "cuts": list(plan.cuts),
        "chunks": plan.chunks,
        "layout": plan.layout,
        "slices": list(plan.slices),
        "mapping": None if plan.mapping is None else str(plan.mapping),
        "passes": candidate.pipeline,
        "predicted_step_seconds": candidate.seconds,
        "tokens_per_second": tokens_per_second(candidate),
        "peak_bytes": candidate.peak_bytes,
        "bound_seconds": candidate.bound_seconds,
        "exposed_tail_seconds": candidate.evaluation.exposed_tail_seconds if candidate.evaluation else None,
        "how": how(candidate),
        "family": candidate.family,
        "clusters": plan.clusters,
        "idle_clusters": clusters - plan.clusters,
    }
    disturbance = candidate.evaluation.disturbance if candidate.evaluation else None
    if disturbance is not None:
        data |= asdict(disturbance)
    if tokens is not None:
        data["days"], data["cluster_hours"] = training_cost(candidate, clusters, tokens)
    return data


def how(candidate: Candidate) -> str:
    """Where the time of a candidate comes from."""
    if candidate.evaluation is None:
        return "estimate"
    return "folded" if candidate.evaluation.estimated else "simulated"


def answer_json(answer: Answer, tokens: float | None = None) -> dict[str, Any]:
    """The whole answer as `--json` prints it."""
    request = answer.request
    return {
        "model": request.model.name,
        "machine": request.machine.name,
        "strategy": request.strategy.name,
        "families": [family.name for family in request.searched],
        "objective": request.objective.name,
        "clusters": request.clusters,
        "global_batch": request.global_batch,
        "seq_len": request.seq_len,
        "plans": [candidate_json(c, request.clusters, tokens) for c in best_plans(answer)],
        "bound": answer.bound[0],
        "bound_step_seconds": answer.bound_seconds if request.objective is TIME else None,
        "gap": answer.gap,
        "relaxed_bound": answer.relaxed_bound[0],
        "relaxed_bound_step_seconds": answer.relaxed_bound_seconds if request.objective is TIME else None,
        "relaxed_gap": answer.relaxed_gap,
        "proven": answer.proven,
        "crossings": [crossing.to_json() for crossing in best_crossings(answer)],
        "notes": [note for note in (slices_note(answer.best.plan, request.machine) if answer.best else "",) if note],
        "losers": [
            {"plan": loser.text, "reason": loser.reason} | ({"seconds": loser.mechanisms} if request.explain else {})
            for loser in answer.losers
        ],
        "considered": {"shapes": answer.shapes, "plans": answer.plans, "evaluations": answer.evaluations},
        "seconds": answer.seconds,
    }


def best_crossings(answer: Answer) -> list[Crossing]:
    """What of the best plan crosses which group of clusters; nothing where links are uniform."""
    request, best = answer.request, answer.best
    if best is None or are_uniform(request.machine.link_groups):
        return []
    return crossings(best.plan, request.model, request.machine)


def answer_parts(answer: Answer, tokens: float | None) -> Iterator[Part]:
    """What the model is, and tables: the best plans, the instructive losers, the certificate."""
    request = answer.request
    for line in summary(model_facts(request.model, request.seq_len)):
        yield line
    shown = best_plans(answer)[: max(_SHOWN, request.keep)]
    columns = ["plan", "cuts", "step", "tokens/s", "peak", "tail", "how"]
    if any(candidate.shape.tiles for candidate in shown):
        columns.insert(2, "mapping")
    if request.families:
        columns.insert(1, "schedule")
    if request.robust:
        columns += ["slow stage", "jitter"]
    if tokens is not None:
        columns += ["days", "cluster-h"]
    rows = [_row(c, request, tokens, mapped="mapping" in columns) for c in shown]
    of_families = f", {families_text(request.families)}" if request.families else ""
    title = (
        f"{request.model.name} on {request.clusters} x {request.machine.name}, {request.global_batch} sequences of "
        f"{request.seq_len} tokens a step, strategy {request.strategy.name}{of_families} (all times simulated)"
    )
    yield TextTable(title, columns, rows)
    crossed = best_crossings(answer)
    if crossed:
        rows = [[each.what, each.group, each.way] for each in crossed]
        yield TextTable("links of the best plan", ("what", "stays within a", "way, and bytes over the links of"), rows)
    if answer.losers:
        yield TextTable("why not", ("plan", "reason"), [[loser.text, loser.reason] for loser in answer.losers])
    for line in certificate(answer):
        yield line


def families_text(searched: Sequence[Family]) -> str:
    """How many schedules are searched, and with which memories beside DDR."""
    memories = dict.fromkeys(family.memory for family in searched if family.memory is not None)
    using = f" and {', '.join(map(repr, memories))}" if memories else ""
    return f"{len({family.schedule for family in searched})} schedules{using}"


def certificate(answer: Answer) -> list[str]:
    """What is known of the best plan against all others."""
    assert answer.best is not None
    assert answer.gap is not None
    assert answer.relaxed_gap is not None
    best, objective, tokens = answer.best, answer.request.objective, answer.best.plan.tokens_per_step
    measured = "" if objective is TIME else f"{objective.text(best.cost(objective)[0], tokens)}, "
    lines = [
        f"best found {measured}{seconds_text(best.seconds)} a step ({how(best)}), passes {best.pipeline}",
        *_bounds_text(answer),
        (
            f"{answer.plans:,} plans of {answer.shapes:,} shapes; {answer.evaluations} compiled and simulated; "
            f"{answer.seconds:.1f} s"
        ),
    ]
    if note := slices_note(answer.best.plan, answer.request.machine):
        lines.append(note)
    idle = answer.request.clusters - best.plan.clusters
    if not idle or objective is not TIME:
        return lines
    known = "no plan that uses more is faster" if answer.proven else "no plan was found that uses more and is faster"
    return [*lines, f"{idle} clusters stay idle: {known}"]


def _bounds_text(answer: Answer) -> Iterator[str]:
    """What no plan can be better than."""
    assert answer.best is not None
    assert answer.gap is not None
    assert answer.relaxed_gap is not None
    objective, tokens = answer.request.objective, answer.best.plan.tokens_per_step
    proven = ", proven best of what these passes make" if answer.proven else ""
    if objective is TIME:
        yield f"lower bound of every plan considered {seconds_text(answer.bound_seconds)}: gap {100 * answer.gap:.1f} %{proven}"
        yield (
            f"closed form, whatever passes order them: {seconds_text(answer.relaxed_bound_seconds)}, "
            f"gap {100 * answer.relaxed_gap:.1f} %"
        )
        return
    yield (
        f"no plan that was considered {objective.none_better} {objective.text(answer.bound[0], tokens)}: "
        f"gap {100 * answer.gap:.1f} %{proven}"
    )
    yield (
        f"closed form, whatever passes order them: {objective.text(answer.relaxed_bound[0], tokens)}, "
        f"gap {100 * answer.relaxed_gap:.1f} %"
    )
    if answer.bound[0] == answer.best.cost(objective)[0] and answer.bound_seconds < answer.best.seconds:
        yield f"of those as good, none takes less than {seconds_text(answer.bound_seconds)}"


def shape_text(candidate: Candidate) -> str:
    """A plan in a few words."""
    return candidate.plan.summary


def _row(candidate: Candidate, request: Request, tokens: float | None, *, mapped: bool) -> list[str]:
    plan = candidate.plan
    tail = candidate.evaluation.exposed_tail_seconds if candidate.evaluation else None
    row = [
        shape_text(candidate),
        cuts_text(plan.cuts),
        seconds_text(candidate.seconds),
        f"{tokens_per_second(candidate):,.0f}",
        size_text(candidate.peak_bytes) + ("" if candidate.evaluation else "+"),
        "-" if tail is None else seconds_text(tail),
        how(candidate),
    ]
    if mapped:
        row.insert(2, str(plan.mapping or "-"))
    if request.families:
        row.insert(1, candidate.family)
    if request.robust:
        disturbance = candidate.evaluation.disturbance if candidate.evaluation else None
        row += (
            [seconds_text(disturbance.slow_stage_seconds), seconds_text(disturbance.jitter_seconds)]
            if disturbance
            else ["-", "-"]
        )
    if tokens is not None:
        days, hours = training_cost(candidate, request.clusters, tokens)
        row += [f"{days:,.1f}", f"{hours:,.0f}"]
    return row


def cuts_text(cuts: Sequence[int]) -> str:
    """Cuts on a line, many of them shortened."""
    if not cuts:
        return "-"
    words = [str(cut) for cut in cuts]
    return ",".join(words) if len(words) <= 5 else f"{','.join(words[:3])}..{words[-1]}"


def plan_file(answer: Answer, candidate: Candidate, model: str, target: MachineChoice | None = None) -> str:
    """The TOML text of a plan, with what the search knows of it in comments; for the default machine where none is given."""
    request = answer.request
    sequences = f"{request.global_batch} sequences of {request.seq_len} tokens a step"
    simulated = (
        f"{seconds_text(candidate.seconds)} a step, {tokens_per_second(candidate):,.0f} tokens/s ({how(candidate)})"
    )
    head = [
        f"Planned for {request.model.name} on {request.clusters} x {request.machine.name}: {sequences}.",
        f"Predicted: {simulated}, highest peak {'' if candidate.evaluation else 'at least '}{size_text(candidate.peak_bytes)}.",
        *_known(answer),
        *(_mapping_reasons(answer, candidate) if candidate.plan.mapping is not None else ()),
    ]
    return plan_text(candidate, request.model, model, head, target)


def _known(answer: Answer) -> Iterator[str]:
    """What the plan file says of all other plans."""
    objective, tokens = answer.request.objective, answer.request.global_batch * answer.request.seq_len
    if objective is not TIME:
        yield f"Looked for: {objective.name}."
    least = objective.text(answer.bound[0], tokens)
    yield f"No plan that was considered {objective.none_better} {least} with these passes,"
    than = objective.none_better.split(" ", 1)[1]
    yield f"or {than} {objective.text(answer.relaxed_bound[0], tokens)} (closed form) with any."


def _mapping_reasons(answer: Answer, candidate: Candidate) -> Iterator[str]:
    """What a mapping keeps near, and what the next best mapping of the same shape comes to."""
    request = answer.request
    yield f"Mapped to the groups of {request.machine.name}:"
    yield from (f"  {crossing}" for crossing in crossings(candidate.plan, request.model, request.machine))
    alike = evolve(candidate.shape, tiles=())
    others = [c for c in answer.candidates if evolve(c.shape, tiles=()) == alike and c.shape != candidate.shape]
    if others:
        other = min(others, key=lambda c: c.seconds)
        yield f"  Next best mapping of this shape: {other.plan.mapping}, {seconds_text(other.seconds)} ({how(other)})."
    else:
        yield "  No other mapping of this shape was simulated: it has none, or bounds ruled them out."


def plan_text(
    candidate: Candidate, config: ModelConfig, model: str, head: Sequence[str], target: MachineChoice | None = None
) -> str:
    """The TOML text of a candidate under lines of comment; for the default machine where none is given."""
    return text_of_plan(candidate.plan, candidate.pipeline, config, model, head, target)


def text_of_plan(
    plan: Plan,
    pipeline: str,
    config: ModelConfig,
    model: str,
    head: Sequence[str],
    target: MachineChoice | None = None,
) -> str:
    """Return the TOML text of a plan for a pipeline, under lines of comment that end with how to compile it.

    `config` is the model, and `model` what the command calls it. Raises `DiagnosticError` RT011 where that would not be read as the plan.
    """
    words = "" if target is None else target.text
    compiling = [
        "Compile it with:",
        f"  ratrainc compile --model {model} --plan THIS.toml{words} \\",
        f'    --passes "{without_idle_options(pipeline, plan, config)}"',
    ]
    said = evolve(plan, schedule=placed_by(pipeline))
    text = "".join(f"{toml_comment(line)}\n" for line in [*head, *compiling]) + "\n" + plan_to_toml(said)
    for key, comment in _COMMENTS.items():
        text = _commented(text, key, comment)
    return checked_plan_text(text, said)


_COMMENTS = {
    "pp": "pipeline stages",
    "dp": "replicas of the whole pipeline",
    "tp": "tensor peers, which share out every block of a stage",
    "sequence_sharding": "whether they share out the rows of activations between blocks too",
    "mapping": "stages x replicas, and x tensor peers, that share a group; start ranks so with --rank-order mapping",
    "cuts": "the layer where each later stage starts",
    "micro_batch_size": "sequences that go through a stage together",
    "micro_batches": "of each replica in a step",
    "zero": "what the replicas share out: 1 optimizer state, 2 gradients too, 3 parameter views too",
    "reduce": "when gradients meet those of the other replicas",
}


def _commented(text: str, key: str, comment: str) -> str:
    lines = text.split("\n")
    return "\n".join(f"{line}  # {comment}" if line.startswith(f"{key} = ") else line for line in lines)


def nearest_text(answer: Answer) -> str:
    """Of the shapes that bounds rule out, the one that lacks least; empty where there is none."""
    if not answer.rejected:
        return ""
    nearest = min(answer.rejected, key=lambda r: r.short_bytes)
    shape = nearest.shape
    return (
        f"nearest: {f'{nearest.family} ' if answer.request.families else ''}P={shape.pp} D={shape.dp}{f' T={shape.tp}' if shape.tp > 1 else ''} b={shape.micro_batch_size}, ZeRO {shape.zero} {shape.reduce}: stage "
        f"@{nearest.stage} lacks at least {size_text(int(nearest.short_bytes))}"
    )


def no_plan(answer: Answer) -> NoReturn:
    """Refuse, say whether it is proved that nothing fits, and what comes nearest.

    Raises `DiagnosticError` RT053.
    """
    request = answer.request
    proved = answer.proven_empty
    notes = [Note(text) for text in (nearest_text(answer),) if text]
    notes += [
        Note(f"the compiler refused {shape_text(c)}: {c.evaluation.refusal}")
        for c in answer.refused[:3]
        if c.evaluation
    ]
    if proved:
        notes.insert(0, Note("proved: bounds on bytes rule out every plan"))
    else:
        refused = (
            f": the compiler refused {len(answer.refused)} plans, the others were not tried" if answer.refused else ""
        )
        notes.insert(0, Note(f"not proved: bounds on bytes do not rule out every plan{refused}"))
    account = request.machine.capacity(request.clusters > 1).account
    notes += [Note(f"of a rank {account}")] if account is not None else []
    more = "more time (--seconds), or every plan (--exhaustive); else "
    fail(
        "RT053",
        f"no plan of {request.model.name} with {request.global_batch} sequences of {request.seq_len} tokens "
        f"{'fits' if proved else 'was found that fits'} {request.clusters} clusters of "
        f"{capacity_text(request.machine.whole('ddr_capacity'))}",
        notes=notes,
        help=f"{'' if proved or request.exhaustive else more}use more clusters, shorter sequences, or another strategy",
    )
