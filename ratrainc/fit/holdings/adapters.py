"""Low-rank adapters on frozen weights: which linears take one, what trains, and how frozen weights are stored.

An adapter of rank r on a linear of n inputs and m outputs is A [r, n] and B [m, r]: r (n + m) elements. They alone have
gradients and moments. LLaMA-3-8B with rank 16 on all linears of its layers:

    frozen     6.98 B in the layers: 2 bytes each, or 0.516 in nf4; 1.05 B of embedding and head: 2 bytes each
    adapters   41.9 M: 4 bytes, a gradient of 4 and moments of 8 in f32

Storage of a frozen weight (bitsandbytes functional.py quantize_4bit, QuantState; nn/modules.py Int8Params; transformers
integrations/bitsandbytes.py leaves the head out; torchao dtypes/nf4tensor.py has the same blocks):

    4 bits     half a byte, and an f32 maximum of each 64; double quantised: a byte of each 64, an f32 of each 64 * 256
    8 bits     a byte, and an f32 of each row of outputs

fp4 and nf4 differ in levels, not in bytes. Tables of levels, about a KiB a matrix, are left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.quantised import nf4_sizes
from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.support.module_patterns import expression_error, expression_of, is_expression, is_named
from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.adapted_experts import (
    adapted_parameters,
    parameters_refusal,
    parameters_trained,
    targets_of_experts,
)
from ratrain.ratrainc.fit.holdings.frozen_layers import layers_of, trains_embedding, trains_head
from ratrain.ratrainc.fit.holdings.part import itemsize, share
from ratrain.ratrainc.fit.holdings.styles import TRANSFORMERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.ratrainc.fit.holdings.part import Part

ADAPTERS = "adapters"
FROZEN = "frozen weights"
_HEAD = "lm_head"
SHARED_INPUT, SHARED_PRODUCT = "input of a shared expert", "product of a shared expert"
_F32 = 4
READ = frozenset({*TRANSFORMERS, "torchtune"})
"""Frameworks whose adapters were read: peft tuners/lora/layer.py, torchtune modules/peft/lora.py."""
_SEPARATE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3")
"""Families whose linears are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""
_WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
"""Families whose experts are stacks: their linears are those of attention, and of an expert of all tokens."""


@frozen
class Linear:
    """One linear of a layer."""

    path: str
    """path within the layer, as targets name it: `self_attn.q_proj`"""
    inputs: int
    outputs: int
    role: str
    """tensor that it reads: `attention input`, `attention output`, `mlp input`, `mlp product`, or of a shared expert"""

    @property
    def elements(self) -> int:
        """Elements of its matrix."""
        return self.inputs * self.outputs


def linears(part: Part) -> tuple[Linear, ...]:
    """Return the linears of a layer in the framework's model code; none for a family whose names are not known."""
    hidden, query, key, ffn = part.model.hidden_size, part.query, part.key, part.ffn
    family = part.model.family
    packed = part.job.framework in TRANSFORMERS
    inside = (
        ("attention input", hidden),
        ("attention output", query),
        ("mlp input", hidden),
        ("mlp product", ffn),
    )
    if family == "phi3" and packed:
        names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        widths = (query + 2 * key, hidden, 2 * ffn, hidden)
    elif family == "gpt2" and packed:
        names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        widths = (query + 2 * key, hidden, ffn, hidden)
    elif family == "gpt_neox" and packed:
        names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        widths = (query + 2 * key, hidden, ffn, hidden)
    elif part.model.experts is not None and family in _WITH_EXPERTS:
        return (*_separate(hidden, query, key, ffn)[:4], *_of_shared_expert(part))
    elif family in (*_SEPARATE, *_WITH_EXPERTS) or (family == "phi3" and not packed):
        return _separate(hidden, query, key, ffn)
    else:
        return ()
    return tuple(
        Linear(name, inputs, outputs, role) for name, outputs, (role, inputs) in zip(names, widths, inside, strict=True)
    )


def _separate(hidden: int, query: int, key: int, ffn: int) -> tuple[Linear, ...]:
    return (
        Linear("self_attn.q_proj", hidden, query, "attention input"),
        Linear("self_attn.k_proj", hidden, key, "attention input"),
        Linear("self_attn.v_proj", hidden, key, "attention input"),
        Linear("self_attn.o_proj", query, hidden, "attention output"),
        Linear("mlp.gate_proj", hidden, ffn, "mlp input"),
        Linear("mlp.up_proj", hidden, ffn, "mlp input"),
        Linear("mlp.down_proj", ffn, hidden, "mlp product"),
    )


