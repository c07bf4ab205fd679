"""Profile of the work of a model on a machine: seconds and bytes of one micro-batch.

It is read off a module of one layer of each class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.passes.pass_base import PassContext
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.recovery.keep_gathered import all_made_twice, with_kept
from ratrain.passes.recovery.kept_bytes import kept_bytes, mlp_input_bytes
from ratrain.passes.recovery.layer_choice import LayerChoice, same_for_all
from ratrain.passes.recovery.rewriting import rewritten
from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import Block, block, has_backward, passes_gradient_on
from ratrain.ratrain_ir.model.expert_ranks import (
    combined_types,
    dispatched_types,
    made_gradient_types,
    product_types,
    shares_experts,
)
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    attended_slots,
    computed_type,
    exchanged_type,
    kept_in_forward,
    saved_slots,
    shared_head_slots,
    shares_rows,
    stream_type,
    token_type,
)
from ratrain.ratrain_ir.ops.compute import (
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    Forward,
    Project,
    Recompute,
)
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, ForwardExperts, Route
from ratrain.ratrainc.planner.space.units import Vector, by_block, unit_vector
from ratrain.targets.target import MachineTarget, target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.types import TensorType
    from ratrain.ratrain_ir.model.expert_ranks import Types
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrainc.planner.space.layer_classes import LayerClasses
    from ratrain.ratrainc.planner.space.search_setting import ContextExchange, SearchSetting

_FORWARD = (Forward, Project, Attend, Route, ForwardExperts)
_BACKWARD = (Backward, BackwardHeads, AttendBackward, BackwardExperts)
"""Ops that compute a block forward and back: in parts where norms span tensor-parallel ranks, where context ranks
exchange keys or heads, and where expert ranks exchange rows."""


@frozen(eq=False)
class WorkProfile:
    """Seconds and bytes of one micro-batch, which do not depend on the number of replicas.

    For a micro-batch in slices, seconds are the sum over all slices, and bytes are the smallest slice's. The hull is
    that of all slices.
    """

    forward: Vector
    """seconds of a unit's forward"""
    backward: Vector
    """seconds of a unit's backward without recovery"""
    kept_bytes: Vector
    """bytes that a layer with a backward keeps beyond its checkpoint, ascending: corners of the convex hull of all
    choices of recovery"""
    recovery: Vector
    """seconds of recovery at these corners, descending"""
    held: Vector
    """bytes that a layer holds of each pass whatever is recovered: its input, keys and values for later slices or for
    context ranks' backward, and what an mlp saves whose rows expert ranks exchange; nothing without a backward"""
    mlp_ends: int
    """bytes of an mlp's input and of the gradients of its input and output; whole tensors with tensor-parallel ranks"""
    head_ends: int
    """bytes of the head's input and of its gradient, where something below trains"""
    tokens: int
    """bytes of the tokens of a micro-batch, held for the embedding's backward; 0 if it has none"""
    labels: int
    """bytes of the labels of a micro-batch"""
    documents: int
    """bytes of the document starts of a micro-batch, held by every stage from forward to backward; 0 if none are kept
    apart"""
    mlp_saved: int
    """bytes of all that an mlp's backward reads except its input, and what `held` has of it"""
    mlp_scratch: int
    """workspace of an mlp's backward, with what expert ranks exchange for it; 0 with tensor-parallel ranks, whose
    backward may come in halves"""
    head_scratch: int
    """workspace of the head's backward, plus the bytes that its forward saved for it"""
    attention_scores: int
    """bytes that an attention's backward through its scores works on, but for the layer's input, gradients of
    parameters and views: with context ranks keys of all tokens, and f32 parts of their gradients; 0 without"""
    boundary: int
    """bytes sent to the next stage"""
    first_forward: Vector
    """seconds of a unit's forward of the first slice, or of the whole micro-batch without slices"""
    first_backward: Vector
    """seconds of compute until the first slice's gradient has passed a unit"""
    passed_back: Vector
    """`first_backward` of a whole micro-batch; if tp > 1, whose backwards may come in halves, the input halves
    alone
    """
    weight_half: Vector
    """seconds of a unit's backward that may follow after the gradient has passed; 0 if backwards are whole"""
    input_half: Vector
    """seconds of a unit's backward up to its gradient, where schedules have it in halves; else all"""
    parameter_half: Vector
    """seconds of the other half; 0 where there is none"""
    pending: int
    """bytes that a layer holds from the input half of its backward to its weight half, if they are apart"""


