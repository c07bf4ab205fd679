"""The ops in `rtir.md`: what each class says of itself, and every form in which a sound schedule has it.

Forms are not written down: they are the ops of compiled schedules, one of each shape, with their operands named by role. The
schedules are of every kind of plan that changes what ops there are (`plans`), changed in every way that does (`changed`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from ratrain.passes.manager import PassManager
from ratrain.passes.recovery.layer_choice import CHOICES, LAYER, NOTHING, LayerChoice, same_for_all
from ratrain.passes.recovery.rewriting import mark_checkpoints, rewrite
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.model.slots import (
    attended_slots,
    head_gradient_slots,
    normed_gradient_slots,
    pending_slots,
    saved_slots,
    shared_head_slots,
)
from ratrain.ratrain_ir.ops.base import Engine, Op
from ratrain.ratrain_ir.ops.collectives import AllReduceScalar, why_never_repeated
from ratrain.ratrain_ir.ops.compute import BackwardHeads, BlockOp, Forward, Recompute, Release
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward
from ratrain.ratrain_ir.ops.kinds import FIELDS, OP_CLASSES
from ratrain.ratrain_ir.ops.memory import Fetch
from ratrain.ratrain_ir.ops.signatures import bind, signatures
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.printer import declaration_text, op_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

WIDTH = 118
_SHOWN = 2
"""Blocks of a collective in an example: enough to see the order of its operands."""

Shape = tuple[object, ...]
"""What makes two ops the same form."""

Groups = dict[str, Tensors]
Kinds = dict[str, frozenset[StateKind]]

MODEL = ModelConfig(
    name="toy",
    family="llama",
    vocab_size=16,
    hidden_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn_size=12,
    norm_eps=1e-5,
)
PLAN = Plan(pp=2, dp=2, cuts=(1,), micro_batch_size=1, micro_batches=2, seq_len=8)

LEAN = LayerChoice("lean", "lean")
BLOCKING = "bucket-grad-sync{bytes=1 blocking=true},insert-prefetch{blocking=true}"

SHARDING: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero": 0},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2, each micro-batch": {"zero": 2, "reduce": "each-micro-batch"},
    "ZeRO 3": {"zero": 3},
    "ZeRO 3, each micro-batch": {"zero": 3, "reduce": "each-micro-batch"},
    "ZeRO 3, view groups": {"zero": 3, "dp": 4, "view_group": 2},
}
CLIPPING = {"without clipping": "none", "with clipping": "global"}
TYING = {"embeddings not tied": False, "embeddings tied": True}
MASKING = {"a causal mask": "causal", "documents kept apart": "document"}

NORMED = "tensor-parallel ranks, where what blocks add is normed"
OVER_HEADS = "tensor-parallel ranks, where norms are over all heads"
CONTEXT = "context ranks"
IN_GROUPS = "context ranks that gather keys in groups of heads"
SHARING_HEADS = "context ranks that exchange heads"
EXPERTS = "replicas that share out experts"
BIASED = "routers that choose with a bias"
PEERS: dict[str, dict[str, Any]] = {
    "one tensor-parallel rank": {},
    "tensor-parallel ranks": {"tp": 2},
    NORMED: {"tp": 2},
    OVER_HEADS: {"tp": 2},
    CONTEXT: {"cp": 2},
    IN_GROUPS: {"cp": 2, "context_groups": 2},
    SHARING_HEADS: {"cp": 2, "context_exchange": "heads"},
    EXPERTS: {"dp": 4, "ep": 2},
    BIASED: {"router": RouterLosses(bias_update=0.001)},
}
MODELS = {
    NORMED: {"norm_placement": "both"},
    OVER_HEADS: {"norm_placement": "post", "qk_norm": "whole"},
    IN_GROUPS: {"kv_heads": 2},
    **{each: {"family": "mixtral", "experts": 4, "experts_per_token": 2} for each in (EXPERTS, BIASED)},
}
_OF_EXPERTS = frozenset({EXPERTS, BIASED})

_EXCHANGES = frozenset({CONTEXT, IN_GROUPS, SHARING_HEADS})
_TOGETHER = {
    frozenset({"a causal mask"}): "",
    frozenset({"one tensor-parallel rank"}): "",
    frozenset({"tensor-parallel ranks"}): "with tensor-parallel ranks",
    frozenset({"tensor-parallel ranks", NORMED}): "with tensor-parallel ranks",
    frozenset(
        {"one tensor-parallel rank", "tensor-parallel ranks", NORMED}
    ): "unless queries or keys wait for other ranks",
    frozenset({"tensor-parallel ranks", NORMED, OVER_HEADS}): "with tensor-parallel ranks",
    frozenset({NORMED}): f"with {NORMED}",
    frozenset({NORMED, OVER_HEADS}): f"with {NORMED}",
    frozenset({OVER_HEADS}): f"with {OVER_HEADS}",
    frozenset({EXPERTS}): f"with {EXPERTS}",
    frozenset({BIASED}): f"with {BIASED}",
    frozenset({CONTEXT}): "with context ranks that gather keys of all heads",
    frozenset({IN_GROUPS}): f"with {IN_GROUPS}",
    frozenset({CONTEXT, IN_GROUPS}): "with context ranks that gather keys",
    frozenset({SHARING_HEADS}): f"with {SHARING_HEADS}",
    frozenset({IN_GROUPS, SHARING_HEADS}): "with context ranks that attend with some heads at a time",
    _EXCHANGES: "with context ranks",
    _EXCHANGES | {"one tensor-parallel rank"}: "",
    _EXCHANGES | {"one tensor-parallel rank", "tensor-parallel ranks"}: "",
    frozenset(PEERS) - {OVER_HEADS, SHARING_HEADS} - _OF_EXPERTS: "unless heads are exchanged",
    frozenset({"one tensor-parallel rank", CONTEXT, IN_GROUPS}): "unless heads are exchanged",
    frozenset({"one tensor-parallel rank", "tensor-parallel ranks"}): "without context ranks",
    frozenset(PEERS) - {OVER_HEADS} - _OF_EXPERTS: "unless tensor-parallel ranks norm queries and keys over all heads",
    frozenset({"ZeRO 1", "ZeRO 3", "ZeRO 3, view groups"}): "ZeRO 1 to 3, reduced once a step",
    frozenset({"ZeRO 3", "ZeRO 3, view groups"}): "ZeRO 3",
    frozenset({"ZeRO 0", "ZeRO 1", "ZeRO 2, each micro-batch"}): "frozen parameters, ZeRO 0 to 2",
    frozenset({"ZeRO 2, each micro-batch", "ZeRO 3, each micro-batch"}): "ZeRO 2 and 3, reduced each micro-batch",
    frozenset({"ZeRO 1", "ZeRO 2, each micro-batch"}): "ZeRO 1 and 2",
    frozenset({"ZeRO 3", "ZeRO 3, each micro-batch"}): "ZeRO 3",
    frozenset(SHARDING) - {"ZeRO 0"}: "ZeRO 1 to 3",
    frozenset(SHARDING) - {"ZeRO 3, view groups"}: "",
    frozenset({"ZeRO 0", "ZeRO 1", "ZeRO 3"}): "reduced once a step",
    frozenset(SHARDING) - {"ZeRO 2, each micro-batch", "ZeRO 3, each micro-batch"}: "reduced once a step",
}


@frozen
class Conditions:
    """One kind of plan, in the words of the page."""

    sharding: str
    clipping: str
    tying: str
    masking: str
    peers: str


@define
class Form:
    """One shape of an op: an example of it with its operands named by role, and where it occurs."""

    op: Op
    accumulates: bool
    groups: Groups = field(factory=dict)
    """saved slots of the op's block: what `%s.*` stands for"""
    kinds: Kinds = field(factory=dict)
    """the kinds of state that each role may have"""
    places: set[Conditions] = field(factory=set)

    @property
    def text(self) -> str:
        """The op as the language writes it."""
        return op_text(self.op, self.groups)

    @property
    def declarations(self) -> list[str]:
        """Declarations with which the text can be read."""
        slots = (tensor for group in self.groups.values() for tensor in group)
        return [declaration_text(tensor) for tensor in dict.fromkeys((*slots, *self.op.operands))]


