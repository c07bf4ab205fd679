"""The answer of a search: the plans that were found, the shapes that were ruled out, and the bounds on all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import isinf
from typing import Any

from attrs import asdict, define, field, frozen

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.space.objective import Cost, Objective
from ratrain.ratrainc.planner.space.plan_families import family_schedule
from ratrain.ratrainc.planner.space.space import Shape

_SECONDS_OF_DAY = 86400.0


AT_LEAST = "+ behind a peak: at least these bytes, by a bound; the plan was not compiled"
"""Sentence of a legend on peaks of plans that were not compiled."""


@frozen
class Candidate:
    """One plan under one pipeline, with its evaluation if there is one."""

    shape: Shape
    plan: Plan
    pipeline: str
    bound_seconds: float
    evaluation: PlanEvaluation | None = None
    estimated_seconds: float = float("inf")
    """closed form, for a plan that was not simulated"""
    bound_bytes: float = 0.0
    """lower bound on the highest peak"""
    family: str = ""
    """the name of its family"""
    why_estimated: str = ""
    """reason why a quick answer did not simulate it, if it did not"""

    @property
    def seconds(self) -> float:
        """Seconds of a step: simulated, from a folded step, or a closed form; infinite if it does not fit."""
        if self.evaluation is None:
            return self.estimated_seconds
        step_seconds = self.evaluation.step_seconds
        return float("inf") if step_seconds is None else step_seconds

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all stages; a lower bound if nothing was compiled."""
        return max(self.evaluation.peak_bytes) if self.evaluation else int(self.bound_bytes)

    @property
    def identity(self) -> tuple[str, Plan]:
        """Key that the same plan has under other settings of its passes, or with another use of memories."""
        # the memory in a family's name is a choice of its passes, not of the plan
        return family_schedule(self.family), self.plan

    def cost(self, objective: Objective) -> Cost:
        """Return its cost, by its seconds and peak as far as known."""
        return objective.cost(self.seconds, self.peak_bytes, self.shape.clusters)

    def bound(self, objective: Objective) -> Cost:
        """Return a lower bound on its cost."""
        return objective.cost(self.bound_seconds, self.bound_bytes, self.shape.clusters)

    def rank(self, objective: Objective) -> tuple[Cost, bool, Shape, tuple[int, ...], str]:
        """Return the sort key of candidates: cost, then exact ones first, then anything that tells them apart."""
        # the last entries make the order of equal plans the same in every run
        return self.cost(objective), not self.is_exact, self.shape, self.plan.cuts, self.pipeline

    @property
    def is_exact(self) -> bool:
        """True if the whole step was simulated, or found not to fit."""
        return self.evaluation is not None and not self.evaluation.estimated

    @property
    def how(self) -> str:
        """Source of its time: `estimate`, `folded` or `simulated`."""
        if self.evaluation is None:
            return "estimate"
        return "folded" if self.evaluation.estimated else "simulated"

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its seconds."""
        return self.plan.tokens_per_step / self.seconds

    def utilisation(self, request: PlanRequest) -> float:
        """Return its model operations a second, without recovery, as a fraction of the peak of its clusters."""
        operations = trained_flops_per_token(request.model, self.plan) * self.tokens_per_second
        return operations / (request.machine["fp16_peak"] * self.plan.clusters)

    def training_cost(self, clusters: int, tokens: float) -> tuple[float, float]:
        """Return the days, and the hours of all clusters together (idle ones too), of training on `tokens` tokens."""
        seconds = tokens / self.tokens_per_second
        # idle clusters are reserved, and paid for, as well
        return seconds / _SECONDS_OF_DAY, seconds * clusters / 3600.0

    def to_json(self, clusters: int, tokens: float | None = None) -> dict[str, Any]:
        """Return the plan as `--json` prints it, with the cost of a training if `tokens` are given."""
        plan = self.plan
        data: dict[str, Any] = {
            "summary": plan.summary,
            "pp": plan.pp,
            "dp": plan.dp,
            "cp": plan.cp,
            "context_exchange": plan.context_exchange if plan.cp > 1 else None,
            "context_groups": plan.context_groups,
            "tp": plan.tp,
            "ep": plan.ep,
            "micro_batch_size": plan.micro_batch_size,
            "micro_batches": plan.micro_batches,
            "zero": plan.zero,
            "reduce": plan.reduce,
            "zero_blocks": None if plan.zero_blocks is None else str(plan.zero_blocks),
            "shard_group": plan.shard_group,
            "view_group": plan.view_group,
            "cuts": list(plan.cuts),
            "chunks": plan.chunks,
            "layout": plan.layout,
            "slices": list(plan.slices),
            "mapping": None if plan.mapping is None else str(plan.mapping),
            "passes": self.pipeline,
            "predicted_step_seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "bound_seconds": self.bound_seconds,
            "exposed_tail_seconds": self.evaluation.exposed_tail_seconds if self.evaluation else None,
            "how": self.how,
            "family": self.family,
            "clusters": plan.clusters,
            "idle_clusters": clusters - plan.clusters,
        }
        disturbance = self.evaluation.disturbance if self.evaluation else None
        if disturbance is not None:
            data |= asdict(disturbance)
        if tokens is not None:
            data["days"], data["cluster_hours"] = self.training_cost(clusters, tokens)
        return data


@frozen
class OversizedShape:
    """A shape that fits under no cuts: the stage that lacks least, and the bytes it lacks."""

    shape: Shape
    stage: int
    short_bytes: float
    family: str = ""


@frozen
class RejectedPlan:
    """A kind of plans that lost to the best one, and the reason."""

    text: str
    reason: str
    mechanisms: dict[str, float] = field(factory=dict)
    """extra seconds of a step by mechanism, with a remainder, compared with the best plan; empty if not asked for"""
    more_seconds: float | None = None
    """sum of these: the seconds of `reason` less the best plan's seconds"""


