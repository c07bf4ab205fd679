"""A schedule as a table of actions: what each rank does, in order. Modules and foreign schedules lower to the same table.

A foreign schedule is PyTorch's (torch.distributed.pipelining), as CSV: one row a rank, one cell a time step. A cell is an
action, a forward and a backward that overlap, or empty (idle):

    0F0,0F1,,0B0,(0F2;0B1)OVERLAP_F_B,0B2

A row without any action, like an empty line, is a rank that runs nothing.

An action is a stage, what it does, and the micro-batch: `2F1`, `2B1` (whole backward), `2I1` and `2W1` (its input and weight
halves), `1SEND_F0`, `2RECV_F0`, `2SEND_B0`, `1RECV_B0`, and for the whole stage `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`. A
schedule without any send or receive is *compute only*: its runtime places the messages. With them it is *lowered*.

Where micro-batches are cut into slices, the slice follows after a dot: `2F1.3`, `1SEND_F0.0`. PyTorch has no slices, and reads no
table that has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.module import Module, SourceText, Stage
from ratrain.ratrain_ir.ops.base import Group, Op, Payload
from ratrain.ratrain_ir.ops.collectives import AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.support.files import read_text

FORWARDS = frozenset({ActionKind.FORWARD})
BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
"""What makes the gradient of a stage's input."""
COMPUTES = FORWARDS | BACKWARDS | {ActionKind.BACKWARD_WEIGHT}
SENDS = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
"""Each send with its receive."""
RECVS = {recv: send for send, recv in SENDS.items()}
MESSAGES = frozenset(SENDS) | frozenset(RECVS)
WHOLE_STAGE = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
"""What has no micro-batch."""

_KINDS = {kind.value: kind for kind in ActionKind}
_OVERLAP = "OVERLAP_F_B"
_ACTION = re.compile(r"([0-9]+)([A-Za-z_]+)([0-9]*)(?:\.([0-9]+))?", re.ASCII)
_GROUP = re.compile(r"\((.*)\)\s*(\w*)", re.ASCII)
_MAX_DIGITS = 9
_MAX_ERRORS = 200
"""More malformed cells than this say that the file is something else."""


Part = tuple[int | None, int | None]
"""What of a step an action is of: a micro-batch, and which slice of it or None for all of it; a whole stage's has neither."""


def part_text(part: Part) -> str:
    """A part as it is written behind what is done."""
    micro_batch, place = part
    return ("" if micro_batch is None else str(micro_batch)) + ("" if place is None else f".{place}")


@frozen
class PlacedAction:
    """One action in a cell of a rank's row. Two actions that share a cell overlap.

    `line` and `column` are where it was read, 1-based; column 0 is the line's first word, line 0 is nowhere.
    """

    rank: int
    slot: int
    stage: int
    kind: ActionKind
    micro_batch: int | None = None
    line: int = field(default=0, eq=False)
    column: int = field(default=0, eq=False)
    slice: int | None = None
    """which slice of the micro-batch; None: all of it"""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{part_text(self.part)}"

    @property
    def part(self) -> Part:
        """The micro-batch, and its slice."""
        return self.micro_batch, self.slice


@frozen
class ActionTable:
    """The rows of all ranks, each in slot order. Tables are equal when they say the same, wherever they were read."""

    rows: tuple[tuple[PlacedAction, ...], ...]
    source: SourceText | None = field(default=None, eq=False, repr=False)

    @property
    def actions(self) -> Iterator[PlacedAction]:
        """All actions, rank by rank."""
        return (action for row in self.rows for action in row)

    @property
    def ranks_without_actions(self) -> list[int]:
        """The ranks that run nothing."""
        return [rank for rank, row in enumerate(self.rows) if not row]

    @property
    def is_lowered(self) -> bool:
        """Whether sends and receives are written out."""
        return any(action.kind in MESSAGES for action in self.actions)

    def locate(self, action: PlacedAction) -> Location | None:
        """Where an action was read."""
        if self.source is None or action.line == 0:
            return None
        if action.column == 0:
            return self.source.locate(action.line)
        return Location(self.source.file, action.line, action.column, len(str(action)))

    def text(self, action: PlacedAction) -> str | None:
        """The line an action was read from."""
        return self.source.line(action.line) if self.source else None


def actions_of_module(module: Module) -> ActionTable:
    """The table of a module, rank s being stage s: computation, messages, and the reduction of the gradients.

    A "stage" of the table is a chunk of the module (a virtual stage). Actions stand where they end; REDUCE_GRAD stands at the last
    reduction over the replicas.
    """
    return ActionTable(tuple(_stage_row(module, stage) for stage in module.stages), module.source)


def _stage_row(module: Module, stage: Stage) -> tuple[PlacedAction, ...]:
    last_reduction = next((op for op in reversed(stage.ops) if _reduces(op)), None)
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
                add(op, ActionKind.REDUCE_GRAD, chunk, None)
    return tuple(row)


_MESSAGE_KINDS: dict[type[Op], tuple[ActionKind, ActionKind]] = {
    Send: (ActionKind.SEND_F, ActionKind.SEND_B),
    Recv: (ActionKind.RECV_F, ActionKind.RECV_B),
}
"""Messages with an activation, and with a gradient."""


