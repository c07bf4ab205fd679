"""Routines of the block ops: which kernels run in which order, and where their intermediates lie in the workspace.

Forward writes the saved slots that its op keeps; slots it does not keep are intermediates. Recovery is forward without the parts
that nothing needs. Backward follows the chain rule through the same kernels. Each half of a split backward runs its share of these very
steps, so that the two together give the same bits as the whole.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from ratrain.passes.memory.allocation import AllocationProblem, allocate
from ratrain.ratrain_ir.blocks import (
    Block,
    block,
    flat_elements,
    parameters,
    pending_slots,
    saved_slots,
    tokens_per_micro_batch,
)
from ratrain.ratrain_ir.frontend.model_config import ModelConfig
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrain_ir.ops import BlockOp, Recompute
from ratrain.ratrain_ir.signatures import bind
from ratrain.ratrain_ir.types import Dtype, StateKind, aligned, tensor_type
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import Formal, Intermediate, ParameterView, Routine, Shape, Step, parse_reference

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Interval


def routine_of(op: BlockOp, model: ModelConfig, plan: Plan) -> Routine:
    """The routine of a block op, under the roles its operands bind."""
    binding = bind(op, model, plan)
    form = RoutineForm(op.keyword, representative(op.block), tuple(binding.tensors), _given(op), binding.accumulates)
    return derived_routine(form, model, plan)


@frozen
class RoutineForm:
    """What distinguishes one routine of a model and plan from another."""

    keyword: str
    block: Block
    """a layer's block stands for those of all layers: their shapes are equal"""
    roles: tuple[str, ...]
    """operands that the op binds, its workspace apart"""
    given: tuple[str, ...]
    """saved slots a recovery reads, because they were kept"""
    accumulates: bool


def _given(op: BlockOp) -> tuple[str, ...]:
    if not isinstance(op, Recompute):
        return ()
    return tuple(t.slot for t in op.reads if t.kind is StateKind.SAVED)


def representative(one: Block) -> Block:
    """All layers have equal shapes, so one routine serves them."""
    return one if one.layer is None else block(one.kind, 0)


def _key(form: RoutineForm, model: ModelConfig, plan: Plan) -> str:
    """Name of a routine: block kind, op, and in which way it differs from the plain one."""
    parts = [f"{form.block.kind}.{form.keyword}"]
    if form.keyword in ("forward", "recompute"):
        slots = [slot.name for slot in saved_slots(model, plan, form.block)]
        made = [name for name in slots if name in form.roles and name not in form.given]
        if form.given:
            parts.append("from-" + "-".join(form.given))
        if len(made) + len(form.given) < len(slots):
            parts.append("keep-" + "-".join(made) if made else "keep-none")
    if form.keyword == "recompute" and "y" in form.roles:
        parts.append("y")
    if form.accumulates:
        parts.append("add")
    return "-".join(parts)


@cache
def derived_routine(form: RoutineForm, model: ModelConfig, plan: Plan) -> Routine:
    """The routine of a form; what is asked for twice is the same object."""
    backward = form.keyword in _BACKWARDS
    halves = _BACKWARDS.get(form.keyword, frozenset())
    builder = _Builder(model, plan, form.block, form.roles, form.accumulates, halves)
    recipe = {
        ("embed", False): _embed_forward,
        ("attention", False): _attention_forward,
        ("mlp", False): _mlp_forward,
        ("head", False): _head_forward,
        ("embed", True): _embed_backward,
        ("attention", True): _attention_backward,
        ("mlp", True): _mlp_backward,
        ("head", True): _head_backward,
    }[form.block.kind, backward]
    recipe(builder)
    if form.keyword == "recompute":
        builder.keep_what_yields({role for role in form.roles if role not in (*form.given, "x", "w")}, form.given)
    if _WEIGHT in halves and not form.accumulates:
        builder.zero_gaps()
    return builder.finish(_key(form, model, plan))


def mlp_chunk_rows(plan: Plan) -> int:
    """Rows an mlp block computes at a time."""
    rows = tokens_per_micro_batch(plan)
    return min(plan.mlp_chunk or rows, rows)


