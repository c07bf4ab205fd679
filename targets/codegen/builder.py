"""Builder of a block op's routine: steps one after the other, rows in chunks, intermediates in the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from ratrain.passes.memory.allocation import AllocationProblem, allocate
from ratrain.ratrain_ir.config.model_config import LayerKind, ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks, rank_model
from ratrain.ratrain_ir.config.types import Dtype, aligned, tensor_type
from ratrain.ratrain_ir.model.adapters import FIRST, SECOND, adapter_module, is_stack, stems_of_first
from ratrain.ratrain_ir.model.blocks import (
    Block,
    flat_elements,
    next_block,
    parameters,
    trained_parameters,
)
from ratrain.ratrain_ir.model.expert_blocks import expert_rows
from ratrain.ratrain_ir.model.expert_ranks import copied_stacks, exchanged_types, expected_rows
from ratrain.ratrain_ir.model.micro_batch import mlp_chunk_rows, mlp_chunk_starts, tokens_per_micro_batch
from ratrain.ratrain_ir.model.parameter_names import JOINT
from ratrain.ratrain_ir.model.sharded_blocks import frozen_elements, packed_frozen_bytes
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    KEY_SLOTS,
    PRODUCTS,
    attended_slots,
    branch_slots,
    branch_sums,
    computed_type,
    exchanged_type,
    forward_slots,
    head_gradient_slots,
    key_part_types,
    made_by_project,
    normed_gradient_slots,
    output_gradient_slots,
    pending_slots,
    row_sum_slots,
    saved_slots,
    seen_slices,
    shared_gradient_slots,
    shared_head_slots,
    sum_slots,
    takes_pair,
    whole_key_slots,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart
from ratrain.ratrain_ir.ops.roles import is_of_other_slice, of_slice
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import (
    COPIES,
    FROZEN,
    PACKED,
    Formal,
    Intermediate,
    ParameterView,
    Routine,
    Shape,
    Step,
    parse_reference,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.analysis.lifetime import Interval

ByRank = tuple[dict[str, Any] | None, ...]
"""Options that each context rank adds to a step, or None for one that leaves it out; empty: all ranks do alike."""

INPUT, WEIGHT = "input", "weight"
"""Halves of a backward."""


@frozen
class Chunk:
    """Rows `start` up to `stop` of the `rows` of a micro-batch, of which chunks of `size` are computed at a time."""

    start: int
    stop: int
    size: int
    rows: int

    def of(self, name: str) -> str:
        """Return these rows of an operand that has all of them, and that may itself be rows of a larger one."""
        if self.size == self.rows:
            return name
        named = parse_reference(name)
        first = named.rows[0] if named.rows else 0
        return f"{named.whole}[{first + self.start}:{first + self.stop}]"

    def of_scratch(self, name: str) -> str:
        """Return the rows in use of a buffer that serves every chunk: the last chunk may be smaller."""
        used = self.stop - self.start
        return name if used == self.size else f"{name}[0:{used}]"


@define(eq=False)
class Builder:
    """Collector of a routine's steps; places intermediates by their first and last use."""

    whole: ModelConfig
    plan: Plan
    block: Block
    roles: tuple[str, ...]
    accumulates: bool
    halves: frozenset[str]
    """the halves of a backward that the op runs"""
    head_group: int | None = None
    """the group of heads that the op attends with, where keys are gathered in groups"""
    steps: list[Step] = field(factory=list)
    temporaries: dict[str, tuple[Dtype, Shape]] = field(factory=dict)

    model: ModelConfig = field(init=False)
    """part of the whole model that a tensor-parallel rank computes"""
    frozen: dict[str, Shape] = field(init=False)
    """shapes of the block's frozen parameters, by short name"""
    packed: dict[str, str] = field(init=False)
    """formats of the block's packed matrices, by short name"""
    firsts: dict[str, str] = field(init=False)
    """stem of its A by the stem of each adapted linear layer: `q` of `q_proj`; of parts of a packed one it is `qkv`"""
    ranks: dict[str, int] = field(init=False)
    """rank of the adapter of each of these"""

    def __attrs_post_init__(self) -> None:
        self.model = rank_model(self.whole, self.plan)
        own = parameters(self.model, self.block)
        self.packed = {each.weight: each.packed for each in own if each.packed is not None}
        self.frozen = {each.weight: each.shape for each in own if not each.trains}
        self.firsts = stems_of_first(each.weight for each in own)
        self.ranks = {each.weight.removesuffix(SECOND): each.shape[-1] for each in own if each.weight.endswith(SECOND)}

    @property
    def act(self) -> Dtype:
        """Type of activations."""
        return Dtype(self.plan.view_dtype)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return tokens_per_micro_batch(self.plan)

    @property
    def gives_pair(self) -> bool:
        """True if the block's output is a pair (`takes_pair`): its input, and below that the sum with its branch.

        In models with parallel branches the mlp of a layer reads the upper half and adds to the lower half.
        """
        return self.block.kind != "head" and takes_pair(self.model, self.plan, next_block(self.model, self.block))

    def above(self, name: str) -> str:
        """Return the upper half of a pair."""
        return f"{name}[0:{self.rows}]"

    def below(self, name: str) -> str:
        """Return the lower half of a pair."""
        return f"{name}[{self.rows}:{2 * self.rows}]"

    @property
    def source(self) -> str:
        """Operand that the block computes from: its input, or one half of a pair."""
        return self.above("x") if takes_pair(self.model, self.plan, self.block) else "x"

    @property
    def stream(self) -> str:
        """Operand that the block adds to: its input, one half of a pair, or a tensor-parallel rank's sum so far."""
        if self.has("branch_part"):
            return "branch_part"
        return self.below("x") if takes_pair(self.model, self.plan, self.block) else "x"

    @property
    def residual(self) -> dict[str, str]:
        """Operand of a product that adds to the stream; none if ranks add the stream where they sum parts."""
        return {} if self.plan.tp > 1 and not self.has("branch_part") else {"residual": self.stream}

    @property
    def adds_apart(self) -> bool:
        """True if an op of its own norms the block's branch and adds it to the stream, behind a sum over peers."""
        return adds_branch_apart(self.whole, self.plan, self.block)

    @property
    def norms_over_ranks(self) -> bool:
        """True if queries and keys are normed over heads of which a tensor-parallel rank has only some."""
        return norms_over_ranks(self.whole, self.plan)

    @property
    def norms_branch(self) -> bool:
        """True if the block itself norms its branch."""
        return self.model.has_post_norm and not self.adds_apart

    @property
    def total(self) -> str:
        """Operand for the sum."""
        return self.below("y") if self.gives_pair else "y"

    @property
    def total_gradient(self) -> str:
        """Gradient of the sum, which is also that of the branch."""
        return self.below("dy") if self.gives_pair else "dy"

    @property
    def bypassing_gradient(self) -> str:
        """Gradient of the block's input on all paths around its own computation, or the part of it so far.

        Tensor-parallel ranks have such a part in an operand of its own, `branch_part`.
        """
        if self.has("branch_part"):
            return "branch_part"
        return self.above("dy") if self.gives_pair else "dy"

    @property
    def source_gradient(self) -> str:
        """Operand for the gradient of `source`; in a pair that is the one on all paths but through attention."""
        return self.above("dx") if takes_pair(self.model, self.plan, self.block) else "dx"

    def pass_input_on(self) -> None:
        """Add, where the output is a pair, a copy of the layer's input, which its mlp reads too."""
        if self.gives_pair:
            self.step("cast", {"src": "x", "dst": self.above("y")})

    def pass_gradient_on(self) -> None:
        """Add, where the input is a pair, a copy of `dy` as the gradient of its lower half, the attention's sum."""
        if takes_pair(self.model, self.plan, self.block):
            self.step("cast", {"src": "dy", "dst": self.below("dx")})

    @property
    def layer_kind(self) -> LayerKind:
        """Properties in which the block's layer may differ from others."""
        assert self.block.layer is not None
        return self.model.layer_kind(self.block.layer)

    def has(self, role: str) -> bool:
        """Return whether the op binds an operand."""
        return role in self.roles

    @property
    def documents(self) -> dict[str, str]:
        """Operand of kernels that need the starts of documents; none where attention does not keep documents apart."""
        return {"documents": "documents"} if self.has("documents") else {}

    def step(self, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """Add a kernel call; products with weights get the plan's way to sum."""
        self.step_by_rank((), kernel, operands, **options)

    def step_by_rank(self, by_rank: ByRank, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """Add a kernel call with other options on each context rank (`Step.by_rank`)."""
        if kernel == "gemm" and self.plan.half_run is not None:
            options["half_run"] = self.plan.half_run
        if self.frozen:
            if self._only_frozen_gradients(kernel, operands):
                return
            optional = {each.name for each in KERNELS[kernel].operands if each.optional}
            operands = {
                name: self._of_frozen(reference, **options)
                for name, reference in operands.items()
                if not (name in optional and self._is_frozen_gradient(reference))
            }
        self.steps.append(Step(kernel, operands, options, by_rank=by_rank))

    def _only_frozen_gradients(self, kernel: str, operands: Mapping[str, str]) -> bool:
        """Tell whether a kernel would give nothing but gradients of frozen parameters."""
        return all(self._is_frozen_gradient(operands[name]) for name in KERNELS[kernel].outputs if name in operands)

    def _is_frozen_gradient(self, reference: str) -> bool:
        return reference.startswith("g.") and reference.removeprefix("g.") in self.frozen

    def _of_frozen(self, reference: str, *, accumulate: bool = False, **_options: Any) -> str:
        """Return a step's operand with frozen parameters in their own tensor, and their gradients in scratch.

        Scratch that a kernel adds to is zeroed first.
        """
        base, _, part = reference.partition(".")
        if part not in self.frozen:
            return reference
        if base == "w":
            return f"{FROZEN}.{part}" if part not in self.packed else self._unpacked(part)
        shape = self.frozen[part]
        scratch = self.temporary(f"unused_{part}", *shape, dtype=Dtype(self.plan.grad_dtype))
        if accumulate:
            self.steps.append(Step("zero", {"a": scratch}, {}))
        return scratch

    def step_of(self, half: str, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """Add a kernel call if the op runs this half of a backward."""
        if half in self.halves:
            self.step(kernel, operands, **options)

    def slot(self, name: str, rows: int | None = None) -> str:
        """Return a saved or pending slot: an operand where the op has it, else an intermediate.

        With `rows` the intermediate has that many rows.
        """
        if not self.has(name):
            slots = (
                *forward_slots(self.whole, self.plan, self.block),
                *pending_slots(self.whole, self.plan, self.block),
                *made_by_project(self.whole, self.plan, self.block),
            )
            wanted = next(slot for slot in slots if slot.name == name)
            shape = wanted.type.shape if rows is None else (rows, *wanted.type.shape[1:])
            self.temporaries[name] = (wanted.type.dtype, shape)
        return name

    def temporary(self, name: str, *shape: int, dtype: Dtype | None = None) -> str:
        """Return an intermediate of a shape, by its name."""
        self.temporaries[name] = (dtype or self.act, shape)
        return name

    def chunks(self) -> list[Chunk]:
        """Return the chunks of rows that an mlp block computes one after the other."""
        size, starts = mlp_chunk_rows(self.plan), mlp_chunk_starts(self.plan)
        return [Chunk(start, min(start + size, self.rows), size, self.rows) for start in starts]

    def chunk_slot(self, name: str, chunk: Chunk) -> str:
        """Return a chunk's rows of a saved or pending slot; without that operand, of an intermediate of one chunk."""
        return chunk.of(name) if self.has(name) else chunk.of_scratch(self.slot(name, rows=chunk.size))

    def chunk_temporary(self, name: str, chunk: Chunk, width: int, *, dtype: Dtype | None = None) -> str:
        """Return an intermediate [rows of a chunk, width] that every chunk uses again."""
        return chunk.of_scratch(self.temporary(name, chunk.size, width, dtype=dtype))

    def _unpacked(self, weight: str) -> str:
        """Return a packed matrix as blocks compute with it: an intermediate that its first use fills."""
        name = f"{weight}_unpacked"
        if name not in self.temporaries:
            self.temporary(name, *self.frozen[weight])
            operands = {"packed": f"{PACKED}.{weight}", "out": name}
            bits = FORMATS.get(self.packed[weight])
            nf4 = Step("dequantise_nf4", operands, {})
            self.steps.append(nf4 if bits is None else Step("dequantise", operands, {"bits": bits}))
        return name

    def linear_gradients(self, dy: str, source: str, weight: str, chunk: Chunk | None = None) -> None:
        """Add the gradients of `y = source @ weight^T` and of its adapter; chunks after the first add to them.

        Parts of a packed layer, in order, sum their dy B in f32; the last one gives the gradient of the A they share.
        """
        adds = self.accumulates or (chunk is not None and chunk.start > 0)
        operands = {"a": dy, "b": source, "out": f"g.{weight}"}
        self.step_of(WEIGHT, "gemm", operands, trans_a=True, accumulate=adds)
        stem = weight.removesuffix("_proj")
        if stem not in self.firsts:
            return
        low, dlow, parts = self.low(stem, chunk), self.low_gradient(stem, chunk), self.parts_of(stem)
        self.step("gemm", {"a": dy, "b": low, "out": f"g.{stem}{SECOND}"}, trans_a=True, accumulate=adds)
        self.step("gemm", {"a": dy, "b": f"w.{stem}{SECOND}", "out": dlow}, accumulate=stem != parts[0])
        if stem == parts[-1]:
            self.scale_low(stem, dlow)
            out = f"g.{self.firsts[stem]}{FIRST}"
            self.step("gemm", {"a": dlow, "b": source, "out": out}, trans_a=True, accumulate=adds)

    def add_adapter(self, stem: str, source: str, out: str, chunk: Chunk | None = None, *, again: bool = False) -> None:
        """Add an adapter's product to that of its linear layer, `out`: out += scale * (source A^T) B^T.

        A backward that computes it again reads the thin product that the forward saved.
        """
        if stem in self.firsts:
            low = self.low(stem, chunk) if again else self.add_low(stem, source, chunk)
            self.step("gemm", {"a": low, "b": f"w.{stem}{SECOND}", "out": out}, trans_b=True, accumulate=True)

    def add_low(self, stem: str, source: str, chunk: Chunk | None = None) -> str:
        """Add the first product of an adapter, scale * source A^T, and return its operand; empty without an adapter.

        Parts of a packed layer share the product of the first of them.
        """
        if stem not in self.firsts:
            return ""
        low = self.low(stem, chunk)
        if stem == self.parts_of(stem)[0]:
            self.step("gemm", {"a": source, "b": f"w.{self.firsts[stem]}{FIRST}", "out": low}, trans_b=True)
            self.scale_low(stem, low)
        return low

    def gradient_through_adapter(self, dy: str, stem: str) -> None:
        """Add the gradient scale * dy B of an adapter's thin side, where no `linear_gradients` does before."""
        if stem in self.firsts:
            low = self.low_gradient(stem)
            self.step("gemm", {"a": dy, "b": f"w.{stem}{SECOND}", "out": low})
            self.scale_low(stem, low)

    def add_adapter_gradient(self, stem: str, out: str, chunk: Chunk | None = None) -> None:
        """Add to a gradient of a linear layer's input the part through its adapter; after `linear_gradients`."""
        if stem in self.firsts and stem == self.parts_of(stem)[-1]:
            operands = {"a": self.low_gradient(stem, chunk), "b": f"w.{self.firsts[stem]}{FIRST}", "out": out}
            self.step("gemm", operands, accumulate=True)

    def parts_of(self, stem: str) -> tuple[str, ...]:
        """Return the stems that share an adapter's A, in the order in which blocks compute them."""
        return JOINT.get(self.firsts[stem], (stem,))

    def low(self, stem: str, chunk: Chunk | None = None) -> str:
        """Return the operand for scale * x A^T of an adapter."""
        name = f"{self.firsts[stem]}_low"
        return self.slot(name) if chunk is None else self.chunk_slot(name, chunk)

    def low_gradient(self, stem: str, chunk: Chunk | None = None) -> str:
        """Return the intermediate for scale * dy B of an adapter."""
        name, rank = f"d{self.firsts[stem]}_low", self.ranks[stem]
        dtype = Dtype.F32 if len(self.parts_of(stem)) > 1 else self.act
        if chunk is None:
            rows = expert_rows(self.model, self.plan) if is_stack(stem) else self.rows
            return self.temporary(name, rows, rank, dtype=dtype)
        return self.chunk_temporary(name, chunk, rank, dtype=dtype)

    def scale_low(self, stem: str, low: str) -> None:
        """Scale what an adapter's thin side holds, in place."""
        module = adapter_module(self.model, self.block.kind, self.block.layer, stem)
        scale = self.model.training.scale_of(module)
        if scale != 1:
            self.step("scale", {"a": low, "out": low}, scale=scale)

    def bias_gradient(self, dy: str, bias: str, *, first: bool = True) -> None:
        """Add the gradient of the bias of a linear layer; chunks after the `first` add to it."""
        operands = {"a": dy, "out": f"g.{bias}"}
        self.step_of(WEIGHT, "column_sum", operands, accumulate=self.accumulates or not first)

    def prune_backward(self) -> None:
        """Drop the steps of a backward that only the gradient of the block's input needs: nothing below trains."""
        self.temporary("dx", *self.input_of(self.block)[1])
        gradients = {f"g.{each.weight}" for each in trained_parameters(self.model, self.block)}
        self.prune_steps(gradients | {role for role in self.roles if is_of_other_slice(role)}, ())

    def prune_steps(self, wanted: set[str], given: tuple[str, ...]) -> None:
        """Drop the steps that no wanted operand depends on; given operands of a recovery are not computed again.

        Where a needed kernel also writes a given operand, that result goes to the workspace.
        """
        needed = set(wanted)
        kept: list[Step] = []
        # Backwards: a step is needed if it writes something needed; then its operands are needed too, unless they are
        # given.
        for step in reversed(self.steps):
            outputs = [name for name in KERNELS[step.kernel].outputs if name in step.operands]
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
            kept.append(evolve(step, operands=operands))
        self.steps = kept[::-1]

    def gaps(self) -> list[ParameterView]:
        """Return the parts of the flat tensor that belong to no parameter."""
        gaps: list[ParameterView] = []
        position = 0
        ends = [(p.offset, p.elements) for p in trained_parameters(self.model, self.block)]
        for offset, elements in [*ends, (flat_elements(self.whole, self.plan, self.block), 0)]:
            if offset > position:
                gaps.append(ParameterView(f"gap{len(gaps)}", (offset - position,), position))
            position = offset + elements
        return gaps

    def zero_gaps(self) -> None:
        """Add steps that write zeros to the parts of a new gradient that belong to no parameter."""
        for gap in self.gaps():
            self.step("zero", {"a": f"g.{gap.name}"})

    def finish(self, key: str) -> Routine:
        """Return the routine of the steps so far."""
        intermediates, workspace = self.placed()
        own = parameters(self.model, self.block)
        views = [ParameterView(p.weight, p.stored_shape, p.offset, p.held.value) for p in own]
        copied = copied_stacks(self.model, self.block) if self.has(COPIES) else ()
        copies = [ParameterView(*each, COPIES) for each in copied]
        everything = (*views, *self.gaps(), *copies)
        expected = expected_rows(self.model, self.plan) if self.has("bounds") else None
        return Routine(key, self.formals(), everything, intermediates, workspace, tuple(self.steps), expected)

    def placed(self) -> tuple[tuple[Intermediate, ...], int]:
        """Return the intermediates with their offsets, and the bytes of the workspace.

        Intermediates whose lives do not meet share bytes.
        """
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
        """Return the op's operands, with their types."""
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
        known["branch_part"] = (self.act, (self.rows, self.model.hidden_size))
        known |= dict.fromkeys(("tokens", "labels", "documents"), (Dtype.I32, (self.rows,)))
        known |= {
            "w": (self.act, flat),
            "g": (Dtype(self.plan.grad_dtype), flat),
            FROZEN: (self.act, (frozen_elements(self.whole, self.plan, self.block),)),
            PACKED: (Dtype.U8, (packed_frozen_bytes(self.whole, self.plan, self.block),)),
            "loss": (Dtype.F64, (1,)),
            "scale": (Dtype.F32, (2,)),
            "bias": (Dtype.F32, (experts := self.model.experts or 0,)),
            "load": (Dtype.I32, (experts,)),
        }
        return tuple(Formal(role, *known[role]) for role in self.roles)

    def input_of(self, block: Block) -> tuple[Dtype, Shape]:
        """Return dtype and shape of the input of a block."""
        type_ = computed_type(self.whole, self.plan, block)
        return type_.dtype, type_.shape

    def operands_of_branches(self) -> dict[str, tuple[Dtype, Shape]]:
        """Return dtype and shape of the operands of ops that norm a branch and add it to the stream.

        They have the rows of a tensor-parallel rank.
        """
        if not self.adds_apart:
            return {}
        slots = (*branch_slots(self.model, self.plan), *branch_sums(self.model, self.plan, self.block))
        stream = exchanged_type(self.model, self.plan)
        between = dict.fromkeys(("stream", "sum", "dsum", "dbranch"), (stream.dtype, stream.shape))
        return between | {slot.name: (slot.type.dtype, slot.type.shape) for slot in slots}

    def operands_around_sums(self) -> dict[str, tuple[Dtype, Shape]]:
        """Return dtype and shape of gradients before norms over ranks, of the sums that the norms need, and of keys.

        The latter, and parts of their gradients, are exchanged by context ranks.
        """
        slots = (
            *normed_gradient_slots(self.whole, self.plan, self.block),
            *row_sum_slots(self.whole, self.plan, self.block, PRODUCTS),
        )
        between = (
            *made_by_project(self.whole, self.plan, self.block),
            *whole_key_slots(self.whole, self.plan, self.block),
            *head_gradient_slots(self.whole, self.plan, self.block),
            *shared_head_slots(self.whole, self.plan, self.block),
            *attended_slots(self.whole, self.plan, self.block),
            *output_gradient_slots(self.whole, self.plan, self.block),
            *shared_gradient_slots(self.whole, self.plan, self.block),
        )
        types = {slot.name: slot.type for slot in (*slots, *between)}
        for of_ranks in (key_part_types, exchanged_types):
            types |= of_ranks(self.whole, self.plan, self.block)
        return {name: (type_.dtype, type_.shape) for name, type_ in types.items()}

    def slots_of_other_slices(self) -> dict[str, tuple[Dtype, Shape]]:
        """Return dtype and shape of an attention slice's operands of other slices, and of its own sums."""
        own = {slot.name: (slot.type.dtype, slot.type.shape) for slot in sum_slots(self.whole, self.plan, self.block)}
        if self.block.kind != "attention":
            return own
        earlier = [(number, slice_plan(self.plan.whole, number)) for number in seen_slices(self.whole, self.plan)]
        if self.plan.cp > 1:
            types = {
                of_slice(name, number): type_
                for number, plan in earlier
                for name, type_ in (
                    *((slot.name, slot.type) for slot in whole_key_slots(self.whole, plan, self.block)),
                    *key_part_types(self.whole, plan, self.block).items(),
                )
            }
            return {name: (type_.dtype, type_.shape) for name, type_ in types.items()}
        return own | {
            of_slice(slot.name, number): (slot.type.dtype, slot.type.shape)
            for number, plan in earlier
            for slots in (saved_slots, sum_slots)
            for slot in slots(self.whole, plan, self.block)
            if slots is sum_slots or slot.name in KEY_SLOTS
        }
