"""Routing: which share of a layer's rows each expert gets, and what its ranks have to do then.

A balanced router gives each of E experts the share 1 / E. A token goes to k distinct experts, so no share exceeds
1 / k. Ranks that share out experts compute as many rows whatever the routers say; ranks with room copy experts for it
(`targets/program/expert_balance.py`). Every rank's router is taken to give the same shares. Example: two ranks with two
experts each, of which rank 0's get 3 and 1 of the 4 rows that each rank sends:

    rank 0 keeps rows 0 to 3, all of expert 0    rank 1 copies both experts for rows 4 to 7, two of each

With a capacity of 2 rows each rank sends 2 of the 3 rows and drops one: rank 0 computes 4 and 2 rows, rank 1 none.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.blocks import block, has_experts
from ratrain.ratrain_ir.model.expert_blocks import expert_rows, experts_of
from ratrain.ratrain_ir.model.expert_ranks import capacity_of
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.targets.program.expert_balance import Routes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

BALANCED, ONE_HOT, HOT_RANK = "balanced", "one-hot", "hot-rank"
ROUTINGS = (BALANCED, ONE_HOT, HOT_RANK)
"""Routings that have a name; others are in files."""

Shares = tuple[float, ...]
"""Share of a layer's rows that each expert gets."""
ExpertLoads = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Rows of each expert of its own, and of each that it copies, of ranks that differ in them."""


@frozen
class Routing:
    """Shares of all layers, by a name."""

    name: str
    layers: tuple[Shares, ...]
    """by layer; or one for all layers"""

    def of_layer(self, layer: int) -> Shares | None:
        """Return the shares of a layer; None where all experts get as many rows."""
        shares = self.shares_of(layer)
        return None if max(shares) == min(shares) else shares

    def shares_of(self, layer: int) -> Shares:
        """Return the shares of a layer, equal ones too."""
        return self.layers[layer if self.differs_by_layer else 0]

    @property
    def differs_by_layer(self) -> bool:
        """Tell whether layers have shares of their own."""
        return len(self.layers) > 1

    @property
    def busiest(self) -> float:
        """Rows of the busiest expert of all layers, as a multiple of those under a balanced router."""
        return max(max(shares) * len(shares) for shares in self.layers)


def named_routing(name: str, experts: int, per_token: int, ranks: int) -> Routing:
    """Return the routing of a name: equal shares, all rows to the first experts, or to the first rank's.

    Each token goes to `per_token` distinct experts, so as many get rows at least. `ranks` share out the experts.
    """
    of_rank = max(experts // ranks, per_token)
    busy = {BALANCED: experts, ONE_HOT: per_token, HOT_RANK: of_rank}[name]
    return Routing(name, ((1 / busy,) * busy + (0.0,) * (experts - busy),))


@frozen
class RankLoad:
    """Work of a rank for one layer and micro-batch: rows of each expert, and what travels."""

    own: tuple[int, ...]
    """rows of each of its own experts"""
    copied: tuple[int, ...]
    """rows of each expert that it copies"""
    rows_sent: int
    """to other ranks"""
    rows_received: int
    copies_sent: int
    """experts that it sends to other ranks, once for each of these"""
    copies_received: int

    @property
    def rows(self) -> int:
        """Rows that it computes."""
        return sum(self.own) + sum(self.copied)


@cache
def rank_loads(shares: Shares, ranks: int, rows: int, capacity: int | None = None) -> tuple[RankLoad, ...]:
    """Return the loads of ranks that share out the experts of a layer; each of them routes `rows` rows.

    With a `capacity` each sends as many rows to an expert at most, and drops the others; no expert is copied.
    """
    own = len(shares) // ranks
    routes = Routes.of(np.tile(_whole_rows(shares, rows), (ranks, 1)), capacity)
    parts, found = routes.shares, routes.runs
    copies = [len({run.expert for run in runs if run.copied}) for runs in found]
    loads = []
    for rank, runs in enumerate(found):
        of_experts = np.zeros((2, own), np.int64)
        for run in runs:
            of_experts[int(run.copied), run.expert % own] += run.rows
        loads.append(
            RankLoad(
                own=tuple(of_experts[0].tolist()),
                copied=tuple(of_experts[1].tolist()),
                rows_sent=sum(run.rows for other in found if other is not runs for run in other if run.origin == rank),
                rows_received=sum(run.rows for run in runs if run.origin != rank),
                copies_sent=sum(copies[taker] for taker, part in enumerate(parts) if part.donor == rank),
                copies_received=copies[rank],
            )
        )
    return tuple(loads)


def _whole_rows(shares: Shares, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return whole rows by expert, `rows` in all: shares rounded down, then one more for the largest remainders."""
    exact = np.array(shares) * (rows / sum(shares))
    whole = np.floor(exact + 1e-9).astype(np.int64)
    largest = np.argsort(whole - exact, kind="stable")
    whole[largest[: rows - int(whole.sum())]] += 1
    return whole


def sent_rows(shares: Shares, rows: int, capacity: int | None) -> int:
    """Return how many of the rows that a rank routes it sends: to each expert as many as the capacity at most."""
    whole = _whole_rows(shares, rows)
    return int((whole if capacity is None else np.minimum(whole, capacity)).sum())


def dropped_share(routing: Routing | None, model: ModelConfig, plan: Plan) -> float | None:
    """Return the part of the rows of all layers that ranks drop; None for a plan that drops none, whatever comes.

    Without a routing all experts get as many rows.
    """
    if model.experts is None or capacity_of(model, plan) is None:
        return None
    layers = [layer for layer in range(model.layers) if has_experts(model, block("mlp", layer))]
    even = (1 / experts_of(model),) * experts_of(model)
    routed = sent = 0
    for piece in [slice_plan(plan, index) for index in range(len(plan.slices))] or [plan]:
        rows, capacity = expert_rows(model, piece), capacity_of(model, piece)
        routed += rows * len(layers)
        sent += sum(sent_rows(routing.shares_of(each) if routing else even, rows, capacity) for each in layers)
    return 1 - sent / routed


def expert_loads(shares: Shares, ranks: int, rows: int, capacity: int | None = None) -> ExpertLoads:
    """Return the distinct loads of ranks; rows are in ascending order, as products cost as much in any order."""
    loads = rank_loads(shares, ranks, rows, capacity)
    return tuple(sorted({(tuple(sorted(load.own)), tuple(sorted(load.copied))) for load in loads}))
