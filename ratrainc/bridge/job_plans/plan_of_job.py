"""A plan of a job: the settings of another framework as keys of ours.

`fit` answers how many bytes the framework would hold; `import-plan` makes a plan of the same file, for the same ranks,
batch, types and sharded state. Each field of the job takes one of three ways:

    tp, micro_batch_size, sharding, ...   keys of the plan
    checkpointing, offload                passes, which the command prints for --passes
    adapter                               keys of [train] (adapter_keys.py)
    thawed                                freeze of [train] (frozen_keys.py)
    experts, fp8, ...                     refused by name: without them another model or other state is trained

The third way has one exit: state in fewer bits than a plan's (weights without f32 masters, moments in 8 bits) becomes
f32 if `Asked.f32_state` says so, and is named then. A learning rate of another shape than a plan's
(`job_rates.py`), and whatever `job_notes.py` lists, is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from ratrain.ratrain_ir.config.plan_keys import CONTIGUOUS, OF_HEADS
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.text import Place, shown
from ratrain.ratrainc.bridge.job_plans.adapter_keys import is_carried, put_adapter
from ratrain.ratrainc.bridge.job_plans.frozen_keys import put_thawed
from ratrain.ratrainc.bridge.job_plans.job_notes import bare, left_of, rule_of_ignored, rule_of_open
from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
from ratrain.ratrainc.bridge.job_plans.job_rates import put_rate
from ratrain.ratrainc.bridge.jobs.context_ranks import length_divisor, source_of_one_run
from ratrain.ratrainc.bridge.jobs.job import (
    FSDP,
    Attention,
    Checkpointing,
    Context,
    Job,
    Sharding,
)
from ratrain.ratrainc.bridge.reasons import KERNELS, MODEL, RECOMPUTE, UPDATES
from ratrain.ratrainc.bridge.settings import Asked, Default, Left, as_integer, as_number, is_off, until_said

_LEVELS: Mapping[Sharding, int] = {
    Sharding.NONE: 0,
    Sharding.DDP: 0,
    Sharding.ZERO1: 1,
    Sharding.DISTRIBUTED_OPTIMIZER: 1,
    Sharding.ZERO2: 2,
    Sharding.ZERO3: 3,
}
"""ZeRO levels; FSDP's depends on whether gathered weights stay for the backward."""
_F32_MOMENTS = ("adamw", "adamw-fused", "adamw-foreach-off", "adamw-paged")
_NARROW_MOMENTS = {"adamw-8bit": "8 bits", "adamw-8bit-paged": "8 bits", "adamw-4bit": "4 bits"}
_SCALE = "fp16.loss_scale"
"""Fixed loss scale of DeepSpeed; 0 means that it follows overflows (deepspeed_rules.py, LOSS_SCALE)."""
_SEEDS = ("seed", "general.seed", "rng.seed")
_DECAYS_ALL = ("torchtune", "nanotron", "llm-foundry")
"""Frameworks that decay norms and biases too: torchtune recipes/full_finetune_single_device.py, _setup_optimizer;
nanotron src/nanotron/config/config.py, OptimizerArgs.weight_decay_exclude_named_params; llm-foundry
llmfoundry/utils/builders.py, _extract_param_groups. A plan does not."""


def zero_level(job: Job) -> int:
    """Return the ZeRO level of a plan that shares out as much of the state as the job's mechanism."""
    return _LEVELS.get(job.sharding, 3 if job.reshard_after_forward else 2)


def plan_of_job(job: Job, title: str, top: Place, asked: Asked) -> JobPlan:
    """Return keys of a plan and passes that express a job, and the settings that they leave out.

    Raises `DiagnosticError`: RT063 if the job leaves open what a plan needs, RT064 if it trains what no plan can.
    """
    made = JobPlan(job, title, top, asked)
    _refuse_methods(made)
    _state_bits(made)
    if job.adapter is not None:
        put_adapter(made)
    elif job.thawed is not None:
        put_thawed(made)
    _ranks(made)
    _batch(made)
    if "dp" in made.values:
        _shards(made)
    _types(made)
    _attention(made)
    _passes(made)
    _optimizer(made)
    put_rate(made)
    _elsewhere(made)
    _notes(made)
    made.report.check()
    return made


# what is refused