STORES = ((Home.HOST, 1 << 40),)
STORING = "place-gpipe,recompute{policy=full store=host}"
FETCHING = "place-gpipe,offload-state{home=host what=views}"
LENDING = "place-gpipe,recompute{policy=full store=peer}"


def plans() -> Iterator[tuple[Conditions, ModelConfig, Plan]]:
    """Every kind of plan that changes what ops there are; documents make no difference to what tensor-parallel ranks exchange."""
    kinds = (kind.items() for kind in (SHARDING, CLIPPING, TYING, MASKING, PEERS))
    for (sharding, keys), (clipping, clip), (tying, tied), (masking, mask), (peers, ranks) in product(*kinds):
        if ("tp" in ranks or "ep" in ranks) and mask != "causal":
            continue
        if "ep" in ranks and "view_group" in keys:
            continue
        optimizer = evolve(PLAN.optimizer, clip=clip)
        model = evolve(MODEL, tied_embeddings=tied, **MODELS.get(peers, {}))
        plan = evolve(PLAN, optimizer=optimizer, attention_mask=mask, **ranks, **keys)
        yield Conditions(sharding, clipping, tying, masking, peers), model, plan


def changed(model: ModelConfig, plan: Plan) -> Iterator[Module]:
    """A step as it is lowered, and as each pass makes it that changes what ops there are."""
    for choice in (*CHOICES["none"], *CHOICES["full"], *CHOICES["attention"], LEAN, *layer_choices(model, plan)):
        module = lower(model, plan)
        for stage in module.stages:
            mark_checkpoints(rewrite(stage, same_for_all(choice)).starts)
        yield module
    if plan.ep == 1:  # else backwards are whole
        yield PassManager(FakeTarget()).run(lower(model, plan), "place-zb-h1{delay=1}")
    yield PassManager(FakeTarget()).run(lower(model, plan), BLOCKING)
    yield PassManager(FakeTarget(update_engine=Engine.HOST)).run(lower(model, plan), "insert-release,legalise")
    if plan.tp == 1 and not plan.exchanges_heads:
        yield PassManager(FakeTarget(stores=STORES)).run(lower(model, plan), STORING)
        yield PassManager(FakeTarget()).run(lower(model, plan), LENDING)


