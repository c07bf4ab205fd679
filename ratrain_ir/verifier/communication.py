"""Layer 4: messages and collectives match, and the program ends under every timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.progress import Event, blocking_cycle, channels, meeting_stages
from ratrain.ratrain_ir.diagnostics import Location, Note
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import (
    AllReduce,
    AllReduceScalar,
    BackwardInput,
    BackwardWeight,
    Forward,
    InputGradientOp,
    Op,
    Recv,
    Send,
)
from ratrain.ratrain_ir.schedules import SCHEDULES, ActionKind, micro_batches_in_flight

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
            if send.micro_batch != recv.micro_batch:
                note = report.note(f"@{source} sends here", send)
                text = f"crossed messages, {name}: @{destination} receives m{recv.micro_batch} where @{source} sends m{send.micro_batch}"
                report.at_op("RT041", text, module.stages[destination], recv, notes=[note])
                break


def _check_matched(
    name: str,
    sent: Sequence[Send | Recv],
    received: Sequence[Send | Recv],
    module: Module,
    report: Reporter,
    source: int,
    destination: int,
) -> bool:
    """RT040: each message is sent once and received once."""
    sound = True
    out, into = {op.micro_batch for op in sent}, {op.micro_batch for op in received}
    for ops, others, stage, missing in (
        (sent, into, source, "is never received"),
        (received, out, destination, "is never sent"),
    ):
        seen: set[int] = set()
        for op in ops:
            if op.micro_batch not in others:
                report.at_op("RT040", f"the {name} of m{op.micro_batch} {missing}", module.stages[stage], op)
                sound = False
            if op.micro_batch in seen:
                text = f"'{op!r}' happens twice"
                report.at_op("RT040", text, module.stages[stage], op)
                sound = False
            seen.add(op.micro_batch)
    return sound


def _op(module: Module, place: tuple[int, int]) -> Send | Recv:
    op = module.stages[place[0]].ops[place[1]]
    assert isinstance(op, Send | Recv)
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
        if mine is None or theirs is None or _collective_name(mine) != _collective_name(theirs):
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


def _collective_name(op: Op) -> str:
    """What must be equal on all members: the kind of collective, and what it combines."""
    assert isinstance(op, AllReduce | AllReduceScalar)
    quantity = op.quantity.value if isinstance(op, AllReduceScalar) else "gradient"
    return f"{op.keyword} {quantity} {op.group.value}"


def check_schedule_claim(module: Module, report: Reporter) -> None:
    """RT044: the order is that of the schedule the plan names; a plan that names none claims nothing."""
    schedule = module.plan.schedule
    if schedule is not None:
        for stage in module.stages:
            if _keeps_in_flight(module, stage, schedule, report):
                _check_order(module, stage, schedule, report)


def _keeps_in_flight(module: Module, stage: Stage, schedule: str, report: Reporter) -> bool:
    """At most as many micro-batches in flight as the schedule claims, under 1F1B and ZB-H1 min(P - s, M).

    A micro-batch is in flight until the gradient of the stage's input is made; a weight half may come later.
    """
    plan = module.plan
    blocks = module.topology.stage_blocks[stage.index]
    bound = micro_batches_in_flight(schedule, plan.pp, plan.micro_batches, stage.index)
    started: set[int] = set()
    for op in stage.ops:
        if type(op) is Forward:
            started.add(op.micro_batch)
            if len(started) > bound:
                _report_in_flight(stage, op, started, bound, schedule, report)
                return False
        elif isinstance(op, InputGradientOp) and op.block is blocks[0]:
            started.discard(op.micro_batch)
    return True


def _check_order(module: Module, stage: Stage, schedule: str, report: Reporter) -> None:
    """Forwards and backwards of the whole stage come in the order of the schedule.

    Only ZB-H1 delays weight halves, by the stage's index at most; fewer micro-batches, or backwards that are whole, are ZB-H1 too: a
    stage delays what its memory allows.
    """
    plan = module.plan
    blocks = module.topology.stage_blocks[stage.index]
    is_zb = schedule == "zb-h1"
    wanted = iter(SCHEDULES["1f1b" if is_zb else schedule].actions(plan.pp, plan.micro_batches, stage.index))
    most_waiting = stage.index if is_zb else 0
    waiting = 0
    for op in stage.ops:
        if type(op) is BackwardWeight and op.block is blocks[0]:
            waiting -= 1
        elif (type(op) is Forward and op.block is blocks[-1]) or (
            isinstance(op, InputGradientOp) and op.block is blocks[0]
        ):
            action = next(wanted)
            kind = ActionKind.FORWARD if type(op) is Forward else ActionKind.BACKWARD
            if (kind, op.micro_batch) != (action.kind, action.micro_batch):
                wrong = f"the {action.kind.name.lower()} of m{action.micro_batch}"
            elif waiting > most_waiting:
                wrong = f"done the weight halves of all but {most_waiting} micro-batches"
            else:
                waiting += type(op) is BackwardInput
                continue
            name = _SCHEDULE_NAMES[schedule]
            text = f"stage @{stage.index} is not in the order of {name}, which has {wrong} where this has '{op!r}'"
            report.at_op("RT044", text, stage, op, help=_OWN_ORDER)
            return


_OWN_ORDER = "an order of its own has schedule = none in the plan's line of the module's header"
_SCHEDULE_NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "zb-h1": "ZB-H1"}


def _report_in_flight(stage: Stage, op: Op, started: set[int], bound: int, schedule: str, report: Reporter) -> None:
    names = ", ".join(f"m{m}" for m in sorted(started))
    text = f"{len(started)} micro-batches in flight ({names}), but {_SCHEDULE_NAMES[schedule]} allows {bound} on stage @{stage.index}"
    report.at_op("RT044", text, stage, op, help=_OWN_ORDER)


def check_progress(module: Module, report: Reporter) -> None:
    """RT042: no cycle of waiting, with buffered and with rendezvous sends; the cycle is the counterexample.

    A rendezvous only adds waits, so a program that ends with it ends with buffered sends too.
    """
    cycle = blocking_cycle(module, rendezvous=True)
    if cycle is None:
        return
    buffered = blocking_cycle(module, rendezvous=False)
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