def _refuse_methods(made: JobPlan) -> None:
    """Refuse what trains another model, or other parts of it, than a plan does."""
    job = made.job
    if job.adapter is None and job.method == "lora":
        made.wrong("method", f"{made.key('method')}: rank and targets of the adapter are not said", "say them")
    if job.fp8:
        made.wrong("fp8", f"{made.key('fp8')}: float8 is no type of a plan", "switch it off: bf16, f16 or f32")
    if job.dropout:
        text = f"{made.key('dropout')}: layers drop {job.dropout:g} of their results; a plan has no dropout"
        made.wrong("dropout", text, "say 0, in the file or in the model's config.json")
    kind = job.optimizer
    if kind not in (*_F32_MOMENTS, *_NARROW_MOMENTS):
        text = f"{made.key('optimizer')}: a plan trains with AdamW, not with {kind}"
        made.wrong("optimizer", text, "say AdamW, and its learning rate")


def _state_bits(made: JobPlan) -> None:
    """Refuse state in fewer bits than a plan's, or list it if f32 was asked for in its place."""
    job, found = made.job, []
    if job.master_dtype is None and job.trained_dtype != "f32":
        what, name = ("weights", "weight_dtype") if job.adapter is None else ("adapters", "gradient_dtype")
        origin = job.origins.get(name)
        name = "adapter" if job.adapter is not None and (origin is None or origin.default) else name
        text = f"{what} and moments are held in {job.trained_dtype}, without f32 masters"
        found.append((name, text, job.trained_dtype))
    elif job.master_dtype not in (None, "f32"):
        found.append(("master_dtype", f"masters are held in {job.master_dtype}", job.master_dtype))
    if job.optimizer in _NARROW_MOMENTS:
        text = f"moments are held in {_NARROW_MOMENTS[job.optimizer]}"
        found.append(("optimizer", text, job.optimizer))
    elif job.state_dtype not in (None, "f32"):
        found.append(("state_dtype", f"moments are held in {job.state_dtype}", job.state_dtype))
    for name, text, value in found:
        if made.asked.f32_state:
            made.leave(name, value, f"{text}; the plan's masters and moments are f32", trains=True)
        else:
            way_out = "--f32-state makes a plan with f32 masters and moments in their place"
            made.wrong(name, f"{made.key(name)}: {text}; a plan's state is f32", way_out)
    if made.asked.f32_state and not found:
        text = "--f32-state changes nothing: the file keeps masters and moments in f32"
        made.report.error("RT064", text, made.top.location, help="leave it out")
    if job.optimizer.endswith("paged"):
        made.leave("optimizer", job.optimizer, "state does not move by pages: 'offload-state' says where it is")


# keys


def _ranks(made: JobPlan) -> None:
    """Put the degrees of parallelism, chunks and schedule; report devices that they do not share out."""
    job = made.job
    if job.devices is None:
        text = f"this file of {made.title} does not say on how many devices it runs"
        made.wrong("devices", text, "give --clusters N", code="RT063")
    elif job.devices < 1 or job.devices % job.model_ranks:
        text = f"{job.devices} devices are not a multiple of tp {job.tp} * pp {job.pp} * cp {job.cp}"
        made.wrong("devices", text, f"give --clusters {job.model_ranks}, or a multiple")
    else:
        made.put("dp", job.dp, "devices", "sharding")
    made.put("pp", job.pp, "pp")
    if job.tp > 1:
        made.put("tp", job.tp, "tp")
        made.put("sequence_sharding", job.sequence_sharding, "sequence_sharding", "tp")
    if job.ep > 1:
        made.put("ep", job.ep, "ep")
    if job.cp > 1:
        made.put("cp", job.cp, "cp")
        if job.context is Context.HEADS:
            made.put("context_exchange", OF_HEADS, "context", "cp")
        _context_layout(made)
    if job.virtual_stages > 1:
        made.put("chunks", job.virtual_stages, "virtual_stages")
    if job.pp > 1 and job.schedule in SCHEDULES:
        made.put("schedule", job.schedule, "schedule", "pp")
    elif job.pp > 1:
        made.leave("schedule", job.schedule, "the strategy, or a schedule of the plan, places another")


def _context_layout(made: JobPlan) -> None:
    """Put one run a context rank if the framework cuts sequences so, and two of each do not go into the length."""
    job, source = made.job, source_of_one_run(made.job)
    odd = job.seq_len is not None and job.seq_len % (2 * job.cp) and job.seq_len % job.cp == 0
    if odd and source is not None and length_divisor(job) <= job.cp:
        made.put("context_layout", CONTIGUOUS, "cp")
        made.defaults["context_layout"] = Default(CONTIGUOUS, source)


