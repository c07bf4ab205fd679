"""Tensors of one stage of a dataflow module: their names, their types, and which of them an op of a block needs.

A tensor's name is its content, block and piece: `x.mlp.3.m0` is the input of `mlp.3` for micro-batch 0. Prefixes:
`x` activation and `dx` its gradient, `w` view, `v` part of a view, `f` frozen parameters, `fq` packed ones, `p` master,
`m1` `m2` moments, `t` update count, `g` gradient, `gs` its shard, `s` saved slot, `d` slot between the halves of a
backward, `b` branch (post-norm), `bias` of a router's choice, `load` counts of its experts' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Dtype, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.model.blocks import (
    Block,
    flat_elements,
    previous_block,
    trains,
)
from ratrain.ratrain_ir.model.expert_ranks import biases_choice
from ratrain.ratrain_ir.model.expert_slots import routed_slots
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch
from ratrain.ratrain_ir.model.sharded_blocks import (
    gathers_within_step,
    is_sharded,
    parts_view,
    reduces_each_micro_batch,
    shard_elements,
    shares_frozen,
    view_shard_elements,
)
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    KEY_SLOTS,
    SQUARES,
    Slot,
    activation_type,
    begins_key_gradients,
    branch_slots,
    branch_sums,
    computed_type,
    exchanged_type,
    head_gradient_slots,
    key_part_types,
    made_by_project,
    normed_gradient_slots,
    projected_slots,
    reads_documents,
    row_sum_slots,
    row_sums_type,
    saved_slots,
    seen_slices,
    sum_slots,
    token_type,
    whole_key_slots,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart, is_parallel_mlp
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Part, Phase, Piece, Slice, piece_name
from ratrain.ratrain_ir.ops.roles import choice_bias_roles, frozen_part_roles, frozen_roles, load_roles
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.topology import Topology

SlotsOf = Callable[[ModelConfig, Plan, Block], tuple[Slot, ...]]
"""Lister of some slots of a block."""


@define
class StageTensors:
    """Tensors of one stage, each declared where it is first asked for."""

    model: ModelConfig
    plan: Plan
    topology: Topology
    stage: Stage

    def tensor(self, kind: StateKind, name: str, type_: TensorType) -> Tensor:
        """Return the tensor of that name; declare it on first use."""
        tensor = self.stage.tensors.get(name)
        return tensor if tensor is not None else self.stage.add(Tensor(name, kind, type_))

    def carried(self, kind: StateKind, name: str, type_: TensorType) -> Tensor:
        """Declare a tensor that lives from step to step."""
        return self.stage.add(Tensor(name, kind, type_, carried=True))

    def named(self, name: str) -> Tensor:
        """Return a declared tensor."""
        return self.stage.tensors[name]

    def declare_state(self, block: Block) -> None:
        """Declare a block's carried tensors: frozen parameters, view (or part of one), master, moments, count."""
        if shares_frozen(self.model, self.plan, block):
            for role in frozen_part_roles(self.model, self.plan, block):
                self.carried(role.kind, role.name, role.type)
        else:
            for role in frozen_roles(self.model, self.plan, block):
                self.carried(role.kind, f"{role.name}.{block}", role.type)
        if not trains(self.model, self.plan, block):
            return
        whole = flat_elements(self.model, self.plan, block)
        shard = shard_elements(self.model, self.plan, block)
        if not gathers_within_step(self.plan, block):
            self.carried(StateKind.VIEW, f"w.{block}", tensor_type(Dtype(self.plan.view_dtype), (whole,)))
        elif parts_view(self.model, self.plan, block):
            part = view_shard_elements(self.model, self.plan, block)
            self.carried(StateKind.VIEW_SHARD, f"v.{block}", tensor_type(Dtype(self.plan.view_dtype), (part,)))
        self.carried(StateKind.MASTER, f"p.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m1.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m2.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.SCALAR, f"t.{block}", tensor_type(Dtype.I64, (1,)))
        for of_choice in (choice_bias_roles, load_roles):
            for role in of_choice(self.model, self.plan, block):
                self.carried(role.kind, f"{role.name}.{block}", role.type)

    def pieces(self, micro_batch: int) -> list[Piece]:
        """List the pieces of a micro-batch in the order of its rows: its slices, or the whole micro-batch."""
        count = len(self.plan.slices)
        return [Slice(micro_batch, number) for number in range(count)] if count else [micro_batch]

    def gradient(self, block: Block, micro_batch: int) -> Tensor:
        """Return the gradient that a backward adds to: one per step, or per micro-batch if each is reduced alone."""
        elements = flat_elements(self.model, self.plan, block)
        suffix = f".m{micro_batch}" if reduces_each_micro_batch(self.model, self.plan, block) else ""
        return self.tensor(StateKind.GRAD, f"g.{block}{suffix}", tensor_type(Dtype(self.plan.grad_dtype), (elements,)))

    def shard(self, block: Block) -> Tensor:
        """Return this rank's shard of a block's reduced gradient."""
        elements = shard_elements(self.model, self.plan, block)
        dtype = Dtype(self.plan.grad_shard_dtype)
        return self.tensor(StateKind.GRAD_SHARD, f"gs.{block}", tensor_type(dtype, (elements,)))

    def scalar(self, name: str, dtype: Dtype) -> Tensor:
        """Return a tensor of one number."""
        return self.tensor(StateKind.SCALAR, name, tensor_type(dtype, (1,)))

    def input(self, part: Part, piece: Piece) -> Tensor:
        """Return tokens, labels or document starts of a piece."""
        return self.tensor(StateKind.INPUT, f"{part.value}.{piece_name(piece)}", token_type(self.plan_of(piece)))

    def activation(self, block: Block, piece: Piece, *, gradient: bool = False) -> Tensor:
        """Return the input of a block for one piece, or the gradient of that input; a boundary if it crosses a cut."""
        kind = StateKind.BOUNDARY if block in self.topology.blocks_behind_cuts else StateKind.ACTIVATION
        prefix = "dx" if gradient else "x"
        type_ = activation_type(self.model, self.plan_of(piece), block)
        return self.tensor(kind, f"{prefix}.{block}.{piece_name(piece)}", type_)

    def adds_apart(self, block: Block) -> bool:
        """Tell whether a separate op norms the block's output and adds it to the residual stream."""
        return adds_branch_apart(self.model, self.plan, block)

    def written_activation(self, block: Block, piece: Piece, *, gradient: bool = False) -> Tensor:
        """Return what the block before writes for the input of a block, or the block itself for the input's gradient.

        It is the activation itself, or with tensor parallelism this rank's partial sum of it.
        """
        if self.plan.tp == 1:
            return self.activation(block, piece, gradient=gradient)
        what = f"{'dx' if gradient else 'x'}_part.{block}"
        if not gradient and self.adds_apart(before := previous_block(block, self.model)):
            what = f"branch_part.{before}"
        name = f"{what}.{piece_name(piece)}"
        return self.tensor(StateKind.PARTIAL, name, computed_type(self.model, self.plan_of(piece), block))

    def branch(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return a block's summed output and the statistics of its norm. The block's own ops do not save them."""
        return self.slots(block, piece, branch_slots(self.model, self.plan_of(piece)), "b")

    def branch_gradient(self, block: Block, piece: Piece) -> Tensor:
        """Return the gradient of a block's summed output, for the rows that a rank has between blocks."""
        type_ = exchanged_type(self.model, self.plan_of(piece))
        return self.tensor(StateKind.ACTIVATION, f"dbranch.{block}.{piece_name(piece)}", type_)

    def branch_sums(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the weight-gradient sums of the post-norm, which its backward leaves for the block's backward."""
        return self.slots(block, piece, branch_sums(self.model, self.plan_of(piece), block), "b")

    def branch_part(self, mlp: Block, piece: Piece, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """Return the partial sum that a parallel attention wrote and this mlp adds to; empty for other blocks.

        `gradient`: the mlp's partial gradient of their common input, to which attention's backward adds.
        """
        if not is_parallel_mlp(self.model, self.plan, mlp):
            return ()
        return (self.written_activation(mlp, piece, gradient=gradient),)

    def plan_of(self, piece: Piece) -> Plan:
        """Return the plan that gives the sizes of a piece: that of its slice, or of whole micro-batches."""
        return slice_plan(self.plan, None if isinstance(piece, int) else piece.number)

    def slots(self, block: Block, piece: Piece, slots: Iterable[Slot], group: str = "s") -> tuple[Tensor, ...]:
        """Return the tensors of some slots of a block for a piece; `group` is the prefix of their names."""
        names = f"{group}.{block}.{piece_name(piece)}"
        return tuple(self.tensor(StateKind.SAVED, f"{names}.{slot.name}", slot.type) for slot in slots)

    def saved(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return what a forward saves for its backward."""
        return self.slots(block, piece, saved_slots(self.model, self.plan_of(piece), block))

    def projected(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return queries, keys and values before their norm, if it sums over tensor-parallel ranks; else nothing.

        A separate op (`project`) makes them. `row_sums`, `normed_gradients` and `part_of_sums` serve this case alone.
        """
        return self.slots(block, piece, projected_slots(self.model, self.plan_of(piece), block))

    def row_sums(self, block: Block, piece: Piece, name: str) -> tuple[Tensor, ...]:
        """Return the sums over each row, complete over all tensor-parallel ranks; `name` is `SQUARES` or `PRODUCTS`."""
        slots = row_sum_slots(self.model, self.plan_of(piece), block, name)
        return self.slots(block, piece, slots, "s" if name == SQUARES else "d")

    def normed_gradients(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the gradients of normed queries, normed keys and values."""
        return self.slots(block, piece, normed_gradient_slots(self.model, self.plan_of(piece), block), "d")

    def part_of_sums(self, block: Block, piece: Piece, name: str) -> Tensor:
        """Return this rank's part of the sums over each row."""
        name = f"{name}_part.{block}.{piece_name(piece)}"
        return self.tensor(StateKind.PARTIAL, name, row_sums_type(self.plan_of(piece)))

    def made_by_project(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return queries, keys, values and saved slots before them, which `project` makes for context ranks."""
        return self.slots(block, piece, made_by_project(self.model, self.plan_of(piece), block))

    def routed(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the saved slots that `route` makes before expert ranks exchange rows; empty for other blocks."""
        return self.slots(block, piece, routed_slots(self.model, self.plan_of(piece), block))

    def whole_keys(self, block: Block, piece: Piece, phase: Phase, group: int | None = None) -> tuple[Tensor, ...]:
        """Return keys and values of all context ranks, or of a group of heads, as a pass reads them.

        Empty without such ranks.
        """
        slots = whole_key_slots(self.model, self.plan_of(piece), block)
        return self.slots(block, piece, slots, f"{phase.value}_keys{'' if group is None else group}")

    def of_heads(self, block: Block, piece: Piece, of: SlotsOf) -> tuple[Tensor, ...]:
        """Return the tensors of slots that context ranks exchange heads for; `of` lists them; empty if they do not."""
        return self.slots(block, piece, of(self.model, self.plan_of(piece), block), "h")

    def seen_whole_keys(self, block: Block, piece: Piece, phase: Phase) -> tuple[Tensor, ...]:
        """Return keys and values of all context ranks, of the earlier slices that a slice sees and of its own."""
        pieces = (*self.seen(block, piece), piece)
        return tuple(tensor for each in pieces for tensor in self.whole_keys(block, each, phase))

    def seen_key_parts(self, block: Block, piece: Piece, *, first: bool) -> tuple[Tensor, ...]:
        """Return this rank's parts of the gradients of keys to which a slice adds: its own, and of earlier slices.

        `first` selects those that this slice begins; otherwise those that a later slice has begun.
        """
        return tuple(
            tensor
            for other in (piece, *self.seen(block, piece))
            if self.begins(piece, other) is first
            for tensor in self.key_parts(block, other)
        )

    def begins(self, piece: Piece, owner: Piece) -> bool:
        """Tell whether a piece is the first to add to the gradients of the keys of another, or of its own."""
        return begins_key_gradients(self.model, self.plan_of(piece), self.plan_of(owner))

    def head_gradients(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values as they enter the softmax; empty without context ranks."""
        return self.slots(block, piece, head_gradient_slots(self.model, self.plan_of(piece), block), "d")

    def key_parts(self, block: Block, piece: Piece, group: int | None = None) -> tuple[Tensor, ...]:
        """Return a context rank's parts of the gradients of all keys and values, or of those of a group of heads."""
        types = key_part_types(self.model, self.plan_of(piece), block)
        of = "" if group is None else group
        names = {f"{name}{of}.{block}.{piece_name(piece)}": type_ for name, type_ in types.items()}
        return tuple(self.tensor(StateKind.PARTIAL, name, type_) for name, type_ in names.items())

    def seen(self, block: Block, piece: Piece) -> list[Slice]:
        """List the earlier slices of the micro-batch whose keys a slice of an attention sees; none for other blocks."""
        if isinstance(piece, int) or block.kind != "attention":
            return []
        return [Slice(piece.micro_batch, number) for number in seen_slices(self.model, self.plan_of(piece))]

    def seen_keys(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return keys and values of the earlier slices that a slice of an attention sees."""
        return tuple(t for other in self.seen(block, piece) for t in self.saved(block, other) if t.slot in KEY_SLOTS)

    def sums(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the sums in which later slices collect the gradients of this slice's keys and values."""
        return self.slots(block, piece, sum_slots(self.model, self.plan_of(piece), block))

    def seen_sums(self, block: Block, piece: Piece, *, first: bool) -> tuple[Tensor, ...]:
        """Return the key and value gradient sums that a slice of an attention adds to.

        `first` selects the sums that this slice begins; otherwise those that a later slice has begun.
        """
        return tuple(
            tensor
            for other in self.seen(block, piece)
            if self.begins(piece, other) is first
            for tensor in self.sums(block, other)
        )

    def documents(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return the tensor of document starts for a block that reads it; else nothing."""
        return (self.input(Part.DOCUMENTS, piece),) if reads_documents(self.model, self.plan, block) else ()

    def parts_of_loss(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return a tensor-parallel rank's log-sum-exp and loss, each over its part of the vocabulary, for a piece."""
        rows = tensor_type(Dtype.F32, (tokens_per_micro_batch(self.plan_of(piece)),))
        types = {"lse_part": rows, "loss_part": tensor_type(Dtype.F64, (1,))}
        lse, loss = (self.tensor(StateKind.PARTIAL, f"{n}.head.{piece_name(piece)}", t) for n, t in types.items())
        return lse, loss

    def choice_bias(self, block: Block) -> tuple[Tensor, ...]:
        """Return the bias with which a block's router chooses; empty without one."""
        return (self.named(f"bias.{block}"),) if biases_choice(self.model, self.plan, block) else ()

    def counted(self, block: Block) -> tuple[Tensor, ...]:
        """Return the counts of tokens that a block's router has sent to each expert; empty without a bias."""
        return (self.named(f"load.{block}"),) if biases_choice(self.model, self.plan, block) else ()

    def reduced(self, block: Block) -> Tensor:
        """Return the reduced gradient that the block's update reads."""
        return self.shard(block) if is_sharded(self.model, self.plan, block) else self.gradient(block, 0)