def work_profile(
    setting: SearchSetting, micro_batch_size: int, slices: int, tp: int, cp: int, exchange: ContextExchange, ep: int
) -> WorkProfile:
    """Read the profile of a micro-batch of `micro_batch_size` sequences in `slices` on one of `tp` x `cp` ranks.

    `ep` replicas share out experts.
    """
    classes = setting.classes
    # the ops of two micro-batches may differ, and the lesser one bounds both
    sizes: dict[str, Any] = {"tp": tp, "cp": cp, "dp": ep, "ep": ep}
    sizes |= {"context_exchange": exchange[0], "context_groups": exchange[1]}
    sizes |= {"micro_batches": 2, "micro_batch_size": micro_batch_size}
    plan = setting.shaped(**sizes, slices=setting.slice_lengths(slices, cp))
    module = lower(classes.model, plan)
    target = target_of(setting.machine)
    context = PassContext(target)  # it knows ops that take equal time
    # one stage for each choice of recovery, with its recomputation written out
    chosen = [(choice, False, rewritten(module.stages[0], same_for_all(choice))) for choice in setting.choices]
    products = ep > 1 and setting.may_keep_gathered
    if products:
        chosen += [(choice, True, _with_products(stage, module)) for choice, _, stage in chosen]
    # backwards of what trains less than the whole model are whole, and so are those of shared out experts
    apart = None if plan.training or ep > 1 else _in_halves(module)
    numbers = range(slices) if plan.slices else (None,)
    parts = [
        _slice_profile(classes, slice_plan(plan, number), module, chosen, apart, context, number) for number in numbers
    ]
    seconds = {name: np.sum([part.seconds[name] for part in parts], axis=0) for name in parts[0].seconds}
    nbytes: dict[str, Any] = {name: np.min([part.nbytes[name] for part in parts], axis=0) for name in parts[0].nbytes}
    # points of all slices together: the hull lies below the choices of each
    kept_bytes, recovery = _lower_hull([point for part in parts for point in part.choices])
    return WorkProfile(
        **seconds,
        **nbytes,
        kept_bytes=kept_bytes,
        recovery=recovery,
        mlp_scratch=_mlp_scratch_bytes(module, target, products) if tp == 1 or apart is None else 0,
        head_scratch=_scratch_bytes(module.stages[0], module, target, Backward, "head")
        + min(part.head_saved for part in parts),
        attention_scores=_scores_bytes(module) if cp > 1 and classes.all_go_back else 0,
        first_forward=parts[0].seconds["forward"],
        first_backward=parts[0].seconds["passed_back"],
        pending=0 if apart is None else min(_pending_bytes(apart, number) for number in numbers),
    )


@frozen(eq=False)
class _SliceProfile:
    """Fields of a `WorkProfile` by name, of one slice or of a whole micro-batch."""

    seconds: dict[str, Vector]
    nbytes: dict[str, Any]
    head_saved: int
    choices: list[tuple[int, float]]
    """bytes that each choice of recovery keeps beyond what is always kept, and seconds beyond the least; of layers with
    a backward"""


