"""Bytes of a mixture of experts in place of an MLP, as `transformers` runs it.

    T tokens --router--> k experts each --> T k rows, in order of their experts --> gate, up, down --> weighted, summed

A layer of Qwen3-30B-A3B in bf16: h = 2048, E = 128 experts of I = 768, k = 8, so 8 rows a token:

    router     input 2 T h, probabilities 4 T E, choices 8 T k, order of the rows 3 * 8 T k          4.8 KiB a token
    experts    rows 2 T k h, gate and up 4 T k I, silu and product 2 T k I each, output 2 T k h     112 KiB a token

**Routing is data, and no saved byte depends on it.** Each token goes to k experts, so all experts together have T k
rows whatever the routers choose; a hot expert has rows that others lack. Only a loop over experts makes tensors of one
expert's rows: T k / E if all get as many, T if every token chooses it (top-k never chooses an expert twice, so one
expert never has all T k rows).

Read in transformers 5.24: integrations/moe.py grouped_mm_experts_forward; models/mixtral, qwen2_moe, qwen3_moe, olmoe
and granitemoe, classes ...TopKRouter, ...Experts and ...SparseMoeBlock; load_balancing_loss_func. A module for each
expert is that of transformers 4. tests/ratrainc/fit/test_saved_by_experts.py counts the storages of these classes
against this, and what their backward makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.model.expert_targets import DOWN, GATE_UP
from ratrain.ratrain_ir.support.module_patterns import is_expression
from ratrain.ratrainc.bridge.jobs.job import Experts, Job, Sharding
from ratrain.ratrainc.facts.expert_facts import kinds_text
from ratrain.ratrainc.fit.holdings.adapted_experts import ROUTER as ADAPTED_ROUTER
from ratrain.ratrainc.fit.holdings.adapted_experts import adapted_parameters, router_kept, stack_gradient, stacks_kept
from ratrain.ratrainc.fit.holdings.adapters import SHARED_INPUT, SHARED_PRODUCT, inputs_kept, names_path
from ratrain.ratrainc.fit.holdings.part import itemsize, share
from ratrain.ratrainc.fit.holdings.styles import TRANSFORMERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrainc.fit.holdings.part import Part

ROUTER = "activations: router"
EXPERTS = "activations: experts"
CODE = {
    Experts.GROUPED: "transformers 5 runs them (grouped_mm)",
    Experts.EAGER: "transformers 5 runs them in a loop (eager)",
    Experts.MODULES: "transformers 4 runs them, a module each",
}
"""Code of experts in words, by what a job has."""
READ = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"})
"""Families whose blocks were read."""
_F32 = 4
_INDEX = 8
"""Bytes of a number of a token or an expert: int64."""
_INSIDE = (
    *(f"mlp.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")),
    *(f"block_sparse_moe.{name}" for name in ("input_linear", "output_linear", "router.layer", "gate", "experts")),
    *("mlp.gate", "mlp.experts", "mlp.shared_expert", "mlp.shared_expert_gate", "mlp", "block_sparse_moe"),
)
"""Paths in a layer of what a block with experts consists of, in transformers 4 or 5."""
_ZERO = (Sharding.ZERO1, Sharding.ZERO2)

Saved = tuple[str, str, int]
"""Owner, name and bytes of a saved tensor."""


def weight_item(part: Part) -> int:
    """Return the bytes of the weight by which a row of an expert is multiplied.

    Mixtral's router returns f32, which transformers 4 cast; Granite's has the type of the block's input, which autocast
    leaves in f32; others have the type of their logits.
    """
    if part.model.family == "mixtral" and part.job.experts is not Experts.MODULES:
        return _F32
    return part.stream_item if part.model.family == "granitemoe" else part.item


def _weighted_item(part: Part) -> int:
    """Return the bytes of an element of a weighted row: the wider of the row's type and the weight's."""
    return max(part.expert_item, weight_item(part))


def experts_kept(part: Part) -> Iterator[Saved]:
    """Yield what the forward of one block saves, without its norm."""
    yield from _router(part)
    yield from _rows(part)
    yield from _shared(part)


def _router(part: Part) -> Iterator[Saved]:
    """Yield the input, the probabilities and the choices.

    The input is one tensor for the router and a shared expert's linears; autocast casts it for each of them.
    """
    model, tokens, rows = part.model, part.tokens, part.rows_of_experts
    assert model.experts is not None
    copies = 1 if model.shared_expert_size is None or not part.casts else 4
    if part.job.adapter is None:
        yield ROUTER, "input", copies * part.item * tokens * model.hidden_size
    else:
        yield from _input_of_adapters(part)
    yield ROUTER, "choices", _INDEX * rows
    if model.family == "granitemoe":  # softmax of the chosen logits alone
        yield ROUTER, "probabilities", _F32 * rows
        return
    yield ROUTER, "probabilities", _F32 * tokens * model.experts
    if model.router_normalised:
        yield ROUTER, "chosen probabilities", _F32 * rows
        yield ROUTER, "sums of chosen", _F32 * tokens


def _input_of_adapters(part: Part) -> Iterator[Saved]:
    """Yield what adapters of a router, and of the linears that open a shared expert, keep of the block's input."""
    elements = part.tokens * part.model.hidden_size
    of_shared = dict(inputs_kept(part, SHARED_INPUT, elements))
    if ADAPTED_ROUTER in adapted_parameters(part):  # the made router reads the tensor that a shared expert reads too
        of_shared["input"] = part.item * elements
        yield from ((ROUTER, *each) for each in router_kept(part))
    yield from ((ROUTER if name == "input" else EXPERTS, name, nbytes) for name, nbytes in of_shared.items())


