"""Upper bound of a run's memory from the program and the kernel set alone, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Home
from ratrain.ratrain_ir.ops.base import Quantity
from ratrain.ratrain_ir.ops.collectives import AllReduceScalar
from ratrain.ratrain_ir.ops.compute import LoadInput, Update
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.arena.kernel_memory import Work
from ratrain.targets.runtime.engine.messages_ahead import Form, messages_ahead
from ratrain.targets.runtime.engine.optimizer import update_scratch_bytes
from ratrain.targets.runtime.engine.rank import DENOMINATOR, rope_tables, routine_scratch_bytes
from ratrain.targets.runtime.engine.tensor_collectives import exchange_scratch_bytes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import TensorType
    from ratrain.ratrain_ir.topology import Rank
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program, ProgramStage
    from ratrain.targets.runtime.kernels import KernelSet

_COSINE_AND_SINE = 2 * 4
"""Bytes for each pair of a head's elements at each position."""


@frozen
class Certificate:
    """Bytes of a process that runs ranks: the most that its memory gives out, on the device if there is one."""

    arena_bytes: int
    scratch_bytes: int
    constants: Mapping[str, int]
    """bytes besides arenas and scratch, by purpose; messages included"""
    messages: Mapping[Form, int]
    """number of messages of each form that there is room for"""

    @property
    def total_bytes(self) -> int:
        """Sum of all."""
        return self.arena_bytes + self.scratch_bytes + sum(self.constants.values())


def certificate(
    program: Program, kernels: KernelSet, *, evaluates: bool = False, process_pool: bool = False
) -> Certificate:
    """Return the bound for a run of all ranks in this process, for every order of instructions that the waits allow.

    `evaluates`: the run also evaluates. `process_pool`: each engine of each rank has a thread (`ThreadedEngine`).
    """
    places = program.topology.ranks
    scratches = scratch_capacities(program, kernels, overlaps=process_pool or kernels.memory.overlaps)
    messages = messages_ahead(program, evaluates=evaluates)
    of_messages = sum(count * prod(shape) * dtype.itemsize for (dtype, shape), count in messages.items())
    constants = {
        **constants_of(program, kernels, places, areas=len(places) + len(scratches), process_pool=process_pool),
        "messages": of_messages,
    }
    arenas = sum(program.stages[place.stage].arena_bytes for place in places)
    return Certificate(arenas, sum(scratches), constants, messages)


def constants_of(
    program: Program, kernels: KernelSet, places: Sequence[Rank], *, areas: int, process_pool: bool = False
) -> dict[str, int]:
    """Return the bytes that some ranks of a process take besides arenas, scratch and messages, by purpose.

    `areas` is the number of arenas and scratches.
    """
    inputs: Counter[Form] = Counter()
    sums = streams = denominators = 0
    divides = [
        sum(DENOMINATOR in KERNELS[step.kernel].arguments(step.options) for step in routine.steps)
        for routine in program.routines
    ]
    for place in places:
        stage = program.stages[place.stage]
        for stream in stage.streams.values():
            for item in stream:
                denominators += divides[item.routine] if item.routine is not None else 0
                if item.keyword == LoadInput.keyword:
                    inputs.update((held.dtype, held.shape) for held in _types(stage, item))
            sums += any(map(_sums_squares, stream))
            streams += any(item.routine is not None for item in stream)
    tables = sum(length * (width // 2) * _COSINE_AND_SINE for length, width, _, _ in rope_tables(program))
    work = Work(
        inputs=inputs,
        sums=sums if process_pool else min(sums, 1),
        areas=areas,
        streams=streams,
        denominators=denominators,
        ranks=len(places),
        blocks=sum(len(program.topology.stage_blocks[place.stage]) for place in places),
    )
    stored = [count for place in places if (count := program.stages[place.stage].bytes_in(Home.HOST))]
    in_host = {"stored in 'host'": sum(stored) + ALIGNMENT_BYTES * len(stored)} if stored else {}
    return {"rotary tables": tables, **in_host, **kernels.memory.constants(work)}


def _types(stage: ProgramStage, item: Instruction) -> list[TensorType]:
    """Return the types of an instruction's operands."""
    return [stage.tensors[operand.tensor].type for operand in item.operands]


def scratch_capacities(program: Program, kernels: KernelSet, *, overlaps: bool) -> list[int]:
    """Return the bytes of each scratch of a process that runs all ranks.

    One scratch if one instruction runs at a time. Otherwise each rank has one for routines, one for reductions, one for
    updates, and one for exchanges of tensor-parallel, context or expert ranks if these sum anything.
    """
    updates = update_scratch_bytes(program, kernels)
    most = scratch_bytes(program, kernels)
    exchanges = [needed] if (needed := exchange_scratch_bytes(program, kernels)) else []
    return [most, updates, updates, *exchanges] * len(program.topology.ranks) if overlaps else [most]


def scratch_bytes(program: Program, kernels: KernelSet) -> int:
    """Return the scratch that a kernel set needs for the largest instruction of a program."""
    routines = max((routine_scratch_bytes(routine, kernels) for routine in program.routines), default=0)
    return max(routines, update_scratch_bytes(program, kernels), exchange_scratch_bytes(program, kernels))


def _sums_squares(item: Instruction) -> bool:
    """Return True if an instruction sums squares of gradients: an update for the log, or the norm that clips."""
    return item.keyword == Update.keyword or (
        item.keyword == AllReduceScalar.keyword and item.variant == Quantity.NORM.value
    )