def _slice_profile(
    classes: LayerClasses,
    plan: Plan,
    module: Module,
    chosen: Sequence[tuple[LayerChoice, bool, Stage]],
    apart: Stage | None,
    context: PassContext,
    number: int | None,
) -> _SliceProfile:
    """Read the profile of slice `number`, whose plan is `plan`; `apart`: the stage with split backwards, if any.

    `chosen`: choices of recovery, whether gate and up of experts' rows are kept, and the stage with both.
    """
    model, embed, head = classes.model, block("embed"), block("head")
    whole = _Ops.of(module, module.stages[0], context, number)
    options = [(choice, kept, _Ops.of(module, stage, context, number)) for choice, kept, stage in chosen]
    layers = [
        _class_profile(model, plan, layer, goes_back, options) for layer, goes_back in enumerate(classes.goes_back)
    ]
    returning = [layer for layer, back in zip(layers, classes.goes_back, strict=True) if back]
    forward = unit_vector(
        whole.seconds(Forward, embed), [each.forward for each in layers], whole.seconds(Forward, head)
    )
    backward = unit_vector(
        whole.seconds(Backward, embed), [each.backward for each in layers], whole.seconds(Backward, head)
    )
    passed_back, weight_half = backward, np.zeros_like(backward)
    input_half, parameter_half = passed_back, weight_half
    if apart is not None:
        split = _Ops.of(module, apart, context, number)
        input_half = by_block(len(classes), lambda owner: split.seconds((*_BACKWARD, BackwardInput), owner))
        parameter_half = by_block(len(classes), lambda owner: split.seconds(BackwardWeight, owner))
    # with tensor-parallel ranks a pass may split backwards under any schedule, so the lesser of both forms counts
    if apart is not None and plan.tp > 1:
        passed_back, weight_half = np.minimum(backward, input_half), parameter_half
    tokens = aligned(token_type(plan).nbytes)
    all_attentions = all(has_backward(model, plan, block("attention", layer)) for layer in range(len(classes)))
    return _SliceProfile(
        seconds={
            "forward": forward,
            "backward": backward,
            "passed_back": passed_back,
            "weight_half": weight_half,
            "input_half": input_half,
            "parameter_half": parameter_half,
        },
        nbytes={
            "held": unit_vector(0, [each.held for each in layers], 0),
            "mlp_ends": min((each.mlp_ends for each in returning), default=0),
            "head_ends": (1 + passes_gradient_on(model, plan, head)) * aligned(stream_type(model, plan).nbytes),
            "tokens": tokens if has_backward(model, plan, embed) else 0,
            "labels": tokens,
            "documents": tokens if plan.keeps_documents_apart and all_attentions else 0,
            "mlp_saved": min((each.mlp_saved for each in returning), default=0),
            "boundary": exchanged_type(model, plan).nbytes,
        },
        head_saved=_saved_bytes(model, plan, head),
        choices=[point for each in returning for point in each.choices] or [(0, 0.0)],
    )


@frozen(eq=False)
class _ClassProfile:
    """Seconds and bytes of a layer of a class, of one slice or of a whole micro-batch."""

    forward: float
    backward: float
    held: int
    mlp_ends: int
    mlp_saved: int
    choices: list[tuple[int, float]]


def _class_profile(
    model: ModelConfig, plan: Plan, layer: int, back: bool, options: Sequence[tuple[LayerChoice, bool, _Ops]]
) -> _ClassProfile:
    """Read the profile of a layer of the model of classes; `options` are as `chosen`, with ops in place of stages."""
    attention, mlp = block("attention", layer), block("mlp", layer)
    # the least over all choices of recovery, so that no choice takes less than forward, backward and its recovery
    forward = min(ops.seconds(_FORWARD, attention, mlp) for *_, ops in options)
    backward = min(ops.seconds(_BACKWARD, attention, mlp) for *_, ops in options)
    if not back:
        return _ClassProfile(forward, backward, 0, 0, 0, [])
    always_kept = _always_kept_bytes(model, plan, attention)
    stream, ends = (aligned(kind(model, plan).nbytes) for kind in (exchanged_type, _mlp_type))
    # The first layer of a model whose lowest block that trains is an mlp holds that one's input in place of its own.
    attention_goes_back = has_backward(model, plan, attention)
    twice = 0 if attention_goes_back else mlp_input_bytes(model, plan)
    # With peers the gathered tensor is live together with the rows of the output's gradient, to which a sum then adds.
    gathered = ends if shares_rows(plan) else 0
    # Without a backward of the attention its rows are not read again once they are gathered for that of the mlp.
    own = stream if attention_goes_back else -stream if gathered else 0
    # context ranks keep no keys for a backward that there is not
    keys = always_kept if plan.cp == 1 or attention_goes_back else 0
    keys += _shared_heads_bytes(model, plan, attention) if attention_goes_back else 0
    saved = _saved_bytes(model, plan, mlp)
    routed = saved if shares_experts(model, plan, mlp) else 0
    products = _type_bytes(product_types(model, plan)) if routed else 0
    return _ClassProfile(
        forward,
        backward,
        held=stream + keys + routed,
        mlp_ends=own + gathered + (1 + passes_gradient_on(model, plan, mlp)) * ends,
        mlp_saved=saved - routed,
        choices=[
            (
                max(kept_bytes(model, plan, choice, layer) - always_kept - routed - twice, 0) + kept * products,
                ops.seconds((*_FORWARD, Recompute, *_BACKWARD), attention, mlp) - forward - backward,
            )
            for choice, kept, ops in options
        ],
    )


