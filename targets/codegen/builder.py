"""What a routine of a block op is made with: its steps one after the other, rows in chunks, intermediates placed in the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from ratrain.passes.memory.allocation import AllocationProblem, allocate
from ratrain.ratrain_ir.config.model_config import LayerKind, ModelConfig
from ratrain.ratrain_ir.config.plan import Plan, slice_plan
from ratrain.ratrain_ir.config.tensor_peers import norms_over_peers, peer_model
from ratrain.ratrain_ir.config.types import Dtype, aligned, tensor_type
from ratrain.ratrain_ir.model.blocks import (
    KEY_SLOTS,
    PRODUCTS,
    Block,
    branch_slots,
    branch_sums,
    computed_type,
    exchanged_type,
    flat_elements,
    next_block,
    normed_gradient_slots,
    parameters,
    pending_slots,
    row_sum_slots,
    saved_slots,
    seen_slices,
    sum_slots,
    takes_pair,
    tokens_per_micro_batch,
)
from ratrain.ratrain_ir.model.peer_blocks import adds_branch_apart
from ratrain.ratrain_ir.ops.roles import of_slice
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import Formal, Intermediate, ParameterView, Routine, Shape, Step, parse_reference

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Interval


INPUT, WEIGHT = "input", "weight"
"""The halves of a backward."""


def mlp_chunk_rows(plan: Plan) -> int:
    """Rows an mlp block computes at a time."""
    rows = tokens_per_micro_batch(plan)
    return min(plan.mlp_chunk or rows, rows)


def mlp_chunk_starts(plan: Plan) -> range:
    """The first row of each chunk of an mlp block."""
    return range(0, tokens_per_micro_batch(plan), mlp_chunk_rows(plan))


@frozen
class Chunk:
    """Rows `start` up to `stop` of the `rows` of a micro-batch, of which chunks of `size` are computed at a time."""

    start: int
    stop: int
    size: int
    rows: int

    def of(self, name: str) -> str:
        """These rows of an operand that has all of them, which may be rows of a larger one."""
        if self.size == self.rows:
            return name
        named = parse_reference(name)
        first = named.rows[0] if named.rows else 0
        return f"{named.whole}[{first + self.start}:{first + self.stop}]"

    def of_scratch(self, name: str) -> str:
        """The rows in use of a buffer that serves every chunk: the last chunk may be smaller."""
        used = self.stop - self.start
        return name if used == self.size else f"{name}[0:{used}]"


@define(eq=False)
class Builder:
    """Collects steps; intermediates get their places from when they are first and last used."""

    whole: ModelConfig
    plan: Plan
    block: Block
    roles: tuple[str, ...]
    accumulates: bool
    halves: frozenset[str]
    """which halves of a backward this is"""
    steps: list[Step] = field(factory=list)
    temporaries: dict[str, tuple[Dtype, Shape]] = field(factory=dict)

    model: ModelConfig = field(init=False)
    """what a tensor peer computes of the whole model"""

    def __attrs_post_init__(self) -> None:
        self.model = peer_model(self.whole, self.plan)

    @property
    def act(self) -> Dtype:
        """The type of activations."""
        return Dtype(self.plan.view_dtype)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return tokens_per_micro_batch(self.plan)

    @property
    def gives_pair(self) -> bool:
        """Whether the output of the block is a pair (`takes_pair`): the input of its layer above, and what its mlp is added to below."""
        return self.block.kind != "head" and takes_pair(self.model, self.plan, next_block(self.model, self.block))

    def above(self, name: str) -> str:
        """The upper half of a pair."""
        return f"{name}[0:{self.rows}]"

    def below(self, name: str) -> str:
        """The lower half of a pair."""
        return f"{name}[{self.rows}:{2 * self.rows}]"

    @property
    def source(self) -> str:
        """The input of the block, or the half of it that the block is computed of."""
        return self.above("x") if takes_pair(self.model, self.plan, self.block) else "x"

    @property
    def stream(self) -> str:
        """What the block adds to: its input, or the half of it that is meant, or what tensor peers have of the sum already."""
        if self.has("beside"):
            return "beside"
        return self.below("x") if takes_pair(self.model, self.plan, self.block) else "x"

    @property
    def residual(self) -> dict[str, str]:
        """The operand of a product that adds to the stream; tensor peers give parts, and the stream is added where these meet."""
        return {} if self.plan.tp > 1 and not self.has("beside") else {"residual": self.stream}

    @property
    def adds_apart(self) -> bool:
        """Whether what the block gives is normed and added to the stream by an op of its own, behind a sum of tensor peers."""
        return adds_branch_apart(self.whole, self.plan, self.block)

    @property
    def norms_over_peers(self) -> bool:
        """Whether queries and keys are normed over heads of which a tensor peer has some."""
        return norms_over_peers(self.whole, self.plan)

    @property
    def norms_branch(self) -> bool:
        """Whether the block itself norms what it adds."""
        return self.model.has_post_norm and not self.adds_apart

    @property
    def total(self) -> str:
        """Where the sum goes."""
        return self.below("y") if self.gives_pair else "y"

    @property
    def total_gradient(self) -> str:
        """The gradient of the sum, which is that of what the block adds."""
        return self.below("dy") if self.gives_pair else "dy"

    @property
    def bypassing_gradient(self) -> str:
        """The gradient of the input of the block on all ways around what it computes, or what tensor peers have of it already."""
        if self.has("beside"):
            return "beside"
        return self.above("dy") if self.gives_pair else "dy"

    @property
    def source_gradient(self) -> str:
        """Where the gradient of `source` goes, which in a pair is that on all ways but through attention."""
        return self.above("dx") if takes_pair(self.model, self.plan, self.block) else "dx"

    def pass_input_on(self) -> None:
        """With a pair behind the block: the input of the layer, which its mlp is computed of too."""
        if self.gives_pair:
            self.step("cast", {"src": "x", "dst": self.above("y")})

    def pass_gradient_on(self) -> None:
        """With a pair before the block: the gradient of what its attention adds, which is added to the same sum."""
        if takes_pair(self.model, self.plan, self.block):
            self.step("cast", {"src": "dy", "dst": self.below("dx")})

    @property
    def layer_kind(self) -> LayerKind:
        """In what the layer of the block may differ from others."""
        assert self.block.layer is not None
        return self.model.layer_kind(self.block.layer)

    def has(self, role: str) -> bool:
        """Whether the op binds an operand."""
        return role in self.roles

    @property
    def documents(self) -> dict[str, str]:
        """The operand of kernels that ask where documents start; none where attention does not keep them apart."""
        return {"documents": "documents"} if self.has("documents") else {}

    def step(self, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """One more call of a kernel."""
        self.steps.append(Step(kernel, operands, options))

    def step_of(self, half: str, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """A step that belongs to one half of a backward."""
        if half in self.halves:
            self.step(kernel, operands, **options)

    def slot(self, name: str, rows: int | None = None) -> str:
        """A saved or pending slot: an operand where the op has it, an intermediate where not, of `rows` of it if given."""
        if not self.has(name):
            slots = (
                *saved_slots(self.whole, self.plan, self.block),
                *pending_slots(self.whole, self.plan, self.block),
            )
            wanted = next(slot for slot in slots if slot.name == name)
            shape = wanted.type.shape if rows is None else (rows, *wanted.type.shape[1:])
            self.temporaries[name] = (wanted.type.dtype, shape)
        return name

    def temporary(self, name: str, *shape: int, dtype: Dtype | None = None) -> str:
        """An intermediate of a shape, by its name."""
        self.temporaries[name] = (dtype or self.act, shape)
        return name

    def chunks(self) -> list[Chunk]:
        """The rows an mlp block computes at a time."""
        size, starts = mlp_chunk_rows(self.plan), mlp_chunk_starts(self.plan)
        return [Chunk(start, min(start + size, self.rows), size, self.rows) for start in starts]

    def chunk_slot(self, name: str, chunk: Chunk) -> str:
        """The rows of a saved or pending slot that belong to a chunk; where the op has it not, they are all that is held."""
        return chunk.of(name) if self.has(name) else chunk.of_scratch(self.slot(name, rows=chunk.size))

    def chunk_temporary(self, name: str, chunk: Chunk, width: int) -> str:
        """An intermediate [rows of a chunk, width] that every chunk uses anew."""
        return chunk.of_scratch(self.temporary(name, chunk.size, width))

    def linear_gradients(self, dy: str, source: str, weight: str, *, first: bool = True) -> None:
        """Weight gradient of `y = source @ weight^T`; what is not the `first` chunk adds to it."""
        operands = {"a": dy, "b": source, "out": f"g.{weight}"}
        self.step_of(WEIGHT, "gemm", operands, trans_a=True, accumulate=self.accumulates or not first)

    def bias_gradient(self, dy: str, bias: str, *, first: bool = True) -> None:
        """Gradient of the bias of a linear layer; what is not the `first` chunk adds to it."""
        operands = {"a": dy, "out": f"g.{bias}"}
        self.step_of(WEIGHT, "column_sum", operands, accumulate=self.accumulates or not first)

    def keep_what_yields(self, wanted: set[str], given: tuple[str, ...]) -> None:
        """Drop the steps of a recovery that nothing wanted depends on; what is given is not computed again.

        Where a needed kernel also writes something given, that result goes to the workspace.
        """
        needed = set(wanted)
        kept: list[Step] = []
        for step in reversed(self.steps):
            outputs = KERNELS[step.kernel].outputs
            if not any(parse_reference(step.operands[name]).whole in needed for name in outputs):
                continue
            operands = dict(step.operands)
            for name in outputs:
                slot = operands[name]
                if slot in given:
                    dtype, shape = next(
                        (s.type.dtype, s.type.shape)
                        for s in saved_slots(self.whole, self.plan, self.block)
                        if s.name == slot
                    )
                    operands[name] = self.temporary(f"{slot}_again", *shape, dtype=dtype)
            needed |= {parse_reference(reference).whole for reference in operands.values()} - set(given)
            kept.append(Step(step.kernel, operands, step.options))
        self.steps = kept[::-1]

    def gaps(self) -> list[ParameterView]:
        """Parts of the flat tensor that belong to no parameter."""
        gaps: list[ParameterView] = []
        position = 0
        ends = [(p.offset, p.elements) for p in parameters(self.model, self.block)]
        for offset, elements in [*ends, (flat_elements(self.whole, self.plan, self.block), 0)]:
            if offset > position:
                gaps.append(ParameterView(f"gap{len(gaps)}", (offset - position,), position))
            position = offset + elements
        return gaps

    def zero_gaps(self) -> None:
        """Write zeros where a first gradient writes no parameter's."""
        for gap in self.gaps():
            self.step("zero", {"a": f"g.{gap.name}"})

    def finish(self, key: str) -> Routine:
        """The routine of the steps so far."""
        intermediates, workspace = self.placed()
        views = [ParameterView(p.weight, p.shape, p.offset) for p in parameters(self.model, self.block)]
        return Routine(key, self.formals(), (*views, *self.gaps()), intermediates, workspace, tuple(self.steps))

    def placed(self) -> tuple[tuple[Intermediate, ...], int]:
        """Intermediates share bytes where their uses do not meet."""
        uses: dict[str, list[int]] = {name: [] for name in self.temporaries}
        for position, step in enumerate(self.steps):
            for reference in step.operands.values():
                name = parse_reference(reference).whole
                if name in uses:
                    uses[name].append(position)
        names = [name for name, positions in uses.items() if positions]
        sizes = [aligned(tensor_type(*self.temporaries[name]).nbytes) for name in names]
        spans: list[tuple[Interval, ...]] = [((min(uses[name]), max(uses[name]) + 1),) for name in names]
        placement = allocate(AllocationProblem(sizes, spans, len(self.steps)))
        intermediates = [
            Intermediate(name, *self.temporaries[name], offset)
            for name, offset in zip(names, placement.offsets, strict=True)
        ]
        return tuple(intermediates), placement.arena_bytes

    def formals(self) -> tuple[Formal, ...]:
        """The op's operands, with their types."""
        flat = (flat_elements(self.whole, self.plan, self.block),)
        known: dict[str, tuple[Dtype, Shape]] = {
            slot.name: (slot.type.dtype, slot.type.shape)
            for slots in (saved_slots, pending_slots)
            for slot in slots(self.whole, self.plan, self.block)
        }
        known |= self.slots_of_other_slices() | self.operands_of_branches() | self.operands_around_sums()
        known |= dict.fromkeys(("x", "dx"), self.input_of(self.block))
        if self.block.kind != "head":
            known |= dict.fromkeys(("y", "dy"), self.input_of(next_block(self.model, self.block)))
        known["beside"] = (self.act, (self.rows, self.model.hidden_size))
        known |= dict.fromkeys(("tokens", "labels", "documents"), (Dtype.I32, (self.rows,)))
        known |= {
            "w": (self.act, flat),
            "g": (Dtype(self.plan.grad_dtype), flat),
            "loss": (Dtype.F64, (1,)),
            "scale": (Dtype.F32, (2,)),
        }
        return tuple(Formal(role, *known[role]) for role in self.roles)

    def input_of(self, block: Block) -> tuple[Dtype, Shape]:
        """Dtype and shape of the input of a block."""
        type_ = computed_type(self.whole, self.plan, block)
        return type_.dtype, type_.shape

    def operands_of_branches(self) -> dict[str, tuple[Dtype, Shape]]:
        """Dtype and shape of what is normed and added to the stream apart, of the rows that a tensor peer has."""
        if not self.adds_apart:
            return {}
        slots = (*branch_slots(self.model, self.plan), *branch_sums(self.model, self.plan, self.block))
        stream = exchanged_type(self.model, self.plan)
        between = dict.fromkeys(("stream", "sum", "dsum", "dbranch"), (stream.dtype, stream.shape))
        return between | {slot.name: (slot.type.dtype, slot.type.shape) for slot in slots}

    def operands_around_sums(self) -> dict[str, tuple[Dtype, Shape]]:
        """Dtype and shape of what comes back before norms over tensor peers, and of the sums that these wait for."""
        slots = (
            *normed_gradient_slots(self.whole, self.plan, self.block),
            *row_sum_slots(self.whole, self.plan, self.block, PRODUCTS),
        )
        return {slot.name: (slot.type.dtype, slot.type.shape) for slot in slots}

    def slots_of_other_slices(self) -> dict[str, tuple[Dtype, Shape]]:
        """Dtype and shape of what a slice of an attention reads and adds to of other slices, and finds of its own."""
        own = {slot.name: (slot.type.dtype, slot.type.shape) for slot in sum_slots(self.whole, self.plan, self.block)}
        if self.block.kind != "attention":
            return own
        earlier = [(number, slice_plan(self.plan.whole, number)) for number in seen_slices(self.whole, self.plan)]
        return own | {
            of_slice(slot.name, number): (slot.type.dtype, slot.type.shape)
            for number, plan in earlier
            for slots in (saved_slots, sum_slots)
            for slot in slots(self.whole, plan, self.block)
            if slots is sum_slots or slot.name in KEY_SLOTS
        }
