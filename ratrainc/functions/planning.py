"""Functions about plans: search, compare, scale and import them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.text.plan_file import load_plan, place_in_plan
from ratrain.ratrainc.bridge.job_plans import importing_jobs
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import Goal, PlanChoice, SearchEffort
from ratrain.ratrainc.compiling.building import chosen_machine, resolved
from ratrain.ratrainc.console.progress import OnProgress, counting
from ratrain.ratrainc.planner.answer import planned, strategy_comparison
from ratrain.ratrainc.planner.answer import robust_links as links
from ratrain.ratrainc.planner.answer import what_if as changed
from ratrain.ratrainc.planner.answer.fewest_clusters import FewestClusters, fewest_clusters
from ratrain.ratrainc.planner.answer.pareto_front import ParetoFront, pareto_front
from ratrain.ratrainc.planner.answer.scaling import Scaling, fixed_points, planned_points
from ratrain.ratrainc.planner.search.kept_results import KeptResults
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.targets.machine.machine import Machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.importing import Imported
    from ratrain.ratrainc.planner.answer.planned import Planned
    from ratrain.ratrainc.planner.answer.robust_links import RobustLinks
    from ratrain.ratrainc.planner.answer.strategy_comparison import Comparison
    from ratrain.ratrainc.planner.answer.what_if import WhatIf

MachineLike = str | Machine | MachineChoice | None
"""A machine: its name or path, a `Machine`, or a choice with another capacity.

None is the machine that a plan's file was made for, if there is a plan's file, else the default one.
"""


def plan(
    model: str | ModelConfig,
    clusters: int,
    global_batch: int,
    *,
    seq_len: int = 2048,
    machine: MachineLike = None,
    plans: PlanChoice | None = None,
    effort: SearchEffort | None = None,
    quick: bool = False,
    robust: bool = False,
    tokens: float | None = None,
    goal: Goal | None = None,
    progress: OnProgress | None = None,
) -> Planned:
    """Find the plan to run on `clusters` clusters, and bound its distance from the best possible.

    A step has `global_batch` sequences of `seq_len` tokens. `plans` restricts the search, `effort` limits its time;
    `quick` uses closed forms alone and takes seconds. With `tokens` the answer shows the cost of a training on that
    many tokens; with `robust`, how the best plans bear a slow stage and jitter. `goal` is what is best (step time by
    default) and how many plans are kept. If `plans` names neither a strategy nor schedules, all usual schedules are
    searched. Raises `DiagnosticError` RT053 if no plan that fits was found.
    """
    tick = counting(progress)
    config = _model(model)
    chosen, named = _machine(machine, _like(plans))
    request = planning_request(
        config,
        clusters,
        global_batch,
        seq_len,
        machine=chosen,
        plans=plans,
        effort=effort,
        robust=robust,
        goal=goal,
        whole=True,
    )
    answer = planned.answer_to(request, tick, quick=quick)
    return planned.Planned(answer, quick, tokens, _words(model), named)


def pareto(
    model: str | ModelConfig,
    clusters: int,
    global_batch: int,
    *,
    against: Literal["clusters", "memory"] = "clusters",
    seq_len: int = 2048,
    machine: MachineLike = None,
    plans: PlanChoice | None = None,
    effort: SearchEffort | None = None,
    quick: bool = False,
    tokens: float | None = None,
    progress: OnProgress | None = None,
) -> ParetoFront:
    """Find the plans that are faster than any with as few clusters, or with as few bytes on the fullest rank.

    `against` chooses between the two; `clusters` is the most. If `plans` names neither a strategy nor schedules, all
    usual schedules are searched. Raises `DiagnosticError` RT053 if nothing fits.
    """
    chosen, named = _machine(machine, _like(plans))
    request = planning_request(
        _model(model), clusters, global_batch, seq_len, machine=chosen, plans=plans, effort=effort, whole=True
    )
    return pareto_front(
        request, against, counting(progress), quick=quick, tokens=tokens, model=_words(model), machine=named
    )


def what_if(answer: Planned, *changes: str, progress: OnProgress | None = None) -> WhatIf:
    """Plan again for each change of the answer's machine, such as `"ddr=16GiB,link=7.4GB/s"`.

    Raises `DiagnosticError` for a change that cannot be read.
    """
    return changed.what_if(answer, changes, counting(progress))


def robust_links(answer: Planned, *, progress: OnProgress | None = None) -> RobustLinks:
    """Time the answer's plan with each link constant changed, and plan again with clusters that share a port."""
    return links.robust_links(answer, counting(progress))


