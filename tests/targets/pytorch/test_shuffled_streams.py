"""Waits on streams: sound programs leave the same bits whatever runs first, and where a wait is dropped some order leaves others."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import cache
from typing import Any

import pytest
from attrs import evolve

from ratrain.targets.verifier.races import stage_races
from tests.end_to_end.tiny_runs import OPTIMIZER, make_program
from tests.end_to_end.toys import TOY
from tests.targets.verifier.test_races import wait_places, without_waits

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

from ratrain.targets.pytorch.device_streams import StreamOrder  # noqa: E402
from tests.targets.pytorch.shuffled import ShuffledRun  # noqa: E402
from tests.targets.pytorch.test_streams import without_receipts  # noqa: E402

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "2x1": ("ratrain", {"dp": 1, "micro_batches": 3, "zero": 0}),
    "2x2-zero3": ("ratrain", {"micro_batches": 2, "zero": 3}),
    "tied-each": ("ratrain", {"micro_batches": 2, "zero": 2, "reduce": "each-micro-batch"}),
    "clipped-zb": ("zb-h1", {"micro_batches": 3, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)}),
    "interleaved": ("interleaved", {"dp": 1, "zero": 0, "chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3)}),
    "peers": ("ratrain", {"pp": 1, "dp": 1, "tp": 2, "zero": 0, "micro_batches": 2}),
    "replicas of peers": ("ratrain", {"pp": 1, "dp": 2, "tp": 2, "zero": 1, "micro_batches": 2}),
    "slices": ("seq1f1b", {"dp": 1, "zero": 0, "slices": (3, 3), "micro_batches": 2}),
}
GATE = ("2x1", "tied-each")
SEEDS = 6
SMALL = {"seq_len": 6, "micro_batch_size": 1}


@cache
def program_of(kind: str) -> Any:
    name, keys = PROGRAMS[kind]
    model = evolve(TOY, layers=4 if keys.get("chunks") else 2, tied_embeddings=kind == "tied-each")
    return make_program(model, name, view_dtype="f32", **SMALL, **keys)


@cache
def run_of(kind: str) -> ShuffledRun:
    return ShuffledRun(program_of(kind))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in GATE else [pytest.mark.full]) for kind in PROGRAMS]
)
def test_a_sound_program_leaves_the_same_bits_in_any_order(kind: str) -> None:
    assert not any(run_of(kind).changes(program_of(kind), seed) for seed in range(SEEDS))


def dropped(kind: str, most: int) -> tuple[int, int, list[str]]:
    """Each of some waits is dropped: how many, how many of them change bits under some seed, and those that vector clocks let pass."""
    program, run = program_of(kind), run_of(kind)
    every = list(wait_places(program))
    places = every[:: -(-len(every) // most)]
    changed, passed = 0, []
    for number, engine, at, index in places:
        mutant = without_waits(program, (number, engine, at, index))
        item = program.stages[number].streams[engine][at]
        if not stage_races(mutant.stages[number]):
            passed.append(f"stage @{number}, '{item.title}' without its wait for {item.waits[index]}")
        changed += any(run.changes(mutant, seed) for seed in range(SEEDS))
    return len(places), changed, passed


def test_some_dropped_waits_change_bits() -> None:
    count, changed, passed = dropped("2x1", 6)
    assert not passed
    assert changed > count / 4, (changed, count)


@pytest.mark.full
@pytest.mark.parametrize("kind", PROGRAMS)
def test_dropped_waits_are_races_and_many_change_bits(kind: str) -> None:
    """All waits of the smallest program, some of the others. Vector clocks let none pass; one that changes no bit is a race all the same: of bytes that were equal, or orders no seed had."""
    count, changed, passed = dropped(kind, 38 if kind == "2x1" else 12)
    print(f"{kind}: {count} waits, {len(passed)} not seen by vector clocks, {changed} change bits")  # noqa: T201
    assert not passed
    assert changed > count / 4


class _WithoutWaits(StreamOrder):
    def _wait(self, stream: Any, key: Any, count: int) -> None:
        """Wait for nothing."""


def _done_at_once(device: Any) -> Any:
    """An event that nobody has to wait for."""
    event = device.record(device.stream())
    event.done = True
    return event


def _without_messages(device: Any) -> StreamOrder:
    order = StreamOrder(device)
    order._sent = defaultdict(lambda: deque([_done_at_once(device)] * 10**3))
    return order


@pytest.mark.parametrize("order", [_WithoutWaits, _without_messages, without_receipts])
def test_an_order_that_drops_waits_leaves_other_bits(order: Any) -> None:
    run = ShuffledRun(program_of("2x1"), make_order=order)
    assert any(run.changes(program_of("2x1"), seed) for seed in range(4 * SEEDS))
