"""Makes mutants by seeded choice, judges them, and counts what becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Module
from tests.mutation import (  # those that are not used register their operators
    module_chunks,  # noqa: F401
    module_fields,  # noqa: F401
    module_order,  # noqa: F401
    module_parts,
    module_slices,  # noqa: F401
    module_tensors,  # noqa: F401
    program_chunks,  # noqa: F401
    program_claims,  # noqa: F401
    program_fields,  # noqa: F401
    program_parts,
    program_routines,  # noqa: F401
    program_slices,  # noqa: F401
    program_streams,  # noqa: F401
    program_tensors,  # noqa: F401
)
from tests.mutation.judge import Judgement, Verdict, judge_module, judge_program
from tests.mutation.subjects import SUBJECTS, Subject, copy_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from tests.mutation.operators import Operator

OPERATORS: dict[str, Mapping[str, Operator[Any]]] = {
    "module": module_parts.operator.operators,
    "program": program_parts.operator.operators,
}
"""All operators by level and name."""
_ATTEMPTS = 3
"""Times an operator may look for something to change in a subject."""


@frozen
class Mutant:
    """A mutant, what was done to make it, and what became of it."""

    level: str
    """`module` or `program`"""
    operator: str
    subject: str
    number: int
    change: str
    judgement: Judgement
    fits: bool
    """whether every code it was refused with is one of its operator's, and whether what should have refused it did"""

    def __str__(self) -> str:
        found = self.judgement
        reason = ", ".join(found.codes) or found.verdict.value
        return f"{self.level} {self.operator} / {self.subject} / {self.number}: {self.change}\n    {found.by}: {reason} {found.message}"


def mutants(
    level: str, each: int, subjects: Iterable[Subject] = tuple(SUBJECTS.values()), names: Iterable[str] | None = None
) -> Iterator[Mutant]:
    """`each` different mutants of every operator (or those named) and subject, as far as there are so many; always the same ones."""
    wanted = set(OPERATORS[level] if names is None else names)
    for subject in subjects:
        for operator in OPERATORS[level].values():
            changes: set[str] = set()
            for number in range(each * _ATTEMPTS if operator.name in wanted else 0):
                if len(changes) == each:
                    break
                made = mutant(level, operator, subject, number, changes)
                if made is not None:
                    yield made


def mutant(
    level: str, operator: Operator[Any], subject: Subject, number: int, known: set[str] | None = None
) -> Mutant | None:
    """One mutant; None where there is nothing to change, or where the change is known already."""
    random = Random(f"{level}/{operator.name}/{subject.name}/{number}")
    copy: Module | Program = copy_module(subject.module()) if level == "module" else copy_program(subject.program())
    change = operator.change(copy, random)
    if change is None or (known is not None and change in known):
        return None
    if known is not None:
        known.add(change)
    judgement = judge_module(copy, subject) if isinstance(copy, Module) else judge_program(copy, subject)
    # a schedule that verifies is emitted, and gives a program that verifies; one of no machine yet may ask for what the machine does not have
    unknown = isinstance(copy, Module) and copy.target is None and set(judgement.codes) == {"RT065"}
    late = level == "module" and judgement.by in ("emission", "program verifier") and not unknown
    due = not operator.always or judgement.verdict is Verdict.REFUSED
    fits = set(judgement.codes) <= operator.codes and not late and due
    return Mutant(level, operator.name, subject.name, number, change, judgement, fits)


@define
class Row:
    """What became of the mutants of one operator."""

    mutants: int = 0
    refused: Counter[str] = field(factory=Counter)
    """by the first of the codes"""
    equivalent: Counter[str] = field(factory=Counter)
    """by how that was shown"""
    survivors: int = 0
    misfits: int = 0


@define
class Table:
    """Counts by operator."""

    rows: dict[tuple[str, str], Row] = field(factory=dict)
    faults: list[Mutant] = field(factory=list)
    """Survivors, and mutants that are refused with a code that does not fit, or that should have been refused."""

    def add(self, mutant: Mutant) -> None:
        """Count a mutant."""
        row = self.rows.setdefault((mutant.level, mutant.operator), Row())
        row.mutants += 1
        found = mutant.judgement
        if found.verdict is Verdict.REFUSED:
            row.refused[" ".join(found.codes)] += 1
        elif found.verdict is Verdict.EQUIVALENT:
            row.equivalent[found.by] += 1
        else:
            row.survivors += 1
        if not mutant.fits:
            row.misfits += 1
        if not mutant.fits or found.verdict is Verdict.SURVIVOR:
            self.faults.append(mutant)

    @property
    def mutants(self) -> int:
        """Mutants counted."""
        return sum(row.mutants for row in self.rows.values())

    def markdown(self) -> str:
        """The table, for people."""
        lines = ["| operator | mutants | refused | equivalent | survivors | by code |", "|---|---|---|---|---|---|"]
        for (level, operator), row in self.rows.items():
            single: Counter[str] = Counter()
            for codes, count in row.refused.items():
                single[codes.split()[0]] += count
            codes = ", ".join(f"{code} {count}" for code, count in sorted(single.items()))
            equal = sum(row.equivalent.values())
            refused = sum(row.refused.values())
            lines.append(f"| {level} {operator} | {row.mutants} | {refused} | {equal} | {row.survivors} | {codes} |")
        total = self.rows.values()
        lines.append(
            f"| all | {self.mutants} | {sum(sum(r.refused.values()) for r in total)} "
            f"| {sum(sum(r.equivalent.values()) for r in total)} | {sum(r.survivors for r in total)} | |"
        )
        return "\n".join(lines)


def table_of(found: Iterable[Mutant]) -> Table:
    """Count all mutants."""
    table = Table()
    for item in found:
        table.add(item)
    return table