def _rows(part: Part) -> Iterator[Saved]:
    """Yield what the experts save, the same for each row, to whichever expert it goes."""
    model, item, rows = part.model, part.expert_item, part.rows_of_experts
    assert model.experts is not None
    width, inner = model.hidden_size, model.expert_width
    grouped = part.job.experts is Experts.GROUPED
    yield EXPERTS, "gate and up", 2 * item * rows * inner
    yield EXPERTS, "activation", item * rows * inner
    if part.job.adapter is None:  # frozen weights do not read the inputs of their products again
        yield EXPERTS, "rows", item * rows * width
        yield EXPERTS, "product", item * rows * inner
    else:
        yield from ((EXPERTS, *each) for each in stacks_kept(part))
    yield EXPERTS, "output", item * rows * width
    yield ROUTER, "weights", weight_item(part) * rows
    if grouped:  # the sort, its rows' tokens, its inverse; ends of the groups are int32
        yield ROUTER, "order of rows", 3 * _INDEX * rows + 4 * model.experts
        return
    yield ROUTER, "order of rows", 2 * _INDEX * rows  # a place and a token
    yield EXPERTS, "weighted output", part.stream_item * rows * width  # index_add keeps its source


def _shared(part: Part) -> Iterator[Saved]:
    """Yield what the expert of all tokens saves, with its sigmoid gate; nothing without one."""
    model, item, tokens = part.model, part.item, part.tokens
    if model.shared_expert_size is None:
        return
    inner = model.shared_expert_size * (4 if part.job.adapter is None else 3)
    yield EXPERTS, "shared expert", item * tokens * inner
    if part.job.adapter is not None:
        for name, nbytes in inputs_kept(part, SHARED_PRODUCT, tokens * model.shared_expert_size):
            yield EXPERTS, f"{name} of the shared expert", nbytes
    yield EXPERTS, "output of the shared expert", item * tokens * model.hidden_size
    yield ROUTER, "gate of the shared expert", item * tokens


def router_logits_kept(part: Part) -> int:
    """Return the bytes that one layer leaves for an auxiliary loss, recomputed or not: logits and their softmax.

    (load_balancing_loss_func goes over the layers; Granite's logits are f32)
    """
    model = part.model
    if model.experts is None or not part.job.router_logits:
        return 0
    item = _F32 if model.family == "granitemoe" else part.item
    return 2 * item * part.tokens * model.experts


def gradients_inside(part: Part, rows: int | None = None) -> int:
    """Return the bytes that the backward of one block makes at its fullest, without gradients of weights.

    `rows` are computed at once: by grouped products all, in a loop the rows of one expert. Not given, they are all, or
    as many as each expert has in an even routing. The fullest of:

        weights     gradient of the weighted rows, and its products with weights and outputs; a cast, if they are wider
        product     gradients of gate and up, and both in one tensor
        rows        gradients of gate and up in one tensor, and of the rows
        tokens      gradients of the rows, and two tensors of the block's input (index_put adds out of place)
        made        gradient of an adapted stack, and of what its product read
    """
    model, item, weighted = part.model, part.expert_item, _weighted_item(part)
    width, inner = model.hidden_size, model.expert_width
    grouped = part.job.experts is Experts.GROUPED
    even = part.rows_of_experts if grouped else share(part.rows_of_experts, model.experts or 1)
    count = even if rows is None else rows
    stream = part.stream_item * part.tokens * width
    weights = count * width * (3 * weighted + (item if weighted > item else 0))
    product = 4 * item * count * inner
    of_rows = item * count * (2 * inner + width)
    tokens = item * count * width + 2 * stream
    down = stack_gradient(part, DOWN)
    gate_up = stack_gradient(part, GATE_UP)
    # by then what the products from gate and up to the output kept is gone
    freed = down + item * count * (width + (4 if down else 3) * inner) if gate_up else 0
    made = max(item * count * (width + inner) + down, of_rows + gate_up - freed)
    own = max(weights, product, of_rows, tokens, made)
    if not grouped:
        own += stream  # gradient of the input, to which each expert adds
    shared = 0 if model.shared_expert_size is None else 2 * part.item * part.tokens * width
    return own + shared


