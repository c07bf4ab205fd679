"""A schedule table of another runtime, held against a plan: what it is the order of, and what of it a module cannot say.

The table has been linted: every chunk is on one rank, every micro-batch runs once, nobody waits forever. A rank of it is a stage here, and
a "stage" a chunk. Everything here raises `DiagnosticError` RT010 at the cell that is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ratrain.ratrain_ir.analysis.actions import COMPUTES, ActionTable, PlacedAction, read_torch_csv
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Order
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Note, fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

_GRADIENT_SIDE = frozenset(
    {
        ActionKind.BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
        ActionKind.SEND_B,
        ActionKind.RECV_B,
    }
)
_IN_ORDER = (
    (
        "forwards",
        frozenset({ActionKind.FORWARD}),
        "number the micro-batches in the order in which the first stage takes them",
    ),
    (
        "input gradients",
        frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT}),
        "place-from-file{... renumber=true} in --passes numbers the micro-batches of backwards anew, in the order of the table",
    ),
    (
        "weight gradients",
        frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT}),
        "put weight halves, and whole backwards, in that order",
    ),
)
"""Kinds of work in which the micro-batches of a chunk ascend, and the way out; a whole backward is of two of them."""


def read_foreign_table(path: str) -> ActionTable:
    """The sound table of a CSV file in PyTorch's format.

    Raises `DiagnosticError` RT002, RT007, or with what `ratrainc lint` says of it.
    """
    table = read_torch_csv(path)
    check_schedule(table)
    return table


def refuse_action(table: ActionTable, action: PlacedAction, text: str, way_out: str, *notes: Note) -> NoReturn:
    """Raise `DiagnosticError` RT010 at the cell of an action."""
    fail("RT010", text, table.locate(action), source=table.text(action), notes=notes, help=way_out)


def shape_of_table(table: ActionTable) -> PipelineShape:
    """The stages, micro-batches, chunks, their layout, and slices of a table."""
    stages = len(table.rows)
    if empty := table.ranks_without_actions:
        first = next(table.actions)
        text = f"rank {empty[0]} runs nothing, but every stage of a plan holds layers"
        refuse_action(table, first, text, "delete its row")
    holders: dict[int, PlacedAction] = {}
    micro_batches = slices = 1
    for action in table.actions:
        holders.setdefault(action.stage, action)
        micro_batches = max(micro_batches, (action.micro_batch or 0) + 1)
        slices = max(slices, (action.slice or 0) + 1)
    chunks = -(-len(holders) // stages)
    strays = {}
    for layout in LAYOUTS:
        shape = PipelineShape(stages, micro_batches, chunks, layout, slices)
        wanted = shape.chunk_stages
        stray = next((chunk for chunk in range(len(wanted)) if not _is_on(holders.get(chunk), wanted[chunk])), None)
        if stray is None:
            return shape
        strays[stray] = wanted[stray], layout
    chunk = max(strays)
    rank, layout = strays[chunk]
    if chunk == len(holders):
        text = f"{len(holders)} stages do not lie on {stages} ranks, as many on each"
        refuse_action(
            table, holders[chunk - 1], text, "a plan gives each rank as many chunks of the model as any other"
        )
    text = f"stage {chunk} is on rank {holders[chunk].rank}, where no layout of chunks puts it"
    loop = f'layout = "loop" puts stage c on rank c mod {stages}, "vee" goes 0..{stages - 1} and back'
    refuse_action(table, holders[chunk], text, f'{loop}; it would be on rank {rank} with layout = "{layout}"')


def _is_on(action: PlacedAction | None, rank: int) -> bool:
    return action is not None and action.rank == rank


def check_against_plan(table: ActionTable, plan: Plan) -> None:
    """Refuse a table of another shape than the plan's, with the keys that would fit."""
    shape, planned = shape_of_table(table), plan.shape
    if shape == planned:
        return
    mine, theirs = shape_keys(shape), shape_keys(planned)
    for keys, others in ((mine, theirs), (theirs, mine)):
        if "slices" in others:
            keys.setdefault("slices", 1)
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    differing += [name for name in theirs if name not in mine]
    first = next(table.actions)
    fail(
        "RT010",
        f"the table has {_words(mine, differing)}, but the plan has {_words(theirs, differing)}",
        table.locate(first),
        source=table.text(first),
        help=f"it fits a plan with {_words(mine, mine)}",
    )


def shape_keys(shape: PipelineShape) -> dict[str, int | str]:
    """The keys of a plan that a shape comes from; where a stage has one chunk there is no layout, where micro-batches are whole no slices."""
    keys: dict[str, int | str] = {"pp": shape.stages, "micro_batches": shape.micro_batches, "chunks": shape.chunks}
    if shape.chunks > 1:
        keys["layout"] = shape.layout
    if shape.slices > 1:
        keys["slices"] = shape.slices
    return keys