def mlp_chunk_starts(plan: Plan) -> range:
    """The first row of each chunk of an mlp block."""
    return range(0, tokens_per_micro_batch(plan), mlp_chunk_rows(plan))


_INPUT, _WEIGHT = "input", "weight"
_BACKWARDS = {
    "backward": frozenset({_INPUT, _WEIGHT}),
    "backward_input": frozenset({_INPUT}),
    "backward_weight": frozenset({_WEIGHT}),
}
"""The halves of a backward that each op runs."""


@frozen
class Chunk:
    """Rows `start` up to `stop` of the `rows` of a micro-batch, of which chunks of `size` are computed at a time."""

    start: int
    stop: int
    size: int
    rows: int

    def of(self, name: str) -> str:
        """These rows of an operand that has all of them."""
        return name if self.size == self.rows else f"{name}[{self.start}:{self.stop}]"

    def of_scratch(self, name: str) -> str:
        """The rows in use of a buffer that serves every chunk: the last chunk may be smaller."""
        used = self.stop - self.start
        return name if used == self.size else f"{name}[0:{used}]"


@define(eq=False)
class _Builder:
    """Collects steps; intermediates get their places from when they are first and last used."""

    model: ModelConfig
    plan: Plan
    block: Block
    roles: tuple[str, ...]
    accumulates: bool
    halves: frozenset[str]
    """which halves of a backward this is"""
    steps: list[Step] = field(factory=list)
    temporaries: dict[str, tuple[Dtype, Shape]] = field(factory=dict)

    @property
    def act(self) -> Dtype:
        return Dtype(self.plan.view_dtype)

    @property
    def rows(self) -> int:
        return tokens_per_micro_batch(self.plan)

    def has(self, role: str) -> bool:
        return role in self.roles

    def step(self, kernel: str, operands: dict[str, str], **options: Any) -> None:
        self.steps.append(Step(kernel, operands, options))

    def step_of(self, half: str, kernel: str, operands: dict[str, str], **options: Any) -> None:
        """A step that belongs to one half of a backward."""
        if half in self.halves:
            self.step(kernel, operands, **options)

    def slot(self, name: str, rows: int | None = None) -> str:
        """A saved or pending slot: an operand where the op has it, an intermediate where not, of `rows` of it if given."""
        if not self.has(name):
            slots = (
                *saved_slots(self.model, self.plan, self.block),
                *pending_slots(self.model, self.plan, self.block),
            )
            wanted = next(slot for slot in slots if slot.name == name)
            shape = wanted.type.shape if rows is None else (rows, *wanted.type.shape[1:])
            self.temporaries[name] = (wanted.type.dtype, shape)
        return name

    def temporary(self, name: str, *shape: int, dtype: Dtype | None = None) -> str:
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
        self.step_of(_WEIGHT, "gemm", operands, trans_a=True, accumulate=self.accumulates or not first)

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
                        for s in saved_slots(self.model, self.plan, self.block)
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
        for offset, elements in [*ends, (flat_elements(self.model, self.plan, self.block), 0)]:
            if offset > position:
                gaps.append(ParameterView(f"gap{len(gaps)}", (offset - position,), position))
            position = offset + elements
        return gaps

    def zero_gaps(self) -> None:
        for gap in self.gaps():
            self.step("zero", {"a": f"g.{gap.name}"})

    def finish(self, key: str) -> Routine:
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
        rows, hidden = self.rows, self.model.hidden_size
        flat = (flat_elements(self.model, self.plan, self.block),)
        known: dict[str, tuple[Dtype, Shape]] = {
            slot.name: (slot.type.dtype, slot.type.shape)
            for slots in (saved_slots, pending_slots)
            for slot in slots(self.model, self.plan, self.block)
        }
        known |= dict.fromkeys(("x", "y", "dx", "dy"), (self.act, (rows, hidden)))
        known |= dict.fromkeys(("tokens", "labels"), (Dtype.I32, (rows,)))
        known |= {
            "w": (self.act, flat),
            "g": (Dtype(self.plan.grad_dtype), flat),
            "loss": (Dtype.F64, (1,)),
            "scale": (Dtype.F32, (2,)),
        }
        return tuple(Formal(role, *known[role]) for role in self.roles)


