"""Schedules as tables of actions: each rank's work in order. Modules and foreign schedules become the same table.

The foreign format is PyTorch's (torch.distributed.pipelining) CSV: one row a rank, one cell a time step. A cell is one
action, or a forward and a backward that overlap, or empty (idle):

    0F0,0F1,,0B0,(0F2;0B1)OVERLAP_F_B,0B2

A row without actions, such as an empty line, is a rank that runs nothing.

An action is written as its stage, its kind and its micro-batch: `2F1`, `2B1` (whole backward), `2I1` and `2W1` (its
input and weight halves), `1SEND_F0`, `2RECV_F0`, `2SEND_B0`, `1RECV_B0`; or for a whole stage `0UNSHARD`, `0RESHARD`,
`0REDUCE_GRAD`. A schedule without messages is *compute only*: its runtime places them. With messages it is *lowered*.

If micro-batches are cut into slices, the slice follows after a dot: `2F1.3`, `1SEND_F0.0`. PyTorch knows no slices and
cannot read such tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.module import Module, SourceText, Stage
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.collectives import reduces_over_replicas
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.support.files import read_text

FORWARDS = frozenset({ActionKind.FORWARD})
BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
"""Kinds that make the gradient of a stage's input."""
COMPUTES = FORWARDS | BACKWARDS | {ActionKind.BACKWARD_WEIGHT}
SENDS = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
"""Receive that belongs to each send."""
RECVS = {recv: send for send, recv in SENDS.items()}
MESSAGES = frozenset(SENDS) | frozenset(RECVS)
WHOLE_STAGE = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
"""Kinds without a micro-batch."""

_KINDS = {kind.value: kind for kind in ActionKind}
_OVERLAP = "OVERLAP_F_B"
_ACTION = re.compile(r"([0-9]+)([A-Za-z_]+)([0-9]*)(?:\.([0-9]+))?", re.ASCII)
_GROUP = re.compile(r"\((.*)\)\s*(\w*)", re.ASCII)
_MAX_DIGITS = 9
_MAX_ERRORS = 200
"""Malformed cells after which reading stops: such a file is no schedule at all."""


Part = tuple[int | None, int | None]
"""(micro-batch, slice) of an action. The slice is None for whole micro-batches; both are None for a whole stage."""


def part_text(part: Part) -> str:
    """Return the text of a part as it follows the kind of an action: `1`, `1.3`, or nothing."""
    micro_batch, place = part
    return ("" if micro_batch is None else str(micro_batch)) + ("" if place is None else f".{place}")


@frozen
class PlacedAction:
    """One action in a cell of a rank's row. Two actions with the same `slot` share a cell and overlap.

    `line` and `column` are its place in the text, 1-based. Column 0 means the line's first word; line 0 means no place.
    """

    rank: int
    slot: int
    stage: int
    kind: ActionKind
    micro_batch: int | None = None
    line: int = field(default=0, eq=False)
    column: int = field(default=0, eq=False)
    slice: int | None = None
    """slice of the micro-batch; None: all of it"""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{part_text(self.part)}"

    @property
    def part(self) -> Part:
        """Micro-batch and slice."""
        return self.micro_batch, self.slice


@frozen
class ActionTable:
    """Rows of all ranks, each in slot order. Equality ignores where tables were read."""

    rows: tuple[tuple[PlacedAction, ...], ...]
    source: SourceText | None = field(default=None, eq=False, repr=False)

    @property
    def actions(self) -> Iterator[PlacedAction]:
        """All actions, rank by rank."""
        return (action for row in self.rows for action in row)

    @property
    def ranks_without_actions(self) -> list[int]:
        """Ranks that run nothing."""
        return [rank for rank, row in enumerate(self.rows) if not row]

    @property
    def is_lowered(self) -> bool:
        """True if the table has sends or receives."""
        return any(action.kind in MESSAGES for action in self.actions)

    def locate(self, action: PlacedAction) -> Location | None:
        """Return the place in the text that an action was read from; None if it was not read."""
        if self.source is None or action.line == 0:
            return None
        if action.column == 0:
            return self.source.locate(action.line)
        return Location(self.source.file, action.line, action.column, len(str(action)))

    def text(self, action: PlacedAction) -> str | None:
        """Return the line of text that an action was read from, or None."""
        return self.source.line(action.line) if self.source else None


def actions_of_module(module: Module) -> ActionTable:
    """Return the table of a module, with stage s as rank s: computations, messages, reductions of gradients.

    A "stage" of the table is a chunk of the module (a virtual stage). An action stands at the op that ends it;
    REDUCE_GRAD stands at the last reduction over replicas.
    """
    return ActionTable(tuple(_stage_row(module, stage) for stage in module.stages), module.source)


