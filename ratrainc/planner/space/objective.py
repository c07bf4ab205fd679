"""Objectives of a search: time, tokens a cluster-hour, clusters or bytes; ties go to the faster plan.

Every measure is smaller for a better plan and grows with step seconds, highest peak and clusters alone. So bounds on
these three give a bound on the measure.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite

from attrs import frozen

from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import seconds_text, size_text

Cost = tuple[float, float]
"""Cost of a plan: the measure of the objective, then the seconds of a step, which break ties."""

WORST: Cost = (inf, inf)


@frozen
class Objective:
    """A measure that the search minimises."""

    name: str
    measure: Callable[[float, float, int], float]
    """function of step seconds, highest peak in bytes and clusters"""
    text: Callable[[float, int], str]
    """prints a measure, of a step of a number of tokens"""
    none_better: str
    """verb that says no plan is better than the measure that follows"""
    of_bytes: bool = False
    """True if bytes are what counts: plans are then made with as few as their passes can"""
    of_clusters: bool = False
    """True if the number of clusters is what counts: which numbers are possible is then a question of bytes alone"""

    def cost(self, seconds: float, nbytes: float, clusters: int) -> Cost:
        """Return the cost of a plan, or its bound if the arguments are bounds; `WORST` if `seconds` is infinite."""
        return (self.measure(seconds, nbytes, clusters), seconds) if isfinite(seconds) else WORST


TIME = Objective(
    "time", lambda seconds, _bytes, _clusters: seconds, lambda value, _: seconds_text(value), "takes less than"
)
_TOKENS_PER_CLUSTER_HOUR = Objective(
    "tokens-per-cluster-hour",
    lambda seconds, _bytes, clusters: seconds * clusters,
    lambda cluster_seconds, tokens: f"{tokens * 3600.0 / cluster_seconds:,.0f} tokens a cluster-hour",
    "trains more than",
)
_CLUSTERS = Objective(
    "clusters",
    lambda _seconds, _bytes, clusters: 1.0 * clusters,
    lambda value, _: number_of(value, "cluster", ".0f"),
    "fits fewer than",
    of_clusters=True,
)
_MEMORY = Objective(
    "memory",
    lambda _seconds, nbytes, _clusters: nbytes,
    lambda value, _: size_text(int(value)),
    "needs less on its fullest rank than",
    of_bytes=True,
)
OBJECTIVES = {objective.name: objective for objective in (TIME, _TOKENS_PER_CLUSTER_HOUR, _CLUSTERS, _MEMORY)}
"""Objectives by name, as `plan --objective` has them."""


def scaled(cost: Cost, factor: float) -> Cost:
    """Multiply both parts of a cost."""
    return cost[0] * factor, cost[1] * factor