def _mlp_type(model: ModelConfig, plan: Plan) -> TensorType:
    return computed_type(model, plan, block("mlp", 0))


@frozen(eq=False)
class _Ops:
    """Seconds of the block ops of one slice by op class and block, the lesser of two micro-batches."""

    times: dict[tuple[type, Block], float]

    @classmethod
    def of(cls, module: Module, stage: Stage, context: PassContext, number: int | None) -> _Ops:
        times: dict[tuple[type, Block, int | None], float] = {}
        for op in stage.ops:
            if isinstance(op, BlockOp) and op.slice == number:
                group = op.head_group if isinstance(op, Attend | AttendBackward) else None
                key = (type(op), op.block, group)
                seconds = context.op_seconds(module, stage, op)
                times[key] = min(times.get(key, seconds), seconds)
        total: dict[tuple[type, Block], float] = {}
        for (kind, owner, _), seconds in times.items():  # each group of heads attends in an op of its own
            total[kind, owner] = total.get((kind, owner), 0.0) + seconds
        return cls(total)

    def seconds(self, classes: type | tuple[type, ...], *owners: Block) -> float:
        chosen = classes if isinstance(classes, tuple) else (classes,)
        return sum(self.times.get((op, owner), 0.0) for op, owner in product(chosen, owners))


