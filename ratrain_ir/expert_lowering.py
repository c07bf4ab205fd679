"""Lowering of an mlp whose experts replicas share out: exchanges of rows around the products of experts.

Example: forward and backward of `mlp.0` for a micro-batch (`ops/expert_ranks.py`):

    route   dispatch activation   forward_experts   combine activation   forward
            dispatch gradient     backward_experts  combine gradient     backward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.attention_lowering import AttentionLowering
from ratrain.ratrain_ir.model.blocks import Block, next_block
from ratrain.ratrain_ir.model.expert_ranks import (
    combined_types,
    copies_experts,
    dispatched_types,
    made_gradient_types,
    made_types,
    shares_experts,
)
from ratrain.ratrain_ir.model.expert_slots import exchanged_slots
from ratrain.ratrain_ir.ops.base import Payload, Phase, Piece, piece_fields
from ratrain.ratrain_ir.ops.compute import Forward
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Combine, Dispatch, ForwardExperts, Route

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.expert_ranks import Types
    from ratrain.ratrain_ir.ops.tensor import Tensor

_FORWARD, _BACKWARD = "e", "be"
"""Prefixes of the names of exchanged tensors, by pass."""


@define
class ExpertLowering(AttentionLowering):
    """Builder of the ops around experts that replicas share out."""

    def send_to_experts(self, block: Block, piece: Piece) -> None:
        """Emit routing, and the forward of rows by the ranks of their experts; nothing for other blocks."""
        if not shares_experts(self.model, self.plan, block):
            return
        fields, model, plan = {"block": block, **piece_fields(piece)}, self.model, self.plan_of(piece)
        views, routed = self.views(block, piece, Phase.FORWARD), self.routed(block, piece)
        source = self.read_activation(block, piece, phase=Phase.FORWARD)
        self.emit(Route(**fields, reads=(source, *views, *self.choice_bias(block)), writes=routed))
        sent = self.sent(block, piece)
        given = self.exchanged(block, piece, dispatched_types(model, plan, gradient=False), _FORWARD)
        made = self.exchanged(block, piece, made_types(model, plan), _FORWARD)
        returned = self.exchanged(block, piece, combined_types(model, plan, gradient=False), _FORWARD)
        reads = (*sent, *(views if copies_experts(plan) else ()))
        self.emit(Dispatch(payload=Payload.ACTIVATION, **fields, reads=reads, writes=tuple(given.values())))
        self.emit(ForwardExperts(**fields, reads=(*_computed_with(given), *views), writes=tuple(made.values())))
        reads = (*made.values(), given["counts"], *_chosen(sent))
        self.emit(Combine(payload=Payload.ACTIVATION, **fields, reads=reads, writes=tuple(returned.values())))

    def forward_of_experts(self, block: Block, piece: Piece) -> Forward:
        """Build the forward of an mlp from the rows that came back: their sum, a shared expert, the stream."""
        types = combined_types(self.model, self.plan_of(piece), gradient=False)
        returned = self.exchanged(block, piece, types, _FORWARD)
        views, source = self.views(block, piece, Phase.FORWARD), self.read_activation(block, piece, phase=Phase.FORWARD)
        normed = self.sent(block, piece)[:1] if self.model.shared_expert_size is not None else ()
        made = self.routed(block, piece)
        kept = tuple(tensor for tensor in self.saved(block, piece) if tensor not in made)
        output = self.written_activation(next_block(self.model, block), piece)
        reads = (source, *views, *normed, *returned.values())
        return Forward(block=block, **piece_fields(piece), reads=reads, writes=(output, *kept))

    def send_gradients_to_experts(self, block: Block, piece: Piece, dy: Tensor, *, first: bool) -> tuple[Tensor, ...]:
        """Emit the backward of rows by the ranks of their experts; return what the backward of the block reads of it.

        `first`: the piece begins the gradient of the block. Empty for other blocks.
        """
        if not shares_experts(self.model, self.plan, block):
            return ()
        fields, model, plan = {"block": block, **piece_fields(piece)}, self.model, self.plan_of(piece)
        views, sent = self.views(block, piece, Phase.BACKWARD), self.sent(block, piece)
        given = self.exchanged(block, piece, dispatched_types(model, plan, gradient=True), _BACKWARD)
        made = self.exchanged(block, piece, made_gradient_types(model, plan), _BACKWARD)
        returned = self.exchanged(block, piece, combined_types(model, plan, gradient=True), _BACKWARD)
        copies = copies_experts(plan)
        reads = (dy, *sent, *(views if copies else ()))
        self.emit(Dispatch(payload=Payload.GRADIENT, **fields, reads=reads, writes=tuple(given.values())))
        gradient = (self.gradient(block, piece if isinstance(piece, int) else piece.micro_batch),)
        written, added = (gradient, ()) if first else ((), gradient)
        reads = (*_computed_with(given), given["drows"], *views)
        self.emit(BackwardExperts(**fields, reads=reads, writes=(*made.values(), *written), updates=added))
        reads = (*made.values(), given["counts"], *_chosen(sent))
        back = tuple(returned.values())
        home = gradient if copies else ()
        self.emit(Combine(payload=Payload.GRADIENT, **fields, reads=reads, writes=back, updates=home))
        return back

    def exchanged(self, block: Block, piece: Piece, types: Types, group: str) -> dict[str, Tensor]:
        """Return tensors that ops of expert ranks leave for each other in a pass, by name."""
        return dict(zip(types, self.slots(block, piece, exchanged_slots(types), group), strict=True))

    def sent(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the normed input, the choice and its weights, which `dispatch` reads."""
        return tuple(each for each in self.routed(block, piece) if each.slot in ("xn", "chosen", "weights"))


def _computed_with(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return what the products of rows read of what `dispatch` made."""
    return tuple(given[name] for name in ("rows", "row_weights", "bounds", "pool") if name in given)


def _chosen(sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in sent if tensor.slot == "chosen")
