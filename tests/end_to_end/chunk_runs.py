"""Programs of any schedule, chunks included, and what they train."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain import api
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.tiny_runs import losses, make_plan, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

PASSES = strategy("ratrain").passes
Outcome = tuple[list[float], dict[str, bytes]]
"""Losses, and master weights and moments by block."""


def shapes(stages: int, chunks: int, micro_batches: int) -> Iterator[tuple[str, PipelineShape]]:
    """Every schedule with every layout that it can have."""
    for kind, layout in product(SCHEDULES, LAYOUTS if chunks > 1 else LAYOUTS[:1]):
        shape = PipelineShape(stages, micro_batches, chunks, layout)
        if SCHEDULES[kind].problem(shape) is None:
            yield kind, shape


def plan_keys(kind: str, shape: PipelineShape) -> dict[str, Any]:
    """What a plan says of its schedule and shape; each chunk but the last has one layer."""
    return {
        "schedule": kind,
        "pp": shape.stages,
        "micro_batches": shape.micro_batches,
        "chunks": shape.chunks,
        "layout": shape.layout,
        "cuts": tuple(range(1, shape.stages * shape.chunks)),
    }


def program_of(model: ModelConfig, kind: str, shape: PipelineShape, passes: str = PASSES, **keys: Any) -> Program:
    """The program of a schedule; `passes` leave the placement to the plan."""
    return api.emit(api.compile(model, make_plan(model, **plan_keys(kind, shape), **keys), passes=passes))


def outcome(program: Program, steps: int, **settings: Any) -> Outcome:
    """The outcome of a run that watches its memory and poisons what is freed."""
    run = start(program, steps, poison=True, **settings)
    list(run.steps())
    return outcome_of(run)


def outcome_of(run: TrainingRun) -> Outcome:
    """The outcome of a run that has ended."""
    blocks = training_state(run.engine, len(run.done)).blocks
    arrays = {f"{unit} {name}": getattr(blocks[unit], name) for unit in blocks for name in ("p", "m1", "m2")}
    return losses(run), {name: np.asarray(array).tobytes() for name, array in arrays.items()}