def _of_shared_expert(part: Part) -> tuple[Linear, ...]:
    hidden, shared = part.model.hidden_size, part.model.shared_expert_size
    if shared is None:
        return ()
    return (
        Linear("mlp.shared_expert.gate_proj", hidden, shared, SHARED_INPUT),
        Linear("mlp.shared_expert.up_proj", hidden, shared, SHARED_INPUT),
        Linear("mlp.shared_expert.down_proj", shared, hidden, SHARED_PRODUCT),
        Linear("mlp.shared_expert_gate", hidden, 1, SHARED_INPUT),
    )


def _matches(target: str, part: Part, linear: Linear) -> bool:
    """Tell whether a target names a linear in every layer, as peft tuners/tuners_utils.py check_target_module_exists.

    A regular expression must match the whole path; another text is the path or its end after a dot.
    """
    if target == ALL_LINEAR:
        return True
    if not is_expression(target):
        return f".{linear.path}".endswith(f".{target}")
    paths = (f"{_root(part)}.{layer}.{linear.path}" for layer in range(part.model.layers))
    return all(re.fullmatch(target, path) for path in paths)


def names_path(target: str, path: str) -> bool:
    """Tell whether a target names a path of a LLaMA-like model's first layer, by the same rules."""
    if not is_expression(target):
        return f".{path}".endswith(f".{target}")
    return expression_error(target) is None and re.fullmatch(target, f"model.layers.0.{path}") is not None


def _root(part: Part) -> str:
    return {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}.get(part.model.family, "model.layers")


def adapted(part: Part) -> tuple[Linear, ...]:
    """Return the linears of a layer that take an adapter; none without one."""
    adapter = part.job.adapter
    if adapter is None:
        return ()
    names = targets_of_experts(part.job).linears
    named = (each for each in linears(part) if any(_matches(name, part, each) for name in names))
    return tuple(each for each in named if not _is_excluded(part, each.path))


def _is_excluded(part: Part, inside: str) -> bool:
    """Tell whether a linear takes no adapter in any layer; one that some layers adapt counts as adapted in all."""
    adapter = part.job.adapter
    assert adapter is not None
    paths = [f"{_root(part)}.{layer}.{inside}" for layer in range(part.model.layers)]
    return bool(adapter.excluded) and all(any(_leaves_out(each, path) for each in adapter.excluded) for path in paths)


def _leaves_out(excluded: str, path: str) -> bool:
    """Tell whether a name, or an expression after `re:`, leaves a module out, by PEFT's rules."""
    whole = expression_of(excluded)
    if whole is None:
        return is_named(path, excluded)
    return expression_error(whole) is None and re.fullmatch(whole, path) is not None


def adapts_head(part: Part) -> bool:
    """Tell whether the head of this stage takes an adapter: it is named itself, `all-linear` leaves it out."""
    adapter = part.job.adapter
    if adapter is None or not part.last or _HEAD not in adapter.targets:
        return False
    return not any(_leaves_out(each, _HEAD) for each in adapter.excluded)


def unmatched(part: Part) -> str:
    """Return the first target that names no linear; empty if all do."""
    assert part.job.adapter is not None
    names = (each for each in targets_of_experts(part.job).linears if each != _HEAD)
    return next((name for name in names if not any(_matches(name, part, each) for each in linears(part))), "")


# What trains


def layer_trained(part: Part) -> int:
    """Return the elements of one layer that train: all of them, or its adapters'."""
    adapter = part.job.adapter
    if adapter is None:
        return part.layer_parameters
    own = adapter.rank * sum(each.inputs + each.outputs for each in adapted(part))
    return own + parameters_trained(part)


def head_trained(part: Part) -> int:
    """Return the elements of the head that train."""
    adapter = part.job.adapter
    if part.job.thawed is not None:
        return part.head_matrix if trains_head(part) else 0
    if adapter is None:
        return part.head_matrix
    return adapter.rank * (part.model.hidden_size + part.vocabulary) if adapts_head(part) else 0


