"""Mutations of chunks: messages of another one, its passes elsewhere, twice or exchanged, another layout under the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.ratrain_ir.copying import copy_op
from ratrain.ratrain_ir.ops.compute import Backward, BackwardInput, Forward
from ratrain.ratrain_ir.ops.messages import Recv, Send
from tests.mutation.module_parts import (
    BYTES,
    LIFE,
    MESSAGES,
    ORDER,
    VALUES,
    is_kind,
    operator,
    other_of,
    pick,
    put,
    title_of,
)
from tests.mutation.plan_shapes import SCHEDULE_CODES, other_shape

if TYPE_CHECKING:
    from random import Random

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op

_BACKWARDS = (Backward, BackwardInput)


@operator("RT027", MESSAGES, VALUES)
def change_chunk(module: Module, random: Random) -> str | None:
    """A message says another chunk, or none."""
    place = pick(module, random, is_kind(Send, Recv))
    if place is None:
        return None
    count = len(module.topology.chunk_stages)
    return put(place, chunk=other_of(random, (None, *range(count + 1)), place[0].ops[place[1]].chunk))


@operator("RT025 RT027", MESSAGES, VALUES)
def exchange_chunks_of_messages(module: Module, random: Random) -> str | None:
    """Two messages of one way between the same two stages exchange their chunks, and keep what they carry."""
    place = pick(module, random, is_kind(Send, Recv))
    if place is None:
        return None
    stage, at = place
    op = stage.ops[at]
    partners = [i for i, other in enumerate(stage.ops) if _is_other_chunk_of_way(op, other)]
    if not partners:
        return None
    other = random.choice(partners)
    mine, theirs = op.chunk, stage.ops[other].chunk
    return f"{put((stage, other), chunk=mine)}; {put(place, chunk=theirs)}"


def _is_other_chunk_of_way(op: Op, other: Op) -> bool:
    assert isinstance(op, Send | Recv)
    return type(op) is type(other) and (op.peer, op.payload) == (other.peer, other.payload) and op.chunk != other.chunk


@operator(MESSAGES, VALUES, "RT042")
def cross_channels(module: Module, random: Random) -> str | None:
    """A stage, or both ends of the way, take two channels between the same stages for each other."""
    place = pick(module, random, is_kind(Send, Recv))
    if place is None:
        return None
    op = place[0].ops[place[1]]
    chunks = sorted({held.chunk for held in place[0].ops if type(held) is type(op) and _is_way(op, held)} - {None})
    if len(chunks) < 2:
        return None
    one, other = random.sample(chunks, 2)
    number = {one: other, other: one}
    both = random.random() < 0.5
    for stage in module.stages if both else [place[0]]:
        for at, held in enumerate(stage.ops):
            if isinstance(held, Send | Recv) and held.payload is op.payload and held.chunk in number:
                stage.ops[at] = evolve(held, chunk=number[held.chunk])
    where = "everywhere" if both else f"on stage @{place[0].index}"
    return f"{op.payload.value}s of c{one} and c{other} {where}"


def _is_way(op: Op, other: Op) -> bool:
    assert isinstance(op, Send | Recv)
    assert isinstance(other, Send | Recv)
    return (op.peer, op.payload) == (other.peer, other.payload)


def _pass_of(module: Module, stage: Stage, kinds: tuple[type[Op], ...], chunk: int, m: int) -> list[int]:
    """Positions of the block ops of a micro-batch's pass through a chunk."""
    chunk_of = module.topology.chunk_of
    return [
        at
        for at, op in enumerate(stage.ops)
        if isinstance(op, kinds) and op.micro_batch == m and chunk_of[op.block] == chunk
    ]


def _pick_chunks(module: Module, random: Random) -> tuple[Stage, int, int, int] | None:
    """A stage, two of its chunks and a micro-batch."""
    if not module.topology.has_several_chunks:
        return None
    stage = random.choice(module.stages)
    one, other = random.sample(module.topology.chunks_of(stage.index), 2)
    return stage, one, other, random.randrange(module.plan.micro_batches)


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def begin_chunk_early(module: Module, random: Random) -> str | None:
    """The forward of a micro-batch through a chunk before what brings its input."""
    found = _pick_chunks(module, random)
    if found is None:
        return None
    stage, chunk, _, m = found
    moved = [stage.ops[at] for at in _pass_of(module, stage, (Forward,), chunk, m)]
    source = next(at for at, op in enumerate(stage.ops) if moved[0].reads[0] in op.writes)
    rest = [op for op in stage.ops if all(op is not each for each in moved)]
    stage.ops = [*rest[:source], *moved, *rest[source:]]
    return f"stage @{stage.index}: forward of m{m} through c{chunk} to {source + 1}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def advance_pass(module: Module, random: Random) -> str | None:
    """A pass of a micro-batch through a chunk, forward or backward, its messages included, before an earlier one through another chunk."""
    if not module.topology.has_several_chunks:
        return None
    stage = random.choice(module.stages)
    groups = split_into_groups(stage, module.topology)
    side = random.choice((groups.forward, groups.backward))
    one, other = random.sample(sorted(side), 2)
    if one[0] == other[0]:
        return None
    first, moved = side[one], side[other]
    start, at = (next(place for place, op in enumerate(stage.ops) if op is group[0]) for group in (first, moved))
    if start > at:
        return None
    rest = [op for op in stage.ops if all(op is not each for each in moved)]
    stage.ops = [*rest[:start], *moved, *rest[start:]]
    return f"stage @{stage.index}: {moved[0]!r} and what follows of it to {start + 1}"


@operator(LIFE, VALUES, MESSAGES, ORDER)
def repeat_pass(module: Module, random: Random) -> str | None:
    """A micro-batch passes a chunk twice."""
    found = _pick_chunks(module, random)
    if found is None:
        return None
    stage, chunk, _, m = found
    kinds = random.choice(((Forward,), _BACKWARDS))
    places = _pass_of(module, stage, kinds, chunk, m)
    to = places[-1] + 1
    stage.ops[to:to] = [copy_op(stage.ops[at]) for at in places]
    return f"{title_of((stage, places[0]))} to {title_of((stage, places[-1]))} again"


@operator(SCHEDULE_CODES)
def change_shape_of_plan(module: Module, random: Random) -> str | None:
    """The module stands under another plan of as many stages."""
    found = other_shape(module.plan, module.model, random)
    if found is None:
        return None
    module.plan, words = found
    return words