def _attention_options(builder: _Builder) -> dict[str, Any]:
    model, plan = builder.model, builder.plan
    return {
        "batch": plan.micro_batch_size,
        "seq_len": plan.seq_len,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "window": model.sliding_window,
        "alibi": model.position == "alibi",
    }


def _rope(builder: _Builder, x: str, heads: int, *, inverse: bool) -> None:
    if builder.model.position == "rope":
        options = {"heads": heads, "head_dim": builder.model.head_dim, "seq_len": builder.plan.seq_len}
        builder.step("rope", {"x": x}, **options, theta=builder.model.rope_theta, inverse=inverse)


def _norm(builder: _Builder) -> None:
    operands = {"x": "x", "gamma": "w.norm", "xn": builder.slot("xn"), "rstd": builder.slot("rstd")}
    builder.step("rmsnorm_forward", operands, eps=builder.model.norm_eps)


def _norm_backward(builder: _Builder, *, residual: bool) -> None:
    operands = {"dxn": "dxn", "x": "x", "gamma": "w.norm", "rstd": "rstd", "dx": "dx", "dgamma": "g.norm"}
    if residual:
        operands["residual"] = "dy"
    if _WEIGHT in builder.halves:
        builder.step("rmsnorm_backward", operands, accumulate=builder.accumulates)
    else:
        builder.step("rmsnorm_backward", operands | {"dgamma": "dgamma"}, accumulate=False)


def _norm_weights(builder: _Builder) -> None:
    """What the input half has summed, added to the gradient and rounded once."""
    if builder.accumulates:
        builder.step("add", {"a": "dgamma", "b": "g.norm", "out": "g.norm"})
    else:
        builder.step("cast", {"src": "dgamma", "dst": "g.norm"})


def _block_norm_backward(builder: _Builder) -> None:
    if _INPUT in builder.halves:
        _norm_backward(builder, residual=True)
    else:
        _norm_weights(builder)


def _embed_forward(builder: _Builder) -> None:
    builder.step("embedding_forward", {"tokens": "tokens", "table": "w.table", "y": "y"})


def _embed_backward(builder: _Builder) -> None:
    operands = {"tokens": "tokens", "dy": "dy", "dtable": "g.table"}
    builder.step("embedding_backward", operands, accumulate=builder.accumulates)


def _attention_forward(builder: _Builder) -> None:
    model = builder.model
    _norm(builder)
    for name in ("q", "k", "v"):
        operands = {"a": "xn", "b": f"w.{name}_proj", "out": builder.slot(name)}
        if model.qkv_bias:
            operands["bias"] = f"w.{name}_bias"
        builder.step("gemm", operands, trans_b=True)
    _rope(builder, "q", model.heads, inverse=False)
    _rope(builder, "k", model.kv_heads, inverse=False)
    operands = {"q": "q", "k": "k", "v": "v", "o": builder.slot("o"), "lse": builder.slot("lse")}
    builder.step("attention_forward", operands, **_attention_options(builder))
    if builder.has("y"):
        builder.step("gemm", {"a": "o", "b": "w.o_proj", "out": "y", "residual": "x"}, trans_b=True)


def _attention_backward(builder: _Builder) -> None:
    model, rows = builder.model, builder.rows
    q_width = model.heads * model.head_dim
    builder.linear_gradients("dy", "o", "o_proj")
    builder.step_of(_INPUT, "gemm", {"a": "dy", "b": "w.o_proj", "out": builder.temporary("do", rows, q_width)})
    operands = {name: name for name in ("q", "k", "v", "o", "lse", "do")}
    operands |= {name: builder.slot(name) for name in ("dq", "dk", "dv")}
    operands["delta"] = builder.temporary("delta", model.heads, rows, dtype=Dtype.F32)
    builder.step_of(_INPUT, "attention_backward", operands, **_attention_options(builder))
    if _INPUT in builder.halves:
        _rope(builder, "dq", model.heads, inverse=True)
        _rope(builder, "dk", model.kv_heads, inverse=True)
    builder.temporary("dxn", rows, model.hidden_size)
    for index, name in enumerate(("q", "k", "v")):
        builder.linear_gradients(f"d{name}", "xn", f"{name}_proj")
        if model.qkv_bias:
            operands = {"a": f"d{name}", "out": f"g.{name}_bias"}
            builder.step_of(_WEIGHT, "column_sum", operands, accumulate=builder.accumulates)
        operands = {"a": f"d{name}", "b": f"w.{name}_proj", "out": "dxn"}
        builder.step_of(_INPUT, "gemm", operands, accumulate=index > 0)
    _block_norm_backward(builder)


