"""Check of another runtime's schedule table against a plan, and the orders that it gives.

The table has passed the schedule rules: every chunk is on one rank, every micro-batch runs once, nobody waits forever.
A rank of the table is a stage here, and a "stage" of it is a chunk. Every refusal is a `DiagnosticError` RT010 at the
cell at fault, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ratrain.ratrain_ir.analysis.actions import (
    BACKWARDS,
    COMPUTES,
    ActionTable,
    PlacedAction,
    first_with_backward,
    read_torch_csv,
)
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
"""Actions that `renumbered` renumbers: backwards and their messages."""
_IN_ORDER = (
    (
        "forwards",
        frozenset({ActionKind.FORWARD}),
        "number the micro-batches in the order in which the first stage takes them",
    ),
    (
        "input gradients",
        frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT}),
        (
            "place-from-file{... renumber=true} in --passes numbers the micro-batches of backwards anew, in the "
            "order of the table"
        ),
    ),
    (
        "weight gradients",
        frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT}),
        "put weight halves, and whole backwards, in that order",
    ),
)
"""Kinds of work in which the micro-batches of a chunk must ascend, with a way out.

A whole backward is in two of them.
"""


def read_foreign_table(path: str, forward_only: int | None = None) -> ActionTable:
    """Read a CSV file in PyTorch's format and check it against the schedule rules.

    `forward_only` is the number of first stages without a backward; None: as many as have none in the table. Raises
    `DiagnosticError` RT002 or RT007, or the findings of `ratrainc lint`.
    """
    table = read_torch_csv(path)
    check_schedule(table, forward_only=first_with_backward(table) if forward_only is None else forward_only)
    return table


def refuse_action(table: ActionTable, action: PlacedAction, text: str, way_out: str, *notes: Note) -> NoReturn:
    """Raise `DiagnosticError` RT010 at the cell of an action."""
    fail("RT010", text, table.locate(action), source=table.text(action), notes=notes, help=way_out)


def shape_of_table(table: ActionTable) -> PipelineShape:
    """Return the shape of a table: stages, micro-batches, chunks per stage, layout of chunks, slices.

    Refuses a table with an empty rank, or whose chunks follow no known layout.
    """
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
    # No layout fits: report the one that fits longest, at its first chunk on the wrong rank.
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
    """Refuse, with RT010, a table whose shape differs from the plan's; the error names the keys that would fit."""
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
    """Return the plan keys that give a shape. `layout` is left out for one chunk per stage, `slices` for one slice."""
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

    Gradients and losses are added up in that order, which decides how they are rounded.
    """
    for what, kinds, way_out in _IN_ORDER:
        latest: dict[int, PlacedAction] = {}
        for action in table.actions:
            if action.kind not in kinds:
                continue
            before = latest.setdefault(action.stage, action)
            if _place_in_order(before) > _place_in_order(action):
                order = (
                    f"the {what} of a stage {_ORDERS[action.slice is not None and what != 'forwards']}: "
                    "they are added up in it"
                )
                note = Note(f"'{before}' is here", table.locate(before))
                refuse_action(table, action, f"'{action}' comes after '{before}', but {order}", way_out, note)
            latest[action.stage] = action


_ORDERS = (
    "go through the micro-batches in ascending order",
    "go through the micro-batches in ascending, and through the slices of each in descending order",
)


def _place_in_order(action: PlacedAction) -> tuple[int, int]:
    """Return the sort key of an action: slices of a micro-batch ascend in forwards and descend in backwards."""
    number = action.slice or 0
    return _number(action), number if action.kind is ActionKind.FORWARD else -number


def _number(action: PlacedAction) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def renumbered(table: ActionTable) -> ActionTable:
    """Return the table with the micro-batches of backwards and of their messages numbered anew.

    They get the order in which the first chunk with a backward takes them. Raises `DiagnosticError` RT010 where they
    ascend already, or the findings of the schedule rules in the new table.
    """
    first = first_with_backward(table)
    of_first = [a for a in table.actions if a.stage == first and a.kind in BACKWARDS]
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
        check_schedule(changed, forward_only=first)
    except DiagnosticError as error:
        note = Note("of the table as renumber=true makes it")
        raise DiagnosticError([evolve(item, notes=(*item.notes, note)) for item in error.diagnostics]) from None
    return changed


def orders_of_table(table: ActionTable) -> list[Order]:
    """Return the computations of each rank in order. Of two overlapped actions, the first of the cell comes first."""
    return [[action_of(action) for action in row if action.kind in COMPUTES] for row in table.rows]


def action_of(action: PlacedAction) -> Action:
    """Return a computation of the table as a schedule action."""
    return Action(action.kind, _number(action), action.stage, action.slice or 0)


def schedule_of(table: ActionTable, plan: Plan, shape: PipelineShape) -> str | None:
    """Return the name of the schedule with exactly the table's order, preferably the plan's; None if there is none.

    `shape` is the plan's, with its chunks that only go forward.
    """
    orders = orders_of_table(table)
    fitting = [name for name, schedule in SCHEDULES.items() if schedule.problem(shape) is None]
    equal = [name for name in fitting if _first_difference(orders, name, shape) is None]
    return plan.schedule if plan.schedule in equal else next(iter(equal), None)


def check_said_schedule(table: ActionTable, plan: Plan, shape: PipelineShape) -> None:
    """Refuse a table whose order is not that of the schedule that the plan names; `shape` as for `schedule_of`.

    Raises `DiagnosticError` RT064 at the first cell that differs.
    """
    if plan.schedule is None or schedule_of(table, plan, shape) == plan.schedule:
        return
    difference = _first_difference(orders_of_table(table), plan.schedule, shape)
    assert difference is not None  # a plan's own schedule can be made for its shape
    rank, position = difference
    cell = [action for action in table.rows[rank] if action.kind in COMPUTES][position]
    schedule = SCHEDULES[plan.schedule]
    wanted = schedule.order(shape, rank)[position]
    fail(
        "RT064",
        f"the plan says schedule = {shown(plan.schedule)}, but {schedule.title} has '{wanted.chunk}{wanted.kind.value}"
        f"{wanted.micro_batch}' where rank {rank} of the table has '{cell}'",
        table.locate(cell),
        source=table.text(cell),
        help="leave schedule out of the plan: the order is that of the table",
    )


def _first_difference(orders: Sequence[Order], name: str, shape: PipelineShape) -> tuple[int, int] | None:
    """Return rank and position of the first action that differs from a schedule; None where all are the same.

    Both orders of a rank have the same length, so neither is a prefix of the other.
    """
    for rank, order in enumerate(orders):
        wanted = SCHEDULES[name].order(shape, rank)
        if list(order) != list(wanted):
            both = zip(order, wanted, strict=False)
            return rank, next(position for position, (mine, theirs) in enumerate(both) if mine != theirs)
    return None
