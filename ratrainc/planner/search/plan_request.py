"""Requests to the planner, and how commands make them from names and files."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import inf
from typing import Any

from attrs import evolve, frozen

from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import DEFAULT_HEAD_CHUNK, Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.schedules.named import SCHEDULES, default_schedule
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.text.plan_file import load_plan, place_in_plan
from ratrain.ratrainc.choices.plan_choices import Goal, PlanChoice, SearchEffort
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, Strategy, strategy
from ratrain.ratrainc.planner.bounds.held_passes import has_halves
from ratrain.ratrainc.planner.search.plan_evaluation import Task, is_folded
from ratrain.ratrainc.planner.space.context_ranks import choose_cp
from ratrain.ratrainc.planner.space.expert_ranks import HALVES, SLICES, choose_ep
from ratrain.ratrainc.planner.space.layer_classes import ends_train
from ratrain.ratrainc.planner.space.objective import OBJECTIVES, TIME, Objective
from ratrain.ratrainc.planner.space.plan_families import USUAL, PlanFamily, families, with_memories
from ratrain.ratrainc.planner.space.search_setting import SearchSetting
from ratrain.ratrainc.planner.space.space import STATE_MODES, Shape, divisions, shapes, with_dtype
from ratrain.ratrainc.planner.space.space import template as usual_template
from ratrain.ratrainc.planner.space.tensor_ranks import choose_tp, with_whole_rows
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.target import target_of


@frozen
class PlanRequest:
    """A question to the planner: model, machine, size of a step, and the plans to consider."""

    model: ModelConfig
    machine: Machine
    clusters: int
    global_batch: int
    seq_len: int
    strategy: Strategy
    seconds: float = 60.0
    """no new evaluation starts after this time"""
    jobs: int = 1
    exhaustive: bool = False
    """go on until bounds prove that nothing is left to gain; no step is folded"""
    zero_levels: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels to choose from, if the strategy does not fix one; level 2 with `reduce = "last"` counts as 1"""
    peers: tuple[int, ...] | None = None
    """numbers of tensor-parallel ranks to choose from; None: all that divide the clusters and share out the model"""
    contexts: tuple[int, ...] | None = None
    """numbers of context ranks to choose from; None: 1, and for long sequences all that are possible"""
    expert_ranks: tuple[int, ...] | None = None
    """numbers of expert ranks to choose from; None: 1 and all that share out the model's experts, if it has some"""
    robust: bool = False
    """simulate the best plans with a slow stage and with jitter too"""
    plan_template: Plan | None = None
    """dtypes, chunks and optimizer of every plan; None: the usual ones"""
    families: tuple[PlanFamily, ...] = ()
    """families to search together; empty: the strategy's own plans"""
    objective: Objective = TIME
    keep: int = 1
    """number of best plans wanted, no two alike"""
    wide: bool = False
    """embedding and head may have a ZeRO level of their own, and shards may stay within groups of near replicas"""
    explain: bool = False
    """break down by mechanism why each rejected plan is slower"""
    slices_of_one: bool = False
    """cut only micro-batches of one sequence into slices; of several sequences, smaller micro-batches come first"""

    @property
    def searched(self) -> tuple[PlanFamily, ...]:
        """The families of the search, at least one; with those that `families_left_out` names."""
        return self.families or (PlanFamily(self.strategy.name, self.strategy),)

    @property
    def modes(self) -> tuple[tuple[int, str], ...]:
        """The ZeRO levels and reduce modes of the strategy."""
        # a strategy named after a ZeRO level leaves no choice
        fixed = self.strategy.zero
        wanted = self.zero_levels if fixed is None else (fixed,)
        return tuple(mode for mode in STATE_MODES if mode[0] in wanted)

    @property
    def schedule(self) -> str:
        """The schedule of all plans: the strategy's, else the template's, else the usual one for its chunks."""
        if self.strategy.schedule is not None or self.plan_template is None:
            return self.strategy.schedule or default_schedule(PipelineShape(1, 1))
        return self.plan_template.schedule or default_schedule(self.plan_template.shape)

    @property
    def fewest(self) -> int:
        """The fewest clusters that the ranks which are asked for take."""
        return max(min(self.peers or (1,)) * min(self.contexts or (1,)), min(self.expert_ranks or (1,)))

    def of_clusters(self, clusters: int, global_batch: int) -> PlanRequest:
        """Return the request for at least `fewest` clusters, without those of the ranks asked for that are more."""
        asked = {"peers": self.peers, "contexts": self.contexts, "expert_ranks": self.expert_ranks}
        ranks: dict[str, Any] = {
            name: numbers and tuple(number for number in numbers if number <= clusters)
            for name, numbers in asked.items()
        }
        return evolve(self, clusters=clusters, global_batch=global_batch, **ranks)

    def left_out(self, schedule: str) -> str | None:
        """Return why no plan of a schedule can have what this request asks for; None if some can.

        A model that trains in part has whole backwards, and so have expert ranks, without slices.
        """
        if self.setting.template.training and _in_halves(schedule):
            return "backwards in halves, of a model with frozen parameters or adapters, are not built"
        if self.expert_ranks is None or 1 in self.expert_ranks:
            return None
        return _without_expert_ranks(schedule)

    def check_attention(self) -> None:
        """Raise RT064 if every plan of the strategy has slices, and the template holds scores of whole sequences."""
        held = self.setting.template.attention
        if held != "fused" and all(slices > 1 for *_, slices in divisions(self.schedule)):
            text = f'attention = "{held}" holds the scores of whole sequences, which slices do not have'
            way_out = f"the strategy '{self.strategy.name}' goes with attention = \"fused\" (plan --attention fused)"
            fail("RT064", text, help=way_out)

    @property
    def families_left_out(self) -> dict[str, str]:
        """The families that the search leaves out, with the reason."""
        reasons = {family.name: self.left_out(family.schedule) for family in self.families}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def shapes(self) -> list[Shape]:
        """Return every shape to consider.

        Raises `DiagnosticError` RT064 if there is none, if the machine has fewer clusters, if tensor-parallel ranks
        that are asked for, or needed by the strategy, do not share out the model, if context ranks that are asked for
        do not share out its sequences, or expert ranks its experts, or if bounds or the schedule do not go with what
        trains, or with these ranks.
        """
        check_training(self.model, self.setting.shaped())
        self.check_attention()
        if (reason := self.left_out(self.schedule)) is not None:
            whole = "backwards" if _in_halves(self.schedule) else "sequences"
            fail("RT064", f"{self.schedule}: {reason}", help=f"plan for a schedule with whole {whole}, as 1f1b")
        peers = choose_tp(self.setting, self.clusters, self.peers, self.strategy)
        contexts = choose_cp(self.setting, self.clusters, self.contexts)
        if (least := peers[0] * contexts[0]) > self.clusters:
            text = f"{peers[0]} tensor-parallel x {contexts[0]} context ranks take {least} of {self.clusters} clusters"
            fail("RT064", text, help="use more clusters, or fewer of these ranks (--tp, --cp)")
        expert_ranks = self._expert_ranks(peers, contexts)
        if not any(self.setting.context_exchanges(tp, cp) for tp, cp in product(peers, contexts)):
            given = self.setting.template
            said = 'context_exchange = "heads"' if given.exchanges_heads else f"context_groups = {given.context_groups}"
            text = f"{said} of the plan to be like shares out the heads of no rank that is asked for"
            fail("RT064", text, help="leave it out there, or use other numbers of ranks (--tp, --cp)")
        sliced = all(slices > 1 for *_, slices in divisions(self.schedule))
        if sliced and 1 not in contexts and self.setting.template.attends_apart:
            heads = self.setting.template.exchanges_heads
            refused = "exchange heads" if heads else "gather keys in groups"
            way_out = 'with context_exchange = "keys"' if heads else "without context_groups"
            title = SCHEDULES[self.schedule].title
            text = f"{title} cuts sequences into slices, over which context ranks do not {refused}"
            fail("RT064", text, help=f"use --cp 1, another schedule, or a plan {way_out}")
        space = shapes(
            self.model,
            self.clusters,
            self.global_batch,
            self.modes,
            self.machine.link_groups,
            schedule=self.schedule,
            seq_len=self.seq_len,
            peers=peers,
            contexts=contexts,
            exchanges=self.setting.context_exchanges,
            expert_ranks=expert_ranks,
            ends=self.zero_levels if self.wide else (),
            slices_of_one=self.slices_of_one,
            # a search that is not asked for context ranks has the fewest that may pay
            contexts_of_one=self.contexts is None,
        )
        if not ends_train(self.model, self.setting.shaped()):  # a level of their own would be of nothing
            space = [shape for shape in space if shape.ends is None]
        return with_whole_rows(self.setting, space)

    def _expert_ranks(self, peers: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of expert ranks to choose from, with these numbers of other ranks.

        Raises `DiagnosticError` RT064 if numbers above 1 are asked for that no plan has replicas for: all plans have
        such other ranks, or sequences are not shared out evenly.
        """
        numbers = choose_ep(self.setting, self.clusters, self.expert_ranks)
        if numbers[0] > 1 and not peers[0] == contexts[0] == 1:
            text = f"{numbers[0]} expert ranks do not go with tensor-parallel or context ranks"
            fail("RT064", text, help="use --ep 1, or --tp 1 and --cp 1")
        if all(self.global_batch % number for number in numbers):
            groups = f"groups of {' or '.join(map(str, numbers))} replicas that share out experts"
            text = f"{groups} do not share out {number_of(self.global_batch, 'sequence')} evenly"
            fail("RT064", text, help="use another --ep, or a global batch that it divides")
        return (1,) if _without_expert_ranks(self.schedule) is not None else numbers

    @property
    def setting(self) -> SearchSetting:
        """The setting that profiles are made for."""
        plan = self.plan_template or usual_template(self.seq_len)
        return SearchSetting(self.model, self.machine, plan, self.strategy.passes)

    def task(self, plan: Plan, pipeline: str) -> Task:
        """Return the evaluation of a plan with its step folded, if folding saves anything."""
        return Task(self.model, plan, pipeline, self.machine, is_folded(plan, pipeline))


def _in_halves(schedule: str) -> bool:
    """Tell whether a schedule has backwards in halves."""
    smallest = (PipelineShape(2, 4, *division) for division in divisions(schedule))
    return any(has_halves(schedule, each) for each in smallest)


def _without_expert_ranks(schedule: str) -> str | None:
    """Return why no plan of a schedule has expert ranks; None if some may have them."""
    sliced = all(slices > 1 for *_, slices in divisions(schedule))
    return HALVES if _in_halves(schedule) else SLICES if sliced else None


def _computing(given: Plan | None, plans: PlanChoice, seq_len: int, usual_dtype: str) -> Plan:
    """Return the template, of a plan file if one is given, with the chosen type, attention and logits."""
    dtype = plans.dtype or (usual_dtype if given is None else None)
    plan = given or usual_template(seq_len)
    plan = plan if dtype is None else with_dtype(plan, dtype)
    said = {"attention": plans.attention, "attention_mask": plans.attention_mask, "logits": plans.logits}
    chosen: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if not chosen:
        return plan
    plan = evolve(plan, **chosen)
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
) -> PlanRequest:
    """Make the request for the best plan of a step on at most `clusters` clusters.

    A step has `global_batch` sequences of `seq_len` tokens. If neither strategy nor schedules are named, a `whole`
    search has all schedules of `USUAL`, each also with every other memory that the machine has; a search for the
    `fewest` clusters has 1F1B, with these memories if there are any. Raises `DiagnosticError` for an unknown strategy
    or machine, for a file that is no plan for the model or has another schedule than the one to plan for; RT064 for
    sequences longer than the model has positions.
    """
    plans, effort, goal = plans or PlanChoice(), effort or SearchEffort(), goal or Goal()
    chosen = strategy(plans.strategy or DEFAULT_STRATEGY)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    usual = USUAL if whole else ("1f1b",) if fewest and machine.stores else ()
    schedules = plans.schedules or (with_memories(usual, machine) if plans.strategy is None else ())
    searched = families(chosen, schedules) if schedules else ()
    _refuse_missing_memories(searched, machine)
    # a plan file gives dtypes, chunks and optimizer; its shape is what the search is for
    template = None
    if plans.like is not None:
        template = plans.like if isinstance(plans.like, Plan) else load_plan(plans.like, model)
        template = _without_schedule(template, chosen, plans.like, searched)
        template = evolve(template, seq_len=seq_len)
    template = _computing(template, plans, seq_len, target_of(machine).usual_dtype)
    searched = _with_attention(searched, template, named=plans.schedules is not None)
    request = PlanRequest(
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
        # a template with tensor-parallel, context or expert ranks asks for as many in every plan
        peers=plans.peers or ((template.tp,) if template.tp > 1 else None),
        contexts=plans.contexts or ((template.cp,) if template.cp > 1 else None),
        expert_ranks=plans.expert_ranks or ((template.ep,) if template.ep > 1 else None),
        plan_template=template,
        families=searched,
        # levels of single blocks are for searches over families, unless the strategy fixes the level
        wide=bool(searched) and chosen.zero is None,
        objective=OBJECTIVES[goal.objective],
        keep=goal.keep or 1,
        explain=goal.explain,
    )
    # fail before the search on anything that no plan of it could have
    planned = request.setting.template
    check_plan(planned, model)
    check_training(model, request.setting.shaped())
    if not searched:
        request.check_attention()
    return request


_NOT_CHOSEN = ("zero_blocks", "shard_group", "view_group", "gather_quantised", "reduce_quantised")
"""Keys of sharding that no search chooses."""


def _refuse_missing_memories(searched: tuple[PlanFamily, ...], machine: Machine) -> None:
    """Raise `DiagnosticError` RT065 if a family uses a memory that the machine does not have."""
    # asking for the bandwidth raises the error
    for family in searched:
        if family.memory not in (None, PEER):
            machine.store_bandwidth(Home(family.memory), fetches=True)


def _with_attention(searched: tuple[PlanFamily, ...], template: Plan | None, *, named: bool) -> tuple[PlanFamily, ...]:
    """Return the families that can compute the template's attention: scores of whole sequences exclude slices.

    Raises `DiagnosticError` RT064 if another one was asked for by name.
    """
    if template is None or template.attention == "fused":
        return searched
    left = tuple(family for family in searched if family.schedule != "seq1f1b")
    if named and left != searched:
        holds = f'attention = "{template.attention}" holds the scores of whole sequences'
        text = f"{holds}, which the slices of seq1f1b do not have"
        fail("RT064", text, help="leave seq1f1b out of --schedules, or use --attention fused")
    return left


def _without_schedule(plan: Plan, chosen: Strategy, like: str | Plan, searched: tuple[PlanFamily, ...]) -> Plan:
    """Return a plan without schedule, chunks and slices, which the families or the strategy choose.

    Raises `DiagnosticError` RT064 if its own are not among their choices, or if it has keys that no search chooses.
    """
    known = {family.schedule for family in searched}
    if plan.schedule is not None and known and plan.schedule not in known:
        at = _place_in(like, "schedule")
        text = f'the plan says schedule = "{plan.schedule}", which is not among the schedules that are searched'
        fail("RT064", text, at.location, source=at.source, help=f"add it: --schedules {plan.schedule},...")
    by = f"the planner, for the strategy '{chosen.name}',"
    _refuse_not_chosen(plan, by, like)
    if not searched:
        _refuse_other_shape(plan, chosen, by, like)
    return without_schedule(plan)


def without_schedule(plan: Plan) -> Plan:
    """Return a plan as a template: without schedule, chunks and slices, groups of its state, levels of some blocks."""
    # a template with several chunks a stage loses its stages too: their cuts would belong to chunks
    ungrouped = evolve(plan, shard_group=None, view_group=None)
    whole = evolve(ungrouped, schedule=None, slices=(), zero_blocks=None)
    return whole if plan.chunks == 1 else evolve(whole, pp=1, cuts=(), mapping=None, chunks=1, layout="loop")


def _place_in(like: str | Plan, key: str) -> Place:
    """Return the place of a key in a plan's file; none for a plan without one."""
    return Place() if isinstance(like, Plan) else place_in_plan(like, key)


def _refuse_other_shape(plan: Plan, chosen: Strategy, by: str, like: str | Plan) -> None:
    """Raise `DiagnosticError` RT064 if a plan has another schedule, chunks or slices than a strategy."""
    wanted = chosen.schedule or default_schedule(PipelineShape(1, 1))
    refuse_contradiction(plan, wanted, by, partial(_place_in, like, "schedule"))
    problem = SCHEDULES[wanted].problem(plan.shape)
    if problem is not None and (plan.chunks > 1 or plan.slices):
        at = _place_in(like, "chunks" if plan.chunks > 1 else "slices")
        text = f"{by} places {wanted}, which this plan cannot have: {problem}"
        help_text = "leave chunks, layout and slices out, or plan for a strategy that has them (plan --strategy)"
        fail("RT064", text, at.location, source=at.source, help=help_text)


def _refuse_not_chosen(plan: Plan, by: str, like: str | Plan) -> None:
    """Raise `DiagnosticError` RT064 if a plan has keys that no search chooses."""
    for key in _NOT_CHOSEN:
        if getattr(plan, key) is not None:
            at = _place_in(like, key)
            text = (
                f"{by} shards all blocks alike over all replicas, and packs nothing: it cannot keep {key} of this plan"
            )
            help_text = f"leave {key} out here, and write it into the plan that is found"
            fail("RT064", text, at.location, source=at.source, help=help_text)