def _words(keys: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} = {shown(keys[name])}" for name in names if name in keys)


def check_ascending(table: ActionTable) -> None:
    """Refuse a table in which the micro-batches of a chunk do not ascend in each kind of work.

    Gradients are added up in that order, which decides how they are rounded; losses too.
    """
    for what, kinds, way_out in _IN_ORDER:
        latest: dict[int, PlacedAction] = {}
        for action in table.actions:
            if action.kind not in kinds:
                continue
            before = latest.setdefault(action.stage, action)
            if _place_in_order(before) > _place_in_order(action):
                order = f"the {what} of a stage {_ORDERS[action.slice is not None and what != 'forwards']}: they are added up in it"
                note = Note(f"'{before}' is here", table.locate(before))
                refuse_action(table, action, f"'{action}' comes after '{before}', but {order}", way_out, note)
            latest[action.stage] = action


_ORDERS = (
    "go through the micro-batches in ascending order",
    "go through the micro-batches in ascending, and through the slices of each in descending order",
)


def _place_in_order(action: PlacedAction) -> tuple[int, int]:
    """Slices of a micro-batch go forward in ascending, backward in descending order."""
    number = action.slice or 0
    return _number(action), number if action.kind is ActionKind.FORWARD else -number


def _number(action: PlacedAction) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def renumbered(table: ActionTable) -> ActionTable:
    """The table with the micro-batches of its backwards, and of their messages, numbered in the order in which the first stage takes them.

    Raises `DiagnosticError` RT010 where they ascend already, else with what is wrong with the new table.
    """
    of_first = [a for a in table.actions if a.stage == 0 and a.kind in _IN_ORDER[1][1]]
    number = {old: new for new, old in enumerate(dict.fromkeys(map(_number, of_first)))}
    if all(old == new for old, new in number.items()):
        text = "the backwards ascend already: renumber=true changes nothing"
        refuse_action(table, of_first[0], text, "leave renumber out")
    rows = (
        tuple(
            evolve(action, micro_batch=number[_number(action)]) if action.kind in _GRADIENT_SIDE else action
            for action in row
        )
        for row in table.rows
    )
    changed = ActionTable(tuple(rows), table.source)
    try:
        check_schedule(changed)
    except DiagnosticError as error:
        note = Note("of the table as renumber=true makes it")
        raise DiagnosticError([evolve(item, notes=(*item.notes, note)) for item in error.diagnostics]) from None
    return changed


def orders_of_table(table: ActionTable) -> list[Order]:
    """What each rank computes, in order; of two actions that overlap, the first of the cell is the first."""
    return [[action_of(action) for action in row if action.kind in COMPUTES] for row in table.rows]


def action_of(action: PlacedAction) -> Action:
    """A computation as the generators have it."""
    return Action(action.kind, _number(action), action.stage, action.slice or 0)


def schedule_of(table: ActionTable, plan: Plan) -> str | None:
    """The name of the schedule whose order a table has exactly, the plan's own where it is that; None where it has no name."""
    shape, orders = plan.shape, orders_of_table(table)
    fitting = [name for name, schedule in SCHEDULES.items() if schedule.problem(shape) is None]
    equal = [name for name in fitting if _first_difference(orders, name, shape) is None]
    return plan.schedule if plan.schedule in equal else next(iter(equal), None)


def check_said_schedule(table: ActionTable, plan: Plan) -> None:
    """Refuse a table that has another order than the schedule that the plan names. Raises `DiagnosticError` RT064 at the first such cell."""
    if plan.schedule is None or schedule_of(table, plan) == plan.schedule:
        return
    difference = _first_difference(orders_of_table(table), plan.schedule, plan.shape)
    assert difference is not None  # a plan's own schedule can be made for its shape
    rank, position = difference
    cell = [action for action in table.rows[rank] if action.kind in COMPUTES][position]
    schedule = SCHEDULES[plan.schedule]
    wanted = schedule.actions(plan.shape, rank)[position]
    fail(
        "RT064",
        f"the plan says schedule = {shown(plan.schedule)}, but {schedule.title} has '{wanted.chunk}{wanted.kind.value}"
        f"{wanted.micro_batch}' where rank {rank} of the table has '{cell}'",
        table.locate(cell),
        source=table.text(cell),
        help="leave schedule out of the plan: the order is that of the table",
    )


def _first_difference(orders: Sequence[Order], name: str, shape: PipelineShape) -> tuple[int, int] | None:
    """Rank and position where the orders leave those of a schedule; None where they are the same. Neither is a part of the other."""
    for rank, order in enumerate(orders):
        wanted = SCHEDULES[name].actions(shape, rank)
        if list(order) != list(wanted):
            both = zip(order, wanted, strict=False)
            return rank, next(position for position, (mine, theirs) in enumerate(both) if mine != theirs)
    return None