@define
class Answer:
    """The outcome of a search."""

    request: PlanRequest
    candidates: list[Candidate]
    """evaluated plans that fit, best first"""
    refused: list[Candidate]
    """evaluated plans that the compiler could not place"""
    oversized: list[OversizedShape]
    """shapes that a bound on bytes rules out"""
    bound: Cost
    """lower bound of all plans of the space, as their passes order them"""
    relaxed_bound: Cost
    """closed form: lower bound of all plans of the space, whatever passes order them"""
    shapes: int
    plans: int
    """plans of the space, with their stage cuts"""
    evaluations: int
    seconds: float
    proven: bool
    """True if no plan was left that could be better than the best"""
    reject: Callable[[], list[RejectedPlan]] = list
    """finds `rejected_plans`, which takes about as long as the bounds of a family"""
    interrupted: bool = False
    """True if it was asked to end early"""
    settled: bool = False
    """True if the search ended by itself: all that it left is ruled out, or expected to be worse than the best"""
    profiles: Profiles | None = None
    """those of the search, for others that ask for the same ones"""

    @cached_property
    def rejected_plans(self) -> list[RejectedPlan]:
        """The kinds of plans that lost to the best one; found when they are first asked for."""
        return self.reject()

    @property
    def best(self) -> Candidate | None:
        """The best plan, or None if none fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def evaluated(self) -> list[Candidate]:
        """The candidates that were compiled and simulated."""
        return [candidate for candidate in self.candidates if candidate.evaluation is not None]

    @property
    def best_plans(self) -> list[Candidate]:
        """The candidates, each plan once with its best pipeline, best first."""
        fastest: dict[Any, Candidate] = {}
        # candidates are sorted, so the first of each plan is its best
        for candidate in self.candidates:
            fastest.setdefault(candidate.identity, candidate)
        return list(fastest.values())

    @property
    def nearest(self) -> OversizedShape | None:
        """The oversized shape that lacks the fewest bytes; None if no shape is oversized."""
        return min(self.oversized, key=lambda shape: shape.short_bytes, default=None)

    @property
    def proven_empty(self) -> bool:
        """True if bounds on bytes rule out every plan: none fits, was refused by the compiler or left untried."""
        # the bound is infinite only if no shape is left whose cuts may fit
        return not self.candidates and not self.refused and isinf(self.bound[0])

    @property
    def bound_seconds(self) -> float:
        """Lower bound on the seconds of all plans; under another objective, of plans as good as the bound."""
        return self.bound[1]

    @property
    def relaxed_bound_seconds(self) -> float:
        """Lower bound of the closed form on the seconds of all plans."""
        return self.relaxed_bound[1]

    @property
    def gap(self) -> float | None:
        """Distance of the best plan's measure from the bound, as a fraction of the bound; None without either."""
        return self._gap_to(self.bound)

    @property
    def relaxed_gap(self) -> float | None:
        """Same distance from the closed form's bound: the most that another schedule or plan could win; or None."""
        return self._gap_to(self.relaxed_bound)

    def _gap_to(self, bound: Cost) -> float | None:
        # a bound of 0 has no relative distance
        return self.best.cost(self.request.objective)[0] / bound[0] - 1 if self.best and bound[0] else None
