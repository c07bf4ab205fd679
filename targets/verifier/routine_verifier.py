"""Rules of routines: every name exists, lies within its bounds and fits its kernel.

A routine reads only what has a value, writes only what its caller lets it write, and leaves no result unwritten. The
last three are checked by a symbolic run of its steps over ranges of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from math import prod
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrain_ir.model.slots import ATTENDED
from ratrain.targets.codegen.context_routines import ALL_HEADS, Heads
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.kernel_calls import step_problem
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.on_chip import on_chip_problem
from ratrain.targets.program.routine import COPIES, FROZEN, PACKED, TRAINED, Routine, held_by, parse_reference

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Parameter
    from ratrain.targets.program.routine import Intermediate, ParameterView, Step

Rows = tuple[int, int]
"""A range of rows: the first, and the exclusive end."""

FLAT = (TRAINED, "g", FROZEN, PACKED, COPIES, f"d{COPIES}")
"""Formals whose parts are the parameters of a block, or copies of another rank's experts."""


JOINT = (*ATTENDED, "dq_out")
"""Formals that calls for groups of heads make jointly, each the rows of its group; the first is said to write them."""


def routine_problem(
    routine: Routine, accesses: Mapping[str, Access], parameters: Iterable[Parameter], heads: Heads = ALL_HEADS
) -> str | None:
    """Explain why a routine cannot serve calls with these accesses of its formals; None if it can.

    `parameters` belong to the blocks that it is called for; `heads` are those that the call attends with.
    """
    problems = chain(_name_problems(routine, accesses), _bound_problems(routine), _layout_problems(routine, parameters))
    problem = next(problems, None)
    if problem is not None:
        return f"routine {routine.key}: {problem}"
    ranks = routine.context_ranks
    if any(step.by_rank and len(step.by_rank) != ranks for step in routine.steps):
        return f"routine {routine.key}: its steps are for different numbers of context ranks"
    own = _rows_of_heads(routine, accesses, heads)
    accesses = {**accesses, **dict.fromkeys(own, Access.WRITE)}
    for rank in range(ranks):
        run = _SymbolicRoutine(routine, accesses, own)
        on = f" on context rank {rank}" if ranks > 1 else ""
        for number, step in enumerate(routine.steps, 1):
            on_rank = step.on_rank(rank)
            problem = None if on_rank is None else run.step(on_rank)
            if problem is not None:
                return f"routine {routine.key}, step {number}{on}: {problem}"
        left = run.unwritten()
        if left:
            return f"routine {routine.key} never writes {left}{on}"
    return None


