"""Layer 4: messages and collectives match, and the program ends under every timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.progress import Event, blocking_cycle, channels, meeting_stages
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import Op, Piece, piece_text
from ratrain.ratrain_ir.ops.collectives import AllReduce, AllReduceScalar
from ratrain.ratrain_ir.ops.compute import Forward, InputGradientOp
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import GuestOp, MessageOp
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.support.diagnostics import Location, Note

if TYPE_CHECKING:
    from ratrain.ratrain_ir.verifier.report import Reporter


def check_communication(module: Module, report: Reporter) -> None:
    """Run all rules of this layer."""
    check_channels(module, report)
    check_collectives(module, report)
    if module.level is Level.DATAFLOW or report.diagnostics.errors:
        return
    check_schedule_claim(module, report)
    check_progress(module, report)


def check_channels(module: Module, report: Reporter) -> None:
    """RT040, RT041: the k-th receive of a channel takes the k-th message sent."""
    for hop, (sends, recvs) in channels(module).items():
        sent = [_op(module, place) for place in sends]
        received = [_op(module, place) for place in recvs]
        source, destination = hop.source, hop.target
        name = f"{hop.channel.payload.value} from @{source} to @{destination}"
        if not _check_matched(name, sent, received, module, report, source, destination):
            continue
        for send, recv in zip(sent, received, strict=True):
            if _carried(send) != _carried(recv):
                note = report.note(f"@{source} sends here", send)
                got, given = (_words_of(_carried(op)) for op in (recv, send))
                text = f"crossed messages, {name}: @{destination} receives {got} where @{source} sends {given}"
                report.at_op("RT041", text, module.stages[destination], recv, notes=[note])
                break
            if isinstance(send, GuestOp) and not _same_tensors(send, recv, module.stages[destination], report):
                break


_Carried = tuple[Block | None, Piece]
"""What a message is of; the block where it says one."""


def _carried(op: MessageOp) -> _Carried:
    return (op.block if isinstance(op, GuestOp) else None), piece_of(op)


def _words_of(carried: _Carried) -> str:
    block, piece = carried
    return piece_text(piece) if block is None else f"{block} {piece_text(piece)}"


def _same_tensors(send: MessageOp, recv: MessageOp, stage: Stage, report: Reporter) -> bool:
    """RT041: what is received has the types of what is sent, one by one."""
    given, got = ([str(tensor.type) for tensor in tensors] for tensors in (send.reads, recv.writes))
    if given == got:
        return True
    note = report.note(f"sent here: {', '.join(given)}", send)
    report.at_op("RT041", f"'{recv!r}' receives {', '.join(got)}, which is not what is sent", stage, recv, notes=[note])
    return False


def _check_matched(
    name: str,
    sent: Sequence[MessageOp],
    received: Sequence[MessageOp],
    module: Module,
    report: Reporter,
    source: int,
    destination: int,
) -> bool:
    """RT040: each message is sent once and received once."""
    sound = True
    out, into = set(map(_carried, sent)), set(map(_carried, received))
    for ops, others, stage, missing in (
        (sent, into, source, "is never received"),
        (received, out, destination, "is never sent"),
    ):
        seen: set[_Carried] = set()
        for op in ops:
            carried = _carried(op)
            if carried not in others:
                report.at_op("RT040", f"the {name} of {_words_of(carried)} {missing}", module.stages[stage], op)
                sound = False
            if carried in seen:
                text = f"'{op!r}' happens twice"
                report.at_op("RT040", text, module.stages[stage], op)
                sound = False
            seen.add(carried)
    return sound


def _op(module: Module, place: tuple[int, int]) -> MessageOp:
    op = module.stages[place[0]].ops[place[1]]
    assert isinstance(op, MessageOp)
    return op


def check_collectives(module: Module, report: Reporter) -> None:
    """RT043: every member of a group sees the same collectives in the same order."""
    topology = module.topology
    orders: dict[tuple[int, ...], dict[int, list[Op]]] = {}
    for stage in module.stages:
        for op in stage.ops:
            group = meeting_stages(op, stage, topology)
            if group:
                orders.setdefault(group, {}).setdefault(stage.index, []).append(op)
    for group, by_stage in orders.items():
        reference = by_stage.get(group[0], [])
        for member in group[1:]:
            _compare_orders(module, group[0], reference, member, by_stage.get(member, []), report)


def _compare_orders(
    module: Module, first: int, reference: list[Op], member: int, ops: list[Op], report: Reporter
) -> None:
    for index in range(max(len(reference), len(ops))):
        mine = reference[index] if index < len(reference) else None
        theirs = ops[index] if index < len(ops) else None
        if mine is None or theirs is None or collective_name(mine) != collective_name(theirs):
            op, stage, other = (theirs, member, mine) if theirs is not None else (mine, first, None)
            assert op is not None
            missing = f"@{first if theirs is not None else member}"
            if other is None:
                text = f"'{op!r}' is collective {index} of its group on @{stage}, but {missing} has none"
                report.at_op("RT043", text, module.stages[stage], op)
            else:
                note = report.note(f"{missing} has this one there", other)
                text = f"'{op!r}' is collective {index} of its group on @{stage}, {missing} has another"
                report.at_op("RT043", text, module.stages[stage], op, notes=[note])
            return


def collective_name(op: Op) -> str:
    """What must be equal on all members: the kind of collective, and what it combines."""
    assert isinstance(op, AllReduce | AllReduceScalar)
    quantity = op.quantity.value if isinstance(op, AllReduceScalar) else "gradient"
    return f"{op.keyword} {quantity} {op.group.value}"


def check_schedule_claim(module: Module, report: Reporter) -> None:
    """RT044: the order is that of the schedule the plan names; a plan that names none claims nothing."""
    for stage in module.stages:
        check_stage_claim(module, stage, report)


def check_stage_claim(module: Module, stage: Stage, report: Reporter) -> None:
    """RT044 of one stage; of its ops, forwards and backwards count."""
    schedule = module.plan.schedule
    if schedule is not None and _keeps_in_flight(module, stage, schedule, report):
        _check_order(module, stage, schedule, report)


def _keeps_in_flight(module: Module, stage: Stage, schedule: str, report: Reporter) -> bool:
    """At most as many passes in flight as the schedule has, under 1F1B and ZB-H1 min(P - s, M).

    A micro-batch's pass through a chunk is in flight until the gradient of the chunk's input is made; a weight half may come later.
    """
    chunk_of = module.topology.chunk_of
    firsts = {blocks[0] for blocks in module.topology.chunk_blocks}
    bound = most_held(schedule, module.plan.shape, stage.index)
    started: set[tuple[int, int, int]] = set()
    for op in stage.ops:
        if type(op) is Forward:
            started.add((op.micro_batch, op.slice or 0, chunk_of[op.block]))
            if len(started) > bound:
                _report_in_flight(module, stage, op, started, bound, schedule, report)
                return False
        elif isinstance(op, InputGradientOp) and op.block in firsts:
            started.discard((op.micro_batch, op.slice or 0, chunk_of[op.block]))
    return True


def _check_order(module: Module, stage: Stage, schedule: str, report: Reporter) -> None:
    """Forwards and backwards of whole chunks come in the order of the schedule."""
    if schedule == "zb-h1":
        _check_zb_h1(module, stage, report)
        return
    wanted = [
        part for action in SCHEDULES[schedule].actions(module.plan.shape, stage.index) for part in _halves(action)
    ]
    position = 0
    for op, action in chunk_actions(module, stage):
        parts = _halves(action)
        if tuple(wanted[position : position + len(parts)]) != parts:
            expected = _words(module, wanted[position]) if position < len(wanted) else "nothing more"
            _report_order(stage, op, schedule, expected, report)
            return
        position += len(parts)


def _halves(action: Action) -> tuple[Action, ...]:
    """A backward is its two halves, one right after the other."""
    if action.kind is not ActionKind.BACKWARD:
        return (action,)
    halves = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
    return tuple([Action(kind, action.micro_batch, action.chunk, action.slice) for kind in halves])


def _check_zb_h1(module: Module, stage: Stage, report: Reporter) -> None:
    """Weight halves are delayed by the stage's index at most.

    Fewer micro-batches, or backwards that are whole, are ZB-H1 too: a stage delays what its memory allows.
    """
    wanted = iter(SCHEDULES["1f1b"].actions(module.plan.shape, stage.index))
    waiting = 0
    for op, action in chunk_actions(module, stage):
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            waiting -= 1
            continue
        expected = next(wanted)
        is_split = action.kind is ActionKind.BACKWARD_INPUT
        if action != (evolve(expected, kind=action.kind) if is_split else expected) or (
            is_split and expected.kind is not ActionKind.BACKWARD
        ):
            wrong = _words(module, expected)
        elif waiting > stage.index:
            wrong = f"done the weight halves of all but {stage.index} micro-batches"
        else:
            waiting += is_split
            continue
        _report_order(stage, op, "zb-h1", wrong, report)
        return


def _words(module: Module, action: Action) -> str:
    chunk = f" in chunk c{action.chunk}" if module.topology.has_several_chunks else ""
    number = f" s{action.slice}" if module.plan.slices else ""
    return f"the {_NAMES[action.kind]} of m{action.micro_batch}{number}{chunk}"


_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward",
    ActionKind.BACKWARD_WEIGHT: "weight half",
}


def _report_order(stage: Stage, op: Op, schedule: str, wrong: str, report: Reporter) -> None:
    name = SCHEDULES[schedule].title
    text = f"stage @{stage.index} is not in the order of {name}, which has {wrong} where this has '{op!r}'"
    report.at_op("RT044", text, stage, op, help=_OWN_ORDER)


_OWN_ORDER = "an order of its own has schedule = none in the plan's line of the module's header"


def _report_in_flight(
    module: Module,
    stage: Stage,
    op: Op,
    started: set[tuple[int, int, int]],
    bound: int,
    schedule: str,
    report: Reporter,
) -> None:
    several, sliced = module.topology.has_several_chunks, bool(module.plan.slices)
    what = "passes" if several else "slices" if sliced else "micro-batches"
    names = ", ".join(
        f"m{m}" + (f" s{number}" if sliced else "") + (f" in c{chunk}" if several else "")
        for m, number, chunk in sorted(started)
    )
    title = SCHEDULES[schedule].title
    text = f"{len(started)} {what} in flight ({names}), but {title} allows {bound} on stage @{stage.index}"
    report.at_op("RT044", text, stage, op, help=_OWN_ORDER)


def check_progress(module: Module, report: Reporter) -> None:
    """RT042: no cycle of waiting, with buffered and with rendezvous sends; the cycle is the counterexample.

    A rendezvous only adds waits, so a program that ends with it ends with buffered sends too.
    """
    cycle = blocking_cycle(module, rendezvous=True, numbers=report.numbers)
    if cycle is None:
        return
    buffered = blocking_cycle(module, rendezvous=False, numbers=report.numbers)
    mode = "rendezvous sends" if buffered is None else "buffered sends"
    cycle = buffered or cycle
    notes = [Note(_event(module, event), _place(module, event)) for event in cycle]
    first = cycle[0]
    stage = module.stages[first.stage]
    text = f"the program hangs with {mode}: each of these {len(cycle)} ops waits for the next, the last for the first"
    report.at_op("RT042", text, stage, stage.ops[first.position], notes=notes)


def _event(module: Module, event: Event) -> str:
    op = module.stages[event.stage].ops[event.position]
    step = "" if event.step == 0 else " of the next step"
    return f"stage @{event.stage} '{op!r}'{step} ({op.engine.value} engine)"


def _place(module: Module, event: Event) -> Location | None:
    op = module.stages[event.stage].ops[event.position]
    return module.source.locate(op.line, op.keyword) if module.source else None
