"""Copies between DDR and another memory of the same rank."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, final, get_args

from attrs import define

from ratrain.ratrain_ir.config.types import StateKind, TensorType
from ratrain.ratrain_ir.ops.base import BlockPieceOp, Engine, Op, Phase, WorkGroup, phase_field
from ratrain.ratrain_ir.ops.operands import Candidates, Role, Roles, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import ACTIVATIONS, SAVED, STORABLE, frozen_roles

if TYPE_CHECKING:
    from typing import TypeGuard

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Store(BlockPieceOp):
    """Copies activations of a block into another memory; their bytes in DDR are free afterwards."""

    keyword = "store"
    default_engine = Engine.STORE
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        del model, plan
        return _copies(self)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Fetch(BlockPieceOp):
    """Copies stored activations of a block back into DDR, or its frozen parameters for one use.

    `phase` is the pass that uses frozen parameters (`fetch mlp.0 m0 forward (%f.mlp.0)`); a fetch of activations has
    none. Frozen parameters never change, so their copies are dropped after the use, and never stored.
    """

    keyword = "fetch"
    default_engine = Engine.FETCH
    alike_on_all_stages = True
    phase: Phase | None = phase_field()

    @property
    def work_group(self) -> WorkGroup:
        """The pass that uses the frozen parameters; a fetch of activations is put beside work in its order."""
        return self.default_work_group if self.phase is None else self.phase.work_group

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _copies(self) if self.phase is None else _frozen_copies(model, plan, self.block)


def fetches_parameters(op: Op) -> TypeGuard[Fetch]:
    """Tell whether an op fetches frozen parameters for a use."""
    return type(op) is Fetch and op.phase is not None


MemoryOp = Store | Fetch
"""Ops that copy tensors between DDR and another memory of the same rank."""


MEMORY_OPS: tuple[type[Op], ...] = get_args(MemoryOp)


COPY_SIDES = ("from", "to")
"""Prefixes of the roles of a tensor and of its copy: `from.0` is copied to `to.0`.

Frozen parameters have the roles that blocks know them by: `f` is copied to `to.f`. Roles tell what a carried tensor is.
"""


def _copies(op: Store | Fetch) -> Candidates:
    """List the one signature of a copy: a role for each tensor it reads, then one of equal type and slot for each copy.

    Raises `SignatureError` if it reads nothing, or a tensor of a kind that is not stored.
    """
    if not op.reads:
        raise SignatureError(f"'{op!r}' copies nothing")
    for tensor in op.reads:
        if tensor.kind is StateKind.FROZEN:
            why = "and frozen parameters never change: a release drops a copy of them, and nothing stores it"
            if isinstance(op, Fetch):
                why = "and is fetched for a pass: write 'forward' or 'backward'"
            raise SignatureError(f"'{op!r}' copies %{tensor.name}, which is frozen, {why}", tensor)
        if tensor.kind not in STORABLE:
            raise SignatureError(
                f"%{tensor.name} is {tensor.kind.value}, which is not stored in another memory", tensor
            )
    return _copies_of(tuple((t.kind is StateKind.SAVED, t.type, t.slot) for t in op.reads))


@cache
def _copies_of(tensors: tuple[tuple[bool, TensorType, str], ...]) -> Candidates:
    sides: list[Roles] = []
    for side in COPY_SIDES:
        roles = (
            Role(f"{side}.{place}", SAVED if saved else ACTIVATIONS, type_, slot=slot if saved else None)
            for place, (saved, type_, slot) in enumerate(tensors)
        )
        sides.append(tuple(roles))
    return [(False, Signature(sides[0], sides[1]))]


@cache
def _frozen_copies(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    """List the one signature of a fetch of frozen parameters: all of the block's, plain ones and packed ones.

    Raises `SignatureError` if the block has none.
    """
    roles = frozen_roles(model, plan, block)
    if not roles:
        raise SignatureError(f"no parameter of {block} is frozen: there is nothing to fetch for a pass")
    copies = tuple(role._replace(name=f"{COPY_SIDES[1]}.{role.name}") for role in roles)
    return [(False, Signature(roles, copies))]