def hot_expert(part: Part) -> int:
    """Return the bytes that one expert, chosen by every token, adds to an even routing.

    Grouped products make all rows at once: nothing. A loop makes tensors of T rows in place of T k / E.
    """
    if part.model.experts is None or part.job.experts is Experts.GROUPED:
        return 0
    return gradients_inside(part, part.tokens) - gradients_inside(part)


def stack_gradients(part: Part) -> int:
    """Return the bytes of gradients of experts' weights in addition to those that gradients or buckets hold.

    DeepSpeed's buckets get a copy of a whole parameter's gradient; ZeRO-3 reduces the gradients of a leaf module, which
    trainers make of a block with experts, when all are there (deepspeed runtime/zero/stage3.py
    reduce_leaf_module_grads; LLaMA-Factory model/model_utils/moe.py add_z3_leaf_module). A loop over a stack makes a
    zeroed stack for each expert and adds it to the sum of those before (torch derivatives.yaml select).
    """
    if part.model.experts is None or part.job.adapter is not None:
        return 0
    stack = part.expert_item * part.layer_matrix
    level = part.job.sharding
    waiting = part.expert_item * part.layer_experts if level is Sharding.ZERO3 else stack if level in _ZERO else 0
    return waiting + (stack if part.job.experts is Experts.EAGER else 0)


# Refusals


def experts_refusal(job: Job) -> str:
    """Return why the bytes of a job's experts are not known; empty if they are, or its model is dense."""
    model = job.model
    if model is None or model.experts is None:
        return ""
    if job.framework not in TRANSFORMERS:
        known = ", ".join(sorted(TRANSFORMERS))
        return f"experts: code of {job.framework} for experts was not read (known: {known})"
    if model.family not in READ:
        return f"experts: code of {model.family} was not read (known: {', '.join(sorted(READ))})"
    if reason := _of_adapter(job):
        return reason
    if job.compiled:
        return "experts: what torch.compile keeps of experts is not known"
    if job.optimizer == "adafactor":
        return "optimizer: Adafactor's factors of stacks of experts are not known"
    autocast = job.autocast and itemsize(job.weight_dtype) > itemsize(job.compute_dtype)
    if autocast and job.experts is not Experts.GROUPED:
        return f"experts: casts of weights by autocast inside {job.experts.value!r} experts are not known"
    if job.router_logits and job.experts is Experts.MODULES:
        return "experts: the auxiliary loss of transformers 4 was not read"
    return ""


def _of_adapter(job: Job) -> str:
    """Return why adapters on a model with experts are not known, before their names are looked at one by one."""
    adapter, model = job.adapter, job.model
    if adapter is None:
        return ""
    assert model is not None
    if adapter.base_bits is not None:
        return "adapter: bitsandbytes quantises linears, and the types of experts in stacks were not read"
    if model.mlp_kinds:
        return _of_both_kinds(job)
    if job.experts is Experts.MODULES:
        if ALL_LINEAR in adapter.targets:
            return f"adapter: {ALL_LINEAR} means experts too where each is a module: name linears of attention"
        asked = adapter.targets
    else:  # an expression, which PEFT tries on names of both versions; a name it takes for the new one
        asked = tuple(each for each in adapter.targets if is_expression(each))
    touched = next((each for each in asked if any(names_path(each, path) for path in _INSIDE)), "")
    if not touched:
        return ""
    return f"adapter: the target {touched!r} touches experts: name linears of attention, or target parameters"


def _of_both_kinds(job: Job) -> str:
    """Return why adapters on a model with experts in some layers are not known: those of attention alone are."""
    adapter, model = job.adapter, job.model
    assert adapter is not None
    assert model is not None
    inside = (*_INSIDE, *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")))
    asked = (*adapter.targets, *adapter.target_parameters)
    touched = next((each for each in asked if each == ALL_LINEAR or any(names_path(each, path) for path in inside)), "")
    if not touched:
        return ""
    where = f"experts are {kinds_text(model)}"
    return f"adapter: the target {touched!r} touches MLPs, and {where}: name linears of attention"
