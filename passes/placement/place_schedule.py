"""`place-schedule{kind=...}`: puts a module into the order of any schedule that has a generator.

    forwards, then backwards         becomes, on stage 0 of 2 that holds chunks 0 and 2 of 4, interleaved:
    c0 F0, c2 F0, c0 F1, ...         c0 F0, c0 F1, c2 F0, c2 F1, c0 F2, c2 B0, ...

`ratrainc schedule` prints the orders. The schedule is that of the plan, unless `kind` names one; chunks, their layout
and slices are always the plan's. Where an order has the halves of a backward apart, the backwards of attention and mlp
blocks are split into `backward_input` and `backward_weight`. 1F1B, GPipe and ZB-H1 have passes of their own.

Each stage's list has the order that the generator gives. `place_orders.py` explains where messages stand, and why no
list can hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from ratrain.passes.pass_base import Decision, Fact, Pass, PassContext
from ratrain.passes.placement.foreign_table import check_against_plan, check_ascending
from ratrain.passes.placement.place_orders import place_orders
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.ratrain_ir.analysis.actions import actions_of_orders
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Order
from ratrain.ratrain_ir.schedules.named import SCHEDULES, default_schedule
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Note, fail
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.compute import Backward


@frozen
class PlaceSchedulePass(Pass):
    """Put every stage's work into the order of a schedule."""

    name: ClassVar[str] = "place-schedule"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.ORDER})
    kind: str | None = field(default=None, metadata={"choices": SCHEDULES, "default": "the plan's"})
    """Name of the schedule; None: the plan's, or the default one of its shape if the plan names none."""

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places; None: the plan's."""
        return self.kind

    def run(self, module: Module, context: PassContext) -> None:
        """Split the backwards that the schedule has in halves, and reorder whole passes of pieces through chunks.

        Raises `DiagnosticError` RT064 where the plan names another schedule, or has chunks or slices that this one
        cannot have.
        """
        kind = self.kind or module.plan.schedule or default_schedule(module.plan.shape)
        begin_placing(module, kind, f"place-schedule{{kind={kind}}}")
        schedule, stages = SCHEDULES[kind], range(module.plan.pp)
        if not SCHEDULES.is_own(kind):
            check_order_of_others(kind, [schedule.actions(module.plan.shape, stage) for stage in stages], module.plan)
        orders = [schedule.order(module.topology.shape, stage) for stage in stages]
        split_where_halves_are_apart(module, orders)
        place_orders(module, orders)
        context.statistics["stages"] = module.plan.pp


def check_order_of_others(kind: str, orders: list[Order], plan: Plan) -> None:
    """Check the order of a schedule that a plugin brings, as `lint` checks a table.

    Raises `DiagnosticError` RT072 with the first of what is wrong.
    """
    for stage, order in enumerate(orders):
        wrong = next((each for each in order if not isinstance(each, Action)), None)
        if wrong is not None:
            fail("RT072", f"the schedule '{kind}' is wrong: stage {stage} has {wrong!r}, which is no Action")
    table = actions_of_orders(orders)
    try:
        check_schedule(table)
        check_against_plan(table, plan)
        check_ascending(table)
    except DiagnosticError as error:
        notes = [Note(each.message) for each in error.diagnostics[:_SHOWN]]
        way_out = f"'ratrainc schedule --kind {kind} ... -o s.csv' writes it, and 'ratrainc lint s.csv' shows each cell"
        fail("RT072", f"the schedule '{kind}' is wrong for {plan.summary}", notes=notes, help=way_out)


_SHOWN = 3
"""Errors of an order that are told."""


def split_where_halves_are_apart(module: Module, orders: list[Order]) -> None:
    """Split each backward whose halves are separate actions in the order of its stage, in place."""
    chunk_of = module.topology.chunk_of
    for stage, order in zip(module.stages, orders, strict=True):
        split = {action.work for action in order if action.kind is ActionKind.BACKWARD_WEIGHT}

        # The default argument binds the set of this stage.
        def wanted(op: Backward, split: set[tuple[int, int, int]] = split) -> bool:
            return (chunk_of[op.block], op.micro_batch, op.slice or 0) in split

        if split:
            split_backwards(module, stage, wanted)
