"""Layer 2 for many ops: record the symbolic run of one op of each kind, and replay it for all others.

Ops of a kind differ only in their micro-batch and their tensors. So a visit of `SymbolicRun` is recorded once for each
kind, as steps on its operands:

    forward mlp.0 m7 (%w, %x)      ONCE   ("forward", mlp.0, m)
                                   EXPECT operand 0 holds ("view", mlp.0, "this step")
                                   EXPECT operand 1 holds ("x", mlp.0, m)
                                   SET    operand 2 holds ("x", attention.1, m)

The visit runs with a micro-batch that no module has, `_ANY`. Where that number, or one next to it, appears in a value,
the number of the actual micro-batch takes its place. Micro-batch 0, with which sums begin, is recorded separately. A
compiled loop (`symbolic_sweep`) then executes the steps of all ops.

The loop can only accept. If anything is wrong, or cannot be recorded, `SymbolicRun` visits every op and makes the
messages. It also does all the work at level dataflow, with slices, and for ops on other memories or remote buffers,
whose meaning depends on what they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.columns import Alike, FoundError, StageColumns
from ratrain.ratrain_ir.model.sharded_blocks import reduces_each_micro_batch
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.verifier.dataflow import SymbolicRun
from ratrain.ratrain_ir.verifier.reporter import Reporter, refuser
from ratrain.ratrain_ir.verifier.slices import Value
from ratrain.ratrain_ir.verifier.symbolic_sweep import (
    AMONG,
    EXPECT,
    MADE_FORWARD,
    NONE,
    ONCE,
    RECOVER,
    SET,
    Holdings,
    Traces,
    compiled_sweep,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

_OPS = 40_000
"""Ops that plain Python handles in three tenths of a second: less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_OPS)
_ANY = 1 << 40
"""Stands for the number of any micro-batch but the first; larger than any real count."""

Int64s = NDArray[np.int64]


def check_dataflow(module: Module, report: Reporter, stages: Sequence[Stage]) -> None:
    """Run some stages symbolically, and report what is wrong."""
    for stage in stages:
        columns = report.columns(stage)
        if not _is_swept(module, columns) or not is_sound(module, stage, columns):
            SymbolicRun(module, stage, report).run()


def _is_swept(module: Module, columns: StageColumns) -> bool:
    return module.level is not Level.DATAFLOW and not module.plan.slices and not ALLOWANCE.take(len(columns))


def is_sound(module: Module, stage: Stage, columns: StageColumns) -> bool:
    """Sweep the symbolic run of a stage; return True if that was possible and found nothing."""
    if module.plan.micro_batches > len(columns):
        return False  # a plan can promise millions of micro-batches that a text does not have
    try:
        return _Sweep(module, stage, columns).finds_nothing()
    except (_UnrecordedError, FoundError):
        return False


class _UnrecordedError(Exception):
    """Error of an op whose meaning is not the same for all micro-batches, or depends on the values it finds."""


