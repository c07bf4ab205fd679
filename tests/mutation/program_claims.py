"""Mutations of what no run on this machine shows: workspace, memories and passes that a program claims. None of them may be let through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, STORES, Dtype, Home, StateKind, tensor_type
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS
from ratrain.targets.program.instruction import Access
from tests.mutation.program_parts import NO_OP, RACE, VALUES, item_at, operator, pick, places, put, title_of

if TYPE_CHECKING:
    from random import Random

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

_CALLS_ROUTINE = {kind.keyword for kind in BLOCK_OPS}


def _workspace_of(item: Instruction) -> int | None:
    """The tensor that an instruction without routine works in, or None."""
    found = [operand.tensor for operand in item.operands if operand.access is Access.SCRATCH]
    return found[0] if found and item.keyword not in _CALLS_ROUTINE else None


@operator("RT025 RT034", always=True)
def starve_what_calls_no_routine(program: Program, random: Random) -> str | None:
    """The workspace of a collective, or of what streams state, is smaller than its machine wants."""
    place = pick(program, random, lambda item: _workspace_of(item) is not None)
    if place is None:
        return None
    number = _workspace_of(item_at(place))
    assert number is not None
    tensors = place[1].tensors
    if any(item.keyword in _CALLS_ROUTINE for item in _users(program, place[0], number)):
        return None
    held = tensors[number].type.nbytes
    left = random.choice((held - ALIGNMENT_BYTES, ALIGNMENT_BYTES, held // 2))
    tensors[number] = evolve(tensors[number], type=tensor_type(Dtype.U8, (left,)))
    return f"{title_of(place)}: {left} of {held} bytes"


def _users(program: Program, stage: int, tensor: int) -> list[Instruction]:
    found = places(program, lambda item: any(operand.tensor == tensor for operand in item.operands))
    return [item_at(place) for place in found if place[0] == stage]


@operator("RT025 RT034", always=True)
def take_workspace_away(program: Program, random: Random) -> str | None:
    """Take the workspace from an instruction that needs one and calls no routine."""
    place = pick(program, random, lambda item: _workspace_of(item) is not None)
    if place is None:
        return None
    operands = tuple(operand for operand in item_at(place).operands if operand.access is not Access.SCRATCH)
    put(place, operands=operands)
    return title_of(place)


@operator("RT025 RT034 RT052 RT053", VALUES, RACE, always=True)
def move_state_elsewhere(program: Program, random: Random) -> str | None:
    """A master or a moment is in another memory, and what works on it works as before."""
    kinds = (StateKind.MASTER, StateKind.MOMENT)
    found = [
        (stage, at)
        for stage in program.stages
        for at, tensor in enumerate(stage.tensors)
        if tensor.kind in kinds and tensor.home is Home.DDR
    ]
    if not found:
        return None
    stage, at = random.choice(found)
    home = random.choice(tuple(STORES))
    moved = stage.tensors[at] = evolve(stage.tensors[at], home=home, offset=stage.bytes_in(home))
    return f"%{moved.name} in {home.value} at {moved.offset}"


@operator(NO_OP, always=True)
def claim_another_pipeline(program: Program, random: Random) -> str | None:
    """The header names passes that cannot have made the program."""
    other = "gpipe" if program.plan.schedule == "1f1b" else "1f1b"
    claims = ["nonsense", "recompute{policy=odd}", "recompute{speed=2}", "place-1f1b,legalize", "legalise,,legalise"]
    claims += [f"place-{other}", f"place-schedule{{kind={other}}}"] if program.plan.schedule else []
    program.pipeline = random.choice(claims)
    return program.pipeline