def _rows_of_heads(routine: Routine, accesses: Mapping[str, Access], heads: Heads) -> dict[str, Rows]:
    """Return the rows that a call for one group of heads writes of what all groups make jointly."""
    if heads.groups == 1:
        return {}
    made = [each for each in routine.formals if each.name in JOINT and accesses.get(each.name) is not Access.READ]
    lengths = {each.name: each.shape[0] // heads.groups for each in made}
    return {name: (heads.group * length, (heads.group + 1) * length) for name, length in lengths.items()}


def _name_problems(routine: Routine, accesses: Mapping[str, Access]) -> Iterator[str]:
    names = [formal.name for formal in routine.formals]
    if sorted(names) != sorted(accesses):
        yield f"its operands are {', '.join(names)}, the call binds {', '.join(accesses)}"
    names += [item.name for item in routine.intermediates]
    for group in (names, [parameter.name for parameter in routine.parameters]):
        for name, count in Counter(group).items():
            if count > 1:
                yield f"'{name}' has {count} meanings"
            if set(name) & set(".[]") or name in ("", "workspace"):
                yield f"'{name}' cannot be a name"


def _bound_problems(routine: Routine) -> Iterator[str]:
    for item in routine.intermediates:
        if item.offset % ALIGNMENT_BYTES or _end(item) > routine.workspace_bytes or not prod(item.shape):
            yield f"'{item.name}' does not lie in the {routine.workspace_bytes} bytes of workspace"
    flats = [formal for formal in routine.formals if formal.name in FLAT]
    for formal in flats:
        for parameter in _parts_of(routine, formal.name):
            if parameter.offset + prod(parameter.shape) > prod(formal.shape) or not prod(parameter.shape):
                yield f"'{parameter.name}' does not lie in '{formal.name}'"
    for flat in (TRAINED, FROZEN, PACKED, COPIES):
        spans = sorted((p.offset, p.offset + prod(p.shape), p.name) for p in _parts_of(routine, flat))
        for (_, stop, name), (start, _, other) in pairwise(spans):
            if start < stop:
                yield f"'{name}' and '{other}' share elements"


def _parts_of(routine: Routine, formal: str) -> list[ParameterView]:
    """Return the parts of a flat formal: parameters that train, frozen or packed ones."""
    return [part for part in routine.parameters if part.held == held_by(formal)]


def _layout_problems(routine: Routine, parameters: Iterable[Parameter]) -> Iterator[str]:
    """Yield parameters that are not at the place that the model gives them."""
    places = {item.name: (item.shape, item.offset, item.held) for item in routine.parameters}
    for parameter in parameters:
        if places.get(parameter.weight) != (parameter.stored_shape, parameter.offset, parameter.held.value):
            yield f"'{parameter.weight}' is not where the model has it"


def _end(item: Intermediate) -> int:
    return item.offset + prod(item.shape) * item.dtype.itemsize


@define
class _SymbolicRoutine:
    """Symbolic run of a routine: which rows of each name hold a value."""

    routine: Routine
    accesses: Mapping[str, Access]
    own: Mapping[str, Rows]
    """rows that are the call's own, of formals that it makes jointly with others"""
    written: dict[str, list[Rows]] = field(factory=dict)
    """rows that steps have written, by name: disjoint ranges, ascending"""

    def step(self, step: Step) -> str | None:
        """Run a step; explain why it cannot run at its place, or return None."""
        try:
            types = {name: self.routine.operand(reference) for name, reference in step.operands.items()}
        except KeyError as error:
            return str(error.args[0])
        problem = step_problem(step, types) or on_chip_problem(step, types)
        if problem is not None:
            return problem
        operands = [operand for operand in KERNELS[step.kernel].operands if operand.name in step.operands]
        for operand in operands:
            reference = step.operands[operand.name]
            if operand.is_read(step.options) and not self.holds(reference):
                return f"'{step.kernel}' reads '{reference}' before anything is written to it"
        read = {step.operands[operand.name] for operand in operands if operand.is_read(step.options)}
        for operand in operands:
            if operand.is_written:
                problem = self.write(step, operand.name, reads=step.operands[operand.name] in read)
                if problem is not None:
                    return problem
        return None

    def holds(self, reference: str) -> bool:
        """Tell whether a reference has a value, from the caller or from a step."""
        named = parse_reference(reference)
        if self.accesses.get(named.base) in (Access.READ, Access.UPDATE):
            return True
        start, stop = self.rows(reference)
        return any(low <= start and stop <= high for low, high in self.written.get(named.whole, ()))

    def rows(self, reference: str) -> Rows:
        """Return the range of rows that a reference means."""
        named = parse_reference(reference)
        return named.rows or (0, self.routine.shape_of(named.whole)[0])

    def write(self, step: Step, name: str, *, reads: bool) -> str | None:
        """Record that a step writes an operand; explain why it may not, or return None."""
        reference = step.operands[name]
        named = parse_reference(reference)
        access = self.accesses.get(named.base)
        if access is Access.READ:
            return f"'{step.kernel}' writes '{reference}', which the call only reads"
        if access is Access.UPDATE and not reads:
            return f"'{step.kernel}' overwrites '{reference}', to which the call adds"
        rows, own = self.rows(reference), self.own.get(named.whole)
        if own is not None and not (own[0] <= rows[0] and rows[1] <= own[1]):
            return f"'{step.kernel}' writes '{reference}', of which rows {own[0]} to {own[1]} are of its group of heads"
        for other, target in step.operands.items():
            if other != name and self.share(reference, target):
                same = reference == target and (name, other) in KERNELS[step.kernel].in_place
                if not same:
                    return f"'{name}' and '{other}' of '{step.kernel}' share bytes"
        # Values that shared these bytes are overwritten: their names hold nothing any more.
        for held in [name for name in self.written if name != named.whole and self.share(reference, name)]:
            del self.written[held]
        self.written[named.whole] = _joined([*self.written.get(named.whole, ()), rows])
        return None

    def share(self, one: str, other: str) -> bool:
        """Tell whether two references have bytes in common.

        Formals never do: that is proved of the tensors that they are bound to.
        """
        first, second = parse_reference(one), parse_reference(other)
        if first.whole == second.whole:
            return _meet(self.rows(one), self.rows(other))
        places = {item.name: (item.offset, _end(item)) for item in self.routine.intermediates}
        if first.whole in places and second.whole in places:
            return _meet(places[first.whole], places[second.whole])
        # A flat formal contains its parts; two different parts of one are disjoint (`_bound_problems`).
        return first.base == second.base and not (first.part and second.part)

    def unwritten(self) -> str | None:
        """Return a result that the routine leaves without a value; None if it leaves none."""
        for formal in self.routine.formals:
            if self.accesses[formal.name] is not Access.WRITE or self.is_whole(formal.name):
                continue
            parts = [p for p in _parts_of(self.routine, formal.name) if self.is_whole(f"{formal.name}.{p.name}")]
            if formal.name not in FLAT or sum(prod(p.shape) for p in parts) < prod(formal.shape):
                return f"all of '{formal.name}'"
        return None

    def is_whole(self, name: str) -> bool:
        """Tell whether steps have written every row of a name, or every row that is the call's own."""
        return self.written.get(name) == [self.own.get(name) or self.rows(name)]


def _meet(one: Rows, other: Rows) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _joined(parts: list[Rows]) -> list[Rows]:
    """Sort ranges, and join those that overlap or touch."""
    joined: list[Rows] = []
    for low, high in sorted(parts):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined
