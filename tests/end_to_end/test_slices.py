"""Micro-batches cut along the sequence: the training of whole ones, whatever the model, the plan, the order and the passes.

Cutting rows changes the order of sums, so losses agree closely and not bit for bit; those of one cut do, whatever the passes and the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve, frozen

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.passes.placement.place_orders import place_orders
from ratrain.passes.placement.place_schedule import split_where_halves_are_apart
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, losses, make_plan, make_stream, same_bits, start, train
from tests.end_to_end.toys import GPT2, NEOX, SHARED_EXPERT

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.schedules.action import Order
    from ratrain.targets.program.program import Program

STEPS = 20
F32_LOSS = 1e-5  # of the loss
SLICES = (4, 3, 3)
ALIBI = evolve(MODEL, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0)
MODELS = {
    "grouped-queries": MODEL,
    "alibi": ALIBI,
    "window-below-a-slice": evolve(MODEL, family="mistral", sliding_window=2),
    "window-above-a-slice": evolve(MODEL, family="mistral", sliding_window=5),
    "learned-positions": GPT2,
    "side-by-side": NEOX,
    "tied": evolve(MODEL, tied_embeddings=True),
    "four-layers": evolve(MODEL, layers=4),
    "experts": SHARED_EXPERT,
}
STATES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero": 0},
    "zero-1": {"zero": 1, "dp": 2},
    "zero-2": {"zero": 2, "dp": 2},
    "zero-2-each": {"zero": 2, "dp": 2, "reduce": "each-micro-batch"},
    "zero-3": {"zero": 3, "dp": 2},
    "zero-3-each": {"zero": 3, "dp": 2, "reduce": "each-micro-batch"},
    "clipped": {"optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)},
}
POLICIES = {
    "joint": "joint-order,allocate-ddr",
    "none": "recompute{policy=none},allocate-ddr",
    "full": "recompute{policy=full},allocate-ddr",
    "attention": "recompute{policy=attention},allocate-ddr",
    "mlp": "recompute{policy=mlp},allocate-ddr",
    "auto": "recompute{policy=auto budget=200KB},allocate-ddr",
    "forward-side": "recompute{policy=full placement=forward-side},allocate-ddr",
}
WHOLE = "place-gpipe,recompute{policy=none},allocate-ddr"


@frozen
class Training:
    """What is trained."""

    model: str = "grouped-queries"
    state: str = "zero-0"
    pp: int = 2
    micro_batch_size: int = 1
    mlp_chunk: int | None = None
    head_chunk: int = 2048

    def program(self, passes: str, orders: Sequence[Order] = (), **keys: Any) -> Program:
        """The program of it, in an order of the schedule that the passes place, or in given ones."""
        own = {"pp": self.pp, "micro_batch_size": self.micro_batch_size, "micro_batches": 2, "dp": 1}
        own |= {"mlp_chunk": self.mlp_chunk, "head_chunk": self.head_chunk, "view_dtype": "f32", **STATES[self.state]}
        module = api.lowered(MODELS[self.model], make_plan(MODELS[self.model], **own, **keys))
        if orders:
            split_where_halves_are_apart(module, list(orders))
            place_orders(module, orders)
        api.run_passes(module, without_idle_options(passes, module.plan, module.model), verify_each=True)
        return api.emit(module)


@cache
def losses_of_whole_micro_batches(training: Training) -> list[float]:
    """The losses without slices, in GPipe order."""
    run = train(training.program(WHOLE), STEPS)
    assert losses(run)[-1] < losses(run)[0] - 0.2, "the model does not learn: equal losses would say little"
    return losses(run)


def check_against_whole(training: Training, program: Program, **settings: Any) -> None:
    """Fail unless a program trains like whole micro-batches."""
    found = losses(train(program, STEPS, **settings))
    expected = losses_of_whole_micro_batches(training)
    assert max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) <= F32_LOSS


COVERING = [
    (Training(), (4, 3, 3), "joint"),
    (Training("alibi", micro_batch_size=3), (1, 9), "full"),
    (Training("window-below-a-slice", "zero-2-each"), (4, 3, 3), "full"),
    (Training("window-above-a-slice", "zero-3", mlp_chunk=3), (2, 2, 3, 3), "attention"),
    (Training("learned-positions", "zero-3-each"), (7, 3), "auto"),
    (Training("tied", "clipped", head_chunk=2), (3, 3, 4), "mlp"),
    (Training("grouped-queries", "zero-1", pp=3, micro_batch_size=2), (9, 1), "forward-side"),
    (Training("side-by-side", "zero-2", mlp_chunk=3), (6, 4), "full"),
    (Training("alibi", "zero-2", pp=1), (5, 5), "none"),
    (Training("experts", "zero-3-each"), (1, 6, 3), "mlp"),
]


@pytest.mark.parametrize(("training", "slices", "policy"), COVERING, ids=str)
@pytest.mark.sampled(6)
def test_slices_train_like_whole_micro_batches(training: Training, slices: tuple[int, ...], policy: str) -> None:
    check_against_whole(training, training.program(POLICIES[policy], slices=slices))


CUTS = ((4, 3, 3), (1, 9), (1,) * 10)
MEETING = [
    (model, state, slices, policy)
    for (m, model), (s, state), (c, slices), (p, policy) in product(*map(enumerate, (MODELS, STATES, CUTS, POLICIES)))
    if (m + s + c + p) % len(POLICIES) == 0
]
"""Of all combinations one in seven, in which any two of a model, a state, cuts and a policy meet."""


@pytest.mark.full
@pytest.mark.parametrize(("model", "state", "slices", "policy"), MEETING, ids=str)
def test_any_slices_train_like_whole_micro_batches(
    model: str, state: str, slices: tuple[int, ...], policy: str
) -> None:
    training = Training(model, state)
    check_against_whole(training, training.program(POLICIES[policy], slices=slices))


# Orders that have no name: every forward first, chunk by chunk; backwards whole or split


def order(stage: int, stages: int, chunks: int, micro_batches: int, slices: int, halves: str) -> Iterator[Action]:
    """A stage's order in a loop of chunks; `halves`: none, next to each other, after a micro-batch's inputs, or at the end."""
    own = [chunk for chunk in range(stages * chunks) if chunk % stages == stage]
    forward, whole = ActionKind.FORWARD, ActionKind.BACKWARD
    first, second = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
    numbers = range(micro_batches)
    for m in numbers:
        yield from (Action(forward, m, chunk, number) for chunk in own for number in range(slices))
    back = {m: [(m, chunk, number) for chunk in reversed(own) for number in reversed(range(slices))] for m in numbers}
    for m in numbers:
        for work in back[m]:
            if halves in ("none", "of the first slice") and not (halves != "none" and work[2] == 0):
                yield Action(whole, *work)
            else:
                yield Action(first, *work)
                if halves in ("next", "of the first slice"):
                    yield Action(second, *work)
        if halves == "after the micro-batch":
            yield from (Action(second, *work) for work in back[m])
    if halves == "at the end":
        yield from (Action(second, *work) for m in numbers for work in back[m])


HALVES = ("none", "next", "of the first slice", "after the micro-batch", "at the end")


def check_order(training: Training, chunks: int, slices: tuple[int, ...], halves: str, policy: str) -> None:
    stages = training.pp
    orders = [list(order(stage, stages, chunks, 2, len(slices), halves)) for stage in range(stages)]
    cuts = tuple(range(1, stages * chunks))
    program = training.program(POLICIES[policy], orders, slices=slices, chunks=chunks, cuts=cuts)
    check_against_whole(training, program)


@pytest.mark.parametrize(
    ("training", "chunks", "halves", "policy"),
    [
        (Training("window-above-a-slice", "zero-3-each"), 1, "at the end", "full"),
        (Training("alibi", "zero-2-each"), 1, "after the micro-batch", "attention"),
        (Training(micro_batch_size=3), 1, "of the first slice", "joint"),
        (Training("four-layers", "zero-1"), 2, "next", "full"),
        (Training("four-layers"), 2, "none", "joint"),
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_halves_and_chunks_of_slices_train_like_whole_micro_batches(
    training: Training, chunks: int, halves: str, policy: str
) -> None:
    check_order(training, chunks, SLICES, halves, policy)


def test_slices_in_chunks_in_the_order_of_their_schedule_train_like_whole_micro_batches() -> None:
    training = Training("four-layers", "zero-2-each")
    keys = {"slices": SLICES, "chunks": 2, "cuts": (1, 2, 3), "schedule": "seq1f1b"}
    check_against_whole(training, training.program(POLICIES["full"], **keys))


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize(
    ("model", "chunks"), [("window-above-a-slice", 1), ("learned-positions", 1), ("four-layers", 2)]
)
def test_any_halves_and_chunks_of_slices_train_like_whole_micro_batches(
    model: str, chunks: int, halves: str, policy: str
) -> None:
    check_order(Training(model, "zero-2-each"), chunks, SLICES, halves, policy)


# One cut: the same bits


def test_one_cut_trains_the_same_bits_whatever_the_passes_the_order_and_the_interleaving() -> None:
    training = Training("window-above-a-slice", "zero-2", micro_batch_size=2)
    orders = [list(order(stage, 2, 1, 2, len(SLICES), "at the end")) for stage in range(2)]
    expected = train(training.program(POLICIES["joint"], slices=SLICES), 3)
    same_bits(expected, train(training.program(POLICIES["full"], orders, slices=SLICES), 3))
    program = training.program(POLICIES["attention"], slices=SLICES)
    for seed in (1, 2, 3):
        same_bits(expected, train(program, 3, interleave_seed=seed, poison=True))
    same_bits(expected, train(program, 3, poison=True, check_memory=True))


@pytest.mark.full
def test_fifty_interleavings_train_the_same_bits() -> None:
    program = Training("tied", "zero-3-each").program(POLICIES["joint"], slices=SLICES)
    expected = train(program, 3)
    for seed in range(50):
        same_bits(expected, train(program, 3, interleave_seed=seed, poison=True))


def test_the_reference_kernels_agree() -> None:
    program = Training("window-above-a-slice").program(POLICIES["full"], slices=SLICES)
    fast, reference = (losses(train(program, 3, kernels=name)) for name in ("fast", "reference"))
    assert reference == pytest.approx(fast, rel=1e-6)


@pytest.mark.parametrize("state", ["zero-2-each", "zero-3"])
def test_a_program_is_the_same_from_its_file(state: str) -> None:
    program = Training(state=state).program(POLICIES["full"], slices=SLICES)
    data = program_bytes(program)
    again = parse_program(data, "slices.rtx")
    check_program(again)
    assert program_bytes(again) == data
    assert [repr(stage.streams) for stage in again.stages] == [repr(stage.streams) for stage in program.stages]
    same_bits(train(program, 2), train(again, 2))


# What is shared with runs of whole micro-batches


@pytest.mark.parametrize("slices", [(4, 6), ()], ids=str)
@pytest.mark.sampled(2)
def test_a_run_goes_on_under_other_slices(slices: tuple[int, ...], tmp_path: Path) -> None:
    training, before = Training("learned-positions", "zero-1"), STEPS // 2
    train(training.program(POLICIES["joint"], slices=SLICES), before, save=str(tmp_path / "checkpoint"))
    program = training.program(POLICIES["joint"], slices=slices)
    rest = train(program, STEPS - before, resume=str(tmp_path / "checkpoint"))
    assert losses(rest) == pytest.approx(losses_of_whole_micro_batches(training)[before:], rel=F32_LOSS)


def test_an_evaluation_gives_the_loss_of_whole_micro_batches_and_changes_no_bit() -> None:
    training = Training("window-above-a-slice", "zero-2")
    sliced = training.program(POLICIES["full"], slices=SLICES)
    found = []
    for program in (sliced, training.program(POLICIES["full"])):
        run = start(program, 3, poison=True)
        held = held_out(make_stream(program.model, 900), program.plan)
        found.append([held.loss(run.engine) for _ in run.steps()])
        if program is sliced:
            same_bits(run, train(program, 3))
    assert found[0] == pytest.approx(found[1], rel=F32_LOSS)
