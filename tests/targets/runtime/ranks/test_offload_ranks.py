"""Ranks that keep activations with each other train the bits of the local engine, and those of the same plan where each keeps its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from tests.end_to_end.tiny_runs import MODEL, make_plan, reports_of, train
from tests.targets.runtime.ranks.mpi_tools import needs_mpi
from tests.targets.runtime.ranks.rank_jobs import STEPS, local_reports, trained_by_ranks
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads
from tests.targets.runtime.ranks.torch_tools import needs_torch

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program

DEEP = evolve(MODEL, layers=4)
PLANS: dict[str, dict[str, Any]] = {
    "2x2": {},
    "4x1": {"pp": 4, "dp": 1, "micro_batches": 6},
    "2x2-views-gathered-for-each-use": {"zero": 3, "reduce": "each-micro-batch"},
    "2x2-slices": {"slices": (4, 3, 3), "zero": 2, "reduce": "each-micro-batch"},
    "2x2-bf16": {"view_dtype": "bf16"},
    "4x1-split": {"pp": 4, "dp": 1, "schedule": "zb-h1", "micro_batches": 5},
}
"""Of four ranks each."""
WAYS = {"kept": "recompute{policy=none}", "lent": "recompute{policy=none store=peer}"}


def programs_of(name: str) -> dict[str, Program]:
    plan = make_plan(DEEP, **PLANS[name])
    found = {way: api.emit(api.compile(DEEP, plan, passes=f"{passes},allocate-ddr")) for way, passes in WAYS.items()}
    assert [bool(program.peer_memory_senders) for program in found.values()] == [False, True]
    return found


def test_threads_train_the_bits_of_the_local_engine() -> None:
    programs = programs_of("2x2")
    alone = train(programs["kept"], 2)
    for run in trained_by_threads(programs["lent"], 2, poison=True):
        assert reports_of(run) == reports_of(alone)


def check_processes(engine: str, folder: Path) -> None:
    programs = {name: programs_of(name) for name in PLANS}
    tasks = [
        {"made": each["lent"], "order": order, "reduction": "ordered", "steps": STEPS, "settings": {"poison": True}}
        for each in programs.values()
        for order in ("pp-first", "dp-first")
    ]
    found = iter(trained_by_ranks(engine, folder, tasks))
    for name, each in programs.items():
        kept = local_reports(each["kept"])
        assert next(found)["reports"] == kept, name
        assert next(found)["reports"] == kept, name


@needs_mpi
@pytest.mark.full
def test_processes_over_mpi_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    check_processes("mpi", tmp_path)


@needs_torch
@pytest.mark.full
def test_processes_over_gloo_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    check_processes("torch", tmp_path)
