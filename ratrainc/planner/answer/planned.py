"""A planner's answer with what can be asked of it: shown, saved, tried on other machines and other links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.machines import changed_machine, parse_changes
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.planner.answer.report import answer_json, answer_parts, best_plans, no_plan, plan_file
from ratrain.ratrainc.planner.answer.robust_links import (
    RobustLinks,
    robust_links,
    robust_links_json,
    robust_links_parts,
)
from ratrain.ratrainc.planner.answer.scenarios import Scenario, kept_plan, scenario_json, scenarios_parts
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, Request
from ratrain.ratrainc.planner.search.quick import quick_answer
from ratrain.ratrainc.planner.search.search import Search
from ratrain.targets.machine.writer import write_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

Tick = Callable[[str], None]


@frozen(repr=False)
class Planned(Shown):
    """The plan to run on a number of clusters, and how far it can be from the best possible."""

    answer: Answer = field(eq=False)
    quick: bool
    """whether it is of closed forms alone"""
    tokens: float | None
    """of a training, of which it says what it takes"""
    model: str
    """as commands name it"""
    machine: MachineChoice
    """as commands name it"""

    @property
    def best(self) -> Candidate:
        """The fastest plan, with its pipeline and what is known of it."""
        assert self.answer.best is not None, "one without a plan was refused"
        return self.answer.best

    @property
    def plan(self) -> Plan:
        """The fastest plan."""
        return self.best.plan

    @property
    def passes(self) -> str:
        """The pipeline that the plan was timed with."""
        return self.best.pipeline

    def text(self) -> str:
        """The plan's file, with what the search knows of it in comments."""
        return plan_file(self.answer, self.best, self.model, self.machine)

    def save(self, path: str) -> None:
        """Write the plan. Raises `DiagnosticError` RT002 where the file cannot be written."""
        write_text(path, self.text())

    def save_kept(self, path: str) -> list[str]:
        """Write each of the best plans that were wanted to a file of its own, numbered from 1; the names of these."""
        kept = best_plans(self.answer)[: self.answer.request.keep]
        names = numbered(path, len(kept))
        for name, candidate in zip(names, kept, strict=True):
            write_text(name, plan_file(self.answer, candidate, self.model, self.machine))
        return names

    def parts(self) -> Iterator[Part]:
        """What the model is, and tables: the best plans, the instructive losers, the certificate."""
        return answer_parts(self.answer, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """The answer as `--json` prints it."""
        return answer_json(self.answer, self.tokens)


def numbered(path: str, number: int) -> list[str]:
    """Names for so many plans in place of one."""
    return [f"{path.removesuffix('.toml')}-{at}.toml" for at in range(1, number + 1)]


def answer_to(request: Request, tick: Tick, *, quick: bool) -> Answer:
    """The answer of a search, or of closed forms alone."""
    return quick_answer(request) if quick else Search(request, tick).run()


@frozen(repr=False)
class WhatIf(Shown):
    """How an answer moves when the machine changes."""

    planned: Planned
    scenarios: tuple[Scenario, ...] = field(eq=False)

    def parts(self) -> Iterator[Part]:
        """A table: the best plan of each changed machine, and its time against that of the given one."""
        return scenarios_parts(self.planned.answer, self.scenarios, self.planned.tokens)

    def to_json(self) -> list[dict[str, Any]]:
        """The scenarios as `--json` prints them."""
        return [scenario_json(each, self.planned.tokens) for each in self.scenarios]

    def save(self, path: str) -> str:
        """Write the best plan of the first changed machine, and that machine beside it; the machine's file.

        Raises `DiagnosticError` RT053 where the changed machine has no plan, RT065 where its constants contradict each other.
        """
        answer, beside = self.scenarios[0].answer, machine_beside(path)
        if answer.best is None:
            no_plan(answer)
        write_machine(answer.request.machine, beside)
        text = plan_file(answer, answer.best, self.planned.model, MachineChoice(beside))
        write_text(path, text)
        return beside


def machine_beside(path: str) -> str:
    """Where the machine of a plan that is for a changed one is written."""
    return f"{path.removesuffix('.toml')}.machine.toml"


def what_if(planned: Planned, changes: Sequence[str], tick: Tick) -> WhatIf:
    """Plan again for a machine changed like `ddr=16GiB,link=7.4GB/s`, for each of such changes."""
    answer = planned.answer
    values = [(text, parse_changes(text, answer.request.machine)) for text in changes]
    scenarios = []
    for text, change in values:
        machine = changed_machine(answer.request.machine, change)
        changed = answer_to(evolve(answer.request, machine=machine), tick, quick=planned.quick)
        scenarios.append(Scenario(text, changed, None if planned.quick else kept_plan(answer, machine)))
    return WhatIf(planned, tuple(scenarios))


@frozen(repr=False)
class LinksReport(Shown):
    """What other links would do to an answer."""

    planned: Planned
    found: RobustLinks = field(eq=False)

    def parts(self) -> Iterator[Part]:
        """A table of the plan under changed links, and whether the answer flips."""
        return robust_links_parts(self.planned.answer, self.found)

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return robust_links_json(self.found, self.planned.tokens)


def links_report(planned: Planned, tick: Tick) -> LinksReport:
    """What each constant of the links does to the plan, and whether another is best where clusters share a port."""
    request = planned.answer.request
    anew = robust_links(planned.answer, lambda machine: Search(evolve(request, machine=machine), tick).run())
    return LinksReport(planned, anew)
