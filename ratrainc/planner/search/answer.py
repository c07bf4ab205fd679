"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from math import isinf

from attrs import define, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.schedules.named import default_schedule
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrainc.choices.strategies import Strategy
from ratrain.ratrainc.planner.bounds.peers import choose_peers, with_whole_rows
from ratrain.ratrainc.planner.search.evaluation import Evaluation
from ratrain.ratrainc.planner.space.families import Family, schedule_of
from ratrain.ratrainc.planner.space.objective import TIME, Cost, Objective
from ratrain.ratrainc.planner.space.setting import Setting
from ratrain.ratrainc.planner.space.space import STATE_MODES, Shape, shapes, template
from ratrain.ratrainc.planner.space.variants import may_keep_gathered, recompute_policy
from ratrain.targets.machine.machine import Machine


@frozen
class Request:
    """What is asked of the planner."""

    model: ModelConfig
    machine: Machine
    clusters: int
    global_batch: int
    seq_len: int
    strategy: Strategy
    seconds: float = 60.0
    """after so many no new evaluation starts"""
    jobs: int = 1
    exhaustive: bool = False
    """go on until the bounds prove that nothing is left to gain; nothing is folded"""
    zero_levels: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels to choose from, where the strategy does not fix one; level 2 with `reduce = "last"` counts as 1"""
    peers: tuple[int, ...] | None = None
    """numbers of tensor peers to choose from; None: one, and all others that divide the clusters and share out the model"""
    robust: bool = False
    """say how the best plans bear a slow stage and jitter"""
    plan_template: Plan | None = None
    """dtypes, chunks and the optimizer of every plan; None: the usual ones"""
    families: tuple[Family, ...] = ()
    """what is searched together; empty: the strategy's own plans"""
    objective: Objective = TIME
    """what the best plan is"""
    keep: int = 1
    """best plans that are wanted, no two of them alike"""
    wide: bool = False
    """embedding and head may have a ZeRO level of their own, and shards may be those of near replicas alone"""
    explain: bool = False
    """say of all that lost what makes it slower, by mechanism"""
    slices_of_one: bool = False
    """only micro-batches of one sequence are cut into slices: those of several are cut into smaller ones before"""

    @property
    def searched(self) -> tuple[Family, ...]:
        """The families of the search, one at least."""
        return self.families or (Family(self.strategy.name, self.strategy),)

    @property
    def modes(self) -> tuple[tuple[int, str], ...]:
        """The ZeRO levels and reduce modes of the strategy."""
        fixed = self.strategy.zero
        wanted = self.zero_levels if fixed is None else (fixed,)
        return tuple(mode for mode in STATE_MODES if mode[0] in wanted)

    @property
    def schedule(self) -> str:
        """The schedule of all plans: that of the strategy; else the one that the template says, or that its chunks and slices usually have."""
        if self.strategy.schedule is not None or self.plan_template is None:
            return self.strategy.schedule or default_schedule(PipelineShape(1, 1))
        return self.plan_template.schedule or default_schedule(self.plan_template.shape)

    def shapes(self) -> list[Shape]:
        """Every shape that is considered.

        Raises `DiagnosticError` RT064 where there is none, or the machine has fewer clusters, or tensor peers are asked for, or needed by
        the strategy, that do not share out the model.
        """
        space = shapes(
            self.model,
            self.clusters,
            self.global_batch,
            self.modes,
            self.machine.link_groups,
            schedule=self.schedule,
            seq_len=self.seq_len,
            peers=choose_peers(self.setting, self.clusters, self.peers, self.strategy),
            ends=self.zero_levels if self.wide else (),
            slices_of_one=self.slices_of_one,
        )
        return with_whole_rows(self.setting, space)

    @property
    def setting(self) -> Setting:
        """What profiles are made for."""
        plan = self.plan_template or template(self.seq_len)
        passes = self.strategy.passes
        return Setting(self.model, self.machine, plan, recompute_policy(passes), may_keep_gathered(passes))


