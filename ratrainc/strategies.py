"""Strategies: named pass pipelines. Under one plan all of them compute the same training, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.ratrain_ir.diagnostics import fail, nearest
from ratrain.ratrain_ir.frontend.text import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.frontend.plan import Plan


@frozen
class Strategy:
    """A name for a pipeline, and what it stands for."""

    name: str
    passes: str
    """the pipeline; without a placement, which is then the one of the plan's schedule"""
    summary: str
    zero: int | None = None
    """the ZeRO level it sets in the plan"""
    note: str = ""
    """what to say where it is run on a given plan"""

    @property
    def schedule(self) -> str | None:
        """The schedule it is named after; None where it takes the plan's."""
        first = self.passes.partition(",")[0]
        return first.removeprefix("place-") if first.startswith("place-") else None

    def check_schedule(self, plan: Plan, place: Callable[[], Place] = Place) -> None:
        """Raise `DiagnosticError` RT064 where the plan says, at `place`, another schedule than the strategy places."""
        if self.schedule is not None:
            refuse_contradiction(plan, self.schedule, f"the strategy '{self.name}'", place)

    def adapted(self, plan: Plan) -> Plan:
        """The plan under this strategy; everything but what its name says stays."""
        return plan if self.zero is None else evolve(plan, zero=self.zero)


_BULK = "bucket-grad-sync{unit=stage}"
_BLOCKING_BULK = "bucket-grad-sync{unit=stage blocking=true},insert-prefetch{depth-blocks=0 blocking=true}"
# A strategy that is named after a schedule places it; the others take the plan's.
_BASELINE = f"place-1f1b,{_BLOCKING_BULK},recompute{{policy=full}},allocate-ddr"

STRATEGIES = (
    Strategy(
        "ratrain",
        "joint-order,allocate-ddr",
        "gradients reduced in buckets, and shards updated, as soon as they are final; views gathered in the next forward's order; "
        "only what does not fit is recomputed, in the pipeline's idle windows where there are any; all of it decided together",
    ),
    Strategy(
        "ratrain-no-fsr",
        "joint-order{policy=full placement=inline},allocate-ddr",
        "ratrain without forward-side recovery: everything is recovered inline, right before each backward",
    ),
    Strategy(
        "ratrain-inline",
        "joint-order{placement=inline},allocate-ddr",
        "ratrain that keeps what fits too, and recovers the rest inline, right before each backward",
    ),
    Strategy(
        "ratrain-no-update-prefetch",
        "joint-order{state=blocking-bulk},allocate-ddr",
        "ratrain with all updates before all gathers, for which compute waits, as in the baseline",
    ),
    Strategy(
        "ratrain-no-layerwise",
        "joint-order{reduction=blocking-bulk},allocate-ddr",
        "ratrain with each stage's gradients reduced at once, while compute waits, as in the baseline",
    ),
    Strategy(
        "zb-h1",
        "place-zb-h1,joint-order,allocate-ddr",
        "ratrain in ZB-H1 order: backwards are split, and their weight halves fill the pipeline's idle time",
    ),
    Strategy(
        "baseline-1f1b",
        _BASELINE,
        "full recomputation inside backward; reduction in bulk after the whole backward, then updates, then gathers; compute waits "
        "for every reduction and gather",
    ),
    Strategy(
        "baseline-1f1b-overlapped",
        f"place-1f1b,{_BULK},recompute{{policy=full}},allocate-ddr",
        "baseline-1f1b in which compute waits only for what it reads",
    ),
    Strategy(
        "tuned-1f1b",
        _BASELINE,
        "baseline-1f1b on the best plan for it, which 'ratrainc plan' and 'ratrainc compare --plan auto' find",
        note="on a given plan tuned-1f1b is baseline-1f1b: its passes are the same, only the plan is its own",
    ),
    Strategy(
        "full-save",
        f"{_BLOCKING_BULK},recompute{{policy=none}},allocate-ddr",
        "baseline-1f1b that keeps every activation instead of recomputing it",
    ),
    Strategy(
        "zero3",
        "bucket-grad-sync{bytes=1GB},insert-prefetch,recompute{policy=auto},allocate-ddr",
        "views sharded too, each gathered one block ahead of every use, and gradients reduced in buckets, both beside compute; only what "
        "does not fit is recomputed, inline (ZeRO 3)",
        zero=3,
    ),
    Strategy(
        "zero3-blocking",
        "bucket-grad-sync{bytes=1GB blocking=true},insert-prefetch{depth-blocks=0 blocking=true},recompute{policy=full},allocate-ddr",
        "zero3 without overlap and with full recomputation: views are gathered right before every use, and compute waits for gathers "
        "and reductions",
        zero=3,
    ),
)

DEFAULT_STRATEGY = "ratrain"


def strategy(name: str) -> Strategy:
    """The strategy of a name.

    Raises `DiagnosticError` RT004 for an unknown one.
    """
    known = {item.name: item for item in STRATEGIES}
    if name not in known:
        text = f"'{name}' is not a strategy; the strategies are {', '.join(known)}"
        fail("RT004", text, help=nearest(name, known))
    return known[name]
