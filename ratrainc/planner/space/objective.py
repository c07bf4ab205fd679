"""What the best plan is: the fastest, or that of the most tokens a cluster-hour, the fewest clusters or the fewest bytes; then the fastest of these.

Every measure is less where it is better, and grows with a plan's step seconds, its highest peak and its clusters alone: so bounds on
those give a bound on the measure.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite

from attrs import frozen

from ratrain.ratrainc.console.console import seconds_text, size_text

Cost = tuple[float, float]
"""Of a plan: what the objective measures, then seconds of a step, by which ties are broken."""

WORST: Cost = (inf, inf)


def _tokens_text(cluster_seconds: float, tokens: int) -> str:
    return f"{tokens * 3600.0 / cluster_seconds:,.0f} tokens a cluster-hour"


@frozen
class Objective:
    """What is looked for."""

    name: str
    measure: Callable[[float, float, int], float]
    """of step seconds, highest peak in bytes and clusters"""
    text: Callable[[float, int], str]
    """a measure for people, of a step of so many tokens"""
    none_better: str
    """that no plan has a better measure than one that follows"""
    of_bytes: bool = False
    """whether bytes are what counts, so that plans are made with as few as their passes can"""

    def cost(self, seconds: float, nbytes: float, clusters: int) -> Cost:
        """The cost of a plan, or a bound of it where both are bounds; the worst where it does not fit."""
        return (self.measure(seconds, nbytes, clusters), seconds) if isfinite(seconds) else WORST


TIME = Objective(
    "time", lambda seconds, _bytes, _clusters: seconds, lambda value, _: seconds_text(value), "takes less than"
)

OBJECTIVES = {
    objective.name: objective
    for objective in (
        TIME,
        Objective(
            "tokens-per-cluster-hour",
            lambda seconds, _bytes, clusters: seconds * clusters,
            _tokens_text,
            "trains more than",
        ),
        Objective(
            "clusters",
            lambda _seconds, _bytes, clusters: 1.0 * clusters,
            lambda value, _: f"{value:.0f} cluster{'' if value == 1 else 's'}",
            "fits fewer than",
        ),
        Objective(
            "memory",
            lambda _seconds, nbytes, _clusters: nbytes,
            lambda value, _: size_text(int(value)),
            "needs less on its fullest rank than",
            of_bytes=True,
        ),
    )
}
"""By name, as `plan --objective` has them."""


def scaled(cost: Cost, factor: float) -> Cost:
    """A cost so many times as large in both."""
    return cost[0] * factor, cost[1] * factor
