"""Mutations of declarations: addresses, types, kinds, names, and the capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Dtype, Home, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.copying import copy_op
from ratrain.ratrain_ir.module import Level, Module, Stage, TargetInfo
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.tensor import Tensor
from tests.mutation.module_parts import (
    BYTES,
    LIFE,
    OPERANDS,
    VALUES,
    operator,
    other_of,
)

if TYPE_CHECKING:
    from random import Random

# Tensors


def _tensor(module: Module, random: Random, wanted: Callable[[Tensor], bool] = lambda _t: True) -> Tensor | None:
    found = [t for stage in module.stages for t in stage.tensors.values() if wanted(t)]
    return random.choice(found) if found else None


def _is_placed(tensor: Tensor) -> bool:
    return tensor.offset is not None


@operator(BYTES, "RT051 RT042")
def shift_offset(module: Module, random: Random) -> str | None:
    """One alignment unit up or down; a single byte now and then."""
    tensor = _tensor(module, random, _is_placed)
    if tensor is None:
        return None
    assert tensor.offset is not None
    by = random.choice((ALIGNMENT_BYTES, -ALIGNMENT_BYTES, ALIGNMENT_BYTES, -ALIGNMENT_BYTES, 1))
    tensor.offset = abs(tensor.offset + by)
    return f"%{tensor.name} to {tensor.offset:#x}"


@operator(BYTES, "RT042")
def share_offset(module: Module, random: Random) -> str | None:
    """A tensor where another one is."""
    stage = random.choice(module.stages)
    one, other = random.sample(list(stage.tensors.values()), 2)
    if one.offset is None or one.offset == other.offset:
        return None
    one.offset = other.offset
    return f"stage @{stage.index} %{one.name} where %{other.name} is"


@operator("RT051")
def drop_offset(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random, _is_placed)
    if tensor is None:
        return None
    tensor.offset = None
    return f"%{tensor.name}"


@operator(OPERANDS, BYTES, "RT041")
def change_shape(module: Module, random: Random) -> str | None:
    """A tensor with one element less or more, or with its dimensions turned round."""
    tensor = _tensor(module, random)
    assert tensor is not None
    shape = tensor.type.shape
    first = random.choice((max(1, shape[0] - 1), shape[0] + 1, max(1, shape[0] // 2)))
    changed = random.choice((shape[::-1], (first, *shape[1:])))
    if changed == shape:
        return None
    tensor.type = tensor_type(tensor.type.dtype, changed)
    return f"%{tensor.name} becomes {tensor.type}"


@operator(OPERANDS, BYTES)
def change_dtype(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    dtype = other_of(random, list(Dtype), tensor.type.dtype)
    tensor.type = tensor_type(dtype, tensor.type.shape)
    return f"%{tensor.name} becomes {tensor.type}"


@operator(OPERANDS, "RT026")
def change_kind(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    tensor.kind = other_of(random, list(StateKind), tensor.kind)
    return f"%{tensor.name} becomes {tensor.kind.value}"


@operator(OPERANDS, BYTES, "RT052 RT053 RT042 RT065")
def change_home(module: Module, random: Random) -> str | None:
    """A tensor in another memory, where the target has none, or where other tensors are."""
    tensor = _tensor(module, random)
    assert tensor is not None
    tensor.home = other_of(random, list(Home), tensor.home)
    return f"%{tensor.name} in {tensor.home.value}"


@operator(LIFE, VALUES, BYTES)
def change_carried(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    tensor.carried = not tensor.carried
    return f"%{tensor.name} {'carried' if tensor.carried else 'not carried'}"


@operator("RT006 RT025")
def rename_tensor(module: Module, random: Random) -> str | None:
    """A name means nothing, except the slot of a saved tensor."""
    stage = random.choice(module.stages)
    tensor = random.choice(list(stage.tensors.values()))
    name = f"{tensor.name}.z"
    stage.tensors = {(name if t is tensor else t.name): t for t in stage.tensors.values()}
    tensor.name = name
    return f"stage @{stage.index} %{name}"


@operator()
def shuffle_declarations(module: Module, random: Random) -> str | None:
    stage = random.choice(module.stages)
    names = list(stage.tensors)
    random.shuffle(names)
    stage.tensors = {name: stage.tensors[name] for name in names}
    return f"stage @{stage.index}: {names[0]} first"


@operator("RT024", "RT020 RT022 RT023")
def add_carried(module: Module, random: Random) -> str | None:
    """Declare a carried tensor that nothing uses."""
    stage = random.choice(module.stages)
    like = random.choice(list(stage.tensors.values()))
    end = stage.arena_bytes if module.level is Level.ALLOCATED else None
    stage.add(Tensor("idle", like.kind, like.type, carried=True, offset=end))
    return f"stage @{stage.index} like %{like.name}"


@operator("RT052 RT053")
def shrink_capacity(module: Module, random: Random) -> str | None:
    if module.target is None:
        return None
    largest = max(stage.arena_bytes for stage in module.stages)
    by = random.randint(-2, 2) * ALIGNMENT_BYTES
    module.target = TargetInfo(module.target.name, largest - by)
    return f"{largest} - {by}"


@operator("RT050 RT051")
def grow_into_next(module: Module, random: Random) -> str | None:
    """Workspace is larger than what the allocator gave it room for."""
    tensor = _tensor(module, random, lambda t: t.kind is StateKind.WORKSPACE and _is_placed(t))
    if tensor is None:
        return None
    size = aligned(tensor.type.nbytes) + ALIGNMENT_BYTES * random.randint(1, 4)
    tensor.type = tensor_type(Dtype.U8, (size,))
    return f"%{tensor.name} becomes {tensor.type}"


@operator(LIFE, VALUES, BYTES, OPERANDS, "RT042")
def merge_tensors(module: Module, random: Random) -> str | None:
    """One tensor for what two held: right where one's life ends before the other's begins."""
    stage = random.choice(module.stages)
    spans = _spans(stage)
    pairs = [
        (one, other)
        for one, first in spans.items()
        for other, second in spans.items()
        if one is not other and (one.kind, one.type) == (other.kind, other.type)
        if one.kind is not StateKind.WORKSPACE and first[1] < second[0]
        if one.kind is not StateKind.SAVED or one.slot == other.slot
    ]
    if not pairs:
        return None
    one, other = random.choice(pairs)
    stage.ops = [copy_op(op, lambda tensor: one if tensor is other else tensor) for op in stage.ops]
    del stage.tensors[other.name]
    return f"stage @{stage.index} %{one.name} for %{other.name} too"


def _spans(stage: Stage) -> dict[Tensor, tuple[int, int]]:
    """The first and the last op, releases among them, that touch each tensor of the step."""
    spans: dict[Tensor, tuple[int, int]] = {}
    for at, op in enumerate(stage.ops):
        for tensor in op.operands:
            if not tensor.carried:
                spans[tensor] = spans.get(tensor, (at, at))[0], at
    return spans


@operator("RT025 RT034 RT050")  # RT034: too little to stream state through
def resize_workspace(module: Module, random: Random) -> str | None:
    """A workspace a byte smaller, or all but gone, or larger."""
    tensor = _tensor(module, random, lambda t: t.kind is StateKind.WORKSPACE)
    if tensor is None:
        return None
    size = tensor.type.nbytes
    tensor.type = tensor_type(Dtype.U8, (random.choice((size - 1, 1, size + ALIGNMENT_BYTES)),))
    return f"%{tensor.name} becomes {tensor.type}"


@operator("RT025 RT026 RT022 RT023 RT052 RT053")
def change_target(module: Module, random: Random) -> str | None:
    """Drop the target, or name one where there is none."""
    if module.target is None:
        module.target = TargetInfo("mt3000", random.choice((1, 20 << 30)))
        return str(module.target)
    module.target = None
    return "dropped"


_NAMES_OF_PASSES = ("ws.mlp.backward", "ws.mlp.forward", "ws.attention.backward", "ws.grad-sync", "ws.head.forward")


@operator()
def take_name_of_a_pass(module: Module, random: Random) -> str | None:
    """A tensor of the schedule has the name that a pass would give one of its own."""
    stage = random.choice(module.stages)
    name = random.choice(_NAMES_OF_PASSES)
    tensor = random.choice([t for t in stage.tensors.values() if t.kind is not StateKind.SAVED])
    if name in stage.tensors:
        return None
    before, tensor.name = tensor.name, name
    stage.tensors = {t.name: t for t in stage.tensors.values()}
    return f"stage @{stage.index} %{before} is %{name}"


@operator("RT052")
def declare_unused(module: Module, random: Random) -> str | None:
    """Declare a tensor of the step that nothing touches."""
    stage = random.choice(module.stages)
    like = random.choice([t for t in stage.tensors.values() if t.kind is not StateKind.SAVED])
    type_ = random.choice((like.type, tensor_type(Dtype.U8, (1 << 40,))))
    stage.add(Tensor("unused", like.kind, type_, offset=0 if module.level is Level.ALLOCATED else None))
    return f"stage @{stage.index} {like.kind.value} {type_}"


@operator(LIFE)
def drop_all_releases(module: Module, random: Random) -> str | None:
    """The releases of one stage, or of all."""
    if not any(type(op) is Release for stage in module.stages for op in stage.ops):
        return None
    chosen = random.choice((module.stages, [random.choice(module.stages)]))
    for stage in chosen:
        stage.ops = [op for op in stage.ops if type(op) is not Release]
    return f"{len(chosen)} stages"
