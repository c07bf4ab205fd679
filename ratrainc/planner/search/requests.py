"""Requests as commands make them: names and files become what the search works with."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.config.plan import DEFAULT_HEAD_CHUNK
from ratrain.ratrain_ir.config.plan_text import check_plan, load_plan, place_in_plan
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.schedules.named import SCHEDULES, default_schedule
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.choices.plan_choices import Goal, PlanChoice, SearchEffort
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy
from ratrain.ratrainc.planner.search.answer import Request
from ratrain.ratrainc.planner.space.families import USUAL, Family, families, with_memories
from ratrain.ratrainc.planner.space.objective import OBJECTIVES
from ratrain.ratrainc.planner.space.space import divisions
from ratrain.ratrainc.planner.space.space import template as usual_template
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.choices.strategies import Strategy


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
    goal: Goal | None = None,
    whole: bool = False,
    fewest: bool = False,
) -> Request:
    """A request for the best plan of a step of `global_batch` sequences, each of `seq_len` tokens, on so many clusters.

    A `whole` search has all schedules of `USUAL`, and each with the memories that the machine has beside DDR, where neither strategy nor schedules are named; a
    search for the `fewest` clusters has 1F1B and these memories, where there are any.
    Raises `DiagnosticError` for an unknown strategy or machine, a file that is no plan for the model, or one that says another
    schedule than the one plans are made for; RT064 for sequences longer than the model has positions.
    """
    plans, effort, goal = plans or PlanChoice(), effort or SearchEffort(), goal or Goal()
    chosen = strategy(plans.strategy or DEFAULT_STRATEGY)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    usual = USUAL if whole else ("1f1b",) if fewest and machine.stores else ()
    schedules = plans.schedules or (with_memories(usual, machine) if plans.strategy is None else ())
    searched = families(chosen, schedules) if schedules else ()
    _refuse_missing_memories(searched, machine)
    template = None
    if plans.like is not None:
        template = load_plan(plans.like, model)
        template = _without_schedule(template, chosen, plans.like, searched)
        template = evolve(template, seq_len=seq_len)
    template = _computing(template, plans, seq_len)
    searched = _with_attention(searched, template, named=plans.schedules is not None)
    request = Request(
        model,
        machine,
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
        families=searched,
        wide=bool(searched) and chosen.zero is None,
        objective=OBJECTIVES[goal.objective],
        keep=goal.keep or 1,
        explain=goal.explain,
    )
    check_plan(request.setting.template, model)
    if (
        not searched
        and request.setting.template.attention != "fused"
        and all(slices > 1 for _, _, slices in divisions(request.schedule))
    ):
        text = f'attention = "{request.setting.template.attention}" holds the scores of whole sequences, which slices do not have'
        fail("RT064", text, help=f"the strategy '{chosen.name}' goes with --attention fused")
    return request


_NOT_CHOSEN = ("zero_blocks", "shard_group", "view_group", "gather_quantised", "reduce_quantised")
"""Keys of how state is sharded that no search has."""


def _refuse_missing_memories(searched: tuple[Family, ...], machine: Machine) -> None:
    """Raise `DiagnosticError` RT065 where families are to use a memory that the machine does not have."""
    for family in searched:
        if family.memory not in (None, PEER):
            machine.store_bandwidth(Home(family.memory), fetches=True)


def _with_attention(searched: tuple[Family, ...], template: Plan | None, *, named: bool) -> tuple[Family, ...]:
    """The families whose plans can compute attention as the template does: scores of whole sequences do not go with slices.

    Raises `DiagnosticError` RT064 where one that cannot was asked for by name.
    """
    if template is None or template.attention == "fused":
        return searched
    left = tuple(family for family in searched if family.schedule != "seq1f1b")
    if named and left != searched:
        text = f'attention = "{template.attention}" holds the scores of whole sequences, which the slices of seq1f1b do not have'
        fail("RT064", text, help="leave seq1f1b out of --schedules, or use --attention fused")
    return left


def _without_schedule(plan: Plan, chosen: Strategy, path: str, searched: tuple[Family, ...]) -> Plan:
    """A plan without its schedule, chunks and slices, which are chosen anew among those of families, or of a strategy where there are none.

    Raises `DiagnosticError` RT064 where it says others than these have, or keys that no search has.
    """
    known = {family.schedule for family in searched}
    if plan.schedule is not None and known and plan.schedule not in known:
        at = place_in_plan(path, "schedule")
        text = f'the plan says schedule = "{plan.schedule}", which is not among the schedules that are searched'
        fail("RT064", text, at.location, source=at.source, help=f"add it: --schedules {plan.schedule},...")
    by = f"the planner, for the strategy '{chosen.name}',"
    _refuse_not_chosen(plan, by, path)
    if not searched:
        _refuse_other_shape(plan, chosen, by, path)
    return without_schedule(plan)


def without_schedule(plan: Plan) -> Plan:
    """A plan without its schedule, chunks and slices, and without the levels and groups of its state: a template of others."""
    whole = evolve(plan, schedule=None, slices=(), zero_blocks=None, shard_group=None, view_group=None)
    return whole if plan.chunks == 1 else evolve(whole, pp=1, cuts=(), mapping=None, chunks=1, layout="loop")


def _refuse_other_shape(plan: Plan, chosen: Strategy, by: str, path: str) -> None:
    """Raise `DiagnosticError` RT064 where a plan says another schedule, or other chunks or slices, than a strategy has."""
    wanted = chosen.schedule or default_schedule(PipelineShape(1, 1))
    refuse_contradiction(plan, wanted, by, partial(place_in_plan, path, "schedule"))
    problem = SCHEDULES[wanted].problem(plan.shape)
    if problem is not None and (plan.chunks > 1 or plan.slices):
        at = place_in_plan(path, "chunks" if plan.chunks > 1 else "slices")
        text = f"{by} places {wanted}, which this plan cannot have: {problem}"
        help_text = "leave chunks, layout and slices out, or plan for a strategy that has them (--strategy)"
        fail("RT064", text, at.location, source=at.source, help=help_text)


def _refuse_not_chosen(plan: Plan, by: str, path: str) -> None:
    """Raise `DiagnosticError` RT064 where a plan says keys that no search has."""
    for key in _NOT_CHOSEN:
        if getattr(plan, key) is not None:
            at = place_in_plan(path, key)
            text = (
                f"{by} shards all blocks alike over all replicas, and packs nothing: it cannot keep {key} of this plan"
            )
            help_text = f"leave {key} out here, and write it into the plan that is found"
            fail("RT064", text, at.location, source=at.source, help=help_text)
