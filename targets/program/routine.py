"""Routines: the kernel sequence of a block op, made once per distinct shape.

A routine names its operands formally; a call binds them to tensors. Steps refer to operands by name: `x`, a parameter inside a
flat tensor as `w.q_proj`, an intermediate in the routine's workspace as `dq`, rows of any of them as `x[0:256]`. Interpreter, cost
model and disassembly all read these steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol

import attrs
from attrs import field, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.json_values import listed, option, refuse_unknown, whole, word

Shape = tuple[int, ...]

SCHEDULES_KEY = "tiles"
"""What plain data calls on-chip schedules, of whichever form: the first form gave them the name."""


@frozen
class Formal:
    """An operand a call binds."""

    name: str
    dtype: Dtype
    shape: Shape


@frozen
class ParameterView:
    """A named part of the block's flat parameter and gradient tensors; `gap...` parts are padding. Offset in elements."""

    name: str
    shape: Shape
    offset: int


@frozen
class Intermediate:
    """A buffer in the routine's workspace. Offset in bytes."""

    name: str
    dtype: Dtype
    shape: Shape
    offset: int


@frozen
class Reference:
    """What the text of a step's operand names: a formal, a part of a flat formal, or an intermediate; and which of its rows."""

    base: str
    part: str
    rows: tuple[int, int] | None
    """first row, and the first that is not meant any more; None: all of it"""

    @property
    def whole(self) -> str:
        """The reference without its rows."""
        return f"{self.base}.{self.part}" if self.part else self.base


_ROWS = re.compile(r"(.*)\[(\d{1,15}):(\d{1,15})\]", re.ASCII | re.DOTALL)


@cache
def parse_reference(reference: str) -> Reference:
    """The parts of the text of a step's operand."""
    match = _ROWS.fullmatch(reference)
    whole, rows = (match[1], (int(match[2]), int(match[3]))) if match else (reference, None)
    base, _, part = whole.partition(".")
    return Reference(base, part, rows)


class OnChipSchedule(Protocol):
    """How a part of a kernel call is computed in on-chip memory: an immutable value that only its form interprets."""

    form: ClassVar[str]
    """The name of its form (`ratrain.targets.program.on_chip`)."""

    def to_json(self) -> Any:
        """The schedule as plain data."""
        ...


@frozen
class Step:
    """One kernel call: arguments by name, then options."""

    kernel: str
    operands: dict[str, str]
    options: dict[str, Any]
    on_chip: Mapping[str, OnChipSchedule] = field(factory=dict)
    """schedules of the parts of the kernel, on a machine with on-chip memory; none elsewhere"""


@frozen
class Routine:
    """The steps of a block op and everything they name."""

    key: str
    formals: tuple[Formal, ...]
    parameters: tuple[ParameterView, ...]
    intermediates: tuple[Intermediate, ...]
    workspace_bytes: int
    steps: tuple[Step, ...]

    def shape_of(self, reference: str) -> Shape:
        """Shape of what a step's operand refers to.

        Raises KeyError when the routine does not name it.
        """
        return self.operand(reference)[1]

    def operand(self, reference: str) -> tuple[Dtype, Shape]:
        """Dtype and shape of what a step's operand refers to.

        Raises KeyError when the routine does not name it, or it has no such rows.
        """
        named = parse_reference(reference)
        dtype, shape = self._whole(named)
        if named.rows is None:
            return dtype, shape
        start, stop = named.rows
        if not start < stop <= shape[0]:
            raise KeyError(
                f"routine {self.key} has {shape[0]} rows of '{named.whole}': '{reference}' is not among them"
            )
        return dtype, (stop - start, *shape[1:])

    def _whole(self, named: Reference) -> tuple[Dtype, Shape]:
        for formal in self.formals:
            if formal.name == named.base:
                if not named.part:
                    return formal.dtype, formal.shape
                for parameter in self.parameters:
                    if parameter.name == named.part:
                        return formal.dtype, parameter.shape
        for intermediate in self.intermediates:
            if intermediate.name == named.whole:
                return intermediate.dtype, intermediate.shape
        raise KeyError(f"routine {self.key} does not name '{named.whole}'")

    def to_json(self, numbers: dict[OnChipSchedule, int] | None = None) -> dict[str, Any]:
        """The routine as plain data; its on-chip schedules by their numbers in `numbers`, to which new ones are added.

        Without `numbers` the schedules are left out.
        """
        kept = attrs.filters.exclude(attrs.fields(Routine).steps)
        data = attrs.asdict(
            self, filter=kept, value_serializer=lambda _i, _a, v: v.value if isinstance(v, Dtype) else v
        )
        data["steps"] = [
            {
                "kernel": step.kernel,
                "operands": step.operands,
                "options": step.options,
                SCHEDULES_KEY: {} if numbers is None else _numbered(step.on_chip, numbers),
            }
            for step in self.steps
        ]
        return data


def _numbered(schedules: Mapping[str, OnChipSchedule], numbers: dict[OnChipSchedule, int]) -> dict[str, int]:
    return {part: numbers.setdefault(schedule, len(numbers)) for part, schedule in schedules.items()}


def routine_from_json(data: dict[str, Any], schedules: Sequence[OnChipSchedule] = ()) -> Routine:
    """The inverse of `Routine.to_json`, with the on-chip schedules by number.

    Raises IndexError, KeyError, TypeError or ValueError where the data is not a routine's.
    """
    refuse_unknown(data, _names_of(Routine), "a routine")
    for cls, items in ((Formal, "formals"), (ParameterView, "parameters"), (Intermediate, "intermediates")):
        for item in listed(data[items]):
            refuse_unknown(item, _names_of(cls), f"an item of a routine's {items}")
    return Routine(
        key=word(data["key"]),
        formals=tuple(Formal(word(f["name"]), Dtype(f["dtype"]), _shape(f["shape"])) for f in data["formals"]),
        parameters=tuple(
            ParameterView(word(p["name"]), _shape(p["shape"]), whole(p["offset"])) for p in data["parameters"]
        ),
        intermediates=tuple(
            Intermediate(word(i["name"]), Dtype(i["dtype"]), _shape(i["shape"]), whole(i["offset"]))
            for i in data["intermediates"]
        ),
        workspace_bytes=whole(data["workspace_bytes"]),
        steps=tuple(_step(step, schedules) for step in listed(data["steps"])),
    )


@cache
def _names_of(cls: type) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(cls))


_STEP_KEYS = ("kernel", "operands", "options", SCHEDULES_KEY)


def _step(data: dict[str, Any], schedules: Sequence[OnChipSchedule]) -> Step:
    refuse_unknown(data, _STEP_KEYS, "a step of a routine")
    parts = {word(part): schedules[whole(number)] for part, number in data.get(SCHEDULES_KEY, {}).items()}
    options = {word(name): option(value) for name, value in data["options"].items()}
    return Step(word(data["kernel"]), _words(data["operands"]), options, parts)


def _words(value: Any) -> dict[str, str]:
    return {word(key): word(item) for key, item in value.items()}


def _shape(value: Any) -> Shape:
    """Raises ValueError where there is no dimension: the least is one element."""
    if not listed(value):
        raise ValueError("expected a shape, got one of no dimension")
    return tuple(map(whole, value))
