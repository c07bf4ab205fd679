"""Layers that do not train, beside some that do: which of them keep activations, and what.

Autograd keeps nothing below the lowest weight that trains, as no input there asks for a gradient (the f32 copy in the
first norm of the lowest layer that trains is not kept either, and counted all the same):

    layers 0 ... 21   frozen, below: nothing is kept, no backward
    layers 22, 23     train: everything, or a checkpoint each
    norm, head        frozen, above: what the gradient of their input reads (a frozen linear keeps no input)

LLaMA Pro spreads the layers that train, so that frozen ones are above some: they keep what a layer does whose
adapters are nowhere, and are not recomputed (LLaMA-Factory src/llamafactory/model/model_utils/checkpointing.py,
get_custom_gradient_checkpointing_func, which checkpoints layers that train).

axolotl's `unfrozen_parameters` freezes before the Trainer checkpoints all layers, so that frozen ones in the backward
keep their input alone; where an expression has the name of embedding or head in it, the embedded tokens ask for a
gradient, and all layers are in the backward (src/axolotl/train.py, setup_model_and_tokenizer). Of a parameter of which
some rows train the others have gradients and moments too, of zeros (utils/freeze.py, _create_freeze_parameters_hook).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrainc.bridge.jobs.job import UNSHARDED, Adapter, Job

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.part import Part

_NOTHING = Adapter(rank=1, alpha=1.0, targets=())
"""Adapter that no linear takes: all of the model is frozen."""
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_KNOWN = f"known: whole layers, {_EMBEDDING}, {_HEAD}"
READ = frozenset({"llama-factory", "axolotl"})
"""Frameworks whose way of freezing was read."""


@frozen
class Layers:
    """Numbers of layers of a stage."""

    trained: int
    above: int
    """frozen ones above the lowest weight that trains"""


def layers_of(part: Part) -> Layers:
    """Return how many layers train, and how many frozen ones are in the backward."""
    thawed = part.job.thawed
    if thawed is None:
        return Layers(part.layers, 0)
    numbers = thawed.numbers(part.layers)
    lowest = 0 if _embedded_ask(part) else min(numbers, default=part.layers)
    return Layers(len(numbers), part.layers - lowest - len(numbers))


def _embedded_ask(part: Part) -> bool:
    """Tell whether the embedded tokens ask for a gradient, so that the backward goes through all layers."""
    thawed = part.job.thawed
    assert thawed is not None
    named = any(table in each for each in thawed.expressions for table in (_EMBEDDING, _HEAD))
    return trains_embedding(part) or named


def recomputes_frozen(job: Job) -> bool:
    """Tell whether frozen layers are recomputed as others are."""
    return job.thawed is not None and bool(job.thawed.expressions)


def trains_embedding(part: Part) -> bool:
    """Tell whether the embedding trains."""
    thawed = part.job.thawed
    return thawed is None or _EMBEDDING in thawed.extra_modules


def trains_head(part: Part) -> bool:
    """Tell whether the head trains; a tied one is the embedding."""
    thawed = part.job.thawed
    if thawed is None:
        return True
    return _HEAD in thawed.extra_modules or (part.model.tied_embeddings and _EMBEDDING in thawed.extra_modules)


def as_frozen(part: Part) -> Part:
    """Return the ranks as if nothing of the model trained."""
    return evolve(part, job=evolve(part.job, adapter=_NOTHING, thawed=None, method="lora"))


def frozen_refusal(job: Job) -> str:
    """Return why the bytes of a job with frozen parts are not known; empty if they are, or it has none."""
    thawed, model = job.thawed, job.model
    if job.method != "frozen" and thawed is None:
        return ""
    if thawed is None or job.framework not in READ:
        return f"method: {job.method}: which parts train decides gradients and moments, and is not known"
    if model is None:
        return ""  # asked for by its own name
    if thawed.spread and (thawed.layers < 1 or model.layers % thawed.layers):
        return f"thawed: {model.layers} layers do not come in {thawed.layers} equal parts"
    if thawed.odd:
        return f"thawed: {thawed.odd} trains without the rest of its layer, which is not counted ({_KNOWN})"
    if thawed.modules != ("all",):
        return f"thawed: parts of a layer that train alone ({', '.join(thawed.modules)}) are not counted (known: all)"
    odd = next((each for each in thawed.extra_modules if each not in (_EMBEDDING, _HEAD)), "")
    if odd or (model.tied_embeddings and _HEAD in thawed.extra_modules):
        return f"thawed: {odd or _HEAD} that trains beside layers is not counted ({_KNOWN})"
    if not thawed.numbers(model.layers):
        return "thawed: no layer is left to train"
    return _not_with(job)


def _not_with(job: Job) -> str:
    assert job.model is not None
    assert job.thawed is not None
    if job.model.experts is not None:
        return "thawed: names of experts, by which layers are found, depend on the version of transformers"
    if job.model.family in ("gpt2", "gpt_neox"):
        return f"thawed: names outside of layers of {job.model.family} were not read"
    if job.optimizer == "adafactor":
        return "optimizer: Adafactor's factors of some layers are not known"
    if job.cp > 1:
        return "thawed: context ranks of a model with frozen layers were not read"
    if not job.autocast and job.sharding in UNSHARDED and job.trained_dtype != job.weight_dtype:
        return "thawed: layers in f32 beside frozen ones do not multiply without mixed precision (bf16: true)"
    if job.autocast and _EMBEDDING in job.thawed.extra_modules and job.trained_dtype != job.compute_dtype:
        return f"thawed: {_EMBEDDING} in f32 makes a stream of f32 through frozen layers, which is not counted"
    if job.autocast and job.weight_dtype == "f32" != job.compute_dtype:
        return "thawed: casts of frozen weights in f32 are not known"
    return ""