@define(eq=False)
class _Refusing:
    """Stand-in for the values of tensors during recording; any access raises `_UnrecordedError`."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _UnrecordedError


_Step = tuple[int, "Tensor | None", "Value"]


@define(eq=False)
class _Recorder(SymbolicRun):
    """Symbolic run that records the steps of a visit instead of executing them."""

    steps: list[_Step] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        values: Any = _Refusing()
        self.values = values

    def once(self, op: Op, code: str, *what: object) -> bool:
        del op, code
        self.steps.append((ONCE, None, what))
        return True

    def expect(self, code: str, op: Op, tensor: Tensor, *value: object) -> None:
        del code, op
        self.steps.append((EXPECT, tensor, value))

    def set(self, tensor: Tensor, *value: object) -> None:
        self.steps.append((SET, tensor, value))

    def expect_made_forward(self, code: str, op: Op, tensor: Tensor) -> None:
        del code, op
        self.steps.append((MADE_FORWARD, tensor, ()))

    def recover(self, tensor: Tensor, op: Op) -> None:
        del op
        self.steps.append((RECOVER, tensor, ()))

    def holds(self, tensors: Tensors, value: Value) -> bool:
        assert self.op is not None
        if tensors is not self.op.reads:
            raise _UnrecordedError
        self.steps.append((AMONG, None, value))
        return True


_COUNT, _UP_TO, _ONLY = "a count", "all up to a count", "the one before a count"
_NO_NUMBER = (-2, 0)
_Number = tuple[int, int]
"""Number of a value, and its growth with the micro-batch (0 or 1)."""


@define(eq=False)
class _Sweep:
    """Traces of the kinds of a stage, and the numbering of values in them."""

    module: Module
    stage: Stage
    columns: StageColumns
    span: int = field(init=False)
    """Counts of each template; a value is `template * span + count`."""
    templates: dict[Value, int] = field(factory=dict)
    known: dict[Value, _Number] = field(factory=dict)
    recorder: _Recorder = field(init=False)
    begins: list[int] = field(factory=lambda: [0])
    rows: list[tuple[int, ...]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.span = self.module.plan.micro_batches + 2
        self.recorder = _Recorder(self.module, self.stage, refuser(self.module))

    def finds_nothing(self) -> bool:
        """Record, run the loop, and check the end of the step; return True if nothing is wrong."""
        columns = self.columns
        works = [kind if type(op) is not Release else NONE for kind, op in enumerate(columns.examples)]
        kinds, micro_batches = (np.array(each, np.int64) for each in (columns.of_ops(works), columns.micro_batches))
        halved = self.record(kinds, micro_batches)
        required = np.concatenate([*self.required(), *halved])
        carried = np.array(columns.carried, np.bool_)
        begins, rows = np.array(self.begins, np.int64), np.array(self.rows, np.int64).reshape(-1, 7)
        bounds, operands = (np.array(each, np.int64) for each in (columns.bounds, columns.operands))
        held, carried_in, owned = (np.full(len(carried), NONE, np.int64) for _ in range(3))
        recovered, done = np.zeros(len(carried), np.bool_), np.zeros(len(self.templates) * self.span, np.bool_)
        traces = Traces(begins, *np.ascontiguousarray(rows.T))
        tensors = Holdings(carried, held, carried_in, owned, recovered)
        wrong = compiled_sweep()(kinds, micro_batches, bounds, operands, traces, tensors, done)
        if wrong != NONE or not done[required].all():
            return False
        # Carried tensors end with the next step's values. They have no micro-batch, so their numbers identify them.
        value_of = {number: value for value, (number, grows) in self.known.items() if not grows}
        for before, after in zip(carried_in[carried].tolist(), held[carried].tolist(), strict=True):
            if (
                before not in value_of
                or after != self.known.get(self.recorder.next_value(value_of[before]), _NO_NUMBER)[0]
            ):
                return False
        return True

    def record(self, kinds: Int64s, micro_batches: Int64s) -> list[Int64s]:
        """Record the traces that ops of the stage need; return the numbers of required weight halves."""
        required: list[Int64s] = []
        ends = np.array([[0, 0]] * len(self.columns.examples), np.int64)
        there = kinds != NONE
        # Ops of each kind with the first micro-batch (or none), and with others: only traces that occur are recorded.
        np.add.at(ends, (kinds[there], (micro_batches[there] > 0).astype(np.int64)), 1)
        for kind, (op, alike) in enumerate(zip(self.columns.examples, self.columns.alike, strict=True)):
            has_first, has_others = ends[kind].tolist()
            self.trace(op, 0, alike, wanted=has_first > 0)
            self.trace(op, _ANY, alike, wanted=has_others > 0)
            if self.recorder.split:
                own = micro_batches[kinds == kind]
                required += [self.numbers(("backward_weight", block, _ANY), own) for block, _ in self.recorder.split]
                self.recorder.split = []
        return required

    def trace(self, op: Op, micro_batch: int, alike: Alike, *, wanted: bool) -> None:
        """Record the visit of an op with this micro-batch as a trace; leave the trace empty unless `wanted`."""
        if wanted:
            place_of = {tensor: place for place, tensor in enumerate(op.reads + op.updates + op.writes)}
            if len(place_of) < len(op.reads) + len(op.updates) + len(op.writes):
                raise _UnrecordedError
            if getattr(op, "micro_batch", None) is not None:
                changed: Any = {"micro_batch": micro_batch}
                op = evolve(op, **changed)
            self.recorder.steps = []
            self.recorder.visit(op, alike)
            self.rows += [self.row(place_of, *step) for step in self.recorder.steps]
        self.begins.append(len(self.rows))

    def row(self, place_of: dict[Tensor, int], what: int, tensor: Tensor | None, value: Value) -> tuple[int, ...]:
        """Turn a step into numbers, in the order of the fields of `Traces`."""
        place = NONE if tensor is None else place_of[tensor]
        owner = (0, 0) if what in (ONCE, MADE_FORWARD, RECOVER, AMONG) else self.number(value[:-1])
        from_before = what == EXPECT and value[-1] == "this step"
        return what, place, *self.number(value), *owner, from_before

    def required(self) -> list[Int64s]:
        """Return numbers of everything that must happen, except weight halves."""
        model, plan, run = self.module.model, self.module.plan, self.recorder
        every = np.arange(plan.micro_batches)
        of_each = [*run.passes(_ANY)]
        of_each += [("reduce", block, _ANY) for block in run.trained if reduces_each_micro_batch(model, plan, block)]
        once = [what for block in run.trained for what in run.required_of(block)] + list(run.required_at_end())
        found = [self.numbers(what, every) for what in of_each]
        return [*found, np.array([self.number(what)[0] for what in once], np.int64)]

    def numbers(self, value: Value, micro_batches: Int64s) -> Int64s:
        """Return the numbers of a value for some micro-batches."""
        number, grows = self.number(value)
        return number + grows * micro_batches

    def number(self, value: Value) -> _Number:
        """Return the number of a value, and its growth with the micro-batch."""
        found = self.known.get(value)
        if found is None:
            found = self.known[value] = self.number_anew(value)
        return found

    def number_anew(self, value: Value) -> _Number:
        template, count = _template_of(value)
        # A count near `_ANY` comes from the micro-batch of the visit: keep its distance, and add the real one in the
        # loop.
        grows = count > self.span
        count -= _ANY * grows
        if not 0 <= count < self.span or any(_is_any(part) for part in template):
            raise _UnrecordedError
        return self.templates.setdefault(template, len(self.templates)) * self.span + count, int(grows)


def _template_of(value: Value) -> tuple[Value, int]:
    """Split a value into a template, equal for all micro-batches, and a count.

    A number m has count m; a range from 0, or of a single number, has its stop. A value with none of these, or several,
    is its own template.
    """
    places = [place for place, part in enumerate(value) if isinstance(part, int | range)]
    if len(places) != 1:
        return value, 0
    (place,) = places
    part, kind = value[place], None
    if isinstance(part, int):
        kind, count = _COUNT, part
    # `range(0, 1)` is both; as the first case it has one number, so that equal values have equal numbers.
    elif isinstance(part, range) and part.step == 1 and part.start == 0:
        kind, count = _UP_TO, part.stop
    elif isinstance(part, range) and part.step == 1 and part.stop == part.start + 1:
        kind, count = _ONLY, part.stop
    if kind is None:
        return value, 0
    return (*value[:place], kind, *value[place + 1 :]), count


def _is_any(part: object) -> bool:
    """Tell whether a part of a value still depends on `_ANY`."""
    numbers = (part.start, part.stop) if isinstance(part, range) else (part,) if isinstance(part, int) else ()
    return any(abs(number) > _ANY // 2 for number in numbers)
