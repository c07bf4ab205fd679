"""Options of a pipeline that change nothing: refused where somebody wrote them, left out where a pipeline that fits many plans is told for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ratrain.passes.pass_base import Decision
from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text, read_pipeline
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def refuse_idle_options(pipeline: str, plan: Plan, model: ModelConfig) -> None:
    """Raise `DiagnosticError` RT073 for each option that a pipeline says and that changes nothing under a plan, whatever its default is."""
    problems = []
    for said in read_pipeline(pipeline):
        for idle in said.item.idle(plan, model):
            if (at := said.places.get(idle.option)) is not None:
                name = idle.option.replace("_", "-")
                text = f"'{name}' of '{said.item.name}' changes nothing: {idle.why}"
                place = Location("pipeline", 1, at.start + 1, at.stop - at.start)
                problems.append(Diagnostic("RT073", text, place, help=idle.way_out, source=pipeline))
    if problems:
        raise DiagnosticError(problems)


def without_idle_options(pipeline: str, plan: Plan, model: ModelConfig) -> str:
    """A pipeline whose options all may change something under a plan: those of a strategy, which are for any plan, said for one."""
    return pipeline_text([_without_idle(item, plan, model) for item in parse_pipeline(pipeline)])


def _without_idle(item: Pass, plan: Plan, model: ModelConfig) -> Pass:
    defaults = {each.name: each.default for each in attrs.fields(type(item))}
    return attrs.evolve(item, **{idle.option: defaults[idle.option] for idle in item.idle(plan, model)})


def refuse_deciding_twice(items: Sequence[Pass]) -> None:
    """Raise `DiagnosticError` RT071 where two passes of a pipeline decide one thing: what the first says, the second would overrule."""
    for index, item in enumerate(items):
        for later in items[index + 1 :]:
            both = [each.value for each in Decision if each in item.decides & later.decides]
            if both:
                names = f"'{item.name}' and '{later.name}'" if item.name != later.name else f"two '{item.name}'"
                text = f"{names} in one pipeline: both decide {', '.join(both)}, and what the first says would not hold"
                fail("RT071", text, help="leave one of them out")