def _batch(made: JobPlan) -> None:
    """Put the batch: sequences, micro-batch, and micro-batches by accumulation or by --global-batch."""
    job = made.job
    for name, text, option in (
        ("seq_len", "how long sequences are", "--seq-len S"),
        ("micro_batch_size", "how many sequences a micro-batch has", "--micro-batch-size N"),
    ):
        value = getattr(job, name)
        if value is None:
            made.wrong(name, f"this file of {made.title} does not say {text}", f"give {option}", code="RT063")
        else:
            made.put(name, value, name)
    times, whole = job.gradient_accumulation, made.asked.global_batch
    micro, dp = job.micro_batch_size, made.values.get("dp")
    if whole is None or micro is None or dp is None:
        if times is None and whole is None and dp is not None:  # a file may say the batch of all devices
            text = f"this file of {made.title} does not say how many micro-batches a step has"
            made.wrong("gradient_accumulation", text, "give --global-batch N", code="RT063")
        elif times is not None:
            made.put("micro_batches", times, "gradient_accumulation")
        return
    origin = job.origins.get("gradient_accumulation")
    open_ = times is None or (origin is not None and origin.default)
    if whole % (micro * dp):
        text = f"--global-batch {whole} is not a multiple of micro-batches of {micro} * {dp} replicas"
        made.wrong("gradient_accumulation", text, f"give --global-batch {micro * dp}, or a multiple")
    elif open_ or whole == micro * dp * (times or 1):
        made.put("micro_batches", whole // (micro * dp), "gradient_accumulation")
    else:
        text = f"--global-batch {whole} contradicts {made.key('gradient_accumulation')} {times}"
        made.wrong("gradient_accumulation", text, f"leave it out: a step has {micro * dp * (times or 1)} sequences")


def _shards(made: JobPlan) -> None:
    """Put the ZeRO level, the time of reductions, and the groups that share out state.

    Context ranks count among the replicas, which hold the same weights.
    """
    job, group, replicas = made.job, made.job.shard_size, made.replicas
    zero = zero_level(job)
    if group == 1:
        zero, group = 0, None  # each replica has the whole state
    times = made.values.get("micro_batches")
    waits = zero < 2 or evolve(job, gradient_accumulation=times).sums_whole
    made.put("zero", zero, "sharding", "reshard_after_forward")
    made.put("reduce", "last" if waits else "each-micro-batch", "sharding")
    if group is not None and 1 < group < replicas and zero:
        made.put("shard_group", group, "shard_size")
    elif group is not None and replicas % group:
        text = f"{made.key('shard_size')}: groups of {group} replicas do not make up {replicas}"
        made.wrong("shard_size", text, "say a number that divides the data-parallel ranks")


def _types(made: JobPlan) -> None:
    """Put the types of views and gradients, and the loss scale.

    A gradient that waits for the last micro-batch is held whole in the framework's own type of gradients; one that
    is reduced at once is made in the type of products, and its shard has the framework's type.
    """
    job, kind = made.job, made.job.compute_dtype
    made.put("view_dtype", kind, "compute_dtype")
    waits = made.values.get("reduce", "last") == "last"
    shards = made.values.get("zero", 0) > 0 and made.replicas > 1
    if not shards or (waits and job.sharding not in FSDP):
        whole = job.gradient_dtype
    else:  # FSDP 2 casts what waits to the type of the reduction (fit/holdings/whole_sums.py)
        whole = job.reduce_dtype if waits and job.sharding is Sharding.FSDP2 else kind
    made.put("grad_dtype", whole, "gradient_dtype", "compute_dtype")
    if shards:
        made.put("grad_shard_dtype", job.gradient_dtype, "gradient_dtype", "reduce_dtype")
    if kind == "f16":
        said = next((each.value for each in job.ignored if bare(each.key) == _SCALE), None)
        scale = as_number(said)
        made.put("loss_scale", scale or "dynamic", "compute_dtype")
    else:
        made.put("loss_scale", 1.0, "compute_dtype")


def _attention(made: JobPlan) -> None:
    """Put the scores that attention holds, and the mask of packed documents."""
    job = made.job
    if job.attention is Attention.EAGER:
        again = job.checkpointing is Checkpointing.ATTENTION
        made.put("attention", "scores-recomputed" if again else "scores-kept", "attention")
    packed = job.training.packing
    if packed and _documents_apart(made):
        made.put("attention_mask", "document", "packing")
    elif packed is False or (packed is None and job.framework in ("axolotl", "trl", "torchtune")):
        text = "each sequence is one sample, padded; 'run' fills sequences with the tokens of several"
        made.leave("packing", False, f'{text} (attention_mask = "document" keeps these apart)', trains=True)


def _documents_apart(made: JobPlan) -> bool:
    """Tell whether tokens of packed samples see their own sample alone.

    They do in axolotl (docs/multipack.qmd) and torchtune (torchtune/modules/attention_utils.py,
    packed_block_causal_mask); in Megatron-Bridge (src/megatron/bridge/training/gpt_step.py, whose attention takes
    the samples' lengths, cu_seqlens); in LLaMA-Factory with neat_packing alone
    (src/llamafactory/hparams/data_args.py, DataArguments); in TRL with flash attention, unless the strategy is
    `wrapped` (trl/trainer/sft_trainer.py, SFTTrainer.__init__, padding_free).
    """
    job = made.job
    if job.framework == "llama-factory":
        return made.key("packing") == "neat_packing"
    if job.framework == "trl":
        strategy = next((each.value for each in job.ignored if each.key == "packing_strategy"), "bfd")
        return job.attention is Attention.FLASH and strategy != "wrapped"
    return job.framework in ("axolotl", "torchtune", "megatron-bridge")


def _passes(made: JobPlan) -> None:
    """List the passes that recompute and offload as the job does."""
    job, store = made.job, " store=host" if made.job.offload_activations else ""
    if job.offload_optimizer:
        made.passes.append("offload-state{home=host}")
    elif job.offload_parameters:
        why = "views of zero = 3 are made of masters for each use: 'offload-state' keeps these elsewhere"
        why = why if job.adapter is None else "'offload-state{what=views}' keeps frozen parameters elsewhere"
        made.leave("offload_parameters", True, why)
    if job.checkpointing is Checkpointing.FULL and job.checkpoint_layers != 0:
        every = "" if job.checkpoint_stride is None else f" every={job.checkpoint_stride}"
        made.passes.append(f"recompute{{policy=full{every}{store}}}")
        if not every and (job.checkpoint_layers is not None or job.checkpoint_every > 1):
            value = job.checkpoint_every if job.checkpoint_layers is None else job.checkpoint_layers
            name = "checkpoint_every" if job.checkpoint_layers is None else "checkpoint_layers"
            why = "every layer is computed again from its own input: 'recompute{policy=auto}' chooses"
            made.leave(name, value, why)
    elif store:
        made.passes.append(f"recompute{{policy=none{store}}}")
    if job.checkpointing is Checkpointing.OPS:
        made.leave("checkpointing", job.checkpointing.value, RECOMPUTE)
    if job.checkpointing is Checkpointing.ATTENTION and job.attention is not Attention.EAGER:
        made.leave("checkpointing", job.checkpointing.value, "fused attention keeps no scores in any case")
    if job.optimizer_in_backward:
        made.leave("optimizer_in_backward", True, UPDATES)


def _optimizer(made: JobPlan) -> None:
    """Put the optimizer's numbers; keys that nobody says are left out of the plan's file, and named."""
    asked = made.asked
    for name, option, value in (
        ("lr", "--lr", asked.lr),
        ("betas", "", None),
        ("eps", "", None),
        ("weight_decay", "--weight-decay", asked.weight_decay),
    ):
        said = made.told(name, option, value)
        if name == "weight_decay" and value is None and said and made.job.framework == "llm-foundry":
            # DecoupledAdamW shrinks weights by weight_decay * rate / lr, AdamW by weight_decay * rate
            # (composer composer/optim/decoupled_weight_decay.py, DecoupledAdamW.adamw)
            said = said / rate if (rate := made.values.get("lr")) else said
        if said is None:
            made.unsaid.append(name)
        else:
            made.put(name, said, name)
    norm = made.told("max_grad_norm", "--max-norm", asked.max_norm)
    if norm:
        made.put("clip", "global", "max_grad_norm")
        made.put("max_norm", norm, "max_grad_norm")
    elif norm is not None or made.job.framework != "accelerate":
        made.put("clip", "none", "max_grad_norm")
    else:
        made.unsaid.append("clip")
    if made.job.framework == "accelerate" and asked.warmup_steps is None:
        made.unsaid.append("warmup_steps")
    if made.unsaid:
        named = ("lr", "weight_decay", "warmup_steps")
        options = [f"--{key.replace('_', '-')}" for key in made.unsaid if key in named]
        options += ["--max-norm"] * ("clip" in made.unsaid)
        text = f"{until_said(made.unsaid)}: the training script says them; say them in [optimizer]"
        text += f", or give {', '.join(options)}" if options else ""
        made.left.append(Left("optimizer", None, text, trains=True))


# settings that no key carries


def _elsewhere(made: JobPlan) -> None:
    """List settings whose fields no key of a plan has, and that change neither training nor the plan's state."""
    job = made.job
    whole = job.adapter is None or job.adapter.modules_to_save  # adapters are matrices
    if job.training.weight_decay and job.framework in _DECAYS_ALL and whole:
        why = "norms and biases are decayed there too; a plan decays matrices alone"
        made.leave("weight_decay", job.training.weight_decay, why, trains=True)
    for name, value, why in (
        ("model_name", job.model_name, MODEL),
        ("loss", job.loss.value, "logits are computed by rows (head_chunk), or whole (logits)"),
        ("context", job.context.value, "keys and values are gathered"),
        ("compiled", job.compiled, KERNELS),
        ("sizes", dict(job.sizes), "of the framework's buffers, which a plan does not have"),
    ):
        origin = job.origins.get(name)
        if origin is not None and not origin.default and value != Context.HEADS.value:
            made.leave(name, value, why)
    for note in job.ignored:
        if note.key.endswith("nvme_path") and job.offload_optimizer:
            why = "state waits in the host's memory: 'offload-state{home=file}' keeps it in files"
            made.left.append(Left(note.key, note.value, why))


def _notes(made: JobPlan) -> None:
    """Carry seed and view groups; refuse or list the other settings that no field of the job carries."""
    for note in made.job.ignored:
        if (note.key.endswith("nvme_path") and made.job.offload_optimizer) or is_carried(made, note.key):
            continue
        rule = rule_of_ignored(note)
        seed = as_integer(note.value) if note.key in _SEEDS else None
        if seed is not None:
            made.values["seed"] = seed
            made.places["seed"] = made.place_of(note.place)
        elif bare(note.key) == _SCALE and made.values["view_dtype"] == "f16":
            continue
        elif not rule.refused:
            made.left += filter(None, [left_of(note, rule)])
        elif not is_off(note.value) and note.value not in rule.agrees:
            _refuse_note(made, note.key, note.value, note.place, rule.why, rule.way_out)
    for note in made.job.not_understood:
        if is_carried(made, note.key):
            continue
        rule = rule_of_open(note, made.title)
        if note.key.endswith("zero_hpz_partition_size"):
            _views(made, note.key, note.value, note.place)
        elif rule.unknown:
            where = made.place_of(note.place).location
            made.report.error("RT063", f"{note.key} is {rule.why}", where, help="correct its name, or take it out")
        elif rule.refused or "HYBRID" in str(note.value).upper():
            _refuse_note(made, note.key, note.value, note.place, rule.why, rule.way_out)
        elif (left := left_of(note, rule)) is not None:
            made.left.append(left)


def _views(made: JobPlan, key: str, said: Any, place: str) -> None:
    """Put the replicas that share a second copy of the weights (hpZ of DeepSpeed)."""
    size, shards = as_integer(said), made.values.get("shard_group") or made.replicas
    if size is None or size < 1:
        _refuse_note(made, key, said, place, "at least 1 is expected")
    elif made.values.get("zero") == 3 and size > 1 and size != shards:
        made.values["view_group"] = size
        made.places["view_group"] = made.place_of(place)
    else:
        made.left.append(Left(key, said, "views are gathered from all that have shards"))


def _refuse_note(made: JobPlan, key: str, value: Any, place: str, why: str, way_out: str = "take it out") -> None:
    said = "" if value is None or value is True else f" {shown(value)}"
    where = made.place_of(place).location
    made.report.error("RT064", f"{key}{said} is not carried over: {why}", where, help=way_out)
