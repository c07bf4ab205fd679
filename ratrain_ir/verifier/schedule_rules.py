"""The rules of a table of actions, with the codes of the module verifier.

1. Places: a stage lives on one rank RT027; only neighbours on different ranks exchange messages RT027, RT026.
2. Completeness: every micro-batch's forward and backward (or both its halves) run exactly once on every stage, forward before
   backward, input half before weight half RT030.
   A rank without actions is sound where no other one needs a stage that nobody runs.
3. Handing over: what a stage takes from a neighbour is there before it is used, and made before it is sent RT020.
4. Sharded state: parameters are gathered where they are used RT026, gradients reduced once, after the last backward RT031.
5. Messages: sends and receives match RT040; between two ranks, in each direction, messages are received in the order they are
   sent RT041, because nothing but their order tells them apart.
6. Progress, with buffered and with rendezvous sends RT042; checked where nothing else is wrong.

How many stages and micro-batches there are is what the table names: a stage or a micro-batch that only some part names is
missing from the others. All rules are linear in the number of actions, apart from sorting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import define, field

from ratrain.ratrain_ir.actions import BACKWARDS, COMPUTES, MESSAGES, SENDS, ActionTable, PlacedAction
from ratrain.ratrain_ir.analysis.schedule_progress import ActionIndex, Blocked, peer_stage, waiting_circle
from ratrain.ratrain_ir.diagnostics import Diagnostics, Note
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.verifier.report import MAX_REPORTS

_HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_MAX_RANGES = 6
"""Longer lists of numbers are cut."""


def verify_schedule(table: ActionTable, diagnostics: Diagnostics) -> None:
    """Report everything that is wrong with a schedule."""
    rules = _Rules(table, diagnostics)
    rules.check_places()
    rules.check_complete()
    rules.check_order()
    rules.check_gathered()
    rules.check_reduced()
    if table.is_lowered:
        rules.check_matched()
        rules.check_message_order()
    if not diagnostics.errors:
        rules.check_progress()


def check_schedule(table: ActionTable) -> None:
    """Raise `DiagnosticError` unless a schedule is sound."""
    diagnostics = Diagnostics()
    verify_schedule(table, diagnostics)
    diagnostics.check()


@define(eq=False)
class _Rules:
    table: ActionTable
    diagnostics: Diagnostics
    index: ActionIndex = field(init=False)
    stages: dict[int, list[PlacedAction]] = field(factory=dict)
    """The actions of each stage, rank by rank, in order."""
    home: dict[int, int] = field(factory=dict)
    """The rank of each stage: where it first computes."""
    last_stage: int = 0

    def __attrs_post_init__(self) -> None:
        self.index = ActionIndex(self.table)
        for action in self.table.actions:
            self.stages.setdefault(action.stage, []).append(action)
        for stage, actions in self.stages.items():
            computing = (action for action in actions if action.kind in COMPUTES)
            self.home[stage] = next(computing, actions[0]).rank
        self.last_stage = max(self.stages, default=0)

    def report(
        self, code: str, message: str, action: PlacedAction, notes: Iterable[Note] = (), way_out: str | None = None
    ) -> None:
        if len(self.diagnostics.items) < MAX_REPORTS:
            place, text = self.table.locate(action), self.table.text(action)
            self.diagnostics.error(code, message, place, notes=tuple(notes), help=way_out, source=text)

    def note(self, message: str, action: PlacedAction) -> Note:
        return Note(f"{message}: {_where(action)}", self.table.locate(action))

    def notes_of_empty(self) -> list[Note]:
        """Which ranks run nothing: where a stage is missing, it may be theirs."""
        empty = self.table.ranks_without_actions
        return [Note(f"nothing runs on {_numbers('rank', empty)}")] if empty else []

    def co_located(self, stage: int, other: int) -> bool:
        """Whether two stages share a rank, so that what one makes the other has."""
        return self.home.get(stage) == self.home.get(other)

    # places

    def check_places(self) -> None:
        """RT027: a stage lives on one rank, a message has another end; RT026: stages of one rank need no messages."""
        for stage, actions in self.stages.items():
            stray = next((action for action in actions if action.rank != self.home[stage]), None)
            if stray is not None:
                text = f"{_where(stray)}, but stage {stage} is on rank {self.home[stage]}: a stage lives on one rank"
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

    # completeness

    def check_complete(self) -> None:
        """RT030: every micro-batch runs forward and backward exactly once on every stage."""
        self.check_stages_named()
        self.check_once()
        by_stage: dict[int, set[int]] = {stage: set() for stage in self.stages}
        named: set[int] = set()
        for action in self.table.actions:
            if action.micro_batch is not None:
                named.add(action.micro_batch)
                if action.kind in COMPUTES:
                    by_stage[action.stage].add(action.micro_batch)
        for stage in sorted(by_stage):
            present = by_stage[stage]
            if not present:
                self.report("RT030", f"stage {stage} never runs forward or backward", self.stages[stage][0])
            elif len(present) < len(named):
                text = f"stage {stage} never runs {_numbers('micro-batch', named - present)}, which the schedule names elsewhere"
                self.report("RT030", text, self.stages[stage][0])
            for micro_batch in sorted(present):
                self.check_halves(stage, micro_batch)
        self.check_micro_batches_named(named)

    def check_stages_named(self) -> None:
        for before, after in pairwise([-1, *sorted(self.stages)]):
            if after > before + 1:
                missing = _ranges_text("stage", [(before + 1, after - 1)])
                text = f"no rank runs {missing}, but there is a stage {after}"
                self.report("RT030", text, self.stages[after][0], self.notes_of_empty())

    def check_micro_batches_named(self, named: set[int]) -> None:
        ordered = sorted(named)
        gaps = [(a + 1, b - 1) for a, b in pairwise([-1, *ordered]) if b > a + 1]
        if gaps:
            last = ordered[-1]
            example = next(action for action in self.table.actions if action.micro_batch == last)
            text = f"no stage runs {_ranges_text('micro-batch', gaps)}, but there is a micro-batch {last}"
            self.report("RT030", text, example)

    def check_once(self) -> None:
        for action in self.table.actions:
            if action.kind in COMPUTES:
                first = self.index.find(action.kind, action.stage, action.micro_batch)
                if first is not None and first is not action:
                    self.report("RT030", f"'{action}' happens twice", action, [self.note("first done here", first)])

    def check_halves(self, stage: int, m: int) -> None:
        """A forward, and a backward in one piece or in both halves."""
        forward = self.index.forward(stage, m)
        whole = self.index.find(ActionKind.BACKWARD, stage, m)
        made, weight = (self.index.find(kind, stage, m) for kind in _HALVES)
        if forward is None:
            other = whole or made or weight
            assert other is not None
            self.report("RT030", f"'{other}' has no forward: '{stage}F{m}' is missing", other)
        half = made or weight
        if whole is not None:
            if half is not None:
                notes = [self.note("the whole backward", whole)]
                self.report("RT030", f"'{half}' repeats what '{whole}' does", half, notes)
        elif made is not None and weight is None:
            self.report("RT030", f"'{made}' has no weight half: '{stage}W{m}' is missing", made)
        elif weight is not None and made is None:
            self.report("RT030", f"'{weight}' has no input half: '{stage}I{m}' is missing", weight)
        elif half is None and forward is not None:
            text = f"'{forward}' has no backward: '{stage}B{m}' (or '{stage}I{m}' and '{stage}W{m}') is missing"
            self.report("RT030", text, forward)

    # order within a rank

    def check_order(self) -> None:
        """RT030: forward before backward, input half before weight half; RT020: values are there when they are used."""
        lowered = self.table.is_lowered
        for action in self.table.actions:
            stage, m = action.stage, action.micro_batch
            if action.kind in BACKWARDS:
                self.check_before("RT030", self.index.forward(stage, m), action, "its forward")
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                made = self.index.find(ActionKind.BACKWARD_INPUT, stage, m)
                self.check_before("RT030", made, action, "its input half")
            elif action.kind is ActionKind.SEND_F:
                self.check_before("RT020", self.index.forward(stage, m), action, "which makes what it sends")
            elif action.kind is ActionKind.SEND_B:
                self.check_before("RT020", self.index.backward(stage, m), action, "which makes what it sends")
            producer = self.index.producer(action)
            if producer is None:
                continue
            if self.co_located(stage, producer.stage):
                self.check_before("RT020", producer, action, "which makes its input on the same rank")
            elif lowered:
                kind = ActionKind.RECV_F if action.kind is ActionKind.FORWARD else ActionKind.RECV_B
                self.check_before("RT020", self.index.find(kind, stage, m), action, "which brings its input")

    def check_before(self, code: str, first: PlacedAction | None, then: PlacedAction, what: str) -> None:
        """An action of the same rank must stand in an earlier cell; where it is missing another rule says so."""
        if first is None or first.rank != then.rank or first.slot < then.slot:
            return
        order = "overlaps with" if first.slot == then.slot else "comes before"
        self.report(code, f"'{then}' {order} '{first}', {what}", then, [self.note("it is here", first)])

    # sharded state

    def check_gathered(self) -> None:
        """RT026: a stage that is ever gathered or dropped is gathered wherever it needs its parameters, and dropped at the end.

        The weight half of a backward needs no parameters.
        """
        marks = {ActionKind.UNSHARD, ActionKind.RESHARD}
        for actions in self.stages.values():
            if any(action.kind in marks for action in actions):
                self.check_gathered_stage(actions)

    def check_gathered_stage(self, actions: Sequence[PlacedAction]) -> None:
        stage = actions[0].stage
        gathered: PlacedAction | None = None
        said = False
        for action in actions:
            if action.kind is ActionKind.UNSHARD:
                if gathered is not None:
                    notes = [self.note("gathered here", gathered)]
                    self.report("RT026", f"'{action}': stage {stage} is gathered already", action, notes)
                gathered, said = action, False
            elif action.kind is ActionKind.RESHARD:
                if gathered is None:
                    self.report("RT026", f"'{action}': stage {stage} is not gathered here", action)
                gathered = None
            elif action.kind in COMPUTES and action.kind is not ActionKind.BACKWARD_WEIGHT and gathered is None:
                if not said:
                    way_out = f"put '{stage}UNSHARD' before it"
                    self.report(
                        "RT026",
                        f"'{action}' needs the parameters of stage {stage}, which are not gathered here",
                        action,
                        (),
                        way_out,
                    )
                said = True
        if gathered is not None:
            text = f"'{gathered}' is never undone: the next step would gather stage {stage} again"
            self.report("RT026", text, gathered, (), f"end the row with '{stage}RESHARD'")

    def check_reduced(self) -> None:
        """RT031: where any stage reduces its gradients, every stage does so once, after its last backward."""
        first = next((a for a in self.table.actions if a.kind is ActionKind.REDUCE_GRAD), None)
        if first is None:
            return
        for stage, actions in self.stages.items():
            reduction: PlacedAction | None = None
            late: PlacedAction | None = None
            for action in actions:
                if action.kind is ActionKind.REDUCE_GRAD:
                    if reduction is not None:
                        notes = [self.note("first done here", reduction)]
                        self.report("RT031", f"'{action}' happens twice", action, notes)
                    reduction = reduction or action
                elif action.kind in {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT} and reduction is not None:
                    late = late or action
            if reduction is None:
                text = f"the gradients of stage {stage} are never reduced: '{stage}REDUCE_GRAD' is missing"
                self.report("RT031", text, actions[-1], [self.note("another stage does it", first)])
            elif late is not None:
                text = f"'{reduction}' comes before '{late}', whose gradients it leaves out"
                self.report("RT031", text, reduction, [self.note("it is here", late)])

    # messages

    def check_matched(self) -> None:
        """RT040: each message is sent once and received once, and what comes from another rank is a message."""
        for action in self.table.actions:
            if action.kind in MESSAGES:
                self.check_partner(action)
            else:
                self.check_brought(action)

    def check_partner(self, action: PlacedAction) -> None:
        first = self.index.find(action.kind, action.stage, action.micro_batch)
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
        m = action.micro_batch
        if self.index.find(send, producer.stage, m) is None and self.index.find(recv, action.stage, m) is None:
            sent, received = f"{producer.stage}{send.value}{m}", f"{action.stage}{recv.value}{m}"
            text = f"'{action}' never gets its input: rank {producer.rank} has no '{sent}', rank {action.rank} no '{received}'"
            self.report("RT040", text, action, [self.note("it is made here", producer)])

    def check_message_order(self) -> None:
        """RT041: in each direction between two ranks, the k-th receive takes the k-th message sent."""
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
            f"receive '{_partner_text(send)}' here, or send '{_partner_text(recv)}' there; a runtime that goes by order takes "
            "the wrong data without an error"
        )
        self.report("RT041", text, recv, [self.note("the send", send)], way_out)

    # progress

    def check_progress(self) -> None:
        """RT042: every rank gets to the end of its row, with buffered and with rendezvous sends.

        A rendezvous only adds waiting, so a schedule that ends with it ends with buffered sends too.
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


def _where(action: PlacedAction) -> str:
    return f"'{action}' on rank {action.rank}"


def _partner_text(action: PlacedAction) -> str:
    """The other end of a message, as it is written."""
    name = action.kind.value
    other = name.replace("SEND", "RECV") if action.kind in SENDS else name.replace("RECV", "SEND")
    return f"{peer_stage(action)}{other}{action.micro_batch}"


def _numbers(what: str, numbers: Iterable[int]) -> str:
    """Numbers in words, neighbours joined: `micro-batches 2, 4 to 7`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return _ranges_text(what, ranges)


def _ranges_text(what: str, ranges: Sequence[tuple[int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"{what} {ranges[0][0]}"
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    shown = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges[:_MAX_RANGES])
    return f"{plural} {shown}" + (", ..." if len(ranges) > _MAX_RANGES else "")
