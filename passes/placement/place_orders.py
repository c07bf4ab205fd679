"""Placement of a module by given orders: any schedule whose orders do not wait for each other in a cycle.

    orders                                     lists: messages stand where the run has them
    @0: F0 F1 B0 B1                            @0: F0 send0 F1 send1 recv0 B0 recv1 B1
    @1: F0 B0 F1 B1                            @1: recv0 F0 recv1 B0 send0 F1 B1 send1

Messages pass in a run in which every forward, and every half of a backward, takes one unit of time
(`ratrain_ir/analysis/unit_run.py`). That run is one total order of the whole program, and the lists of all stages agree
with it, message by message. So an op that waits for something earlier in its list (for its bytes, say) cannot hang,
even if a send ends only with its receive. Cost: linear in actions and ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.passes.placement.stage_placement import StagePlacement
from ratrain.ratrain_ir.analysis.unit_run import Computation, unit_run
from ratrain.ratrain_ir.module import Level

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.schedules.action import Order


def place_orders(module: Module, orders: Sequence[Order]) -> None:
    """Reorder whole groups of a module's ops by one order per stage, in place; ops of the step's end stay last.

    Backwards whose halves an order has apart must have been split before. Raises ValueError where the orders wait for
    each other in a cycle.
    """
    topology = module.topology
    placements = [StagePlacement(stage, topology) for stage in module.stages]
    # Both ends of a message are appended at the same event. So every list is a part of the one order of the run, and
    # the lists of two stages cannot contradict each other.
    for event in unit_run(orders, topology.chunk_stages):
        if isinstance(event, Computation):
            placements[event.stage].compute(event.action)
        else:
            placements[event.source].send(event)
            placements[event.destination].receive(event)
    for placement in placements:
        placement.finish()
    module.level = Level.PLACED
