"""Puts a module into given orders: any schedule, as long as its orders do not wait for each other in a circle.

Messages stand where they pass in a run in which every forward, and every half of a backward, takes one unit of time
(`ratrain_ir/analysis/unit_run.py`). That run is one order of the whole program with which the lists of all stages agree, message by message;
so whatever waits for something earlier in its list (for its bytes, say) cannot hang, even if a send ends only with its receive.
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
    """Reorder whole groups of ops by one order a stage; what belongs to the step's end stays there.

    Backwards whose halves an order has apart must have been split before. Raises ValueError where the orders wait for each other in a
    circle.
    """
    topology = module.topology
    placements = [StagePlacement(stage, topology) for stage in module.stages]
    for event in unit_run(orders, topology.chunk_stages):
        if isinstance(event, Computation):
            placements[event.stage].compute(event.action)
        else:
            placements[event.source].send(event)
            placements[event.destination].receive(event)
    for placement in placements:
        placement.finish()
    module.level = Level.PLACED
