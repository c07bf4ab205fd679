"""Disk that a run's checkpoints need, known before its first step, and refusal where it is not free."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.quantities import size_text
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from ratrain.targets.runtime.checkpoint.state_file import state_shapes
from ratrain.targets.runtime.checkpoint.training_state import STATE_KINDS
from ratrain.targets.runtime.weights.weights import block_elements

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.settings import RunSettings, Saving

_ELEMENT = 4
"""Bytes of an element of the state, which is f32."""


def checkpoint_bytes(program: Program, *, is_series: bool) -> int:
    """Return the bytes of the tensors in one checkpoint of a program, single or of a series.

    Manifest, tensor names and companions come to it: little beside any model that is worth saving.
    """
    if not is_series:
        return _ELEMENT * sum(math.prod(shape) for shape in state_shapes(program.trained_model).values())
    model = rank_model(program.model, program.plan)
    elements = sum(block_elements(model, block) for block in block_chain(model))
    return _ELEMENT * len(STATE_KINDS) * program.plan.tp * elements


def check_room(program: Program, settings: RunSettings, first_step: int, *, is_series: bool) -> None:
    """Refuse a run whose checkpoints do not fit on their disk beside what is there.

    A new checkpoint stands beside the old ones until it is whole. Raises `DiagnosticError` RT002.
    """
    saving = settings.saving
    if saving.directory is None:
        return
    place = Path(os.path.realpath(saving.directory))
    with suppress(OSError):
        disk = shutil.disk_usage(place if is_series else place.parent)
        size = checkpoint_bytes(program, is_series=is_series)
        count = _more_at_once(saving, first_step, settings.steps) if is_series else 1
        # A file system that does not say how large it is does not say what is free either.
        if disk.total and count * size > disk.free:
            _refuse(saving, size, count, disk.free)


def _more_at_once(saving: Saving, first_step: int, steps: int) -> int:
    """Return the most checkpoints of a series that stand at once during a run, less those that stand already."""
    last = first_step + steps
    every = saving.every
    saves = 1 if every is None else last // every - first_step // every + (last % every != 0)
    standing = 0
    with suppress(DiagnosticError):
        standing = sum(step <= first_step for step, _ in saved_steps(saving.directory or ""))
    return max(1, min(saving.keep_last + 1, standing + saves) - standing)


def _refuse(saving: Saving, size: int, count: int, free: int) -> None:
    needed = count * size
    each = f"a checkpoint takes {size_text(size, needed)}"
    several = f", and {count} more of them are kept at once, with the one that is being written" if count > 1 else ""
    ways = [f"free {size_text(needed - free, needed)}", "--save to another disk"]
    if count > 1 and saving.keep_last > 1 and 2 * size <= free:
        ways.append("--keep-last 1")
    fail(
        "RT002",
        f"'{saving.directory}' would not hold what this run saves: {each}{several}; "
        f"{size_text(needed, needed)} are needed and {size_text(free, needed)} are free",
        help=f"{', '.join(ways[:-1])}, or {ways[-1]}",
    )