@frozen
class Candidate:
    """One plan under one pipeline, and what is known of it."""

    shape: Shape
    plan: Plan
    pipeline: str
    bound_seconds: float
    evaluation: Evaluation | None = None
    estimated_seconds: float = float("inf")
    """closed form, where nothing was simulated"""
    bound_bytes: float = 0.0
    """lower bound on the highest peak"""
    family: str = ""
    """the name of its family"""

    @property
    def seconds(self) -> float:
        """Seconds of a step: simulated, from a folded step, or a closed form; infinite where it does not fit."""
        if self.evaluation is None:
            return self.estimated_seconds
        step_seconds = self.evaluation.step_seconds
        return float("inf") if step_seconds is None else step_seconds

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all stages; a lower bound where nothing was compiled."""
        return max(self.evaluation.peak_bytes) if self.evaluation else int(self.bound_bytes)

    @property
    def identity(self) -> tuple[str, Plan]:
        """What it has in common with candidates that are the same plan under other settings of its passes, or with another use of memories."""
        return schedule_of(self.family), self.plan

    def cost(self, objective: Objective) -> Cost:
        """What it costs, by what is known of it."""
        return objective.cost(self.seconds, self.peak_bytes, self.shape.clusters)

    def bound(self, objective: Objective) -> Cost:
        """What it costs at least."""
        return objective.cost(self.bound_seconds, self.bound_bytes, self.shape.clusters)

    def rank(self, objective: Objective) -> tuple[Cost, bool, Shape, tuple[int, ...], str]:
        """What candidates are ordered by: cost, then whether it is exact, then anything that tells them apart."""
        return self.cost(objective), not self.is_exact, self.shape, self.plan.cuts, self.pipeline

    @property
    def is_exact(self) -> bool:
        """Whether the whole step was simulated, or found not to fit."""
        return self.evaluation is not None and not self.evaluation.estimated


@frozen
class Rejected:
    """A shape that no cuts make fit: the least that is missing, and where."""

    shape: Shape
    stage: int
    short_bytes: float
    family: str = ""


@frozen
class Loser:
    """A family of plans and why it lost."""

    text: str
    reason: str
    mechanisms: dict[str, float] = field(factory=dict)
    """seconds of a step by which each mechanism takes longer than in the best plan; empty where that was not asked for"""


@define
class Answer:
    """What a search found."""

    request: Request
    candidates: list[Candidate]
    """evaluated ones that fit, best first"""
    refused: list[Candidate]
    """evaluated ones that the compiler could not place"""
    rejected: list[Rejected]
    """shapes that a bound on bytes rules out"""
    bound: Cost
    """no plan of the space costs less, as its passes order it"""
    relaxed_bound: Cost
    """closed form: no plan of the space costs less, whatever passes order it"""
    shapes: int
    plans: int
    """plans, with their stage cuts, that the space has"""
    evaluations: int
    seconds: float
    proven: bool
    """whether nothing was left that could be better than the best"""
    losers: list[Loser] = field(factory=list)

    @property
    def best(self) -> Candidate | None:
        """The best plan, or None where none fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def proven_empty(self) -> bool:
        """Whether bounds on bytes rule out every plan of the space: nothing fits, nothing was refused by the compiler or left untried."""
        return not self.candidates and not self.refused and isinf(self.bound[0])

    @property
    def bound_seconds(self) -> float:
        """No plan of the space takes less, where that is what was looked for; else none of as good a measure as the bound."""
        return self.bound[1]

    @property
    def relaxed_bound_seconds(self) -> float:
        """The same of the closed form."""
        return self.relaxed_bound[1]

    @property
    def gap(self) -> float | None:
        """How much worse the best may be than what the bound allows, as a fraction of the bound."""
        return self._gap_to(self.bound)

    @property
    def relaxed_gap(self) -> float | None:
        """The same against the closed form: what a better schedule or plan could still win at most."""
        return self._gap_to(self.relaxed_bound)

    def _gap_to(self, bound: Cost) -> float | None:
        return self.best.cost(self.request.objective)[0] / bound[0] - 1 if self.best and bound[0] else None
