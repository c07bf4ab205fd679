"""Stages that hold several chunks train what GPipe trains with one chunk a stage, bit for bit, under every schedule there is."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrainc.choices.strategies import strategy
from tests.end_to_end.chunk_runs import Outcome, outcome, program_of, shapes
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER
from tests.end_to_end.toys import EXPERTS, GPT2, NEOX

STEPS = 20
FEW_STEPS = 3
"""In the gate."""
MODELS = {
    "llama": MODEL,
    "llama-tied": evolve(MODEL, tied_embeddings=True),
    "gpt2-tied": GPT2,
    "side-by-side": NEOX,
    "experts": EXPERTS,
}
STATES: tuple[dict[str, Any], ...] = (
    {"zero": 1},
    {"zero": 2, "reduce": "each-micro-batch"},
    {"zero": 3},
    {"zero": 0},
    {"zero": 3, "reduce": "each-micro-batch"},
)
DTYPES = ("f16", "bf16", "f32")
PASSES = (
    *(strategy(name).passes for name in ("ratrain", "ratrain-inline", "full-save")),
    "recompute{policy=full},bucket-grad-sync{bytes=1KiB},insert-prefetch,allocate-ddr",
)
"""Pipelines that leave the placement to the plan."""

SMALL = [*shapes(2, 2, 3)]
GRID = [
    found
    for stages, chunks, micro_batches in product((2, 3, 4), (1, 2, 3), (1, 2, 4, 7))
    for found in shapes(stages, chunks, micro_batches)
]


def shape_name(item: object) -> str:
    if isinstance(item, PipelineShape):
        return f"p{item.stages}-v{item.chunks}-{item.layout}-m{item.micro_batches}"
    return str(item)


@cache
def reference(family: str, layers: int, micro_batches: int, state: int, dtype: str, steps: int) -> Outcome:
    """What GPipe trains on two stages of one chunk."""
    model = evolve(MODELS[family], layers=layers)
    shape = PipelineShape(2, micro_batches)
    passes = "recompute{policy=full},allocate-ddr"
    return outcome(program_of(model, "gpipe", shape, passes, **STATES[state], view_dtype=dtype), steps)


def trains_as_the_reference(
    kind: str, shape: PipelineShape, number: int, dtype: str, steps: int = STEPS, **settings: Any
) -> None:
    """`number` chooses family, state and passes, so that a few shapes see all of them."""
    family = list(MODELS)[number % len(MODELS)]
    state = number % len(STATES)
    layers = max(2, shape.stages * shape.chunks) + number % 2
    model = evolve(MODELS[family], layers=layers)
    program = program_of(
        model, kind, shape, PASSES[number // len(MODELS) % len(PASSES)], **STATES[state], view_dtype=dtype
    )
    found_losses, found_state = outcome(program, steps, **settings)
    expected_losses, expected_state = reference(family, layers, shape.micro_batches, state, dtype, steps)
    assert found_losses == expected_losses
    assert found_losses[-1] < found_losses[0]
    assert [name for name, held in expected_state.items() if found_state[name] != held] == []


@pytest.mark.parametrize(("schedule", "shape"), SMALL, ids=shape_name)
@pytest.mark.sampled(3)
def test_a_schedule_trains_what_gpipe_trains(schedule: str, shape: PipelineShape) -> None:
    number = SMALL.index((schedule, shape))
    dtype = DTYPES[number // 2 % len(DTYPES)]
    trains_as_the_reference(schedule, shape, number, dtype, FEW_STEPS, interleave_seed=number)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "shape"), GRID, ids=shape_name)
def test_a_schedule_of_any_shape_trains_what_gpipe_trains(kind: str, shape: PipelineShape) -> None:
    """Each shape has one type of views, as neighbouring shapes have the others."""
    number = GRID.index((kind, shape))
    trains_as_the_reference(kind, shape, number, DTYPES[number % len(DTYPES)])


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 50, 10))
@pytest.mark.parametrize(("kind", "shape"), [*shapes(3, 1, 4), *shapes(3, 2, 4)], ids=shape_name)
def test_any_order_the_waits_allow_trains_the_same(kind: str, shape: PipelineShape, first: int) -> None:
    for seed in range(first, first + 10):
        trains_as_the_reference(kind, shape, 0, "f16", interleave_seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2)
def test_clipping_is_the_same_under_every_schedule_of_a_layout(layout: str) -> None:
    """The norm adds up the squares of each stage's blocks, so schedules agree on it where stages hold the same."""
    clipped = evolve(OPTIMIZER, clip="global", max_norm=0.3)
    found = {
        kind: outcome(program_of(evolve(MODEL, layers=4), kind, shape, optimizer=clipped), 2)
        for kind, shape in shapes(2, 2, 3)
        if shape.layout == layout
    }
    first = next(iter(found))
    assert [kind for kind, held in found.items() if held != found[first]] == []