def _stage_row(module: Module, stage: Stage) -> tuple[PlacedAction, ...]:
    last_reduction = next((op for op in reversed(stage.ops) if reduces_over_replicas(op)), None)
    computations = {id(op): action for op, action in chunk_actions(module, stage)}
    row: list[PlacedAction] = []

    def add(op: Op, kind: ActionKind, chunk: int, micro_batch: int | None) -> None:
        number = getattr(op, "slice", None)
        row.append(PlacedAction(stage.index, len(row), chunk, kind, micro_batch, op.line, slice=number))

    for op in stage.ops:
        action = computations.get(id(op))
        if action is not None:
            add(op, action.kind, action.chunk, action.micro_batch)
        elif isinstance(op, Send | Recv):
            hop = hop_of(op, stage, module.topology)
            if hop is not None:
                kinds = _MESSAGE_KINDS[type(op)]
                chunk = hop.channel.source if isinstance(op, Send) else hop.channel.target
                add(op, kinds[op.payload is Payload.GRADIENT], chunk, op.micro_batch)
        elif op is last_reduction:
            for chunk in module.topology.chunks_of(stage.index):
                if chunk >= module.topology.forward_only:
                    add(op, ActionKind.REDUCE_GRAD, chunk, None)
    return tuple(row)


_MESSAGE_KINDS: dict[type[Op], tuple[ActionKind, ActionKind]] = {
    Send: (ActionKind.SEND_F, ActionKind.SEND_B),
    Recv: (ActionKind.RECV_F, ActionKind.RECV_B),
}
"""Kinds of messages that carry an activation, and a gradient."""


def actions_of_orders(orders: Iterable[Sequence[Action]]) -> ActionTable:
    """Return the compute-only table of one order per stage, with stage s as rank s."""
    return ActionTable(tuple(order_row(stage, order) for stage, order in enumerate(orders)))


def order_row(stage: int, order: Sequence[Action]) -> tuple[PlacedAction, ...]:
    """Return the row of one stage's order, for the rank of the same number."""
    sliced = any(action.slice for action in order)  # actions of whole micro-batches have slice 0 too
    return tuple(
        PlacedAction(stage, slot, action.chunk, action.kind, action.micro_batch, slice=action.slice if sliced else None)
        for slot, action in enumerate(order)
    )


def first_with_backward(table: ActionTable) -> int:
    """Return the first stage of a table that has a backward: those below it only go forward. 0 if none has any."""
    return min((action.stage for action in table.actions if action.kind in BACKWARDS), default=0)


def compute_only(table: ActionTable) -> ActionTable:
    """Return the table without messages, gathers and reductions, for runtimes that place messages themselves."""
    return _packed(table, ([action for action in row if action.kind in COMPUTES] for row in table.rows))


def with_gathered_parameters(table: ActionTable) -> ActionTable:
    """Return the table with an UNSHARD of every stage before its rank's row and a RESHARD after it.

    In a module parameters stay gathered across steps. A PyTorch runtime with sharded stages (FSDP) starts a step
    without them; one without sharding ignores both actions.
    """
    return _packed(table, (_gathered(rank, row) for rank, row in enumerate(table.rows)))


def _gathered(rank: int, row: Sequence[PlacedAction]) -> list[PlacedAction]:
    stages = sorted({action.stage for action in row})
    before, after = (
        [PlacedAction(rank, 0, stage, kind) for stage in stages] for kind in (ActionKind.UNSHARD, ActionKind.RESHARD)
    )
    return [*before, *row, *after]


def _packed(table: ActionTable, rows: Iterable[Sequence[PlacedAction]]) -> ActionTable:
    """Return the table with one action a cell and no idle cells."""
    packed = (tuple(evolve(action, slot=slot) for slot, action in enumerate(row)) for row in rows)
    return ActionTable(tuple(packed), table.source)


def torch_csv_lines(table: ActionTable) -> Iterator[str]:
    """Yield the table as PyTorch's CSV, one line a rank. `parse_torch_csv` reads an equal table."""
    return map(torch_csv_row, table.rows)


def torch_csv_row(row: Sequence[PlacedAction]) -> str:
    """Return the CSV line of one rank."""
    cells: list[list[str]] = []
    for action in row:
        while len(cells) <= action.slot:
            cells.append([])
        cells[action.slot].append(str(action))
    return ",".join(cell[0] if len(cell) == 1 else _overlap_text(cell) for cell in cells)


def _overlap_text(cell: list[str]) -> str:
    return f"({';'.join(cell)}){_OVERLAP}" if cell else ""


def read_torch_csv(path: str) -> ActionTable:
    """Read the table of a CSV file in PyTorch's format.

    Raises RT002 if the file cannot be read, RT007 with every cell that is not an action.
    """
    return parse_torch_csv(read_text(path, "schedule table"), path)


