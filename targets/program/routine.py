"""Routines: the kernel sequence of a block op, made once per distinct shape.

A routine names its operands formally; a call binds them to tensors. Steps refer to operands by name: `x`, a parameter
inside a flat tensor as `w.q_proj`, an intermediate in the routine's workspace as `dq`, rows of any of them as
`x[0:256]`. Interpreter, cost model and disassembly all read these steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import attrs
from attrs import field, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import Held
from ratrain.targets.program.json_values import listed, option, refuse_unknown, whole, word

Shape = tuple[int, ...]

TRAINED, FROZEN, PACKED = (held.value for held in Held)
"""Formals whose parts are a block's parameters: those that train, frozen ones, packed ones. Gradients lie in `g` as
parameters in `w`."""

COPIES = "pool"
"""Formal whose parts are copies of another rank's experts. Their gradients lie in `dpool`."""

SCHEDULES_KEY = "tiles"
"""Key of on-chip schedules in JSON, whatever their form; it is the name of the first form."""


@frozen
class Formal:
    """An operand that a call binds to a tensor."""

    name: str
    dtype: Dtype
    shape: Shape


@frozen
class ParameterView:
    """A named part of the block's flat parameter and gradient tensors.

    `gap...` parts are padding. The offset is in elements.
    """

    name: str
    shape: Shape
    offset: int
    held: str = TRAINED
    """formal that it is a part of: `TRAINED` (and of `g`), `FROZEN`, `PACKED` (in which it is bytes), or `COPIES`"""


@frozen
class Intermediate:
    """A buffer in the routine's workspace. The offset is in bytes."""

    name: str
    dtype: Dtype
    shape: Shape
    offset: int


@frozen
class Reference:
    """A parsed operand of a step: a formal, a part of a flat formal, or an intermediate; and which of its rows."""

    base: str
    part: str
    rows: tuple[int, int] | None
    """first row and exclusive end; None: all rows"""

    @property
    def whole(self) -> str:
        """The reference without its rows."""
        return f"{self.base}.{self.part}" if self.part else self.base


_Sized = TypeVar("_Sized", Formal, Intermediate)

_ROWS = re.compile(r"(.*)\[(\d{1,15}):(\d{1,15})\]", re.ASCII | re.DOTALL)


@cache
def parse_reference(reference: str) -> Reference:
    """Parse the text of a step's operand: `base`, `base.part`, each with `[first:stop]` rows or without."""
    match = _ROWS.fullmatch(reference)
    whole, rows = (match[1], (int(match[2]), int(match[3]))) if match else (reference, None)
    base, _, part = whole.partition(".")
    return Reference(base, part, rows)


def held_by(formal: str) -> str:
    """Return how parameters say that they are parts of a formal: gradients lie as what they are gradients of."""
    return {"g": TRAINED, f"d{COPIES}": COPIES}.get(formal, formal)


class OnChipSchedule(Protocol):
    """Schedule of a part of a kernel call in on-chip memory: an immutable value that only its form interprets."""

    form: ClassVar[str]
    """Name of its form (`ratrain.targets.program.on_chip`)."""

    def to_json(self) -> Any:
        """Return the schedule as plain data."""
        ...


@frozen
class Step:
    """One kernel call: operands by argument name, then options."""

    kernel: str
    operands: dict[str, str]
    options: dict[str, Any]
    on_chip: Mapping[str, OnChipSchedule] = field(factory=dict)
    """by part of the kernel, its schedule on a machine with on-chip memory; empty elsewhere"""
    by_rank: tuple[dict[str, Any] | None, ...] = ()
    """for each context rank the options that it adds, or None if it leaves the step out; empty: all ranks do alike"""
    expert_rows: tuple[int, ...] = ()
    """rows of each expert, where a simulation is told them (`targets/machine/routing.py`); no program has them"""

    def on_rank(self, rank: int) -> Step | None:
        """Return the step as a context rank runs it; None if it does not."""
        if not self.by_rank:
            return self
        own = self.by_rank[rank]
        return None if own is None else attrs.evolve(self, options={**self.options, **own}, by_rank=())


