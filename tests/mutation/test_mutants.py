"""Mutants of schedules and programs: each is refused with a code that fits, or trains the same bits. Anything else is a hole."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.support.diagnostics import CODES
from tests.end_to_end.tiny_runs import elements, instructions, start
from tests.mutation import judge
from tests.mutation.judge import Verdict, finished_run, judge_module, judge_program, original_behaviour
from tests.mutation.subjects import SUBJECTS, copy_program
from tests.mutation.table import OPERATORS, mutant, mutants, table_of

EACH_FULL = 8
"""Mutants of each operator and subject; the gate has one of every second pair of them, about 750 in all."""

LEVELS = ("module", "program")


def no_holes(level: str, subject: str, each: int, operators: Iterable[str], least: int) -> None:
    table = table_of(mutants(level, each, [SUBJECTS[subject]], operators))
    assert table.mutants >= least
    assert not table.faults, "\n".join(map(str, table.faults))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.sampled(6)
def test_every_mutant_is_refused_or_equivalent(level: str, subject: str) -> None:
    """Every operator on every second subject, every subject with every second operator."""
    first = list(SUBJECTS).index(subject) % 2
    no_holes(level, subject, 1, list(OPERATORS[level])[first::2], 12)


@pytest.mark.full
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_one_of_many_mutants_is_refused_or_equivalent(level: str, subject: str) -> None:
    no_holes(level, subject, EACH_FULL, OPERATORS[level], 30 * EACH_FULL)


# What the tests above rest on


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.sampled(2)
def test_every_operator_changes_something_and_names_codes_there_are(level: str) -> None:
    for operator in OPERATORS[level].values():
        assert operator.codes <= set(CODES)
        made = (mutant(level, operator, subject, number) for number in range(5) for subject in SUBJECTS.values())
        first = next(filter(None, made), None)
        assert first is not None, operator.name
        assert not table_of([first]).faults, first


def test_mutants_are_the_same_every_time() -> None:
    subject = SUBJECTS["p2-d2-zero1"]
    for level in LEVELS:
        for operator in list(OPERATORS[level].values())[:8]:
            assert str(mutant(level, operator, subject, 3)) == str(mutant(level, operator, subject, 3))


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(5)
def test_subjects_train_so_that_equal_results_mean_something(name: str) -> None:
    """Every block is updated in the plain run; some are skipped in the one with overflows, and only some."""
    subject = SUBJECTS[name]
    program = subject.program()
    run = finished_run(program)
    fresh = start(program, 1)
    for ranks, before in zip(run.engine.ranks, fresh.engine.ranks, strict=True):
        for rank, start_rank in zip(ranks, before, strict=True):
            for what, unit in rank.stage.carried:
                if what in ("p", "w", "m1", "m2"):
                    (number, *_) = rank.stage.carried[what, unit]
                    assert not np.array_equal(elements(rank, number), elements(start_rank, number)), (what, unit)
    assert [step.report.skipped_blocks for step in run.done] == [0] * judge.STEPS
    overflowing = original_behaviour(subject, overflows=True)
    updates = sum(1 for _ in instructions(program, "update")) * program.plan.replicas * program.plan.tp
    assert 0 < overflowing.skipped[0] <= updates
    assert overflowing != original_behaviour(subject, overflows=False)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(8)
def test_the_originals_are_equivalent_to_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    for found in (
        judge_module(copy_module(subject.module()), subject),
        judge_program(copy_program(subject.program()), subject),
    ):
        assert (found.verdict, found.by) == (Verdict.EQUIVALENT, "the same program")
    monkeypatch.setattr(judge, "_original_bytes", lambda _subject: b"")
    found = judge_program(copy_program(subject.program()), subject)
    assert (found.verdict, found.by) == (Verdict.EQUIVALENT, "equal runs")


@pytest.mark.parametrize("operator", ["drop-wait", "exchange-operands", "share-offset", "swap-operands"])
@pytest.mark.sampled(3)
def test_without_the_verifier_mutants_survive(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execution tells a wrong program from a right one: otherwise 'equivalent' would mean nothing."""
    monkeypatch.setattr(judge, "check_program", lambda _program: None)
    subject = SUBJECTS["p2-d2-zero2-each"]
    made = [mutant("program", OPERATORS["program"][operator], subject, number) for number in range(10)]
    verdicts = [item.judgement.verdict for item in made if item is not None]
    assert verdicts.count(Verdict.SURVIVOR) >= 3
    assert Verdict.REFUSED not in verdicts
