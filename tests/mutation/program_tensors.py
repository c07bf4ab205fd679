"""Mutations of tensors: addresses, types, kinds, names, and the capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Dtype, Home, StateKind, aligned, tensor_type
from tests.mutation.program_parts import (
    BYTES,
    NO_OP,
    RACE,
    TOO_LITTLE,
    VALUES,
    operator,
    other_of,
)

if TYPE_CHECKING:
    from random import Random

    from ratrain.targets.program.instruction import ProgramTensor
    from ratrain.targets.program.program import Program, ProgramStage

# Tensors


def _change_tensor(
    program: Program,
    random: Random,
    change: Callable[[ProgramStage, ProgramTensor], ProgramTensor],
    wanted: Callable[[ProgramTensor], bool] = lambda _t: True,
) -> str | None:
    found = [(stage, i) for stage in program.stages for i, t in enumerate(stage.tensors) if wanted(t)]
    if not found:
        return None
    stage, at = random.choice(found)
    before = stage.tensors[at]
    stage.tensors[at] = change(stage, before)
    return None if stage.tensors[at] == before else f"%{before.name} -> {stage.tensors[at]}"


@operator(BYTES, RACE, "RT051 RT052")
def shift_offset(program: Program, random: Random) -> str | None:
    by = random.choice((ALIGNMENT_BYTES, -ALIGNMENT_BYTES, ALIGNMENT_BYTES, -ALIGNMENT_BYTES, 1))
    return _change_tensor(program, random, lambda _s, t: evolve(t, offset=abs(t.offset + by)))


@operator(BYTES, RACE)
def share_offset(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda stage, t: evolve(t, offset=random.choice(stage.tensors).offset))


@operator(NO_OP, BYTES, RACE, "RT034 RT052 RT053")
def change_home(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda _s, t: evolve(t, home=other_of(random, list(Home), t.home)))


@operator(NO_OP, BYTES, RACE, "RT041", TOO_LITTLE)
def change_shape(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        shape = tensor.type.shape
        changed = random.choice((shape[::-1], (max(1, shape[0] + random.choice((-1, 1))), *shape[1:])))
        return evolve(tensor, type=tensor_type(tensor.type.dtype, changed))

    return _change_tensor(program, random, change)


@operator(NO_OP, BYTES, RACE, TOO_LITTLE)
def change_dtype(program: Program, random: Random) -> str | None:
    return _change_tensor(
        program, random, lambda _s, t: evolve(t, type=tensor_type(random.choice(list(Dtype)), t.type.shape))
    )


@operator(NO_OP, "RT025")
def change_kind(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda _s, t: evolve(t, kind=random.choice(list(StateKind))))


@operator(VALUES, BYTES)
def change_carried(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda _s, t: evolve(t, carried=not t.carried))


@operator(NO_OP, TOO_LITTLE)
def shrink_workspace(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        size = max(ALIGNMENT_BYTES, aligned(tensor.type.nbytes) - ALIGNMENT_BYTES * random.randint(1, 8))
        return evolve(tensor, type=tensor_type(Dtype.U8, (size,)))

    return _change_tensor(program, random, change, lambda t: t.kind is StateKind.WORKSPACE)


@operator(BYTES, RACE)
def grow_workspace(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        size = aligned(tensor.type.nbytes) + ALIGNMENT_BYTES * random.randint(1, 8)
        return evolve(tensor, type=tensor_type(Dtype.U8, (size,)))

    return _change_tensor(program, random, change, lambda t: t.kind is StateKind.WORKSPACE)


@operator(NO_OP)
def rename_tensor(program: Program, random: Random) -> str | None:
    """A name means nothing, except the slot of a saved tensor."""
    return _change_tensor(program, random, lambda _s, t: evolve(t, name=f"{t.name}.z"))


@operator("RT052 RT053")
def shrink_capacity(program: Program, random: Random) -> str | None:
    largest = max(stage.arena_bytes for stage in program.stages)
    program.capacity_bytes = largest - ALIGNMENT_BYTES * random.randint(-2, 2)
    return f"{largest} -> {program.capacity_bytes}"
