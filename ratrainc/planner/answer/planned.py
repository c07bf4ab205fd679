"""The planner's answer as commands show it: tables, `--json`, the certificate and plan files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.time_limit import OutOfTime
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.facts.expert_facts import NOT_COUNTED, expert_rows_note
from ratrain.ratrainc.facts.model_facts import model_facts, summary
from ratrain.ratrainc.facts.slices_note import slices_note
from ratrain.ratrainc.planner.answer.crossings import Crossing, crossings
from ratrain.ratrainc.planner.answer.no_plan import no_plan
from ratrain.ratrainc.planner.answer.plan_files import numbered, plan_file
from ratrain.ratrainc.planner.search.answer import AT_LEAST, Answer, Candidate
from ratrain.ratrainc.planner.search.disturbance import JITTER, SLOWER
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import quick_answer
from ratrain.ratrainc.planner.space.objective import TIME
from ratrain.targets.machine.link_groups import are_uniform

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.console.progress import Steps
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

_TAIL = "tail: idle time of the stage that waits longest for reductions, updates and gathers of weights"
_ROBUST = (
    f"slow stage: the step with the busiest stage's compute {100 * (SLOWER - 1):.0f} % slower; jitter: with times that "
    f"vary by {100 * JITTER:.0f} %, which may be shorter too; -: of plans that were not simulated whole"
)
_FOLDED = (
    "folded: simulated with fewer micro-batches, the others at their pace; simulating all of them takes longer than "
    "this answer may: "
)
INTERRUPTED = "interrupted: this is the best so far; the search to its end may find a better one"
_SHOWN = 5
"""Plans of the table, unless more are wanted."""


def answer_to(request: PlanRequest, tick: Steps, *, quick: bool) -> Answer:
    """Answer a request by a search, or if `quick` by the plans that closed forms put first."""
    return quick_answer(request, tick) if quick else Search(request, tick).run()


@frozen(repr=False)
class Planned(Shown):
    """The plan to run on a number of clusters, and its distance from the best possible.

    Raises `DiagnosticError` RT053 if the answer has no plan, `OutOfTime` if it was interrupted before it had one.
    """

    answer: Answer = field(eq=False)
    quick: bool
    """True for an answer whose plans closed forms chose"""
    tokens: float | None
    """tokens of a training whose cost to show"""
    model: str
    """name of the model in commands"""
    machine: MachineChoice
    """machine as commands name it"""

    def __attrs_post_init__(self) -> None:
        if self.answer.best is None:
            if self.answer.interrupted:
                raise OutOfTime
            no_plan(self.answer)

    @property
    def best(self) -> Candidate:
        """The best plan with its pipeline and evaluation."""
        assert self.answer.best is not None, "checked when made"
        return self.answer.best

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.best.plan

    @property
    def passes(self) -> str:
        """The pipeline that the plan was timed with."""
        return self.best.pipeline

    def text(self, path: str | None = None) -> str:
        """Return the text of the plan's file, `path`."""
        return plan_file(self.answer, self.best, self.model, self.machine, path)

    def save(self, path: str) -> None:
        """Write the plan. Raises `DiagnosticError` RT002 if the file cannot be written."""
        write_text(path, self.text(path))

    def save_kept(self, path: str) -> list[str]:
        """Write each of the wanted best plans to a numbered file; return the names."""
        kept = self.answer.best_plans[: self.answer.request.keep]
        names = numbered(path, len(kept))
        for name, candidate in zip(names, kept, strict=True):
            write_text(name, plan_file(self.answer, candidate, self.model, self.machine, name))
        return names

    def parts(self) -> Iterator[Part]:
        """Yield facts of the model, tables of the best and the rejected plans, and the certificate."""
        answer, request = self.answer, self.answer.request
        yield from summary(model_facts(request.model, request.seq_len))
        shown = answer.best_plans[: max(_SHOWN, request.keep)]
        columns = ["plan", "cuts", "step", "tokens/s", "peak", "tail", "how"]
        if any(candidate.shape.tiles for candidate in shown):
            columns.insert(2, "mapping")
        if request.families:
            columns.insert(1, "schedule")
        if request.robust:
            columns += ["slow stage", "jitter"]
        if self.tokens is not None:
            columns += ["days", "cluster-h"]
        of_families = f", {_families_text(request)}" if request.families else ""
        title = (
            f"{request.model.name} on {request.clusters} x {request.machine.name}, "
            f"{number_of(request.global_batch, 'sequence')} of "
            f"{number_of(request.seq_len, 'token')} a step, strategy "
            f"{request.strategy.name}{of_families} ({_times_text(shown)})"
        )
        yield TextTable(title, columns, [self._row(c, mapped="mapping" in columns) for c in shown])
        yield legend(candidate.plan.summary for candidate in shown)
        if any(candidate.evaluation for candidate in shown):
            yield _TAIL
        if request.robust:
            yield _ROBUST
        if not all(candidate.evaluation for candidate in shown):
            yield AT_LEAST
        if self.quick and (said := _estimates_text(shown)):
            yield said
        if crossed := self._crossings:
            columns = ["what", "stays within a", "how, with the bytes that a cluster sends within each"]
            rows = [[each.what, each.group, each.way] for each in crossed]
            yield TextTable("links of the best plan", columns, rows)
        if answer.rejected_plans:
            rows = [[rejected.text, rejected.reason] for rejected in answer.rejected_plans]
            under = f"; P, T, C, E and Z are of {self.best.family}, as the best plan is" if request.families else ""
            yield TextTable(f"why not{under}", ("plan", "reason"), rows)
        yield from self.certificate()

    def _row(self, candidate: Candidate, *, mapped: bool) -> list[str]:
        plan, request, evaluation = candidate.plan, self.answer.request, candidate.evaluation
        tail = evaluation.exposed_tail_seconds if evaluation else None
        row = [
            plan.summary,
            cuts_text(plan.cuts),
            seconds_text(candidate.seconds),
            f"{candidate.tokens_per_second:,.0f}",
            size_text(candidate.peak_bytes) + ("" if evaluation else "+"),
            "-" if tail is None else seconds_text(tail),
            candidate.how,
        ]
        if mapped:
            row.insert(2, str(plan.mapping or "-"))
        if request.families:
            row.insert(1, candidate.family)
        if request.robust:
            disturbance = evaluation.disturbance if evaluation else None
            seconds = (disturbance.slow_stage_seconds, disturbance.jitter_seconds) if disturbance else None
            row += map(seconds_text, seconds) if seconds else ["-", "-"]
        if self.tokens is not None:
            days, hours = candidate.training_cost(request.clusters, self.tokens)
            row += [f"{days:,.1f}", f"{hours:,.0f}"]
        return row

    @property
    def _crossings(self) -> list[Crossing]:
        """Traffic of the best plan by group of clusters; empty if links are uniform."""
        request = self.answer.request
        if are_uniform(request.machine.link_groups):
            return []
        return crossings(self.plan, request.model, request.machine)

    @property
    def _notes(self) -> list[str]:
        """Remarks on the rows that products of the best plan have at a time."""
        request = self.answer.request
        notes = (slices_note(self.plan, request.machine), expert_rows_note(request.model, self.plan, request.machine))
        return [note for note in notes if note]

    def certificate(self) -> Iterator[str]:
        """Yield what is proved of the best plan against all others."""
        answer, best, objective = self.answer, self.best, self.answer.request.objective
        if answer.interrupted:
            yield INTERRUPTED
        measured = ""
        if objective is not TIME:
            measured = f"{objective.text(best.cost(objective)[0], best.plan.tokens_per_step)}, "
        yield f"best found {measured}{seconds_text(best.seconds)} a step ({best.how}), passes {best.pipeline}"
        used = f"{100 * best.utilisation(answer.request):.1f} % of the machine's 16-bit peak"
        counted = f" ({NOT_COUNTED})" if answer.request.model.experts else ""
        yield f"model-flops utilisation {used}{counted}; views and gradients in {best.plan.view_dtype}"
        if accuracy := answer.request.machine.accuracy:
            yield accuracy
        if best.how == "folded":
            yield _FOLDED + ("leave --quick out" if self.quick else "give it more --seconds")
        yield from self._bounds_text()
        if answer.settled and not answer.proven:
            yield (
                "the search ended by itself, and more --seconds change nothing: what the bound leaves open is expected "
                "to be worse than the best by 3 % or more; --exhaustive tries it"
            )
        yield (
            f"{number_of(answer.plans, 'plan', ',')} of {answer.shapes:,} shapes; "
            f"{answer.evaluations} compiled and simulated; "
            f"{answer.seconds:.1f} s"
        )
        for reason, names in _by_reason(answer.request.families_left_out).items():
            yield f"left out: {', '.join(names)}: {reason}"
        yield from self._notes
        idle = answer.request.clusters - best.plan.clusters
        if idle and objective is TIME:
            found = "no plan was found that uses more and is faster"
            stay = f"{number_of(idle, 'cluster')} {'stays' if idle == 1 else 'stay'} idle"
            yield f"{stay}: {'no plan that uses more is faster' if answer.proven else found}"

    def _bounds_text(self) -> Iterator[str]:
        """Yield the bounds on all plans."""
        answer, best, objective = self.answer, self.best, self.answer.request.objective
        assert answer.gap is not None
        assert answer.relaxed_gap is not None
        proven = ", proven best of what these passes make" if answer.proven else ""
        if objective.of_clusters and not proven and answer.bound[0] == best.cost(objective)[0]:
            proven = ", proven: bounds on bytes rule out every plan on fewer"
        gap, relaxed_gap = f"gap {100 * answer.gap:.1f} %{proven}", f"gap {100 * answer.relaxed_gap:.1f} %"
        closed = "closed form, whatever passes order them:"
        if objective is TIME:
            yield f"lower bound of every plan considered {seconds_text(answer.bound_seconds)}: {gap}"
            yield f"{closed} {seconds_text(answer.relaxed_bound_seconds)}, {relaxed_gap}"
            return
        tokens = best.plan.tokens_per_step
        least, relaxed = objective.text(answer.bound[0], tokens), objective.text(answer.relaxed_bound[0], tokens)
        yield f"no plan that was considered {objective.none_better} {least}: {gap}"
        yield f"{closed} {relaxed}, {relaxed_gap}"
        if answer.bound[0] == best.cost(objective)[0] and answer.bound_seconds < best.seconds:
            yield f"of those as good, none takes less than {seconds_text(answer.bound_seconds)}"

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `--json` prints it."""
        answer, request = self.answer, self.answer.request
        of_time = request.objective is TIME
        return {
            "model": request.model.name,
            "machine": request.machine.name,
            "step_error": request.machine.step_error,
            "strategy": request.strategy.name,
            "families": [family.name for family in request.searched],
            "left_out": request.families_left_out,
            "objective": request.objective.name,
            "clusters": request.clusters,
            "global_batch": request.global_batch,
            "seq_len": request.seq_len,
            "plans": [
                c.to_json(request.clusters, self.tokens) | {"mfu": c.utilisation(request)} for c in answer.best_plans
            ],
            "bound": answer.bound[0],
            "bound_step_seconds": answer.bound_seconds if of_time else None,
            "gap": answer.gap,
            "relaxed_bound": answer.relaxed_bound[0],
            "relaxed_bound_step_seconds": answer.relaxed_bound_seconds if of_time else None,
            "relaxed_gap": answer.relaxed_gap,
            "proven": answer.proven,
            "interrupted": answer.interrupted,
            "settled": answer.settled,
            "crossings": [crossing.to_json() for crossing in self._crossings],
            "notes": self._notes,
            "rejected": [
                {"plan": each.text, "reason": each.reason}
                | ({"seconds": each.mechanisms, "more_seconds": each.more_seconds} if request.explain else {})
                for each in answer.rejected_plans
            ],
            "considered": {"shapes": answer.shapes, "plans": answer.plans, "evaluations": answer.evaluations},
            "seconds": answer.seconds,
        }


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the families that were left out by their reason."""
    return {reason: [name for name, own in left_out.items() if own == reason] for reason in left_out.values()}


