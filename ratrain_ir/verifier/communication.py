"""Layer 4: messages and collectives match, and the program ends under every timing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.columns import FoundError
from ratrain.ratrain_ir.analysis.progress import Event, cycle_of
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import Op, piece_text
from ratrain.ratrain_ir.ops.compute import Forward, InputGradientOp
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.support.diagnostics import Location, Note

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop
    from ratrain.ratrain_ir.verifier.reporter import Reporter
    from ratrain.ratrain_ir.verifier.stage_ends import Message, StageEnds


def check_communication(module: Module, report: Reporter, ends: Sequence[StageEnds], *, claimed: bool = False) -> None:
    """Run all rules of this layer.

    `claimed` says that each stage is known to have the order of its schedule (`check_stage_claim`).
    """
    check_channels(module, ends, report)
    check_collectives(module, ends, report)
    if module.level is Level.DATAFLOW or report.diagnostics.errors:
        return
    for stage in () if claimed else module.stages:
        check_stage_claim(module, stage, report)
    check_progress(module, ends, report)


def _op(module: Module, stage: int, position: int) -> Op:
    """Return an op, for its text. Raises `FoundError` if the ops of the module were not made."""
    ops = module.stages[stage].ops
    if not ops:
        raise FoundError
    return ops[position]


def check_channels(module: Module, ends: Sequence[StageEnds], report: Reporter) -> None:
    """Report RT040 or RT041 unless the k-th receive of a channel takes the k-th message sent."""
    sent = {hop: messages for stage in ends for hop, messages in stage.sent.items()}
    received = {hop: messages for stage in ends for hop, messages in stage.received.items()}
    for hop in sorted(sent.keys() | received.keys(), key=lambda hop: _first_op(hop, ends)):
        _check_channel(module, hop, sent.get(hop, []), received.get(hop, []), ends, report)


def _first_op(hop: Hop, ends: Sequence[StageEnds]) -> tuple[int, int]:
    """Return stage and position of the first op of a channel; channels are checked in this order."""
    places = (ends[hop.source].events.sends.get(hop), ends[hop.target].events.recvs.get(hop))
    stages = (hop.source, hop.target)
    return min((stage, int(at[0])) for stage, at in zip(stages, places, strict=True) if at is not None)


def _check_channel(
    module: Module,
    hop: Hop,
    sent: Sequence[Message],
    received: Sequence[Message],
    ends: Sequence[StageEnds],
    report: Reporter,
) -> None:
    # The common case: the same messages in the same order, each once.
    if sent == received and len({message.carried for message in sent}) == len(sent):
        return
    source, target = module.stages[hop.source], module.stages[hop.target]
    sends, recvs = (
        [_op(module, stage, at) for at in places.get(hop, _NOWHERE).tolist()]
        for stage, places in ((hop.source, ends[hop.source].events.sends), (hop.target, ends[hop.target].events.recvs))
    )
    name = f"{hop.channel.payload.value} from @{source.index} to @{target.index}"
    out, into = ({message.carried for message in messages} for messages in (sent, received))
    sound = _check_once(name, sent, sends, source, into, "is never received", report)
    sound = _check_once(name, received, recvs, target, out, "is never sent", report) and sound
    if not sound:
        return
    for given, got, send, recv in zip(sent, received, sends, recvs, strict=True):
        if given.carried != got.carried:
            note = report.note(f"@{source.index} sends here", send)
            text = (
                f"crossed messages, {name}: @{target.index} receives {_words_of(got)} where @{source.index} sends "
                f"{_words_of(given)}"
            )
            report.at_op("RT041", text, target, recv, notes=[note])
            return
        if given.types != got.types:
            note = report.note(f"sent here: {', '.join(given.types)}", send)
            text = f"'{recv!r}' receives {', '.join(got.types)}, which is not what is sent"
            report.at_op("RT041", text, target, recv, notes=[note])
            return


_NOWHERE = np.zeros(0, np.int64)


def _words_of(message: Message) -> str:
    piece = piece_text(message.piece)
    return piece if message.block is None else f"{message.block} {piece}"


def _check_once(
    name: str,
    messages: Sequence[Message],
    ops: Sequence[Op],
    stage: Stage,
    others: Collection[object],
    missing: str,
    report: Reporter,
) -> bool:
    """Report RT040 unless each message is sent once and received once; return True if nothing is reported."""
    sound = True
    seen: set[object] = set()
    for message, op in zip(messages, ops, strict=True):
        if message.carried not in others:
            report.at_op("RT040", f"the {name} of {_words_of(message)} {missing}", stage, op)
            sound = False
        if message.carried in seen:
            report.at_op("RT040", f"'{op!r}' happens twice", stage, op)
            sound = False
        seen.add(message.carried)
    return sound


def check_collectives(module: Module, ends: Sequence[StageEnds], report: Reporter) -> None:
    """Report RT043 unless every member of a group has the same collectives in the same order."""
    for group in dict.fromkeys(group for stage in ends for group in stage.met):
        reference = ends[group[0]].met.get(group, [])
        for member in group[1:]:
            names = ends[member].met.get(group, [])
            if names != reference:
                _report_collective(module, group, reference, member, names, ends, report)


def _report_collective(
    module: Module,
    group: tuple[int, ...],
    reference: Sequence[str],
    member: int,
    names: Sequence[str],
    ends: Sequence[StageEnds],
    report: Reporter,
) -> None:
    """Report the first collective that one stage has and another does not have at that place."""
    index = next(k for k, (mine, theirs) in enumerate(zip_longest(reference, names)) if mine != theirs)
    stage, missing = (member, group[0]) if index < len(names) else (group[0], member)
    op, other = (_collective(module, group, each, index, ends) for each in (stage, missing))
    assert op is not None
    if other is None:
        text = f"'{op!r}' is collective {index} of its group on @{stage}, but @{missing} has none"
        report.at_op("RT043", text, module.stages[stage], op)
    else:
        note = report.note(f"@{missing} has this one there", other)
        text = f"'{op!r}' is collective {index} of its group on @{stage}, @{missing} has another"
        report.at_op("RT043", text, module.stages[stage], op, notes=[note])


def _collective(module: Module, group: tuple[int, ...], stage: int, index: int, ends: Sequence[StageEnds]) -> Op | None:
    places = ends[stage].events.meetings.get(group, _NOWHERE)
    return _op(module, stage, int(places[index])) if index < len(places) else None


def check_stage_claim(module: Module, stage: Stage, report: Reporter) -> None:
    """Report RT044 unless the order of the stage is that of the schedule which the plan names.

    Without a name nothing is claimed. Only forwards and backwards count.
    """
    schedule = module.plan.schedule
    if schedule is not None and _keeps_in_flight(module, stage, schedule, report):
        _check_order(module, stage, schedule, report)


def _keeps_in_flight(module: Module, stage: Stage, schedule: str, report: Reporter) -> bool:
    """Report a stage that has more passes in flight than its schedule allows; return True if it has not.

    A pass of a micro-batch through a chunk with a backward is in flight until the gradient of the chunk's input is
    made; a weight half may come later. Under 1F1B and ZB-H1 the bound is min(P - s, M).
    """
    topology = module.topology
    chunk_of, firsts = topology.chunk_of, topology.backward_ends
    bound = most_held(schedule, module.topology.shape, stage.index)
    started: set[tuple[int, int, int]] = set()
    for op in stage.ops:
        if type(op) is Forward and chunk_of[op.block] >= topology.forward_only:
            started.add((op.micro_batch, op.slice or 0, chunk_of[op.block]))
            if len(started) > bound:
                _report_in_flight(module, stage, op, started, bound, schedule, report)
                return False
        elif isinstance(op, InputGradientOp) and op.block in firsts:
            started.discard((op.micro_batch, op.slice or 0, chunk_of[op.block]))
    return True


def _check_order(module: Module, stage: Stage, schedule: str, report: Reporter) -> None:
    """Check that forwards and backwards of whole chunks are in the order of the schedule."""
    if schedule == "zb-h1":
        _check_zb_h1(module, stage, report)
        return
    wanted = [
        part for action in SCHEDULES[schedule].order(module.topology.shape, stage.index) for part in _halves(action)
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
    """Split a whole backward into its two halves, one right after the other."""
    if action.kind is not ActionKind.BACKWARD:
        return (action,)
    halves = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
    return tuple([Action(kind, action.micro_batch, action.chunk, action.slice) for kind in halves])


def _check_zb_h1(module: Module, stage: Stage, report: Reporter) -> None:
    """Check the order of ZB-H1: that of 1F1B, with weight halves delayed by at most the stage's index.

    Smaller delays and whole backwards are ZB-H1 too, because a stage delays as much as its memory allows.
    """
    wanted = iter(SCHEDULES["1f1b"].order(module.topology.shape, stage.index))
    # Weight halves whose input half is done.
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


def check_progress(module: Module, ends: Sequence[StageEnds], report: Reporter) -> None:
    """Report RT042 with a cycle of waiting, if there is one with buffered or with rendezvous sends.

    A rendezvous only adds waits, so a program that ends with it ends with buffered sends too.
    """
    events = [stage.events for stage in ends]
    cycle = cycle_of(events, rendezvous=True)
    if cycle is None:
        return
    buffered = cycle_of(events, rendezvous=False)
    mode = "rendezvous sends" if buffered is None else "buffered sends"
    cycle = buffered or cycle
    notes = [Note(_event(module, event), _place(module, event)) for event in cycle]
    first = cycle[0]
    stage = module.stages[first.stage]
    text = f"the program hangs with {mode}: each of these {len(cycle)} ops waits for the next, the last for the first"
    report.at_op("RT042", text, stage, _op(module, first.stage, first.position), notes=notes)


def _event(module: Module, event: Event) -> str:
    op = _op(module, event.stage, event.position)
    step = "" if event.step == 0 else " of the next step"
    return f"stage @{event.stage} '{op!r}'{step} ({op.engine.value} engine)"


def _place(module: Module, event: Event) -> Location | None:
    op = _op(module, event.stage, event.position)
    return module.source.locate(op.line, op.keyword) if module.source else None
