"""A schedule does not depend on how many processes made it: every byte of its text is the same, and so are statistics and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.process_pool import processes
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.strategies import Case, cases, for_plan, pipelines, targets
from ratrain.ratrain_ir.text.printer import print_module

if TYPE_CHECKING:
    from ratrain.ratrain_ir.testing.fake_target import FakeTarget

PASSES = (
    ("place-zb-h1", {}),
    ("recompute", {"policy": ("auto", "full"), "placement": ("inline", "forward-side")}),
    ("joint-order", {"store": ("nowhere", "peer")}),
    ("bucket-grad-sync", {"bytes": ("1B", "1KiB")}),
    ("insert-prefetch", {}),
    ("allocate-ddr", {"overlap": ("keep", "ignore")}),
)


def outcome(case: Case, pipeline: str, target: FakeTarget, count: int) -> tuple[object, ...]:
    """Text and statistics, or the diagnostics, where so many processes work on it."""
    manager = PassManager(target)
    with processes(count, least_work=0):
        try:
            module = manager.run(case.module(), pipeline)
        except DiagnosticError as error:
            return tuple(error.diagnostics)
        # of an allocation the last words are the seconds that it took
        told = [
            (run.text, [(key, str(value).rpartition(", ")[0]) for key, value in run.statistics.items()])
            for run in manager.runs
        ]
        return print_module(module), told


@settings(max_examples=20)
@given(cases(), pipelines(PASSES), targets(), st.sampled_from((60, 80, 100, 1000)))
def test_two_processes_make_what_one_makes(case, pipeline, target, percent):
    """Also where bytes are few: some of it is recovered then, or refused."""
    without = PassManager(target).run(case.module(), "allocate-ddr")
    capacity = max(stage.arena_bytes for stage in without.stages) * percent // 100
    target, text = evolve(target, capacity_bytes=capacity), for_plan(pipeline, case.plan)
    assert outcome(case, text, target, 2) == outcome(case, text, target, 1)