def layer_choices(model: ModelConfig, plan: Plan) -> Iterator[LayerChoice]:
    """The recomputation of a layer from its input, where tensor-parallel ranks can repeat the sum in it."""
    if plan.tp > 1 and not why_never_repeated(model, plan):
        yield evolve(NOTHING, checkpoint=LAYER)


def fetches_of_frozen(model: ModelConfig, plan: Plan) -> Iterator[tuple[Module, Op]]:
    """Fetches of frozen parameters in another memory, each with its module."""
    frozen = evolve(plan, training=Training(freeze="model.layers.0.*"))
    module = PassManager(FakeTarget(stores=STORES)).run(lower(model, frozen), FETCHING)
    yield from ((module, op) for stage in module.stages for op in stage.ops if type(op) is Fetch)


@cache
def forms() -> dict[str, list[Form]]:
    """The forms of each op, by keyword in the order of `OP_CLASSES`."""
    by_shape: dict[Shape, Form] = {}
    for conditions, model, plan in plans():
        ops = [(module, op) for module in changed(model, plan) for stage in module.stages for op in stage.ops]
        partly = plan.zero < 3 and plan.tp == plan.ep == 1 and not plan.router.bias_update
        if partly:  # else all parameters train, or replicas have parts of frozen parameters, and gather them
            ops += fetches_of_frozen(model, plan)
        for module, op in ops:
            shape, form = _form(module, op)
            known = by_shape.setdefault(shape, form)
            known.places.add(conditions)
            for role, kinds in form.kinds.items():
                known.kinds[role] = known.kinds.get(role, frozenset()) | kinds
    by_keyword: dict[str, list[Form]] = {keyword: [] for keyword in OP_CLASSES}
    for form in by_shape.values():
        by_keyword[form.op.keyword].append(form)
    return by_keyword


