"""Plans: looked for, compared, scaled, taken over from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import load_plan, place_in_plan
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrainc.bridge import importing
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import Goal, PlanChoice, SearchEffort
from ratrain.ratrainc.compiling.building import resolved
from ratrain.ratrainc.console.progress import OnProgress, counting
from ratrain.ratrainc.planner.answer import planned, strategy_comparison
from ratrain.ratrainc.planner.answer import robust_links as links
from ratrain.ratrainc.planner.answer import what_if as changed
from ratrain.ratrainc.planner.answer.fewest_clusters import FewestClusters, fewest_clusters
from ratrain.ratrainc.planner.answer.pareto_front import ParetoFront, pareto_front
from ratrain.ratrainc.planner.answer.scaling import Scaling, fixed_points, planned_points
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.importing import Imported
    from ratrain.ratrainc.planner.answer.planned import Planned
    from ratrain.ratrainc.planner.answer.robust_links import RobustLinks
    from ratrain.ratrainc.planner.answer.strategy_comparison import Comparison
    from ratrain.ratrainc.planner.answer.what_if import WhatIf

MachineLike = str | Machine | MachineChoice | None
"""A machine by its name or its file, as it is, or one of these with another capacity; None: the default one."""


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
    """The plan to run on so many clusters, for steps of `global_batch` sequences, and how far it can be from the best possible.

    `plans` says which are looked for, `effort` how long; `quick`: closed forms alone, in seconds. With `tokens` the answer says what
    training on so many takes, with `robust` how the best plans bear a slow stage and jitter. `goal` says what is best, the least time unless
    it says otherwise, and how many plans are wanted. Where `plans` names neither a strategy nor schedules, all usual ones are searched.
    Raises `DiagnosticError` RT053 where no plan was found that fits.
    """
    tick = counting(progress)
    config, chosen, named = _model(model), _loaded(machine), _named(machine)
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
    """The plans that are faster than any with as few clusters, up to `clusters`, or as few bytes of the fullest rank.

    All usual schedules are searched where `plans` names neither a strategy nor schedules. Raises `DiagnosticError` RT053 where nothing fits.
    """
    request = planning_request(
        _model(model), clusters, global_batch, seq_len, machine=_loaded(machine), plans=plans, effort=effort, whole=True
    )
    named = _named(machine)
    return pareto_front(
        request, against, counting(progress), quick=quick, tokens=tokens, model=_words(model), machine=named
    )


def what_if(answer: Planned, *changes: str, progress: OnProgress | None = None) -> WhatIf:
    """How an answer moves when its machine changes: planned again for each change, as `"ddr=16GiB,link=7.4GB/s"`.

    Raises `DiagnosticError` for a change that cannot be read.
    """
    return changed.what_if(answer, changes, counting(progress))


def robust_links(answer: Planned, *, progress: OnProgress | None = None) -> RobustLinks:
    """What each constant of the links does to a plan, and whether another is best where clusters share a port."""
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
    """The fewest clusters, up to `clusters`, on which a plan fits, and the plan.

    Where `plans` names neither a strategy nor schedules, plans may use the memories that the machine has beside DDR. Raises `DiagnosticError`
    RT053 where none was found.
    """
    request = planning_request(
        _model(model), clusters, clusters, seq_len, machine=_loaded(machine), plans=plans, fewest=True
    )
    return fewest_clusters(request, _words(model), _named(machine), counting(progress, clusters))


def scale(
    model: str | ModelConfig,
    clusters: Sequence[int],
    *,
    plan: str | Plan | None = None,
    sequences_per_cluster: int = 8,
    seq_len: int = 2048,
    machine: MachineLike = None,
    plans: PlanChoice | None = None,
    effort: SearchEffort | None = None,
    progress: OnProgress | None = None,
) -> Scaling:
    """How throughput grows with the number of clusters when each has as much to do.

    A `plan` keeps its stages and only gets more replicas; without one a plan is looked for at each number, for `effort`. Raises
    `DiagnosticError` where numbers do not divide evenly, or the plan is wrong.
    """
    if not clusters or min(clusters) < 1 or len({*clusters}) < len(clusters):
        misuse("numbers of clusters are from 1 on, and each is given once")
    config = _model(model)
    effort = effort or SearchEffort(seconds=20.0)
    first = clusters[0]
    request = planning_request(
        config,
        first,
        first * sequences_per_cluster,
        seq_len,
        machine=_loaded(machine),
        plans=plans,
        effort=effort,
    )
    if plan is None:
        points = planned_points(request, clusters, sequences_per_cluster, counting(progress))
    else:
        fixed = plan if isinstance(plan, Plan) else load_plan(plan, config)
        request.strategy.check_schedule(fixed, _place(plan))
        fixed = request.strategy.adapted(fixed, config, request.machine)
        points = fixed_points(request, fixed, clusters, sequences_per_cluster, counting(progress, len(clusters)))
    return Scaling(tuple(points), config.name, request.machine.name, request.strategy.name)


def compare(
    model: str | ModelConfig,
    plan: str | Plan,
    *,
    strategies: Sequence[str] | None = None,
    machine: MachineLike = None,
    progress: OnProgress | None = None,
) -> Comparison:
    """Compile and simulate one plan under several strategies, the first of which is the yardstick; of None all that can have it.

    Raises `DiagnosticError` RT064 for a strategy that was named and cannot have the plan.
    """
    config, known = resolved(model, plan)
    total = len(strategy_comparison.chosen_strategies(strategies))
    return strategy_comparison.compare_on_plan(
        config, known, strategies, _loaded(machine), counting(progress, total), _place(plan)
    )


def compare_best(
    model: str | ModelConfig,
    clusters: int,
    global_batch: int,
    *,
    seq_len: int = 2048,
    strategies: Sequence[str] | None = None,
    machine: MachineLike = None,
    effort: SearchEffort | None = None,
    progress: OnProgress | None = None,
) -> Comparison:
    """What strategies come to on the best plan of the default one, and each on its own best plan."""
    chosen, effort = _loaded(machine), effort or SearchEffort(seconds=20.0)
    request = planning_request(_model(model), clusters, global_batch, seq_len, machine=chosen, effort=effort)
    return strategy_comparison.compare_on_best(request, strategies, chosen, counting(progress))


def import_plan(
    framework: Literal["megatron", "deepspeed", "torchtitan"],
    file: str | Path,
    *,
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
    given: Mapping[str, str] | None = None,
) -> Imported:
    """Make a plan of the settings of another framework; the numbers are for where its file does not say them.

    `given` has variables of a launch script, as its environment would (`SLURM_NNODES`), and its arguments as `1`, `2` and on.

    From `pp` on they are for DeepSpeed, whose files leave them to the program that calls it ("auto"). What could not be carried over is in
    `left`, what the file leaves out in `defaults`. Raises `DiagnosticError` for all that is wrong with the file.
    """
    if framework not in importing.FRAMEWORKS:
        misuse(f"there is no framework '{framework}'; there are {', '.join(importing.FRAMEWORKS)}")
    of_deepspeed: dict[str, Any] = {
        "pp": pp,
        "micro_batch_size": micro_batch_size,
        "global_batch": global_batch,
        "dtype": dtype,
        "lr": lr,
        "weight_decay": weight_decay,
        "max_norm": max_norm,
        "warmup_steps": warmup_steps,
        "steps": steps,
    }
    said = [name for name, value in of_deepspeed.items() if value is not None]
    if said and framework != "deepspeed":
        misuse(f"--{said[0].replace('_', '-')} is for --from deepspeed: the others say it in the file")
    if given and not importing.FRAMEWORKS[framework].script:
        misuse("--set is for --from megatron: the others read no script")
    return importing.import_plan(
        framework, file, Asked(clusters=clusters, seq_len=seq_len, given=dict(given or {}), **of_deepspeed)
    )


def _model(model: str | ModelConfig) -> ModelConfig:
    return load_model(model) if isinstance(model, str) else model


def _words(model: str | ModelConfig) -> str:
    """What commands call a model."""
    return model if isinstance(model, str) else model.name


def _loaded(machine: MachineLike) -> Machine:
    if isinstance(machine, MachineChoice):
        return machine.load()
    return machine if isinstance(machine, Machine) else load_machine(machine)


def _named(machine: MachineLike) -> MachineChoice:
    """What commands call a machine."""
    if isinstance(machine, MachineChoice):
        return machine
    return MachineChoice(machine.name if isinstance(machine, Machine) else machine)


def _place(plan: str | Plan) -> Callable[[], Place]:
    """Where the plan says its schedule."""
    return partial(place_in_plan, plan, "schedule") if isinstance(plan, str) else Place
