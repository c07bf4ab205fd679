"""A step of a device that is recorded once and then repeated: every address and every order of a program is the same in all steps."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from ratrain.targets.runtime.arena.streams import Graph, Order

WARM_UP_STEPS = 3
"""Steps before the one that is recorded, for what libraries load and allocate with their first calls: as many as `torch.cuda.make_graphed_callables` makes."""


@define(eq=False)
class RepeatedStep:
    """Issues some steps, records the next one, and has its graph then."""

    order: Order
    issued: int = 0
    graph: Graph | None = None

    def issue(self, issue: Callable[[], None]) -> None:
        """Do a step whose instructions `issue` issues: at once, or by recording them and doing what was recorded."""
        if self.issued < WARM_UP_STEPS:
            self.issued += 1
            issue()
            return
        self.graph = self.order.graph(issue)
        self.graph.replay()
