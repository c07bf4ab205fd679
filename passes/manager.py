"""The pass manager: runs a pipeline, inserts the passes that a pass needs first, and refuses an illegal order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from ratrain.passes.pass_base import Fact, Pass, PassContext, facts_of
from ratrain.passes.pipeline_text import parse_pipeline, pass_text
from ratrain.passes.placed_by import is_placement
from ratrain.passes.registry import PASSES, PROVIDERS, pass_class
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.schedules.named import default_schedule
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Note, fail
from ratrain.ratrain_ir.support.plugins import is_own, line_of, place_of
from ratrain.ratrain_ir.support.time_limit import go_on
from ratrain.ratrain_ir.target import Target


@frozen
class PassRun:
    """Record of one pass: its text, seconds and statistics."""

    text: str
    seconds: float
    statistics: dict[str, int | float | str]
    inserted_for: str | None
    """Name of the pass that needed this one, if the manager inserted it; None if the pipeline names it."""
    peaks: list[int] | None = None
    """Most live bytes in DDR by stage of the module that it left, if it had to find them."""


AfterPass = Callable[[Module, PassRun], None]
"""Callback after a pass, with the rewritten module."""
BeforePass = Callable[[Pass, Sequence[Pass]], None]
"""Callback before a pass, with the passes of the pipeline that are still to run after it."""


@define
class PassManager:
    """Runs passes over a module.

    With `verify_each` the verifier runs after each pass, and an error names the pass that broke the module. Passes of
    plugins are always verified.
    """

    target: Target
    verify_each: bool = False
    after_pass: AfterPass | None = None
    before_pass: BeforePass | None = None
    runs: list[PassRun] = field(factory=list)
    """Every pass run so far, inserted ones included, in order."""

    def run(self, module: Module, passes: str | list[Pass]) -> Module:
        """Run a pipeline (a string or a list of passes) over a module in place, and return the module.

        Raises `DiagnosticError` where a pass refuses, the order is illegal, or a pass broke the module; `OutOfTime`
        where a time limit has passed.
        """
        items = parse_pipeline(passes) if isinstance(passes, str) else passes
        for index, item in enumerate(items):
            self._run_with_needs(module, item, None, items[index + 1 :])
        return module

    def _run_with_needs(self, module: Module, item: Pass, inserted_for: str | None, left: Sequence[Pass]) -> None:
        go_on()
        _refuse_illegal_order(item, facts_of(module))
        for fact in Fact:  # in pipeline order, so that earlier needs are met first
            if fact in item.requires and fact not in facts_of(module):
                self._run_with_needs(module, provider(fact, module)(), item.name, (item, *left))
        if self.before_pass is not None:
            self.before_pass(item, left)
        context = PassContext(self.target)
        start = time.perf_counter()
        draft = module.draft()  # if the pass raises, its changes to the lists are dropped with the draft
        if is_own(type(item)):
            item.run(draft, context)
        else:
            _run_of_plugin(item, draft, context)
        module.adopt(draft)
        seconds = time.perf_counter() - start
        text = pass_text(item)
        module.pipeline = f"{module.pipeline},{text}" if module.pipeline else text
        self.runs.append(PassRun(text, seconds, context.statistics, inserted_for, context.peaks))
        if self.verify_each or not is_own(type(item)):
            _verify_after(module, item, text, self.target)
        if self.after_pass is not None:
            self.after_pass(module, self.runs[-1])


def names_that_run(module: Module, items: Sequence[Pass]) -> list[str]:
    """Return the names of the passes that `items` would run on a module, inserted ones included, in order."""
    makes = {name: fact for fact, name in PROVIDERS.items()}
    facts, names = set(facts_of(module)), []

    def add(item: Pass) -> None:
        for fact in Fact:
            if fact in item.requires and fact not in facts:
                add(provider(fact, module)())
        names.append(item.name)
        made = Fact.PLACED if is_placement(item) else makes.get(item.name)
        facts.update(() if made is None else (made,))

    for item in items:
        add(item)
    return names


def provider(fact: Fact, module: Module) -> type[Pass]:
    """Return the pass class that makes a fact true of a module.

    For `Fact.PLACED` that is `place-<name>` of the plan's schedule, or of the default schedule for the plan's shape;
    `place-schedule` if there is no such pass.
    """
    if fact is Fact.PLACED:
        own = f"place-{module.plan.schedule or default_schedule(module.plan.shape)}"
        return pass_class(own if own in PASSES.names() else "place-schedule")
    return pass_class(PROVIDERS[fact])


_REASONS = {
    Fact.RELEASED: "it moves or changes ops, and the releases would then stand in the wrong places",
    Fact.LEGALISED: "workspace has already been sized for these ops",
    Fact.ALLOCATED: "the offsets hold only for the order they were made for",
}
"""Why a pass cannot run after the one that makes a fact true."""


_DONE = {
    Fact.RELEASED: "the module has its releases already",
    Fact.LEGALISED: "the module's workspace has been sized already, as its line 'target' says",
    Fact.ALLOCATED: "the tensors have addresses already",
}
"""Why the pass that makes a fact true cannot run twice."""


def _refuse_illegal_order(item: Pass, facts: frozenset[Fact]) -> None:
    for fact in Fact:
        if fact in item.forbids and fact in facts:
            first = PROVIDERS[fact]
            if item.name == first:
                fail("RT071", f"'{first}' cannot run twice: {_DONE[fact]}", help=f"leave '{first}' out of the pipeline")
            fail(
                "RT071",
                f"'{item.name}' cannot run after '{first}': {_REASONS.get(fact, 'it would undo it')}",
                help=f"put '{item.name}' before '{first}' in the pipeline; a schedule that has been through "
                f"'{first}' is made anew with 'ratrainc compile --model M --plan P.toml --passes ... -o X.rtir'",
            )


def _run_of_plugin(item: Pass, draft: Module, context: PassContext) -> None:
    """Run a pass of a plugin; blame the pass for any exception and for a changed number of stages.

    Raises `DiagnosticError`: RT072, or the one that the pass itself raises.
    """
    stages, file = len(draft.stages), str(getattr(sys.modules.get(type(item).__module__), "__file__", ""))
    try:
        item.run(draft, context)
    except DiagnosticError:
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it becomes a diagnostic
        fail("RT072", f"the pass '{item.name}' failed: {type(error).__name__}: {error}{place_of(error, file)}")
    if len(draft.stages) != stages:
        fail(
            "RT072",
            f"the pass '{item.name}' left {len(draft.stages)} stages of {stages}, and the plan says how many there "
            f"are{line_of(type(item).run)}",
        )


def _verify_after(module: Module, item: Pass, text: str, target: Target) -> None:
    """Raise `DiagnosticError` with what the verifier finds; of a plugin's pass, RT072 with its line stands before."""
    from ratrain.ratrain_ir.verifier import verify

    problems = Diagnostics()
    verify(module, problems, target)
    if not problems.errors:
        return
    if not is_own(type(item)):
        blame = f"the pass '{text}' broke the schedule{line_of(type(item).run)}: what is wrong with it follows"
        raise DiagnosticError([Diagnostic("RT072", blame), *problems.errors])
    note = Note(f"the module was broken by the pass '{text}'")
    first, *others = problems.errors
    raise DiagnosticError([evolve(first, notes=(*first.notes, note)), *others])