@frozen
class Routine:
    """Steps of a block op and all names they use."""

    key: str
    formals: tuple[Formal, ...]
    parameters: tuple[ParameterView, ...]
    intermediates: tuple[Intermediate, ...]
    workspace_bytes: int
    steps: tuple[Step, ...]
    expected_rows: tuple[int, int] | None = None
    """where data say how many rows there are: those there is room for, and those of balanced routers, which times are
    of"""

    @property
    def as_expected(self) -> Routine:
        """The routine with as many rows as balanced routers have, for its costs."""
        return self if self.expected_rows is None else self.with_rows(*self.expected_rows)

    def with_rows(self, room: int, rows: int) -> Routine:
        """Return the routine with as many rows as come where it has room for others, for its costs."""

        def sized(each: _Sized) -> _Sized:
            lines, *width = each.shape
            return attrs.evolve(each, shape=(rows, *width)) if lines == room and width else each

        formals, intermediates = tuple(map(sized, self.formals)), tuple(map(sized, self.intermediates))
        return attrs.evolve(self, formals=formals, intermediates=intermediates, expected_rows=None)

    @property
    def context_ranks(self) -> int:
        """Number of context ranks whose steps differ; 1 if all ranks run the same ones."""
        return max((len(step.by_rank) for step in self.steps), default=0) or 1

    def on_rank(self, rank: int) -> Routine:
        """Return the routine as a context rank runs it."""
        if self.context_ranks == 1:
            return self
        steps = (step.on_rank(rank) for step in self.steps)
        return attrs.evolve(self, steps=tuple(step for step in steps if step is not None))

    def shape_of(self, reference: str) -> Shape:
        """Return the shape of a step's operand.

        Raises KeyError when the routine does not name it.
        """
        return self.operand(reference)[1]

    def operand(self, reference: str) -> tuple[Dtype, Shape]:
        """Return dtype and shape of a step's operand.

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
                    if parameter.name == named.part and parameter.held == held_by(formal.name):
                        return formal.dtype, parameter.shape
        for intermediate in self.intermediates:
            if intermediate.name == named.whole:
                return intermediate.dtype, intermediate.shape
        raise KeyError(f"routine {self.key} does not name '{named.whole}'")

    def to_json(self, numbers: dict[OnChipSchedule, int] | None = None) -> dict[str, Any]:
        """Return the routine as plain data, with on-chip schedules by their numbers in `numbers`.

        Schedules that are new are added to `numbers`. Without `numbers` the schedules are left out.
        """
        data = attrs.asdict(
            self, filter=_is_written, value_serializer=lambda _i, _a, v: v.value if isinstance(v, Dtype) else v
        )
        data["steps"] = [
            {
                "kernel": step.kernel,
                "operands": step.operands,
                "options": step.options,
                SCHEDULES_KEY: {} if numbers is None else _numbered(step.on_chip, numbers),
                **({"by_rank": list(step.by_rank)} if step.by_rank else {}),
            }
            for step in self.steps
        ]
        return data


def _is_written(attribute: attrs.Attribute[Any], value: object) -> bool:
    """Tell whether a routine's JSON has a field as it is; steps have a form of their own."""
    unsaid = {"held": TRAINED, "expected_rows": None}
    return attribute.name != "steps" and not (attribute.name in unsaid and value == unsaid[attribute.name])


def _numbered(schedules: Mapping[str, OnChipSchedule], numbers: dict[OnChipSchedule, int]) -> dict[str, int]:
    return {part: numbers.setdefault(schedule, len(numbers)) for part, schedule in schedules.items()}


def routine_from_json(data: dict[str, Any], schedules: Sequence[OnChipSchedule] = ()) -> Routine:
    """Return the routine of `Routine.to_json`'s data, with the on-chip schedules by number.

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
            ParameterView(word(p["name"]), _shape(p["shape"]), whole(p["offset"]), _held(p.get("held", TRAINED)))
            for p in data["parameters"]
        ),
        intermediates=tuple(
            Intermediate(word(i["name"]), Dtype(i["dtype"]), _shape(i["shape"]), whole(i["offset"]))
            for i in data["intermediates"]
        ),
        workspace_bytes=whole(data["workspace_bytes"]),
        steps=tuple(_step(step, schedules) for step in listed(data["steps"])),
        expected_rows=_expected(data.get("expected_rows")),
    )


def _expected(value: Any) -> tuple[int, int] | None:
    """Return the rows there is room for and the expected ones; raise ValueError where they are not fewer."""
    if value is None:
        return None
    room, expected = map(whole, listed(value))
    if not 0 < expected < room:
        raise ValueError(f"{expected} expected rows are not some of {room}")
    return room, expected


@cache
def _names_of(cls: type) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(cls))


_STEP_KEYS = ("kernel", "operands", "options", SCHEDULES_KEY, "by_rank")


def _step(data: dict[str, Any], schedules: Sequence[OnChipSchedule]) -> Step:
    refuse_unknown(data, _STEP_KEYS, "a step of a routine")
    parts = {word(part): schedules[whole(number)] for part, number in data.get(SCHEDULES_KEY, {}).items()}
    by_rank = tuple(None if own is None else _options(own) for own in listed(data.get("by_rank", [])))
    return Step(word(data["kernel"]), _words(data["operands"]), _options(data["options"]), parts, by_rank)


def _options(data: dict[str, Any]) -> dict[str, Any]:
    return {word(name): option(value) for name, value in data.items()}


def _words(value: Any) -> dict[str, str]:
    return {word(key): word(item) for key, item in value.items()}


def _held(value: Any) -> str:
    if value not in (TRAINED, FROZEN, PACKED, COPIES):
        raise ValueError(f"no formal '{value}' holds parameters")
    return word(value)


def _shape(value: Any) -> Shape:
    """Return a shape; raise ValueError where it has no dimension."""
    if not listed(value):
        raise ValueError("expected a shape, got one of no dimension")
    return tuple(map(whole, value))