def _mlp_forward(builder: _Builder) -> None:
    _norm(builder)
    for chunk in builder.chunks():
        gate, up, prod = (builder.chunk_slot(name, chunk) for name in ("gate", "up", "prod"))
        for name, out in (("gate", gate), ("up", up)):
            builder.step("gemm", {"a": chunk.of("xn"), "b": f"w.{name}_proj", "out": out}, trans_b=True)
        builder.step("swiglu_forward", {"gate": gate, "up": up, "prod": prod})
        if builder.has("y"):
            operands = {"a": prod, "b": "w.down_proj", "out": chunk.of("y"), "residual": chunk.of("x")}
            builder.step("gemm", operands, trans_b=True)


def _mlp_backward(builder: _Builder) -> None:
    builder.temporary("dxn", builder.rows, builder.model.hidden_size)
    for chunk in builder.chunks():
        _mlp_backward_chunk(builder, chunk)
    _block_norm_backward(builder)


def _mlp_backward_chunk(builder: _Builder, chunk: Chunk) -> None:
    dy, xn, dxn = (chunk.of(name) for name in ("dy", "xn", "dxn"))
    first = chunk.start == 0
    builder.linear_gradients(dy, chunk.of("prod"), "down_proj", first=first)
    dprod = builder.chunk_temporary("dprod", chunk, builder.model.ffn_size)
    builder.step_of(_INPUT, "gemm", {"a": dy, "b": "w.down_proj", "out": dprod})
    dgate, dup = (builder.chunk_slot(name, chunk) for name in ("dgate", "dup"))
    operands = {"gate": chunk.of("gate"), "up": chunk.of("up"), "dprod": dprod, "dgate": dgate, "dup": dup}
    builder.step_of(_INPUT, "swiglu_backward", operands)
    for index, (name, gradient) in enumerate((("gate", dgate), ("up", dup))):
        builder.linear_gradients(gradient, xn, f"{name}_proj", first=first)
        operands = {"a": gradient, "b": f"w.{name}_proj", "out": dxn}
        builder.step_of(_INPUT, "gemm", operands, accumulate=index > 0)


def _head_norm(builder: _Builder) -> None:
    builder.temporary("xn", builder.rows, builder.model.hidden_size)
    builder.temporary("rstd", builder.rows, dtype=Dtype.F32)
    operands = {"x": "x", "gamma": "w.norm", "xn": "xn", "rstd": "rstd"}
    builder.step("rmsnorm_forward", operands, eps=builder.model.norm_eps)
    chunk = min(builder.plan.head_chunk, builder.rows)
    builder.temporary("logits", chunk, builder.model.vocab_size, dtype=Dtype.F32)


def _head_forward(builder: _Builder) -> None:
    _head_norm(builder)
    operands = {"xn": "xn", "table": "w.table"} | {name: name for name in ("labels", "lse", "loss", "logits")}
    options = {"normalise": builder.model.normalised_head, "accumulate": builder.accumulates}
    builder.step("head_forward", operands, **options)


def _head_backward(builder: _Builder) -> None:
    _head_norm(builder)
    operands = {name: name for name in ("xn", "labels", "lse", "scale", "logits")}
    operands |= {"table": "w.table", "dxn": builder.temporary("dxn", builder.rows, builder.model.hidden_size)}
    operands["dtable"] = "g.table"
    options = {"normalise": builder.model.normalised_head, "accumulate": builder.accumulates}
    denominator = float(builder.plan.micro_batches * builder.rows)
    builder.step("head_backward", operands, denominator=denominator, **options)
    _norm_backward(builder, residual=False)
