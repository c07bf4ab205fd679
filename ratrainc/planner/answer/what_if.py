"""Answers for changed machines (`--what-if`), compared with that of the given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.time_limit import OutOfTime, is_ended
from ratrain.ratrainc.choices.machine_changes import changed_machine, parse_changes
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.planner.answer.no_plan import no_plan
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.answer.planned import Planned, answer_to
from ratrain.ratrainc.planner.search.answer import Answer, Candidate
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, evaluate
from ratrain.targets.machine.writer import write_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Steps


@frozen
class Scenario:
    """The answer for a changed machine, and the evaluation of the given machine's plan on it."""

    change: str
    answer: Answer
    kept: PlanEvaluation | None
    """None for a quick answer"""


@frozen(repr=False)
class WhatIf(Shown):
    """The answers for changed machines."""

    planned: Planned
    scenarios: tuple[Scenario, ...] = field(eq=False)
    interrupted: bool = False
    """True if an early end was asked for: the last plan is the best so far, and changes may be missing"""

    def parts(self) -> Iterator[Part]:
        """Yield a table: the best plan of each changed machine, and its time against that of the given one."""
        usual, tokens = self.planned.best, self.planned.tokens
        clusters = self.planned.answer.request.clusters

        def cost(best: Candidate | None) -> list[str]:
            if tokens is None:
                return []
            days, hours = best.training_cost(clusters, tokens) if best else (None, None)
            return ["-", "-"] if days is None else [f"{days:,.1f}", f"{hours:,.0f}"]

        rows = [["unchanged", usual.plan.summary, seconds_text(usual.seconds), "", "", *cost(usual)]]
        for item in self.scenarios:
            best = item.answer.best
            kept = "-" if item.kept is None else _kept_text(item.kept)
            if best is None:
                nothing = "nothing fits" if item.answer.proven_empty else "none was found"
                rows.append([item.change, nothing, "-", "-", kept, *cost(None)])
                continue
            change = f"{100 * (best.seconds / usual.seconds - 1):+.1f} %"
            rows.append([item.change, best.plan.summary, seconds_text(best.seconds), change, kept, *cost(best)])
        columns = ["machine", "best plan", "step", "change", "with the same plan"]
        columns += ["days", "cluster-h"] if tokens is not None else []
        yield TextTable("what if (simulated)", columns, rows)
        yield legend(row[1] for row in rows)
        if self.interrupted:
            yield "interrupted: the last plan is the best so far, and changes that are not listed were not planned for"

    def to_json(self) -> list[dict[str, Any]]:
        """Return the scenarios as `--json` prints them."""
        return [self._json(each) for each in self.scenarios]

    def _json(self, scenario: Scenario) -> dict[str, Any]:
        best = scenario.answer.best
        return {
            "change": scenario.change,
            "plan": best.to_json(scenario.answer.request.clusters, self.planned.tokens) if best else None,
            "bound_step_seconds": scenario.answer.bound_seconds if best else None,
            "step_seconds_with_the_same_plan": scenario.kept.step_seconds if scenario.kept else None,
        }

    def save(self, path: str) -> str:
        """Write the best plan of the first changed machine, and the machine to another file, whose name is returned.

        Raises `DiagnosticError` RT053 if the changed machine has no plan, RT065 if its constants contradict each other.
        """
        if not self.scenarios:
            raise OutOfTime
        answer, machine_file = self.scenarios[0].answer, machine_path(path)
        if answer.best is None:
            no_plan(answer)
        write_machine(answer.request.machine, machine_file)
        write_text(path, plan_file(answer, answer.best, self.planned.model, MachineChoice(machine_file), path))
        return machine_file


def machine_path(path: str) -> str:
    """Return the name of the machine file that goes with a plan for a changed machine."""
    return f"{path.removesuffix('.toml')}.machine.toml"


def what_if(planned: Planned, changes: Sequence[str], tick: Steps) -> WhatIf:
    """Plan again for each change of the machine, like `ddr=16GiB,link=7.4GB/s`."""
    request, best = planned.answer.request, planned.best
    values = [(text, parse_changes(text, request.machine)) for text in changes]
    # folded where the best plan's own time is
    usual = Task(request.model, best.plan, best.pipeline, request.machine, folded=best.how == "folded")
    scenarios = []
    for text, change in values:
        if is_ended():
            break
        machine = changed_machine(request.machine, change)
        tick.prefix = f"{text}: "
        try:
            changed = answer_to(evolve(request, machine=machine), tick, quick=planned.quick)
        except OutOfTime:
            break
        kept = None if planned.quick else evaluate(evolve(usual, machine=machine))
        scenarios.append(Scenario(text, changed, kept))
    return WhatIf(planned, tuple(scenarios), is_ended())


def _kept_text(kept: PlanEvaluation) -> str:
    if kept.stopped:
        return "-"
    return "does not fit" if kept.step_seconds is None else seconds_text(kept.step_seconds)
