"""Signatures: the tensors that a kind of op takes, with their order, state kind and type.

`bind` names an op's operands by role (`x`, `w`, `dy`, `q`, ...). The verifier reports ops that do not bind; code
generation passes operands to routines by these names. Collectives take several blocks; their roles are `g.attention.0`
and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.operands import Candidates, Roles, SignatureError
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.base import Op


@frozen
class Binding:
    """Operands by role."""

    tensors: dict[str, Tensor]
    accumulates: bool
    """True if the result adds to an earlier one: a gradient or the loss after its first contribution"""


def bind(op: Op, model: ModelConfig, plan: Plan) -> Binding:
    """Bind the operands of an op to their roles.

    Raises `SignatureError` where they do not fit the op.
    """
    roles, accumulates = operand_roles(op, model, plan)
    return Binding(dict(zip(roles, op.reads + op.writes + op.updates, strict=True)), accumulates)


def operand_roles(op: Op, model: ModelConfig, plan: Plan) -> tuple[tuple[str, ...], bool]:
    """Return the roles of the operands that an op reads, writes and updates, in this order, and if it accumulates.

    They depend on the fields of the op except its micro-batch, and on kinds, types and saved slots of its operands, but
    not on names of tensors. Raises `SignatureError` (of the first signature tried) where the operands fit none.
    """
    problem: SignatureError | None = None
    for accumulates, signature in signatures(op, model, plan):
        try:
            roles = [
                *_match(op, "reads", op.reads, signature.reads),
                *_match(op, "writes", op.writes, signature.writes),
                *_match(op, "updates", op.updates, signature.updates),
            ]
        except SignatureError as error:
            problem = problem or error
        else:
            return tuple(roles), accumulates
    assert problem is not None
    raise problem


def _match(op: Op, group: str, tensors: Tensors, roles: Roles) -> list[str]:
    matched: list[str] = []
    count = len(tensors)
    # One pass suffices: roles and tensors are in the same order, and an optional role is skipped unless the next tensor
    # fits it.
    for role, kinds, type_, optional, slot in roles:
        tensor = tensors[len(matched)] if len(matched) < count else None
        if tensor is not None and tensor.kind in kinds and (slot is None or slot == tensor.slot):
            if tensor.type is not type_:
                raise SignatureError(f"%{tensor.name} is {tensor.type}, but {role} of '{op!r}' is {type_}", tensor)
            matched.append(role)
        elif not optional:
            expected = " or ".join(sorted(kind.value for kind in kinds))
            got = f"got {tensor.kind.value} %{tensor.name}" if tensor is not None else "nothing is there"
            raise SignatureError(f"'{op!r}' {group} {role} ({expected}, {type_}) here, but {got}", tensor)
    if len(matched) < count:
        extra = tensors[len(matched)]
        raise SignatureError(f"'{op!r}' has no use for {extra.kind.value} %{extra.name} among what it {group}", extra)
    return matched


def signatures(op: Op, model: ModelConfig, plan: Plan) -> Candidates:
    """List the signatures that an op may have, as (accumulates, signature), the likelier first.

    If the op works on a slice, they are that slice's. An op that updates tensors most likely accumulates.
    """
    index = getattr(op, "slice", None)
    if index is not None or (plan.slices and type(op) in _OF_SLICES):
        plan = _plan_of_slice(op, plan, index)
    candidates = op.candidates(model, plan)
    return candidates[::-1] if op.updates else candidates


def _plan_of_slice(op: Op, plan: Plan, index: int | None) -> Plan:
    try:
        return slice_plan(plan, index)
    except IndexError as error:
        named = "no slice" if index is None else f"s{index}"
        raise SignatureError(f"'{op!r}' names {named}: {error}") from None


_OF_SLICES = frozenset({LoadInput, *BLOCK_OPS, *TENSOR_OPS, *MEMORY_OPS, *MESSAGE_OPS})
"""Kinds of ops that must name a slice where the plan cuts micro-batches into slices"""