def parse_torch_csv(text: str, file: str) -> ActionTable:
    """Parse the table of a text in PyTorch's format. Raises RT007 with every cell that is not an action."""
    lines = re.split(r"\r\n|\n|\r", text)
    if lines[-1] == "":  # the last line break ends a row; it does not begin an empty one
        lines.pop()
    source = SourceText(file, tuple(map(_printable, lines)))
    if not lines:
        fail("RT007", "the schedule is empty: expected one row of actions a rank", Location(file, 1))
    reader = _Reader(source)
    rows = tuple(reader.row(rank, line) for rank, line in enumerate(lines))
    reader.diagnostics.check()
    if not any(rows):
        fail("RT007", "the schedule has no action on any rank", Location(file, 1))
    return ActionTable(rows, source)


def _printable(line: str) -> str:
    """Return the line for a terminal, with `?` for each unprintable character, so that columns stay."""
    return line if line.isprintable() else "".join(char if char.isprintable() else "?" for char in line)


@define
class _Reader:
    """Reader of cells that collects their errors."""

    source: SourceText
    diagnostics: Diagnostics = field(factory=Diagnostics)

    def row(self, rank: int, line: str) -> tuple[PlacedAction, ...]:
        row: list[PlacedAction] = []
        start = 1
        for slot, cell in enumerate(line.split(",")):
            column, text = _stripped(cell, start)
            if len(text) > 1 and text[0] == text[-1] == '"':  # some writers quote every cell
                column, text = _stripped(text[1:-1], column + 1)
            if text.startswith("("):
                row.extend(self.group(rank, slot, column, text))
            elif text:
                row.extend(self.action(rank, slot, column, text))
            start += len(cell) + 1  # and the comma
        return tuple(row)

    def group(self, rank: int, slot: int, column: int, text: str) -> list[PlacedAction]:
        """Return the two actions of an overlapped cell; an empty list after an error."""
        match = _GROUP.fullmatch(text)
        if match is None or match[2] != _OVERLAP:
            wanted = f"expected '(0F1;0B0){_OVERLAP}'"
            self.error(rank, column, len(text), f"{_shown(text)} is not an overlapped forward and backward: {wanted}")
            return []
        actions: list[PlacedAction] = []
        start = column + 1
        parts = match[1].split(";")
        for part in parts:
            actions.extend(self.action(rank, slot, *_stripped(part, start)))
            start += len(part) + 1
        if len(actions) == len(parts) and not _is_pair(actions):
            self.error(rank, column, len(text), f"{_shown(text)} must hold one forward and one backward (B or I)")
            return []
        return actions

    def action(self, rank: int, slot: int, column: int, text: str) -> list[PlacedAction]:
        """Return a list with the action of a text; an empty list after an error."""
        match = _ACTION.fullmatch(text)
        if match is None:
            wanted = (
                "expected stage, action and micro-batch like '2F0' or '1SEND_F0', or a stage and UNSHARD, "
                "RESHARD or REDUCE_GRAD"
            )
            self.error(rank, column, len(text), f"{_shown(text)} is not an action: {wanted}")
            return []
        stage, name, micro_batch, place = match.groups()
        kind = _KINDS.get(name)
        problem, help_text = None, None
        if kind is None:
            problem = f"there is no action {_shown(name)}; the actions are {', '.join(_KINDS)}"
            help_text = nearest(name.upper(), _KINDS)
        elif max(map(len, (stage, micro_batch, place or ""))) > _MAX_DIGITS:
            problem = f"a number in {_shown(text)} has more than {_MAX_DIGITS} digits"
        elif kind in WHOLE_STAGE and (micro_batch or place):
            problem = f"{name} is of the whole stage and takes no micro-batch, got {_shown(text)}"
        elif kind not in WHOLE_STAGE and not micro_batch:
            problem = f"{_shown(text)} has no micro-batch: expected something like '{stage}{name}0'"
        if problem is not None:
            self.error(rank, column, len(text), problem, help_text)
            return []
        assert kind is not None
        number, cut = (int(digits) if digits else None for digits in (micro_batch, place))
        return [PlacedAction(rank, slot, int(stage), kind, number, rank + 1, column, cut)]

    def error(self, rank: int, column: int, length: int, message: str, help_text: str | None = None) -> None:
        if len(self.diagnostics.items) >= _MAX_ERRORS:
            self.diagnostics.check()
        line = rank + 1
        place = Location(self.source.file, line, column, max(1, length))
        self.diagnostics.error("RT007", message, place, help=help_text, source=self.source.line(line))


def _stripped(text: str, column: int) -> tuple[int, str]:
    """Return a text without blanks around it, and before it the column where it then starts."""
    bare = text.lstrip(" \t")
    return column + len(text) - len(bare), bare.rstrip(" \t")


def _is_pair(actions: list[PlacedAction]) -> bool:
    kinds = [action.kind for action in actions]
    return len(kinds) == 2 and sum(k in FORWARDS for k in kinds) == 1 and sum(k in BACKWARDS for k in kinds) == 1


def _shown(text: str) -> str:
    """Return a text in quotes, at most 40 characters of it, printable."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
