"""Placement of a module by a schedule table, with messages, gathers and reductions where the table has them.

In a row `UNSHARD F0 SEND_F F1 RESHARD` of a chunk with `zero = 3`, one gather stands first, and both forwards read the
view that it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from ratrain.passes.placement.foreign_table import action_of, orders_of_table, refuse_action
from ratrain.passes.placement.stage_placement import StagePlacement
from ratrain.ratrain_ir.analysis.actions import COMPUTES, RECVS, SENDS, ActionTable, PlacedAction
from ratrain.ratrain_ir.analysis.schedule_progress import peer_stage
from ratrain.ratrain_ir.analysis.unit_run import Computation, UnitMessage, unit_run
from ratrain.ratrain_ir.model.sharded_blocks import any_gathered_within_step, reduces_each_micro_batch
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.collectives import AllGather, reduces_over_replicas
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.ops.signatures import bind
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.topology import Topology

_USES_VIEWS = COMPUTES - {ActionKind.BACKWARD_WEIGHT}
"""Computations that read the gathered parameters; the weight half of a backward needs none."""


def check_state_actions(table: ActionTable, topology: Topology) -> None:
    """Refuse gathers and reductions that contradict how the plan keeps state.

    Raises `DiagnosticError` RT010 at the cell.
    """
    gathered: set[int] = set()
    model, plan, blocks_of = topology.model, topology.plan, topology.chunk_blocks
    for action in table.actions:
        if action.kind is ActionKind.REDUCE_GRAD and any(
            reduces_each_micro_batch(model, plan, block) for block in blocks_of[action.stage]
        ):
            text = f"'{action}' reduces gradients once a step, but the plan says reduce = \"each-micro-batch\""
            refuse_action(table, action, text, 'write reduce = "last", or delete every REDUCE_GRAD from the table')
        if action.kind is ActionKind.UNSHARD and not any_gathered_within_step(plan, blocks_of[action.stage]):
            if action.stage in gathered:
                why = "no parameters of it have zero = 3: they stay whole throughout the step"
                text = f"'{action}' gathers stage {action.stage} a second time, but {why}"
                way_out = "use zero = 3, or leave one UNSHARD and one RESHARD a stage in the table"
                refuse_action(table, action, text, way_out)
            gathered.add(action.stage)


def place_table(module: Module, table: ActionTable) -> None:
    """Reorder whole groups of a module's ops by a table that fits its plan, in place.

    Backwards whose halves the table has apart must have been split before.
    """
    topology = module.topology
    rows = table.rows if table.is_lowered else _with_messages(table, topology)
    for stage, row in zip(module.stages, rows, strict=True):
        gathers = any_gathered_within_step(module.plan, topology.stage_blocks[stage.index])
        placement = _RowPlacement(stage, topology, row=row, gathers=gathers)
        placement.take_row()
        placement.finish()
    module.level = Level.PLACED


def _message(action: PlacedAction, topology: Topology) -> UnitMessage:
    """Return the message that a send or receive of a table belongs to."""
    assert action.micro_batch is not None
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    payload = Payload.ACTIVATION if forward else Payload.GRADIENT
    peer = peer_stage(action)
    # `into` names the later chunk of the two in both directions, as `unit_run` does.
    ends = (action.stage, peer) if action.kind in SENDS else (peer, action.stage)
    source, destination = (topology.chunk_stages[chunk] for chunk in ends)
    return UnitMessage(payload, max(ends), action.micro_batch, action.slice or 0, source, destination)


def _with_messages(table: ActionTable, topology: Topology) -> Sequence[Sequence[PlacedAction]]:
    """Return the rows of a table without messages, with the messages of a run of unit times added.

    In that run (`unit_run`) a message passes as soon as its payload is computed.
    """
    rows: list[list[PlacedAction]] = [[] for _ in table.rows]
    left = [iter(row) for row in table.rows]
    for event in unit_run(orders_of_table(table), topology.chunk_stages):
        if isinstance(event, Computation):
            # Copy up to and including the computation: gathers and reductions of the row stay right where they were.
            for action in left[event.stage]:
                rows[event.stage].append(action)
                if action.kind in COMPUTES:
                    break
            continue
        forward = event.payload is Payload.ACTIVATION
        source, target = (event.into - 1, event.into) if forward else (event.into, event.into - 1)
        send, receive = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
        rows[event.source].append(PlacedAction(event.source, 0, source, send, event.micro_batch, slice=event.slice))
        rows[event.destination].append(
            PlacedAction(event.destination, 0, target, receive, event.micro_batch, slice=event.slice)
        )
    for row, rest in zip(rows, left, strict=True):
        row.extend(rest)
    return rows


@define
class _RowPlacement(StagePlacement):
    """Builder of a stage's list from a row with messages."""

    row: Sequence[PlacedAction] = field(kw_only=True)
    gathers: bool = field(kw_only=True)
    """True if parameters are gathered within the step."""
    settled: set[Op] = field(factory=set)
    """Gathers that are in the list already, or that an earlier gather of the same window replaces."""
    instead: dict[Tensor, Tensor] = field(factory=dict)
    """By the view of a replaced gather: the view of the window, which its users read."""
    reductions: dict[int, list[Op]] = field(factory=dict)
    """By chunk: the reductions of its gradients."""

    def take_row(self) -> None:
        """Append the ops of each action of the row, in its order."""
        # With whole views an UNSHARD places nothing: `gather` gets no uses.
        windows = self.windows() if self.gathers else {}
        if any(action.kind is ActionKind.REDUCE_GRAD for action in self.row):
            self.take_reductions()
        for slot, action in enumerate(self.row):
            if action.kind in COMPUTES:
                self.compute(action_of(action))
            elif action.kind is ActionKind.REDUCE_GRAD:
                self.ops += self.reductions.pop(action.stage)
            elif action.kind is ActionKind.UNSHARD:
                self.gather(windows.get(slot, []))
            elif action.kind in SENDS:
                self.send(_message(action, self.topology))
            elif action.kind in RECVS:
                self.receive(_message(action, self.topology))

    def windows(self) -> dict[int, list[Action]]:
        """Return, by the position of each UNSHARD in the row, the actions that use the parameters it gathers."""
        uses: dict[int, list[Action]] = {}
        begun: dict[int, int] = {}
        for slot, action in enumerate(self.row):
            if action.kind is ActionKind.UNSHARD:
                begun[action.stage] = slot
            elif action.kind in _USES_VIEWS and action.stage in begun:
                uses.setdefault(begun[action.stage], []).append(action_of(action))
        return uses

    def gather(self, uses: list[Action]) -> None:
        """Append one gather of each block that `uses` need; its view serves all later uses.

        Other gathers of the block in the window are dropped.
        """
        views: dict[str, Tensor] = {}
        for op in (op for action in uses for op in self.groups.of(action)):
            if not isinstance(op, AllGather):
                continue
            self.settled.add(op)
            # A gather of several blocks is kept if any of them is new; its views of the other blocks then stay unread.
            roles = {tensor: role for role, tensor in bind(op, self.topology.model, self.topology.plan).tensors.items()}
            if not views.keys() >= {roles[view] for view in op.writes}:
                self.ops.append(op)
            for view in op.writes:
                self.instead[view] = views.setdefault(roles[view], view)

    def compute(self, action: Action) -> None:
        """Append the ops that serve an action; their reads go to the views of the window.

        Messages stand elsewhere in the row, and gathers of a window at its UNSHARD, so they are left out.
        """
        for op in self.groups.of(action):
            if isinstance(op, Send | Recv) or op in self.settled:
                continue
            # A gather that was left out has no view to read: use the one of the window.
            reads = tuple(self.instead.get(tensor, tensor) for tensor in op.reads)
            self.ops.append(op if reads == op.reads else evolve(op, reads=reads))

    def take_reductions(self) -> None:
        """Take the reductions of gradients out of the step's end, so that each REDUCE_GRAD places its chunk's.

        Raises `DiagnosticError` RT071 where one reduction is of several chunks.
        """
        chunk_of = self.topology.chunk_of
        # Reductions of the whole step stand at its end; the row says where each chunk's go instead.
        rest: list[Op] = []
        for op in self.groups.step_end:
            if not reduces_over_replicas(op):
                rest.append(op)
                continue
            chunks = {chunk_of[block] for block in op.blocks}
            if len(chunks) > 1:
                text = f"'{op!r}' reduces gradients of several chunks at once, and the file has a REDUCE_GRAD for each"
                fail("RT071", text, help="put 'place-from-file' before the pass that joins reductions")
            self.reductions.setdefault(chunks.pop(), []).append(op)
        self.groups.step_end = rest

    def finish(self) -> None:
        """Give the stage its list, and drop the views whose gathers were replaced."""
        super().finish()
        if self.gathers:
            self.stage.prune()
