"""Export of a plan as settings of another framework. Keys that do not come back when these are read are reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise

from attrs import fields_dict, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import checked
from ratrain.ratrain_ir.support.toml_text import toml_comment
from ratrain.ratrainc.bridge.importing import Imported, imported
from ratrain.ratrainc.bridge.launchers import WORLD
from ratrain.ratrainc.bridge.megatron import MEGATRON
from ratrain.ratrainc.bridge.megatron_model import model_flags
from ratrain.ratrainc.bridge.recomputing import UNSAID, Recomputing
from ratrain.ratrainc.bridge.settings import Asked, Framework, Missing, product
from ratrain.ratrainc.bridge.torchtitan import TORCHTITAN
from ratrain.ratrainc.bridge.torchtitan_rules import SCHEDULES, TYPES

_TABLE = "'ratrainc export X.rtir --format torch-csv' writes the order as a table"
_WHY = {
    "schedule": f"it has no such schedule; {_TABLE}",
    "slices": f"micro-batches pass whole there; {_TABLE}",
    "mapping": "the launcher says which ranks are neighbours",
    "context_layout": "a context rank has an early and a late run of tokens there",
    "context_exchange": "the settings that are written say of context ranks how many there are",
    "context_groups": "keys of all heads are exchanged at a time there",
    "ep": "the settings that are written are of dense models",
    "head_chunk": "the head computes as its kernels do there",
    "mlp_chunk": "an mlp computes all rows at a time there",
    "logits": "the head computes as its kernels do there",
    **dict.fromkeys(fields_dict(Training), "the whole model trains there"),
}
_WHY_TYPE = "its types are bfloat16 and float32"


@frozen
class Exported:
    """The settings of a framework, and what they cannot express of a plan and its model."""

    text: str
    missing: tuple[Missing, ...]
    to_add: str = ""
    """settings that the framework needs and neither plan nor model says, with the reason; empty: none"""
    assumed: str = ""
    """what the settings say of recomputation although no pass has decided it; empty: one has"""


def export_plan(name: str, plan: Plan, model: ModelConfig, again: Recomputing = UNSAID) -> Exported:
    """Write a plan, its model and what its schedule computes `again` as settings of `megatron` or `torchtitan`.

    The text is read back. Keys of the plan that come back with another value, fields of the model that no argument
    says, and other recomputation than of nothing or of whole layers are listed at its head, and in the result.

    Raises `DiagnosticError` RT061 for a model with experts.
    """
    if model.experts is not None:
        # torchtitan adds to router logits a bias that no setting switches off: load_balance_coeff of its MoE class
        text = f"{model.name} has experts, and settings of {name} are written for dense models alone"
        fail("RT061", text, help=_TABLE)
    writer = _WRITERS[name]
    framework = writer.framework
    lines, of_model = writer.lines(plan, model, again)
    body = "\n".join(lines) + "\n"
    back = imported(framework, "what is exported", body, Asked())
    missing = (*_missing(plan, back.plan, framework), *_not_again(again, back, framework), *of_model)
    assumed = _ASSUMED if again.assumed else ""
    head = [writer.head] + [f"Not expressed: {each}" for each in missing]
    head += [f"Assumed: {assumed}"] * bool(assumed) + [f"To add: {writer.to_add}"]
    text = "\n".join([*map(toml_comment, head), "", body])
    text = checked(text, "file of settings", lambda text: imported(framework, "settings", text, Asked()))
    return Exported(text, missing, writer.to_add, assumed)


_ASSUMED = (
    "nothing is computed again in the backward: passes decide that, and this schedule has had none "
    "('ratrainc opt X.rtir --passes recompute{policy=full}' runs one)"
)


def _not_again(again: Recomputing, back: Imported, framework: Framework) -> tuple[Missing, ...]:
    """Return what a schedule computes again if the settings that are read back say something else."""
    found = "full" if any(each.startswith("recompute{policy=full") for each in back.passes) else "none"
    if again.kind == found:
        return ()
    why = f"the settings of {framework.title} say that all layers are computed again, or none"
    return (Missing("recompute", again.said or "by hand", found, why),)


def _missing(plan: Plan, back: Plan, framework: Framework) -> tuple[Missing, ...]:
    """Return the keys in which a plan differs from the plan that its settings give when they are read back."""
    said, found = plan_words(plan), plan_words(back)
    names = [name for name in {**said, **found} if said.get(name) != found.get(name) and not _idle(plan, name)]
    why = f"{framework.title} cannot express it, or not together with the other keys"
    reasons = _WHY | {name: _WHY_TYPE for name in names if said.get(name) == '"f16"' and framework is TORCHTITAN}
    return tuple(Missing(name, said.get(name, "(left out)"), found.get(name), reasons.get(name, why)) for name in names)


def _idle(plan: Plan, name: str) -> bool:
    """Tell whether a key has no effect: an order on one stage, shards of one replica, a norm without clipping."""
    if name == "zero":
        return plan.replicas == 1 and plan.zero < 3
    return (name in ("schedule", "layout") and plan.pp == 1) or (name == "max_norm" and plan.optimizer.clip == "none")


def _counts(plan: Plan, model: ModelConfig) -> list[int]:
    """Return the layers of each chunk, in forward order."""
    ends = (0, *plan.cuts, model.layers)
    return [after - before for before, after in pairwise(ends)]


def _megatron(plan: Plan, model: ModelConfig, again: Recomputing) -> tuple[list[str], tuple[Missing, ...]]:
    of_model, missing = model_flags(model, plan)
    flags = [
        *of_model,
        *_megatron_shape(plan, model),
        *_megatron_state(plan),
        *_megatron_optimizer(plan),
        *_megatron_attention(plan, again),
    ]
    return [f"{WORLD}={plan.clusters}", "ARGUMENTS=(", *[f"    --{flag}" for flag in flags], ")"], missing


_MEGATRON_TO_ADD = (
    "--train-iters (how long it trains) and --tokenizer-type, --data-path and --save (the data and the places of a "
    "run), which neither plan nor model says"
)


def _megatron_shape(plan: Plan, model: ModelConfig) -> list[str]:
    flags = [f"tensor-model-parallel-size {plan.tp}", f"pipeline-model-parallel-size {plan.pp}"]
    flags += [f"context-parallel-size {plan.cp}"] * (plan.cp > 1)
    if plan.pp > 1:
        counts = _counts(plan, model)
        if plan.layout != "loop":  # there a stage's layers follow one another: they are as many as it has here
            places = plan.shape.chunk_stages
            counts = [
                sum(count for count, at in zip(counts, places, strict=True) if at == stage) for stage in range(plan.pp)
            ]
        parts = ["t" * count for count in counts]
        flags.append(f"pipeline-model-parallel-layout 'E{'|'.join(parts)}L'")
    if plan.tp > 1 and plan.sequence_sharding:
        flags.append("sequence-parallel")
    return [
        *flags,
        f"micro-batch-size {plan.micro_batch_size}",
        f"global-batch-size {plan.global_batch}",
        f"seq-length {plan.seq_len}",
        f"seed {plan.seed}",
    ]


def _megatron_state(plan: Plan) -> list[str]:
    flags = ["use-distributed-optimizer"] * (plan.zero > 0)
    if plan.zero > 1:
        word = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        flags += ["use-megatron-fsdp", f"data-parallel-sharding-strategy {word}"]
    if plan.view_dtype == "bf16":
        flags += ["bf16", *["grad-reduce-in-bf16"] * (plan.grad_dtype == "bf16")]
    elif plan.view_dtype == "f16":
        flags += ["fp16", *["accumulate-allreduce-grads-in-fp32"] * (plan.grad_dtype == "f32")]
        flags += [] if plan.loss_scale is None else [f"loss-scale {plan.loss_scale!r}"]
    return flags


def _megatron_optimizer(plan: Plan) -> list[str]:
    own = plan.optimizer
    flags = [
        f"lr {own.lr!r}",
        f"adam-beta1 {own.betas[0]!r}",
        f"adam-beta2 {own.betas[1]!r}",
        f"adam-eps {own.eps!r}",
        f"weight-decay {own.weight_decay!r}",
        f"clip-grad {own.max_norm if own.clip == 'global' else 0.0!r}",
        f"lr-warmup-iters {own.warmup_steps}",
    ]
    if own.total_steps is None:
        return [*flags, "lr-decay-style constant"]
    if own.decay_steps is None:
        flags.append(f"lr-decay-style {own.decay}")
    else:
        flags += ["lr-decay-style WSD", f"lr-wsd-decay-style {own.decay}", f"lr-wsd-decay-iters {own.decay_steps}"]
    return [*flags, f"lr-decay-iters {own.total_steps}", f"min-lr {own.min_lr!r}"]


def _megatron_attention(plan: Plan, again: Recomputing) -> list[str]:
    flags = [f"attention-backend {'flash' if plan.attention == 'fused' else 'unfused'}"]
    if again.kind == "full":
        flags += ["recompute-granularity full", "recompute-method uniform", "recompute-num-layers 1"]
    elif plan.attention == "scores-recomputed":
        flags.append("recompute-granularity selective")
    return flags + ["reset-position-ids", "reset-attention-mask"] * plan.keeps_documents_apart


def _torchtitan(plan: Plan, model: ModelConfig, again: Recomputing) -> tuple[list[str], tuple[Missing, ...]]:
    # Context ranks share out state too: of a group, the shard degree counts the replicas alone.
    group = plan.cp if plan.zero == 0 else plan.shard_group or plan.replicas
    shard = 1 if group % plan.cp else group // plan.cp
    shards = shard * plan.cp > 1
    lines = ["[parallelism]"]
    lines += [
        f"data_parallel_replicate_degree = {plan.dp // shard}",
        f"data_parallel_shard_degree = {shard}",
        f"tensor_parallel_degree = {plan.tp}",
        f"pipeline_parallel_degree = {plan.pp}",
        *[f"context_parallel_degree = {plan.cp}"] * (plan.cp > 1),
    ]
    if shards:
        lines.append(f'fsdp_reshard_after_forward = "{"always" if plan.zero == 3 else "never"}"')
    if plan.pp > 1:
        lines += _torchtitan_pipeline(plan, model)
    # torchtitan has no f16: computing in the other type of 16 bits, reducing exactly.
    view, reduced = (
        {ours: theirs for theirs, ours in TYPES.items()} | {"f16": other} for other in ("bfloat16", "float32")
    )
    local = plan.micro_batch_size * (plan.micro_batches if plan.pp > 1 else 1)
    lines += ["", "[training]", f"local_batch_size = {local}", f"global_batch_size = {plan.global_batch}"]
    lines += [f"seq_len = {plan.seq_len}", f'mixed_precision_param = "{view[plan.view_dtype]}"']
    lines += [f'mixed_precision_reduce = "{reduced[plan.grad_shard_dtype]}"'] if shards else []
    lines += [*_torchtitan_optimizer(plan), "", "[activation_checkpoint]"]
    # Without the section torchtitan recomputes what it selects.
    lines.append(f'mode = "{"full" if again.kind == "full" else "none"}"')
    return [*lines, "", "[debug]", f"seed = {plan.seed}"], ()


_TORCHTITAN_TO_ADD = (
    "name, flavor and hf_assets_path of [model] (its sizes are in torchtitan's code, and no setting says them), and "
    "steps and dataset of [training], which a plan does not say"
)


def _torchtitan_pipeline(plan: Plan, model: ModelConfig) -> list[str]:
    known = {ours: theirs for theirs, ours in SCHEDULES.items()}
    lines = [f"pipeline_parallel_microbatch_size = {plan.micro_batch_size}"]
    if plan.schedule in known:
        lines.append(f'pipeline_parallel_schedule = "{known[plan.schedule]}"')
    starts = (0, *plan.cuts)
    parts = []
    for number, (start, count) in enumerate(zip(starts, _counts(plan, model), strict=True)):
        first = ["tok_embeddings"] * (number == 0)
        last = ["norm", "output"] * (number == len(starts) - 1)
        modules = [*first, *[f"layers.{layer}" for layer in range(start, start + count)], *last]
        parts.append("    [" + ", ".join(f'"{name}"' for name in modules) + "],")
    return [*lines, "module_fqns_per_model_part = [", *parts, "]"]


def _torchtitan_optimizer(plan: Plan) -> list[str]:
    own = plan.optimizer
    lines = [f"max_norm = {own.max_norm if own.clip == 'global' else math.inf!r}"]
    lines += ["", "[optimizer]", 'name = "AdamW"', f"lr = {own.lr!r}", f"beta1 = {own.betas[0]!r}"]
    lines += [f"beta2 = {own.betas[1]!r}", f"eps = {own.eps!r}", f"weight_decay = {own.weight_decay!r}"]
    lines += ["", "[lr_scheduler]", f"warmup_steps = {own.warmup_steps}"]
    if own.total_steps is None:
        return [*lines, "decay_ratio = 0.0"]
    lines.append(f"total_steps = {own.total_steps}")
    if own.decay_steps is not None:  # a share that is rounded to the steps again
        lines.append(f"decay_ratio = {own.decay_steps / own.total_steps!r}")
    return [*lines, f'decay_type = "{own.decay}"', f"min_lr_factor = {_factor(own.min_lr, own.lr)!r}"]


def _factor(part: float, whole: float) -> float:
    """Return a number whose `product` with `whole` is `part`, exactly if one next to the quotient does that.

    Of two such numbers the shorter one is returned.
    """
    if part == 0 or whole == 0:
        return 0.0
    near = part / whole
    written = float(Decimal(repr(part)) / Decimal(repr(whole)))
    # The rounded quotient, or one of its two neighbours, usually gives the part back to the last bit.
    around = (near, written, math.nextafter(near, 0.0), math.nextafter(near, math.inf))
    exact = [each for each in around if product(each, whole) == part]
    return min(exact, key=lambda each: len(repr(each)), default=near)


@frozen
class _Writer:
    """A framework, and what writes its settings."""

    framework: Framework
    head: str
    """first line of its file"""
    lines: Callable[[Plan, ModelConfig, Recomputing], tuple[list[str], tuple[Missing, ...]]]
    """writes the settings; returns with them the fields of the model that they cannot express"""
    to_add: str


_WRITERS = {
    "megatron": _Writer(MEGATRON, "Settings of Megatron-LM, of a model and a plan.", _megatron, _MEGATRON_TO_ADD),
    "torchtitan": _Writer(TORCHTITAN, "Settings of torchtitan, of a plan.", _torchtitan, _TORCHTITAN_TO_ADD),
}