def smallest(
    model: str | ModelConfig,
    clusters: int,
    *,
    seq_len: int = 2048,
    machine: MachineLike = None,
    plans: PlanChoice | None = None,
    progress: OnProgress | None = None,
) -> FewestClusters:
    """Find the fewest clusters, up to `clusters`, on which a plan fits, and that plan.

    If `plans` names neither a strategy nor schedules, plans may use the memories that the machine has in addition to
    DDR. Raises `DiagnosticError` RT053 if none was found.
    """
    chosen, named = _machine(machine, _like(plans))
    request = planning_request(_model(model), clusters, clusters, seq_len, machine=chosen, plans=plans, fewest=True)
    return fewest_clusters(request, _words(model), named, counting(progress, clusters))


def scale(
    model: str | ModelConfig,
    clusters: Sequence[int],
    *,
    plan: str | Plan | None = None,
    sequences_per_cluster: int | None = None,
    seq_len: int = 2048,
    machine: MachineLike = None,
    plans: PlanChoice | None = None,
    effort: SearchEffort | None = None,
    progress: OnProgress | None = None,
) -> Scaling:
    """Measure weak scaling: simulated throughput by number of clusters, at equal work for each cluster.

    A given `plan` keeps its stages and gets more replicas. Without one, the best plan at each number of clusters is
    searched, with `effort` for each search. `sequences_per_cluster` are those of a step: by default the plan's own,
    without a plan 8. Raises `DiagnosticError` if the numbers do not divide evenly, or the plan
    is wrong.
    """
    if not clusters or min(clusters) < 1 or len({*clusters}) < len(clusters):
        misuse("numbers of clusters are from 1 on, and each is given once")
    config = _model(model)
    effort = effort or SearchEffort(seconds=20.0)
    first, sequences = clusters[0], 8 if sequences_per_cluster is None else sequences_per_cluster
    request = planning_request(
        config,
        first,
        first * sequences,
        seq_len,
        machine=_machine(machine, plan or _like(plans))[0],
        plans=plans,
        effort=effort,
    )
    if plan is None:
        points = planned_points(request, clusters, sequences, counting(progress))
    else:
        fixed = plan if isinstance(plan, Plan) else load_plan(plan, config)
        request.strategy.check_schedule(fixed, _place(plan))
        points = fixed_points(request, fixed, clusters, sequences_per_cluster, counting(progress, len(clusters)))
    each = points[0].global_batch / points[0].clusters
    return Scaling(tuple(points), config.name, request.machine.name, request.strategy.name, each)


def compare(
    model: str | ModelConfig,
    plan: str | Plan,
    *,
    strategies: Sequence[str] | None = None,
    machine: MachineLike = None,
    results: str | None = None,
    progress: OnProgress | None = None,
) -> Comparison:
    """Compile and simulate one plan under several strategies; speed-ups are over the first.

    `strategies` are names; None means all that can have the plan. Each one's result is appended to the file `results`
    as it is found, and what the file has of the same plan, machine and code is not simulated again. Raises
    `DiagnosticError` RT064 for a named strategy that cannot have the plan, RT002 for a file of something else.
    """
    config, known = resolved(model, plan)
    chosen = _machine(machine, plan)[0]
    kept = None if results is None else KeptResults.of(results)
    tick, place = counting(progress), _place(plan)
    return strategy_comparison.compare_on_plan(config, known, strategies, chosen, tick, place, kept)


