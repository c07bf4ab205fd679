"""Options of a pipeline that change nothing: refused where somebody wrote them, left out where a pipeline that fits many plans is told for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text, read_pipeline
from ratrain.ratrain_ir.diagnostics import Diagnostic, DiagnosticError, Location

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan


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