def _times_text(shown: Sequence[Candidate]) -> str:
    """Say which of the times shown are simulated."""
    simulated = sum(candidate.evaluation is not None for candidate in shown)
    if simulated == len(shown):
        return "all times simulated"
    return f"{simulated} of {len(shown)} times simulated, the others estimates" if simulated else "all times estimates"


def _estimates_text(shown: Sequence[Candidate]) -> str:
    """Say how many of the plans shown were not simulated, and why; empty if all were."""
    reasons = Counter(candidate.why_estimated for candidate in shown if candidate.evaluation is None)
    if not reasons:
        return ""
    count = reasons.total()
    why = ", ".join(f"{reason} ({number})" for reason, number in reasons.items())
    plans = "1 of the plans shown is an estimate" if count == 1 else f"{count} of the plans shown are estimates"
    return f"{plans}, not simulated: {why}. The search without --quick settles which plan is best."


def _families_text(request: PlanRequest) -> str:
    """Say how many schedules are searched, and with which other memories."""
    searched = [family for family in request.families if family.name not in request.families_left_out]
    memories = dict.fromkeys(family.memory for family in searched if family.memory is not None)
    using = f" and {', '.join(map(repr, memories))}" if memories else ""
    count = len({family.schedule for family in searched})
    return f"{number_of(count, 'schedule')}{using}"


def cuts_text(cuts: Sequence[int]) -> str:
    """Print cuts on a line; many of them are shortened."""
    if not cuts:
        return "-"
    words = [str(cut) for cut in cuts]
    return ",".join(words) if len(words) <= 5 else f"{','.join(words[:3])}..{words[-1]}"