def outer_trained(part: Part) -> int:
    """Return the elements outside layers that train."""
    if part.job.thawed is not None:
        own = part.embedding_parameters if trains_embedding(part) else 0
        return own + (0 if part.tied_here else head_trained(part))
    return part.outer_parameters if part.job.adapter is None else head_trained(part)


def trained(part: Part) -> int:
    """Return the elements of the rank that train, before data-parallel ranks share them out."""
    if part.model.mlp_kinds:  # of these no layer is frozen
        return sum(count * layer_trained(each) for each, count in part.kinds) + outer_trained(part)
    return layers_of(part).trained * layer_trained(part) + outer_trained(part)


def largest_trained(part: Part) -> int:
    """Return the elements of the largest parameter that trains."""
    adapter = part.job.adapter
    if part.job.thawed is not None:
        outer = part.embedding_parameters if trains_embedding(part) else 0
        return max(part.layer_matrix, part.model.hidden_size * part.query, outer, head_trained(part))
    if adapter is None:
        return part.largest_matrix
    widths = [max(each.inputs, each.outputs) for each in adapted(part)]
    of_linears = adapter.rank * max([*widths, part.vocabulary if adapts_head(part) else 0])
    return max([of_linears, *(max(each.sides) for each in adapted_parameters(part).values())])


# Frozen weights


def _stored(linear: Linear, bits: int | None, double: bool, item: int) -> tuple[int, int]:
    """Return the bytes of a frozen matrix's codes, and of the scales apart from them."""
    elements = linear.elements
    if bits is None:
        return item * elements, 0
    if bits > 4:
        return elements, _F32 * linear.outputs
    four = nf4_sizes(elements)
    return four.pairs, four.nested_bytes if double else _F32 * four.maxima


def _layer_stored(part: Part) -> tuple[int, int]:
    adapter, item = part.job.adapter, itemsize(part.job.weight_dtype)
    assert adapter is not None
    if part.model.experts is not None:
        return item * part.layer_parameters, 0
    each = [_stored(linear, adapter.base_bits, adapter.double_quantised, item) for linear in linears(part)]
    return sum(codes for codes, _ in each) + item * part.layer_vectors, sum(scales for _, scales in each)


def frozen_bytes(part: Part) -> int:
    """Return the bytes of frozen weights on one rank.

    FSDP shares out codes as parameters; the scales are attributes of the parameter and stay whole on each rank
    (bitsandbytes nn/modules.py Params4bit.quant_state).
    """
    if part.job.thawed is not None:
        own = 0 if part.job.offload_parameters else itemsize(part.job.weight_dtype) * (part.parameters - trained(part))
        return share(own, part.shards) if part.sharded else own
    stored = [(count, *_layer_stored(each)) for each, count in part.kinds]
    held = sum(count * codes for count, codes, _ in stored)
    held += itemsize(part.job.weight_dtype) * part.outer_parameters
    if part.job.offload_parameters:
        held = 0
    return (share(held, part.shards) if part.sharded else held) + sum(count * scales for count, _, scales in stored)


def gathered_layer(part: Part) -> int:
    """Return the bytes of one layer's gathered weights: quantised ones are gathered as they are stored."""
    adapter = part.job.adapter
    if adapter is None:
        return part.item * part.layer_parameters
    own = part.item * layer_trained(part)
    return own + (part.item * part.layer_parameters if adapter.base_bits is None else _layer_stored(part)[0])


def dequantised(part: Part) -> int:
    """Return the bytes of the matrix that a product dequantises and drops (bitsandbytes autograd/_functions.py)."""
    adapter = part.job.adapter
    if adapter is None or adapter.base_bits is None:
        return 0
    return part.item * max(each.elements for each in linears(part))


# Inputs that adapters keep


def keeps_base_input(part: Part) -> bool:
    """Tell whether frozen linears keep their inputs: 8-bit products do (autograd/_functions.py MatMul8bitLt)."""
    adapter = part.job.adapter
    return adapter is None or adapter.base_bits == 8


def _adapter_item(part: Part) -> int:
    """Return the bytes of an element of what A reads: the compute type where something casts, else that of A."""
    casts = part.job.autocast or part.sharded or part.job.master_dtype is not None
    return part.item if casts else itemsize(part.job.trained_dtype)