def compare_best(
    model: str | ModelConfig,
    clusters: int,
    global_batch: int,
    *,
    seq_len: int = 2048,
    strategies: Sequence[str] | None = None,
    like: str | Plan | None = None,
    machine: MachineLike = None,
    effort: SearchEffort | None = None,
    progress: OnProgress | None = None,
) -> Comparison:
    """Compare strategies on the best plan of the default strategy, and each on its own best plan.

    Plans are for at most `clusters` clusters and `global_batch` sequences of `seq_len` tokens a step. `strategies` are
    names; None means all that have a shape to search. All plans take from `like` what `PlanChoice.like` names, what
    trains among it. `effort` is for each search: by default 20 seconds. If no plan fits the default strategy, a note
    replaces the first comparison. Raises `DiagnosticError` for an unknown name or machine, and for a named strategy
    without any shape to search, or named after another schedule than `like` has.
    """
    chosen, effort = _machine(machine, like)[0], effort or SearchEffort(seconds=20.0)
    config = _model(model)
    known = load_plan(like, config) if isinstance(like, str) else like
    request = planning_request(
        *(config, clusters, global_batch, seq_len),
        machine=chosen,
        plans=PlanChoice(like=like),
        effort=effort,
    )
    return strategy_comparison.compare_on_best(request, strategies, chosen, counting(progress), known, _place(like))


def import_plan(
    framework: str | None,
    file: str | Path,
    *,
    beside: Sequence[str | Path] = (),
    model: str | ModelConfig | None = None,
    clusters: int | None = None,
    pp: int | None = None,
    seq_len: int | None = None,
    micro_batch_size: int | None = None,
    global_batch: int | None = None,
    dtype: Literal["bf16", "f16", "f32"] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    max_norm: float | None = None,
    warmup_steps: int | None = None,
    steps: int | None = None,
    f32_state: bool = False,
    given: Mapping[str, str] | None = None,
    machine: MachineLike = None,
) -> Imported:
    """Make a plan from the settings of another framework.

    `framework` is `megatron`, `deepspeed`, `torchtitan`, or the name of a format that `fit` reads; None: by the file's
    content. `beside` are further files of the same run: an accelerate file, a ds_config.json. `model` is for files of
    trainers, in place of the one that they name. The numbers from `clusters` to `steps` fill in what the file does not
    say. Those from `pp` on, except `seq_len`, are not for Megatron and torchtitan, whose files say them; `pp` and
    `dtype` are for DeepSpeed alone. With `f32_state` a plan with f32 masters and moments stands for a file that keeps
    them in fewer bits. `given` has the variables of a Megatron launch script, such as `SLURM_NNODES`, and the script's
    arguments as `1`, `2`, ... The plan's file names `machine`, and without one no machine, which is for the default
    one. The result lists settings that were not carried over in `left`, and settings that the file leaves out in
    `defaults`. Raises `DiagnosticError` with everything that is wrong in the file.
    """
    asked = Asked(
        clusters=clusters,
        pp=pp,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        global_batch=global_batch,
        dtype=dtype,
        lr=lr,
        weight_decay=weight_decay,
        max_norm=max_norm,
        warmup_steps=warmup_steps,
        steps=steps,
        given=dict(given or {}),
        beside=tuple(map(Path, beside)),
        model=None if model is None else _model(model),
        f32_state=f32_state,
    )
    made = importing_jobs.import_settings(framework, file, asked)
    return made if machine is None else evolve(made, made_for=_machine(machine)[1].made_for)


def _model(model: str | ModelConfig) -> ModelConfig:
    return load_model(model) if isinstance(model, str) else model


def _words(model: str | ModelConfig) -> str:
    """Return the model's name as commands take it."""
    return model if isinstance(model, str) else model.name


def _machine(machine: MachineLike, plan: str | Plan | None = None) -> tuple[Machine, MachineChoice]:
    """Load the machine; return it and its name in commands.

    Without one, it is the machine that a plan's file was made for, else the default one.
    """
    if isinstance(machine, Machine):
        return machine, MachineChoice(machine.name)
    if isinstance(machine, MachineChoice):
        chosen = machine.for_plan(plan)
        return chosen.load(), chosen
    chosen = MachineChoice(machine).for_plan(plan)
    return chosen_machine(chosen.machine, chosen.capacity), chosen


def _like(plans: PlanChoice | None) -> str | Plan | None:
    return None if plans is None else plans.like


def _place(plan: str | Plan | None) -> Callable[[], Place]:
    """Return a function that finds the key `schedule` in the plan's file; without a file it returns no place."""
    return partial(place_in_plan, plan, "schedule") if isinstance(plan, str) else Place
