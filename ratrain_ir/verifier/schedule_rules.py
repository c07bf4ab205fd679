"""Rules of a table of actions, with the codes of the module verifier.

1. Places: a stage lives on one rank RT027; only neighbours on different ranks exchange messages RT027, RT026.
2. Completeness: every micro-batch's forward and backward (or both its halves) run exactly once on every stage, forward
   before backward, input half before weight half RT030. Of the first stages, as many as are said only go forward: they
   have no backward, and no gradients, RT030. A rank without actions is sound if no other one needs a stage that nobody
   runs.
3. Inputs: a stage has what it takes from a neighbour before it uses it, and makes a message before it sends it RT020.
   Slices of a micro-batch run forward in ascending, backward in descending order RT020, because each attends to the
   keys of the earlier ones, and adds to their gradients.
4. Sharded state: parameters are gathered where they are used RT026, gradients reduced once, after the last backward
   RT031, on all stages if on any. For stages that are sharded this is required in any case RT008, RT009.
5. Messages: sends and receives match RT040; between two ranks, in each direction, messages are received in the order in
   which they are sent RT041, because only their order tells them apart.
6. Progress, with buffered and with rendezvous sends RT042; checked if nothing else is wrong.

The numbers of stages and micro-batches follow from the table: a stage or a micro-batch that any part names is missing
wherever it is not named. All rules are linear in the number of actions, apart from sorting.
"""

from __future__ import annotations

from attrs import define

from ratrain.ratrain_ir.analysis.actions import BACKWARDS, MESSAGES, SENDS, ActionTable, PlacedAction, part_text
from ratrain.ratrain_ir.analysis.schedule_progress import Blocked, peer_stage, waiting_circle
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Note
from ratrain.ratrain_ir.verifier.schedule_completeness import check_complete
from ratrain.ratrain_ir.verifier.schedule_findings import ScheduleFindings, where
from ratrain.ratrain_ir.verifier.schedule_sharding import check_gathered, check_reduced


def verify_schedule(
    table: ActionTable, diagnostics: Diagnostics, *, sharded: bool = False, forward_only: int = 0
) -> None:
    """Report everything that is wrong with a schedule.

    `sharded` says that stages begin a step with a shard of their parameters only, `forward_only` how many of the first
    stages have no backward.
    """
    rules = _Rules(table, diagnostics, forward_only)
    rules.check_places()
    check_complete(rules)
    rules.check_order()
    check_gathered(rules, sharded=sharded)
    check_reduced(rules, sharded=sharded)
    if table.is_lowered:
        rules.check_matched()
        rules.check_message_order()
    if not diagnostics.errors:
        rules.check_progress()


def check_schedule(table: ActionTable, *, sharded: bool = False, forward_only: int = 0) -> None:
    """Raise `DiagnosticError` unless a schedule is sound. Takes the options of `verify_schedule`."""
    diagnostics = Diagnostics()
    verify_schedule(table, diagnostics, sharded=sharded, forward_only=forward_only)
    diagnostics.check()