def _form(module: Module, op: Op) -> tuple[Shape, Form]:
    """The shape of an op, equal for ops that differ in which block, micro-batch or stage they name, and a form of that shape."""
    if type(op) is Release:
        any_tensor = evolve(op.reads[0], name="x", offset=None)
        return (Release,), Form(Release(reads=(any_tensor,)), accumulates=False, kinds={"x": frozenset(StateKind)})
    binding = bind(op, module.model, module.plan)
    groups = _slot_groups(module, op.block) if isinstance(op, BlockOp) else {}
    if type(op) is BackwardHeads and module.plan.cp > 1:
        del groups["d"]  # it leaves one of these
    if isinstance(op, Attend | AttendBackward) and op.head_group is not None:
        groups = {}  # of each group it touches some: without prefixes lines of the page are short
    slots = {tensor.slot: tensor for group in groups.values() for tensor in group}
    named = {
        tensor: (slots.get(role) if tensor.kind is StateKind.SAVED else None)
        or evolve(tensor, name=_name(role, tensor), offset=None, line=0)
        for role, tensor in binding.tensors.items()
    }
    operands = {
        part: _at_most_two_of_a_role([named[tensor] for tensor in getattr(op, part)])
        for part in ("reads", "writes", "updates")
    }
    example = evolve(op, **operands, scratch=(), line=0)
    if isinstance(example, AllReduceScalar):
        example.blocks = example.blocks[:_SHOWN]
    roles = tuple((part, *dict.fromkeys(map(_role, tensors))) for part, tensors in operands.items())
    return (type(op), *_fields(op), *roles), Form(
        example, binding.accumulates, groups, _kinds(module, op, binding.tensors)
    )


def _kinds(module: Module, op: Op, tensors: dict[str, Tensor]) -> Kinds:
    """The kinds of state that the op's signature lets each operand have."""
    _, signature = signatures(op, module.model, module.plan)[0]
    roles = (*signature.reads, *signature.writes, *signature.updates)
    return {_name(role.name, tensors[role.name]): role.kinds for role in roles if role.name in tensors}


def _slot_groups(module: Module, unit: Block) -> Groups:
    """What the forward of a block saves, and what the first half of its backward leaves, each under a prefix."""
    slots = {
        "s": saved_slots(module.model, module.plan, unit),
        "pending": pending_slots(module.model, module.plan, unit),
        "d": normed_gradient_slots(module.model, module.plan, unit)
        or head_gradient_slots(module.model, module.plan, unit),
        "h": (*shared_head_slots(module.model, module.plan, unit), *attended_slots(module.model, module.plan, unit)),
    }
    return {
        prefix: tuple(Tensor(f"{prefix}.{slot.name}", StateKind.SAVED, slot.type) for slot in group)
        for prefix, group in slots.items()
    }


def _name(role: str, tensor: Tensor) -> str:
    """What an operand is called in a form: its role, which for a message or an input is what it carries."""
    if role == "data":
        return tensor.name.partition(".")[0]
    if role == "products":
        return "sums"  # of what its op sums over each row: lines of the page are short
    return tensor.name if role.startswith("flag.") else role


def _role(tensor: Tensor) -> str:
    """The role of an operand, whichever block it is of."""
    return tensor.name if tensor.kind is StateKind.SAVED else tensor.name.partition(".")[0]


def _at_most_two_of_a_role(tensors: list[Tensor]) -> Tensors:
    """A collective on many blocks is shown with two of them."""
    counts: Counter[str] = Counter()
    shown = []
    for tensor in tensors:
        counts[_role(tensor)] += 1
        if counts[_role(tensor)] <= _SHOWN:
            shown.append(tensor)
    return tuple(shown)


def _fields(op: Op) -> Shape:
    return tuple(_shape_of_field(op, getattr(op, attribute.name)) for attribute in FIELDS[type(op)])