def _saved_bytes(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Return the bytes that a block's forward saves for its backward."""
    return sum(aligned(slot.type.nbytes) for slot in saved_slots(model, plan, owner))


def _in_halves(module: Module) -> Stage:
    """Return the one stage of a module with its backwards split into halves."""
    draft = module.draft()
    split_backwards(draft, draft.stages[0])
    return draft.stages[0]


def _pending_bytes(stage: Stage, number: int | None) -> int:
    """Return the least bytes of a layer that its input halves touch and its weight halves read, for one slice."""
    found: dict[tuple[int, int | None], set[Tensor]] = {}
    before: dict[tuple[int, Block], set[Tensor]] = {}
    for op in stage.ops:
        if isinstance(op, BackwardInput) and op.slice == number:
            before[op.micro_batch, op.block] = {*op.reads, *op.writes, *op.updates}
        elif isinstance(op, BackwardWeight) and op.slice == number:
            both = before[op.micro_batch, op.block].intersection(op.reads)
            found.setdefault((op.micro_batch, op.block.layer), set()).update(
                t for t in both if t.kind in _OF_ACTIVATIONS
            )
    return min(sum(aligned(tensor.type.nbytes) for tensor in tensors) for tensors in found.values())


_OF_ACTIVATIONS = (StateKind.SAVED, StateKind.CHECKPOINT, StateKind.BOUNDARY, StateKind.ACTIVATION)


def _with_products(stage: Stage, module: Module) -> Stage:
    """Return a stage that keeps gate and up of the rows that expert ranks exchange."""
    return with_kept(stage, module, all_made_twice(stage, module, ForwardExperts))


def _mlp_scratch_bytes(module: Module, target: MachineTarget, products: bool) -> int:
    """Return the least workspace of an mlp's backward, with what expert ranks exchange for it.

    With `products` gate and up of the rows may be kept, which no workspace holds then.

    Rows that came back are live in the backward itself. When the experts go back, the rows that came and all that is
    made of them are; the gradient of the mlp's input is not yet, nor, if that is made again, its input. A dense mlp
    exchanges nothing.
    """
    scratch = _scratch_bytes(module.stages[0], module, target, Backward, "mlp")
    if module.plan.ep == 1 or module.model.expert_layers < module.model.layers:
        return scratch
    model, plan = module.model, module.plan
    returned = _type_bytes(combined_types(model, plan, gradient=True))
    there = _type_bytes(dispatched_types(model, plan, gradient=True) | made_gradient_types(model, plan))
    forms = [module.stages[0], *([_with_products(module.stages[0], module)] if products else ())]
    of_experts = min(_scratch_bytes(stage, module, target, BackwardExperts, "mlp") for stage in forms) + there
    return max(scratch + returned, of_experts - 2 * aligned(_mlp_type(model, plan).nbytes))


def _type_bytes(types: Types) -> int:
    return sum(aligned(type_.nbytes) for type_ in types.values())


def _scratch_bytes(stage: Stage, module: Module, target: MachineTarget, kind: type[BlockOp], of: str) -> int:
    """Return the least workspace of a stage's ops of a class for a kind of block."""
    ops = (op for op in stage.ops if type(op) is kind and op.block.kind == of)
    requests = [target.workspace(module, op) for op in ops]
    return min((aligned(request.nbytes) if request is not None else 0 for request in requests), default=0)


def _scores_bytes(module: Module) -> int:
    """Return the least bytes of activations, and of their gradients, that a backward through scores works on.

    Where keys come in groups of heads, this is the backward of the first group: keys of the others are gathered later.
    What its layer holds of each pass is left out, and the gradient of the layer's output is added, which is read later.
    """
    ops = module.stages[0].ops
    grouped = module.plan.context_groups > 1
    last = {(op.block, op.micro_batch): _worked_on(op) for op in ops if type(op) is Backward}
    found = {(op.block, op.micro_batch): _worked_on(op) for op in ops if type(op) is BackwardHeads}
    if grouped:
        waiting = {key: tensors & last[key] for key, tensors in found.items()}
        first = (op for op in ops if type(op) is AttendBackward and not op.head_group)
        found = {(op.block, op.micro_batch): _worked_on(op) | waiting[op.block, op.micro_batch] for op in first}
    held = {key: kept_in_forward(module.model, module.plan, key[0]) if grouped else () for key in found}
    return min(
        (sum(aligned(t.type.nbytes) for t in tensors if t.slot not in held[key]) for key, tensors in found.items()),
        default=0,
    )


def _worked_on(op: BlockOp) -> set[Tensor]:
    """Return the activations of an op, and their gradients."""
    return {tensor for tensor in (*op.reads, *op.writes, *op.updates) if tensor.kind in _OF_SCORES}


_OF_SCORES = (StateKind.SAVED, StateKind.ACTIVATION, StateKind.PARTIAL)


def _always_kept_bytes(model: ModelConfig, plan: Plan, attention: Block) -> int:
    """Return the bytes of a layer's slots that its forward keeps whatever is recovered."""
    always = kept_in_forward(model, plan, attention)
    return sum(aligned(slot.type.nbytes) for slot in saved_slots(model, plan, attention) if slot.name in always)


def _shared_heads_bytes(model: ModelConfig, plan: Plan, attention: Block) -> int:
    """Return the bytes of what a context rank's heads take and make of all tokens, which no recovery makes again."""
    slots = (*shared_head_slots(model, plan, attention), *attended_slots(model, plan, attention))
    return sum(aligned(slot.type.nbytes) for slot in slots)


def _lower_hull(points: Iterable[tuple[int, float]]) -> tuple[Vector, Vector]:
    """Return the lower convex hull of points (bytes, seconds), from the fewest bytes to the fewest seconds."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        # more bytes for no fewer seconds: never on the hull
        if hull and y >= hull[-1][1]:
            continue
        # Andrew's monotone chain: a corner stays only if the slope before it is less than the slope over it
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        if hull and hull[-1][0] == x:
            hull.pop()
        hull.append((x, y))
    return np.array([x for x, _ in hull], float), np.array([y for _, y in hull], float)
