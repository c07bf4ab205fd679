"""Options of a pipeline that have no effect under a plan.

An option that a user wrote and that changes nothing is refused. A strategy's pipeline is written for any plan; for one
plan its ineffective options are set back to their defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ratrain.passes.pass_base import Decision
from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text, read_pipeline
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.passes.pass_base import Idle, Pass
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def refuse_idle_options(pipeline: str, plan: Plan, model: ModelConfig, *, fetched: bool = False) -> None:
    """Refuse each option that a pipeline spells out and that has no effect under the plan.

    An option counts even if it is written with its default value. `fetched`: the module fetches views already. Raises
    `DiagnosticError` RT073 with a caret under each.
    """
    problems = []
    for said in read_pipeline(pipeline):
        for idle in _idle_options(said.item, plan, model, fetched=fetched):
            if (at := said.places.get(idle.option)) is not None:
                name = idle.option.replace("_", "-")
                text = f"'{name}' of '{said.item.name}' changes nothing: {idle.why}"
                place = Location("pipeline", 1, at.start + 1, at.stop - at.start)
                problems.append(Diagnostic("RT073", text, place, help=idle.way_out, source=pipeline))
        fetched |= said.item.fetches_views
    if problems:
        raise DiagnosticError(problems)


def without_idle_options(pipeline: str, plan: Plan, model: ModelConfig) -> str:
    """Return the pipeline with each option that has no effect under the plan set back to its default.

    Used for the pipeline of a strategy, which is written for any plan.
    """
    fetched, items = False, []
    for item in parse_pipeline(pipeline):
        defaults = {each.name: each.default for each in attrs.fields(type(item))}
        idle = _idle_options(item, plan, model, fetched=fetched)
        items.append(attrs.evolve(item, **{each.option: defaults[each.option] for each in idle}))
        fetched |= item.fetches_views
    return pipeline_text(items)


def _idle_options(item: Pass, plan: Plan, model: ModelConfig, *, fetched: bool) -> list[Idle]:
    """List the options of a pass that have no effect; `fetched`: passes before it fetch views within the step."""
    return [idle for idle in item.idle(plan, model) if not (fetched and idle.unless_fetched)]


def refuse_deciding_twice(items: Sequence[Pass]) -> None:
    """Refuse a pipeline in which two passes take the same decision: the second would overrule the first.

    Raises `DiagnosticError` RT071.
    """
    for index, item in enumerate(items):
        for later in items[index + 1 :]:
            both = [each.value for each in Decision if each in item.decides & later.decides]
            if both:
                names = f"'{item.name}' and '{later.name}'" if item.name != later.name else f"two '{item.name}'"
                text = f"{names} in one pipeline: both decide {', '.join(both)}, and what the first says would not hold"
                fail("RT071", text, help="leave one of them out")