def _shape_of_field(op: Op, value: object) -> object:
    """What of a field's value makes another form: a choice among words, whether it is there, what kind of block computes."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Block):
        return value.kind if isinstance(op, BlockOp) else True
    return value if isinstance(value, Enum) else value not in (None, ())


_HOW_TO_READ = """Each form below is an example that can be read back, its operands named by role: `%x` is a block's input, `%y` its
output, `%w` its parameter view, `%g` the gradient of its parameters, `%gs` that gradient reduced, `%s.*` what its forward
saves, `%p`, `%m1`, `%m2` and `%t` the master, the moments and the update count. `%dx` and `%dy` are gradients of `%x` and
`%y`. A comment says where the forms below it occur, if not everywhere. Scratch (`using %ws`) is left out.
"""


def section() -> str:
    """The ops, as a part of a page."""
    by_keyword = forms()
    rows = [
        f"| `{keyword}` | {_engines(by_keyword[keyword])} | {summary(cls)} |" for keyword, cls in OP_CLASSES.items()
    ]
    table = "\n".join(["| op | engine | what it does |", "|---|---|---|", *rows])
    return "\n".join([table, "", _HOW_TO_READ, *(_op_text(keyword, items) for keyword, items in by_keyword.items())])


def summary(cls: type[Op]) -> str:
    """The first line of an op's documentation."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def _engines(items: list[Form]) -> str:
    engines = [engine.value for engine in Engine if any(form.op.engine is engine for form in items)]
    return " or ".join(engines).replace("none", "-")


def _op_text(keyword: str, items: list[Form]) -> str:
    """One op: the rest of its documentation, its forms under when they occur, its operands."""
    rest = " ".join(inspect.cleandoc(OP_CLASSES[keyword].__doc__ or "").partition("\n")[2].split())
    remarks = dict.fromkeys(["", *(_remark(form, items) for form in items)])
    examples = []
    for remark in remarks:
        texts = [form.text for form in items if _remark(form, items) == remark]
        examples += [f"// {remark}"] * bool(remark and texts) + texts
    about = textwrap.wrap(f"**`{keyword}`**" + (f": {rest}" if rest else ""), WIDTH)
    return "\n".join([*about, "", *textwrap.indent("\n".join(examples), "    ").split("\n"), "", *_operands(items), ""])


def _operands(items: list[Form]) -> list[str]:
    """What the forms of an op read, write and update, with the kinds of state these may be."""
    lines = []
    for part in ("reads", "writes", "updates"):
        kinds: dict[str, frozenset[StateKind]] = {}
        for form in items:
            for tensor in getattr(form.op, part):
                role = tensor.name.partition(".")[0]
                kinds[role] = kinds.get(role, frozenset()) | form.kinds.get(tensor.name, frozenset({tensor.kind}))
        if kinds:
            shown = ", ".join(f"`{role}` ({_alternatives(role_kinds)})" for role, role_kinds in kinds.items())
            lines += textwrap.wrap(f"- {part} {shown}", WIDTH, subsequent_indent="  ")
    return lines


def _alternatives(kinds: frozenset[StateKind]) -> str:
    if kinds == frozenset(StateKind):
        return "of any kind"
    *others, last = sorted(kind.value for kind in kinds)
    return f"{', '.join(others)} or {last}" if others else last


def _remark(form: Form, items: Iterable[Form]) -> str:
    """When an op has this form, where it has others too."""
    words = [_contribution(form, items), _recovery(form)]
    kinds = {"sharding": SHARDING, "clipping": CLIPPING, "tying": TYING, "masking": MASKING, "peers": PEERS}
    for name, known in kinds.items():
        there = frozenset(getattr(place, name) for place in form.places)
        if name == "peers" and there - _OF_EXPERTS:  # a form of dense models too is not told apart by experts
            there -= _OF_EXPERTS
        if there not in (frozenset(known), frozenset(known) - _OF_EXPERTS):
            words.append(_TOGETHER.get(there, " or ".join(sorted(there))))
    return ", ".join(filter(None, words))


def _contribution(form: Form, items: Iterable[Form]) -> str:
    """Whether it is the first of several that add to one result."""
    alike = [other for other in items if _fields(other.op) == _fields(form.op)]
    if all(other.accumulates == form.accumulates for other in alike):
        return ""
    return "adds to earlier contributions" if form.accumulates else "the first contribution"


def _recovery(form: Form) -> str:
    """How much of what a block's backward needs is kept by its forward."""
    kept = sum(tensor.kind is StateKind.SAVED for tensor in form.op.writes)
    if isinstance(form.op, Forward) and kept < len(form.groups["s"]):
        return "the other slots are recovered" if kept else "all slots are recovered"
    if isinstance(form.op, Recompute):
        return "nothing was kept" if kept == len(form.groups["s"]) else "the slots it reads were kept"
    return ""