def _copies(part: Part) -> bool:
    """Tell whether each adapter reads a copy of its own.

    Under autocast PEFT first casts to the type of A, f32, and autocast back (tuners/lora/layer.py Linear.forward); on a
    quantised base it leaves that to autocast, which copies nothing of its own type (tuners/lora/bnb.py).
    """
    adapter = part.job.adapter
    assert adapter is not None
    wider = itemsize(part.job.trained_dtype) > part.item
    if part.casts:
        return True
    if part.job.autocast:
        return wider and adapter.base_bits is None
    return _adapter_item(part) != part.item


def inputs_kept(part: Part, role: str, elements: int) -> Iterable[tuple[str, int]]:
    """Yield name and bytes of what adapters on the readers of one tensor of `elements` elements keep of it.

    The tensor itself, once, or a copy for each; with dropout the dropped copy and a mask of bytes; and the product with
    A, which the gradient of B reads. A frozen linear needs no input.
    """
    adapter = part.job.adapter
    assert adapter is not None
    readers = [each for each in adapted(part) if each.role == role]
    item, drops = _adapter_item(part), adapter.dropout > 0
    copies = len(readers) if drops or _copies(part) else 0
    shared = (bool(readers) and not copies) or keeps_base_input(part)
    if shared and not (part.job.compiled and role in ("attention input", "mlp input", "mlp product")):
        yield (
            "output" if role == "attention output" else "product" if role == "mlp product" else "input",
            part.item * elements,
        )
    if copies:
        yield "copies for adapters", copies * item * elements
    if drops and readers:
        yield "dropout masks of adapters", len(readers) * elements
    if readers:
        yield "products with A", item * part.tokens * adapter.rank * len(readers)


# Refusals


def adapter_unread(job: Job) -> str:
    """Return why adapters of a job's framework are not known, whatever its model; empty if they are, or none trains."""
    if job.adapter is None and job.method != "lora":
        return ""
    if job.framework not in READ:
        return f"adapter: adapters of {job.framework} were not read (known: {', '.join(sorted(READ))})"
    if job.adapter is None:
        return "adapter: the settings do not say its rank and linears"
    return f"adapter: what {job.adapter.kind} keeps is not known" if job.adapter.kind else ""


def adapter_refusal(part: Part) -> str:
    """Return why the bytes of a job's adapters on its model are not known; empty if they are, or there are none."""
    job, adapter = part.job, part.job.adapter
    if adapter is None:
        return ""
    known = linears(part)
    if not known:
        return f"adapter: names of the linears of {part.model.family} are not known"
    if adapter.rank < 1:
        return "adapter: its rank must be at least 1"
    wrong = next((each for each in adapter.targets if is_expression(each) and expression_error(each)), "")
    if wrong:
        return f"adapter: the target {wrong!r} is no regular expression"
    if odd := parameters_refusal(job):
        return odd
    if odd := unmatched(part):
        return f"adapter: the target {odd!r} names no linear of every layer (known: {_names(known)})"
    if not (adapted(part) or adapts_head(part) or adapted_parameters(part)):
        return "adapter: no linear is left that takes one"
    if adapts_head(part) and part.model.tied_embeddings:
        return "adapter: one on a head that is tied to the embedding is not known"
    return _adapter_combinations(job)


def _names(known: Iterable[Linear]) -> str:
    return ", ".join(each.path.rpartition(".")[2] for each in known)


def _adapter_combinations(job: Job) -> str:
    adapter = job.adapter
    assert adapter is not None
    if adapter.base_bits not in (None, 4, 8):
        return f"adapter: frozen weights in {adapter.base_bits} bits are not known (known: 4, 8)"
    if job.tp * job.pp > 1:
        return "adapter: tensor and pipeline parallelism of adapters was not read"
    if job.optimizer == "adafactor":
        return "optimizer: Adafactor's factors of adapters are not known"
    if adapter.base_bits is not None and job.model is not None and job.model.family == "gpt2":
        return "adapter: GPT-2's matrices lie transposed, and bitsandbytes' bytes of them were not read"
    if adapter.base_bits == 8 and job.sharding in (Sharding.FSDP1, Sharding.FSDP2, Sharding.ZERO3):
        return (
            "adapter: weights in 8 bits do not share out (LLaMA-Factory model/model_utils/quantization.py refuses it)"
        )
    if adapter.base_bits == 4 and job.sharding is Sharding.ZERO3:
        return "adapter: what ZeRO-3 gathers of quantised weights was not read; FSDP is known"
    return ""