@define(eq=False)
class _Rules(ScheduleFindings):
    # places

    def check_places(self) -> None:
        """Report RT027 unless each stage lives on one rank and each message has another end.

        Report RT026 for a message between stages of one rank, which need none.
        """
        for stage, actions in self.stages.items():
            stray = next((action for action in actions if action.rank != self.home[stage]), None)
            if stray is not None:
                text = f"{where(stray)}, but stage {stage} is on rank {self.home[stage]}: a stage lives on one rank"
                self.report("RT027", text, stray)
        for action in self.table.actions:
            if action.kind in MESSAGES:
                self.check_peer(action)

    def check_peer(self, action: PlacedAction) -> None:
        peer = peer_stage(action)
        verb = "sends to" if action.kind in SENDS else "receives from"
        if not 0 <= peer <= self.last_stage:
            end = "first" if peer < 0 else "last"
            text = f"'{action}' {verb} no stage: {action.stage} is the {end} one"
            self.report("RT027", text, action, self.notes_of_empty())
        elif peer in self.stages and self.co_located(action.stage, peer):
            text = f"'{action}' {verb} its own rank: stages {action.stage} and {peer} are both on rank {action.rank}"
            self.report("RT026", text, action, way_out="delete it; stages of one rank hand over without a message")

    # order within a rank

    def check_order(self) -> None:
        """Report RT030 unless forward precedes backward, and input half weight half; RT020 unless inputs come first."""
        lowered = self.table.is_lowered
        for action in self.table.actions:
            stage, part = action.stage, action.part
            if action.slice is not None:
                self.check_before("RT020", self.index.slice_before(action), action, _SLICES.get(action.kind, ""))
            if action.kind in BACKWARDS:
                self.check_before("RT030", self.index.forward(stage, part), action, "its forward")
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                made = self.index.find(ActionKind.BACKWARD_INPUT, stage, part)
                self.check_before("RT030", made, action, "its input half")
            elif action.kind is ActionKind.SEND_F:
                self.check_before("RT020", self.index.forward(stage, part), action, "which makes what it sends")
            elif action.kind is ActionKind.SEND_B:
                self.check_before("RT020", self.index.backward(stage, part), action, "which makes what it sends")
            producer = self.index.producer(action)
            if producer is None:
                continue
            if self.co_located(stage, producer.stage):
                self.check_before("RT020", producer, action, "which makes its input on the same rank")
            elif lowered:
                kind = ActionKind.RECV_F if action.kind is ActionKind.FORWARD else ActionKind.RECV_B
                self.check_before("RT020", self.index.find(kind, stage, part), action, "which brings its input")

    def check_before(self, code: str, first: PlacedAction | None, then: PlacedAction, what: str) -> None:
        """Report unless `first` is in an earlier cell than `then`, if both share a rank; ignore a missing `first`."""
        if first is None or first.rank != then.rank or first.slot < then.slot:
            return
        order = "overlaps with" if first.slot == then.slot else "comes before"
        self.report(code, f"'{then}' {order} '{first}', {what}", then, [self.note("it is here", first)])

    # messages

    def check_matched(self) -> None:
        """Report RT040 unless each message is sent and received once, and input from another rank is a message."""
        for action in self.table.actions:
            if action.kind in MESSAGES:
                self.check_partner(action)
            else:
                self.check_brought(action)

    def check_partner(self, action: PlacedAction) -> None:
        first = self.index.find(action.kind, action.stage, action.part)
        if first is not None and first is not action:
            self.report("RT040", f"'{action}' happens twice", action, [self.note("first done here", first)])
        elif self.index.partner(action) is None and peer_stage(action) in self.stages:
            verb = "received" if action.kind in SENDS else "sent"
            missing = _partner_text(action)
            rank = self.home[peer_stage(action)]
            self.report(
                "RT040", f"'{action}' on rank {action.rank} is never {verb}: rank {rank} has no '{missing}'", action
            )

    def check_brought(self, action: PlacedAction) -> None:
        producer = self.index.producer(action)
        if producer is None or self.co_located(action.stage, producer.stage):
            return
        forward = action.kind is ActionKind.FORWARD
        send, recv = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
        part, written = action.part, part_text(action.part)
        if self.index.find(send, producer.stage, part) is None and self.index.find(recv, action.stage, part) is None:
            sent, received = f"{producer.stage}{send.value}{written}", f"{action.stage}{recv.value}{written}"
            text = (
                f"'{action}' never gets its input: rank {producer.rank} has no '{sent}', rank {action.rank} "
                f"no '{received}'"
            )
            self.report("RT040", text, action, [self.note("it is made here", producer)])

    def check_message_order(self) -> None:
        """Report RT041 unless, in each direction between two ranks, the k-th receive takes the k-th send."""
        sent: dict[tuple[int, int], list[PlacedAction]] = {}
        received: dict[tuple[int, int], list[PlacedAction]] = {}
        for action in self.table.actions:
            if action.kind in MESSAGES and peer_stage(action) in self.home:
                peer = self.home[peer_stage(action)]
                if action.kind in SENDS:
                    sent.setdefault((action.rank, peer), []).append(action)
                else:
                    received.setdefault((peer, action.rank), []).append(action)
        for pair, sends in sent.items():
            recvs = received.get(pair, [])
            wanted = [self.index.partner(send) for send in sends]
            if len(recvs) != len(sends) or set(map(id, wanted)) != set(map(id, recvs)):
                continue  # something is missing or there twice: RT040
            for number, (send, recv, partner) in enumerate(zip(sends, recvs, wanted, strict=True), 1):
                if partner is not recv:
                    self.report_crossed(number, send, recv)
                    break

    def report_crossed(self, number: int, send: PlacedAction, recv: PlacedAction) -> None:
        text = (
            f"crossed messages from rank {send.rank} to rank {recv.rank}: message {number} is sent by '{send}' "
            f"on rank {send.rank} but received by '{recv}' on rank {recv.rank}"
        )
        way_out = (
            f"receive '{_partner_text(send)}' here, or send '{_partner_text(recv)}' there; a runtime that goes "
            "by order takes "
            "the wrong data without an error"
        )
        self.report("RT041", text, recv, [self.note("the send", send)], way_out)

    # progress

    def check_progress(self) -> None:
        """Report RT042 unless every rank reaches the end of its row, with buffered and with rendezvous sends.

        A rendezvous only adds waits, so a schedule that ends with it ends with buffered sends too.
        """
        circle = waiting_circle(self.index, rendezvous=True)
        if circle is None:
            return
        buffered = waiting_circle(self.index, rendezvous=False)
        circle = buffered or circle
        if not self.table.is_lowered:
            mode = "wherever the messages are put"
        elif buffered is None:
            mode = "with rendezvous sends (a send ends only when its receive is there)"
        else:
            mode = "with buffered sends"
        ranks = ", ".join(str(blocked.at.rank) for blocked in circle)
        text = f"the schedule hangs {mode}: ranks {ranks} wait for each other in a circle"
        notes = [
            self.blocked_note(blocked, after) for blocked, after in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        self.report("RT042", text, circle[0].at, notes)

    def blocked_note(self, blocked: Blocked, after: Blocked) -> Note:
        at, awaits = blocked.at, blocked.awaits
        order = "runs with" if awaits.slot == after.at.slot else "comes after"
        text = f"rank {at.rank} at '{at}' waits for '{awaits}' of rank {awaits.rank}, which {order} its '{after.at}'"
        return Note(text, self.table.locate(at))


_SLICES = {
    ActionKind.FORWARD: "whose keys it attends to",
    ActionKind.BACKWARD: "which adds to the gradients of its keys",
    ActionKind.BACKWARD_INPUT: "which adds to the gradients of its keys",
}
"""Reason why a computation on a slice needs the slice next to it."""


def _partner_text(action: PlacedAction) -> str:
    """Format the other end of a message as it is written in a table."""
    name = action.kind.value
    other = name.replace("SEND", "RECV") if action.kind in SENDS else name.replace("RECV", "SEND")
    return f"{peer_stage(action)}{other}{part_text(action.part)}"
