"""How the answer moves when the machine changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.planner.answer.report import candidate_json, shape_text, training_cost
from ratrain.ratrainc.planner.search.answer import Answer, Candidate
from ratrain.ratrainc.planner.search.evaluation import Evaluation, Task, evaluate

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine


@frozen
class Scenario:
    """The answer for a changed machine, and what the plan of the given machine comes to on it."""

    change: str
    answer: Answer
    kept: Evaluation | None


def kept_plan(answer: Answer, machine: Machine) -> Evaluation:
    """The best plan of an answer on another machine."""
    best = answer.best
    assert best is not None
    return evaluate(Task(answer.request.model, best.plan, best.pipeline, machine))


def scenario_json(scenario: Scenario, tokens: float | None = None) -> dict[str, Any]:
    """A scenario as `--json` prints it."""
    best = scenario.answer.best
    return {
        "change": scenario.change,
        "plan": candidate_json(best, scenario.answer.request.clusters, tokens) if best else None,
        "bound_step_seconds": scenario.answer.bound_seconds if best else None,
        "step_seconds_with_the_same_plan": scenario.kept.step_seconds if scenario.kept else None,
    }


def scenarios_parts(answer: Answer, scenarios: Sequence[Scenario], tokens: float | None = None) -> Iterator[Part]:
    """A table: the best plan of each changed machine, and its time against that of the given one."""
    assert answer.best is not None

    def cost(best: Candidate | None) -> list[str]:
        if tokens is None:
            return []
        days, hours = training_cost(best, answer.request.clusters, tokens) if best else (None, None)
        return ["-", "-"] if days is None else [f"{days:,.1f}", f"{hours:,.0f}"]

    rows = [["as it is", shape_text(answer.best), seconds_text(answer.best.seconds), "", "", *cost(answer.best)]]
    for item in scenarios:
        best = item.answer.best
        kept = "-" if item.kept is None else _kept_text(item.kept)
        if best is None:
            nothing = "nothing fits" if item.answer.proven_empty else "none was found"
            rows.append([item.change, nothing, "-", "-", kept, *cost(None)])
            continue
        change = 100 * (best.seconds / answer.best.seconds - 1)
        rows.append([item.change, shape_text(best), seconds_text(best.seconds), f"{change:+.1f} %", kept, *cost(best)])
    columns = ["machine", "best plan", "step", "change", "with the same plan"]
    columns += ["days", "cluster-h"] if tokens is not None else []
    yield TextTable("what if (simulated)", columns, rows)


def _kept_text(kept: Evaluation) -> str:
    return "does not fit" if kept.step_seconds is None else seconds_text(kept.step_seconds)
