"""Mutations of the order of ops: ops, releases and whole parts of a stage that are missing, twice, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.copying import copy_op
from ratrain.ratrain_ir.model.blocks import Block, block
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, AllReduceScalar, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Backward, Forward, LoadInput, Recompute, Release, Update
from ratrain.ratrain_ir.ops.messages import Recv, Send
from tests.mutation.module_parts import (
    BYTES,
    LIFE,
    MESSAGES,
    OPERANDS,
    ORDER,
    VALUES,
    is_kind,
    is_release,
    is_work,
    operator,
    pick,
    pick_two,
    put,
    title_of,
)

if TYPE_CHECKING:
    from random import Random

# The list


@operator(LIFE, VALUES, MESSAGES, ORDER)
def drop_op(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_work)
    assert place is not None
    name = title_of(place)
    del place[0].ops[place[1]]
    return name


@operator(LIFE, VALUES, MESSAGES, "RT043")
def repeat_op(module: Module, random: Random) -> str | None:
    """Write an op once more, at once or later."""
    place = pick(module, random, lambda _op: True)
    assert place is not None
    stage, at = place
    to = random.choice((at + 1, random.randint(at + 1, len(stage.ops))))
    name = title_of(place)
    stage.ops.insert(to, copy_op(stage.ops[at]))
    return f"{name} again as op {to + 1}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_neighbours(module: Module, random: Random) -> str | None:
    stage = random.choice(module.stages)
    at = random.randrange(len(stage.ops) - 1)
    stage.ops[at], stage.ops[at + 1] = stage.ops[at + 1], stage.ops[at]
    return f"{title_of((stage, at))} before {title_of((stage, at + 1))}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_distant(module: Module, random: Random) -> str | None:
    found = pick_two(module, random, is_work)
    if found is None:
        return None
    stage, first, second = found
    stage.ops[first], stage.ops[second] = stage.ops[second], stage.ops[first]
    return f"{title_of((stage, first))} and {title_of((stage, second))}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def move_op(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_work)
    assert place is not None
    stage, at = place
    name = title_of(place)
    op = stage.ops.pop(at)
    to = random.randint(0, len(stage.ops))
    stage.ops.insert(to, op)
    return f"{name} to {to + 1}" if to != at else None


def _hoist_of_kind(module: Module, random: Random, *kinds: type[Op]) -> str | None:
    """The later of two ops right before the earlier one, or the earlier one right after the later."""
    found = pick_two(module, random, is_kind(*kinds))
    if found is None:
        return None
    stage, first, second = found
    start, to = random.choice(((second, first), (first, second)))
    name = title_of((stage, start))
    stage.ops.insert(to, stage.ops.pop(start))
    return f"{name} to {to + 1}"


@operator(LIFE, VALUES, MESSAGES, "RT042", BYTES)
def cross_receives(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, Recv)


@operator(LIFE, VALUES, MESSAGES, "RT042", BYTES)
def cross_sends(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, Send)


@operator(LIFE, VALUES, ORDER, BYTES)
def cross_collectives(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, ReduceScatter, AllReduce, AllReduceScalar, AllGather)


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_micro_batches(module: Module, random: Random) -> str | None:
    """Two forwards, or two backwards, of one block in the other order, with all that they touch."""
    kind = random.choice((Forward, Backward))
    place = pick(module, random, is_kind(kind))
    assert place is not None
    stage, at = place
    unit = stage.ops[at].block
    partners = [i for i, op in enumerate(stage.ops) if type(op) is kind and op.block is unit and i != at]
    if not partners:
        return None
    to = random.choice(partners)
    stage.ops[at], stage.ops[to] = stage.ops[to], stage.ops[at]
    return f"{title_of(place)} and {title_of((stage, to))}"


# Whole parts of a stage: changes that leave every op right by itself


def _chain(stage: Stage, kinds: tuple[type[Op], ...], m: int) -> list[int]:
    """Positions of a micro-batch's ops of some kinds."""
    return [at for at, op in enumerate(stage.ops) if isinstance(op, kinds) and getattr(op, "micro_batch", None) == m]


@operator(VALUES, MESSAGES, "RT042 RT044 RT027")
def exchange_micro_batch_numbers(module: Module, random: Random) -> str | None:
    """A stage takes one micro-batch for another, everywhere."""
    stage = random.choice(module.stages)
    one, other = random.sample(range(module.plan.micro_batches), 2)
    number = {one: other, other: one}
    for at, op in enumerate(stage.ops):
        m = getattr(op, "micro_batch", None)
        if m in number:
            stage.ops[at] = evolve(op, micro_batch=number[m])
    return f"stage @{stage.index}: m{one} and m{other}"