def _reduces(op: Op) -> bool:
    return isinstance(op, ReduceScatter) or (isinstance(op, AllReduce) and op.group is Group.REPLICAS)


def actions_of_orders(orders: Iterable[Sequence[Action]]) -> ActionTable:
    """The compute-only table of one order a stage, rank s being stage s."""
    return ActionTable(tuple(order_row(stage, order) for stage, order in enumerate(orders)))


def order_row(stage: int, order: Sequence[Action]) -> tuple[PlacedAction, ...]:
    """The row of one stage's order, on the rank of the same number."""
    sliced = any(action.slice for action in order)
    return tuple(
        PlacedAction(stage, slot, action.chunk, action.kind, action.micro_batch, slice=action.slice if sliced else None)
        for slot, action in enumerate(order)
    )


def compute_only(table: ActionTable) -> ActionTable:
    """The table without messages, gathers and reductions: what a runtime that lowers schedules itself reads."""
    return _packed(table, ([action for action in row if action.kind in COMPUTES] for row in table.rows))


def with_gathered_parameters(table: ActionTable) -> ActionTable:
    """The table with every stage's parameters gathered at the step's start and dropped at its end.

    In a module they stay gathered across steps; a PyTorch runtime whose stages are sharded (FSDP) starts a step without them,
    and ignores both actions where they are not.
    """
    return _packed(table, (_gathered(rank, row) for rank, row in enumerate(table.rows)))


def _gathered(rank: int, row: Sequence[PlacedAction]) -> list[PlacedAction]:
    stages = sorted({action.stage for action in row})
    before, after = (
        [PlacedAction(rank, 0, stage, kind) for stage in stages] for kind in (ActionKind.UNSHARD, ActionKind.RESHARD)
    )
    return [*before, *row, *after]


def _packed(table: ActionTable, rows: Iterable[Sequence[PlacedAction]]) -> ActionTable:
    """One action a cell, no idle cells."""
    packed = (tuple(evolve(action, slot=slot) for slot, action in enumerate(row)) for row in rows)
    return ActionTable(tuple(packed), table.source)


def torch_csv_lines(table: ActionTable) -> Iterator[str]:
    """The table as PyTorch's CSV, a line a rank. `parse_torch_csv` reads an equal table."""
    return map(torch_csv_row, table.rows)


def torch_csv_row(row: Sequence[PlacedAction]) -> str:
    """One rank's line."""
    cells: list[list[str]] = []
    for action in row:
        while len(cells) <= action.slot:
            cells.append([])
        cells[action.slot].append(str(action))
    return ",".join(cell[0] if len(cell) == 1 else _overlap_text(cell) for cell in cells)


def _overlap_text(cell: list[str]) -> str:
    return f"({';'.join(cell)}){_OVERLAP}" if cell else ""


def read_torch_csv(path: str) -> ActionTable:
    """The table of a CSV file in PyTorch's format.

    Raises RT002 where the file cannot be read, RT007 with every cell that is not an action.
    """
    return parse_torch_csv(read_text(path, "schedule table"), path)


def parse_torch_csv(text: str, file: str) -> ActionTable:
    """The table of a text in PyTorch's format. Raises RT007 with every cell that is not an action."""
    lines = re.split(r"\r\n|\n|\r", text)
    if lines[-1] == "":
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
    """The line as it may be shown on a terminal, character by character."""
    return line if line.isprintable() else "".join(char if char.isprintable() else "?" for char in line)


@define
class _Reader:
    """Reads cells and collects what is wrong with them."""

    source: SourceText
    diagnostics: Diagnostics = field(factory=Diagnostics)

    def row(self, rank: int, line: str) -> tuple[PlacedAction, ...]:
        row: list[PlacedAction] = []
        start = 1
        for slot, cell in enumerate(line.split(",")):
            column, text = _stripped(cell, start)
            if len(text) > 1 and text[0] == text[-1] == '"':  # as some writers quote every cell
                column, text = _stripped(text[1:-1], column + 1)
            if text.startswith("("):
                row.extend(self.group(rank, slot, column, text))
            elif text:
                row.extend(self.action(rank, slot, column, text))
            start += len(cell) + 1
        return tuple(row)

    def group(self, rank: int, slot: int, column: int, text: str) -> list[PlacedAction]:
        """The two halves of an overlapped cell."""
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
        """The action of a text, in a list that is empty where it is none."""
        match = _ACTION.fullmatch(text)
        if match is None:
            wanted = "expected stage, action and micro-batch like '2F0' or '1SEND_F0', or a stage and UNSHARD, RESHARD or REDUCE_GRAD"
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
    """A text without blanks around it, and the column it then starts at."""
    bare = text.lstrip(" \t")
    return column + len(text) - len(bare), bare.rstrip(" \t")


def _is_pair(actions: list[PlacedAction]) -> bool:
    kinds = [action.kind for action in actions]
    return len(kinds) == 2 and sum(k in FORWARDS for k in kinds) == 1 and sum(k in BACKWARDS for k in kinds) == 1


def _shown(text: str) -> str:
    """A text in quotes, short and printable."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
