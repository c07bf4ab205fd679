"""Requests as commands make them: names and files become what the search works with."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.frontend.plan import DEFAULT_HEAD_CHUNK
from ratrain.ratrain_ir.frontend.plan_text import check_plan, load_plan, place_in_plan
from ratrain.ratrain_ir.schedules.named import SCHEDULES, default_schedule
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrainc.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.planner.answer import Request
from ratrain.ratrainc.planner.space import divisions
from ratrain.ratrainc.planner.space import template as usual_template
from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, strategy
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.ratrainc.strategies import Strategy


def _computing(given: Plan | None, plans: PlanChoice, seq_len: int) -> Plan | None:
    """A template that computes attention and logits as was chosen."""
    said = {"attention": plans.attention, "attention_mask": plans.attention_mask, "logits": plans.logits}
    chosen: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if not chosen:
        return given
    plan = evolve(given or usual_template(seq_len), **chosen)
    return evolve(plan, head_chunk=DEFAULT_HEAD_CHUNK) if plan.holds_logits else plan


def planning_request(
    model: ModelConfig,
    clusters: int,
    global_batch: int,
    seq_len: int,
    *,
    machine: str | Machine | None = None,
    plans: PlanChoice | None = None,
    effort: SearchEffort | None = None,
    robust: bool = False,
) -> Request:
    """A request for the best plan of a step of `global_batch` sequences, each of `seq_len` tokens, on so many clusters.

    Raises `DiagnosticError` for an unknown strategy or machine, a file that is no plan for the model, or one that says another
    schedule than the one plans are made for; RT064 for sequences longer than the model has positions.
    """
    plans, effort = plans or PlanChoice(), effort or SearchEffort()
    chosen = strategy(plans.strategy or DEFAULT_STRATEGY)
    template = None
    if plans.like is not None:
        template = load_plan(plans.like, model)
        template = evolve(_without_shape(template, chosen, plans.like), seq_len=seq_len)
    template = _computing(template, plans, seq_len)
    request = Request(
        model,
        machine if isinstance(machine, Machine) else load_machine(machine),
        clusters,
        global_batch,
        seq_len,
        chosen,
        seconds=inf if effort.exhaustive else effort.seconds,
        jobs=effort.jobs,
        exhaustive=effort.exhaustive,
        robust=robust,
        zero_levels=plans.zero_levels,
        peers=plans.peers or ((template.tp,) if template is not None and template.tp > 1 else None),
        plan_template=template,
    )
    check_plan(request.setting.template, model)
    if request.setting.template.attention != "fused" and all(
        slices > 1 for _, _, slices in divisions(request.schedule)
    ):
        text = f'attention = "{request.setting.template.attention}" holds the scores of whole sequences, which slices do not have'
        fail("RT064", text, help=f"the strategy '{chosen.name}' goes with --attention fused")
    return request


_NOT_CHOSEN = ("zero_blocks", "shard_group", "view_group", "gather_quantised", "reduce_quantised")
"""Keys of how state is sharded that no search has."""


def _without_shape(plan: Plan, chosen: Strategy, path: str) -> Plan:
    """A plan without its schedule, chunks and slices, which are chosen anew among those of a strategy.

    Raises `DiagnosticError` RT064 where it says others than the strategy has.
    """
    wanted = chosen.schedule or default_schedule(PipelineShape(1, 1))
    by = f"the planner, for the strategy '{chosen.name}',"
    refuse_contradiction(plan, wanted, by, partial(place_in_plan, path, "schedule"))
    problem = SCHEDULES[wanted].problem(plan.shape)
    if problem is not None and (plan.chunks > 1 or plan.slices):
        at = place_in_plan(path, "chunks" if plan.chunks > 1 else "slices")
        text = f"{by} places {wanted}, which this plan cannot have: {problem}"
        help_text = "leave chunks, layout and slices out, or plan for a strategy that has them (--strategy)"
        fail("RT064", text, at.location, source=at.source, help=help_text)
    for key in _NOT_CHOSEN:
        if getattr(plan, key) is not None:
            at = place_in_plan(path, key)
            text = (
                f"{by} shards all blocks alike over all replicas, and packs nothing: it cannot keep {key} of this plan"
            )
            help_text = f"leave {key} out here, and write it into the plan that is found"
            fail("RT064", text, at.location, source=at.source, help=help_text)
    whole = evolve(plan, schedule=None, slices=())
    return whole if plan.chunks == 1 else evolve(whole, pp=1, cuts=(), mapping=None, chunks=1, layout="loop")