@operator(OPERANDS, VALUES, MESSAGES, "RT043")
def exchange_layers(module: Module, random: Random) -> str | None:
    """A stage takes one layer for another, everywhere."""
    stage = random.choice(module.stages)
    layers = sorted({b.layer for b in module.topology.stage_blocks[stage.index] if b.layer is not None})
    if len(layers) < 2:
        return None
    one, other = random.sample(layers, 2)
    number = {one: other, other: one}
    kind = random.choice(("attention", "mlp", "attention mlp"))

    def renamed(unit: Block) -> Block:
        return block(unit.kind, number.get(unit.layer, unit.layer)) if unit.kind in kind else unit

    for at, op in enumerate(stage.ops):
        if isinstance(op, Forward | Recompute | Backward | Update):
            stage.ops[at] = evolve(op, block=renamed(op.block))
        elif isinstance(op, ReduceScatter | AllReduce | AllGather):
            stage.ops[at] = evolve(op, blocks=tuple(map(renamed, op.blocks)))
    return f"stage @{stage.index}: {kind} of layers {one} and {other}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def run_ahead(module: Module, random: Random) -> str | None:
    """The whole forward of a micro-batch, its messages included, before the backward that stood before it."""
    stage = random.choice(module.stages)
    m = random.randrange(1, module.plan.micro_batches)
    forward = [
        at
        for at in _chain(stage, (LoadInput, Forward, Send, Recv), m)
        if getattr(stage.ops[at], "payload", Payload.ACTIVATION) is Payload.ACTIVATION
    ]
    before = [at for at, op in enumerate(stage.ops[: forward[0]]) if type(op) is Backward]
    if not before:
        return None
    to = random.choice(before)
    chain = [stage.ops[at] for at in forward]
    rest = [op for op in stage.ops if all(op is not moved for moved in chain)]
    stage.ops = [*rest[:to], *chain, *rest[to:]]
    return f"stage @{stage.index}: forward of m{m} to {to + 1}"


@operator(LIFE, VALUES, MESSAGES, "RT043")
def drop_micro_batch(module: Module, random: Random) -> str | None:
    """A stage leaves a micro-batch out."""
    stage = random.choice(module.stages)
    m = random.randrange(module.plan.micro_batches)
    stage.ops = [op for op in stage.ops if getattr(op, "micro_batch", None) != m]
    return f"stage @{stage.index}: m{m}"


@operator(LIFE, VALUES, "RT043")
def drop_reduction(module: Module, random: Random) -> str | None:
    """A block's gradient is reduced nowhere, or its update, or its gather, is forgotten."""
    kinds = random.choice(((ReduceScatter, AllReduce), (Update,), (AllGather,)))
    stage = random.choice(module.stages)
    unit = random.choice(module.topology.stage_blocks[stage.index])
    kept = [
        op
        for op in stage.ops
        if not (isinstance(op, kinds) and unit in getattr(op, "blocks", (getattr(op, "block", None),)))
    ]
    if len(kept) == len(stage.ops):
        return None
    stage.ops = kept
    return f"stage @{stage.index} {unit}: {kinds[0].keyword}"


# Releases


@operator("RT020 RT021 RT022 RT023 RT024 RT028")
def release_earlier(module: Module, random: Random) -> str | None:
    return _move_release(module, random, lambda at, _count: random.randrange(at) if at else None)


@operator("RT022 RT024 RT028")
def release_later(module: Module, random: Random) -> str | None:
    return _move_release(
        module, random, lambda at, count: random.randint(at + 1, count - 1) if at + 1 < count else None
    )


def _move_release(module: Module, random: Random, where: Callable[[int, int], int | None]) -> str | None:
    place = pick(module, random, is_release)
    if place is None:
        return None
    stage, at = place
    to = where(at, len(stage.ops))
    if to is None:
        return None
    name = title_of(place)
    stage.ops.insert(to, stage.ops.pop(at))
    return f"{name} to {to + 1}"


@operator("RT022 RT023")
def drop_release(module: Module, random: Random) -> str | None:
    """Forget one tensor of a release."""
    place = pick(module, random, is_release)
    if place is None:
        return None
    stage, at = place
    reads = stage.ops[at].reads
    kept = tuple(t for t in reads if t is not random.choice(reads))
    name = title_of(place)
    if kept:
        return put(place, reads=kept)
    del stage.ops[at]
    return name


@operator(LIFE)
def release_another(module: Module, random: Random) -> str | None:
    """Release a tensor that is nobody's to release here; where one is released, all must be."""
    place = pick(module, random, lambda _op: True)
    assert place is not None
    if module.level is Level.DATAFLOW:
        return None
    stage, at = place
    tensor = random.choice([t for t in stage.tensors.values() if t.kind is not StateKind.WORKSPACE])
    stage.ops.insert(at, Release(reads=(tensor,)))
    return title_of(place)
