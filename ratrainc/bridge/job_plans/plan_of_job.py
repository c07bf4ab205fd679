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

import math
from collections.abc import Mapping
from typing import Any

from attrs import define, evolve, field

from ratrain.ratrain_ir.config.optimizer import LINEAR, Optimizer
from ratrain.ratrain_ir.config.plan_keys import CONTIGUOUS, OF_HEADS
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.text import Place, shown
from ratrain.ratrainc.bridge.job_plans.adapter_keys import is_carried, put_adapter
from ratrain.ratrainc.bridge.job_plans.frozen_keys import put_thawed
from ratrain.ratrainc.bridge.job_plans.job_notes import bare, left_of, rule_of_ignored, rule_of_open
from ratrain.ratrainc.bridge.job_plans.job_rates import (
    OTHER_SHAPE,
    curve_of,
    fall_of,
    is_level_first,
    needs_end,
    stays_level,
)
from ratrain.ratrainc.bridge.jobs.context_ranks import length_divisor, source_of_one_run
from ratrain.ratrainc.bridge.jobs.job import (
    FSDP,
    OF_TRAINER,
    Attention,
    Checkpointing,
    Context,
    Job,
    Origin,
    Sharding,
    location_of,
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
_LENGTH = "'run --steps' sets the length of a run"
_WARM_UP_SHARE, _MOST_WARM_UP = 0.03, 100
"""axolotl's warm-up without a setting (src/axolotl/core/builders/base.py, _configure_warmup_and_logging)."""


def zero_level(job: Job) -> int:
    """Return the ZeRO level of a plan that shares out as much of the state as the job's mechanism."""
    return _LEVELS.get(job.sharding, 3 if job.reshard_after_forward else 2)


def plan_of_job(job: Job, title: str, top: Place, asked: Asked) -> JobPlan:
    """Return keys of a plan and passes that express a job, and the settings that they leave out.

    Raises `DiagnosticError`: RT063 if the job leaves open what a plan needs, RT064 if it trains what no plan can.
    """
    made = JobPlan(job, title, top, asked)
    made.make()
    made.report.check()
    return made


@define
class JobPlan:
    """Keys of a plan from a job, and what is told of it. Errors collect in `report`."""

    job: Job
    title: str
    """the framework's name"""
    top: Place
    """the file as a whole"""
    asked: Asked
    report: Diagnostics = field(factory=Diagnostics)
    values: dict[str, Any] = field(factory=dict)
    places: dict[str, Place] = field(factory=dict)
    left: list[Left] = field(factory=list)
    passes: list[str] = field(factory=list)
    defaults: dict[str, Default] = field(factory=dict)
    """ways of the framework that decide keys of the plan and are no field of a job"""
    unsaid: list[str] = field(factory=list)
    """keys left out of the plan's file, since neither the file nor the framework determines them"""

    def make(self) -> None:
        """Put all keys and passes; list what is left out."""
        self._refuse_methods()
        self._state_bits()
        if self.job.adapter is not None:
            put_adapter(self)
        elif self.job.thawed is not None:
            put_thawed(self)
        self._ranks()
        self._batch()
        if "dp" in self.values:
            self._shards(self._replicas)
        self._types()
        self._attention()
        self._passes()
        self._optimizer()
        self._rate()
        self._elsewhere()
        self._notes()

    def key(self, name: str) -> str:
        """Return the file's own word for a field of the job; the field's name without one."""
        origin = self._origin(name)
        return name if origin is None or not origin.key else origin.key

    def place(self, name: str) -> Place:
        """Return the place of a field's setting; the file as a whole for a default, an option or an open field."""
        origin = self._origin(name)
        return self.top if origin is None or origin.default else self._place_of(origin.place)

    def _origin(self, name: str) -> Origin | None:
        """Return the origin of a field; of what an adapter has without one, that of the adapter."""
        return self.job.origins.get(name) or self.job.origins.get(name.partition(".")[0])

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of the plan; its place is that of the first of the job's fields `names` that the file says."""
        self.values[key] = value
        places = (self.place(name) for name in names)
        self.places[key] = next((each for each in places if each is not self.top), self.top)

    def wrong(self, name: str, message: str, way_out: str, *, code: str = "RT064") -> None:
        """Report an error at a field's setting."""
        place = self.place(name)
        self.report.error(code, message, place.location, help=way_out, source=place.source)

    def leave(self, name: str, value: Any, why: str, *, trains: bool = False) -> None:
        """List a field of the job that is not carried over, under the file's own word."""
        self.left.append(Left(self.key(name), value, why, trains))

    def _place_of(self, text: str) -> Place:
        """Return the place that an origin or a note names as `file:line`."""
        location = location_of(text)
        return self.top if location is None else Place(location)

    # what is refused

    def _refuse_methods(self) -> None:
        """Refuse what trains another model, or other parts of it, than a plan does."""
        job = self.job
        if job.adapter is None and job.method == "lora":
            self.wrong("method", f"{self.key('method')}: rank and targets of the adapter are not said", "say them")
        if job.fp8:
            self.wrong("fp8", f"{self.key('fp8')}: float8 is no type of a plan", "switch it off: bf16, f16 or f32")
        if job.dropout:
            text = f"{self.key('dropout')}: layers drop {job.dropout:g} of their results; a plan has no dropout"
            self.wrong("dropout", text, "say 0, in the file or in the model's config.json")
        kind = job.optimizer
        if kind not in (*_F32_MOMENTS, *_NARROW_MOMENTS):
            text = f"{self.key('optimizer')}: a plan trains with AdamW, not with {kind}"
            self.wrong("optimizer", text, "say AdamW, and its learning rate")

    def _state_bits(self) -> None:
        """Refuse state in fewer bits than a plan's, or list it if f32 was asked for in its place."""
        job, found = self.job, []
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
            if self.asked.f32_state:
                self.leave(name, value, f"{text}; the plan's masters and moments are f32", trains=True)
            else:
                way_out = "--f32-state makes a plan with f32 masters and moments in their place"
                self.wrong(name, f"{self.key(name)}: {text}; a plan's state is f32", way_out)
        if self.asked.f32_state and not found:
            text = "--f32-state changes nothing: the file keeps masters and moments in f32"
            self.report.error("RT064", text, self.top.location, help="leave it out")
        if job.optimizer.endswith("paged"):
            self.leave("optimizer", job.optimizer, "state does not move by pages: 'offload-state' says where it is")

    # keys

    def _ranks(self) -> None:
        """Put the degrees of parallelism, chunks and schedule; report devices that they do not share out."""
        job = self.job
        if job.devices is None:
            text = f"this file of {self.title} does not say on how many devices it runs"
            self.wrong("devices", text, "give --clusters N", code="RT063")
        elif job.devices < 1 or job.devices % job.model_ranks:
            text = f"{job.devices} devices are not a multiple of tp {job.tp} * pp {job.pp} * cp {job.cp}"
            self.wrong("devices", text, f"give --clusters {job.model_ranks}, or a multiple")
        else:
            self.put("dp", job.dp, "devices", "sharding")
        self.put("pp", job.pp, "pp")
        if job.tp > 1:
            self.put("tp", job.tp, "tp")
            self.put("sequence_sharding", job.sequence_sharding, "sequence_sharding", "tp")
        if job.ep > 1:
            self.put("ep", job.ep, "ep")
        if job.cp > 1:
            self.put("cp", job.cp, "cp")
            if job.context is Context.HEADS:
                self.put("context_exchange", OF_HEADS, "context", "cp")
            self._context_layout()
        if job.virtual_stages > 1:
            self.put("chunks", job.virtual_stages, "virtual_stages")
        if job.pp > 1 and job.schedule in SCHEDULES:
            self.put("schedule", job.schedule, "schedule", "pp")
        elif job.pp > 1:
            self.leave("schedule", job.schedule, "the strategy, or a schedule of the plan, places another")

    def _context_layout(self) -> None:
        """Put one run a context rank if the framework cuts sequences so, and two of each do not go into the length."""
        job, source = self.job, source_of_one_run(self.job)
        odd = job.seq_len is not None and job.seq_len % (2 * job.cp) and job.seq_len % job.cp == 0
        if odd and source is not None and length_divisor(job) <= job.cp:
            self.put("context_layout", CONTIGUOUS, "cp")
            self.defaults["context_layout"] = Default(CONTIGUOUS, source)

    def _batch(self) -> None:
        """Put the batch: sequences, micro-batch, and micro-batches by accumulation or by --global-batch."""
        job = self.job
        for name, text, option in (
            ("seq_len", "how long sequences are", "--seq-len S"),
            ("micro_batch_size", "how many sequences a micro-batch has", "--micro-batch-size N"),
        ):
            value = getattr(job, name)
            if value is None:
                self.wrong(name, f"this file of {self.title} does not say {text}", f"give {option}", code="RT063")
            else:
                self.put(name, value, name)
        times, whole = job.gradient_accumulation, self.asked.global_batch
        micro, dp = job.micro_batch_size, self.values.get("dp")
        if whole is None or micro is None or dp is None:
            if times is None and whole is None and dp is not None:  # a file may say the batch of all devices
                text = f"this file of {self.title} does not say how many micro-batches a step has"
                self.wrong("gradient_accumulation", text, "give --global-batch N", code="RT063")
            elif times is not None:
                self.put("micro_batches", times, "gradient_accumulation")
            return
        origin = job.origins.get("gradient_accumulation")
        open_ = times is None or (origin is not None and origin.default)
        if whole % (micro * dp):
            text = f"--global-batch {whole} is not a multiple of micro-batches of {micro} * {dp} replicas"
            self.wrong("gradient_accumulation", text, f"give --global-batch {micro * dp}, or a multiple")
        elif open_ or whole == micro * dp * (times or 1):
            self.put("micro_batches", whole // (micro * dp), "gradient_accumulation")
        else:
            text = f"--global-batch {whole} contradicts {self.key('gradient_accumulation')} {times}"
            self.wrong("gradient_accumulation", text, f"leave it out: a step has {micro * dp * (times or 1)} sequences")

    def _shards(self, replicas: int) -> None:
        """Put the ZeRO level, the time of reductions, and the groups that share out state.

        Context ranks count among the `replicas`, which hold the same weights.
        """
        job, group = self.job, self.job.shard_size
        zero = zero_level(job)
        if group == 1:
            zero, group = 0, None  # each replica has the whole state
        times = self.values.get("micro_batches")
        waits = zero < 2 or evolve(job, gradient_accumulation=times).sums_whole
        self.put("zero", zero, "sharding", "reshard_after_forward")
        self.put("reduce", "last" if waits else "each-micro-batch", "sharding")
        if group is not None and 1 < group < replicas and zero:
            self.put("shard_group", group, "shard_size")
        elif group is not None and replicas % group:
            text = f"{self.key('shard_size')}: groups of {group} replicas do not make up {replicas}"
            self.wrong("shard_size", text, "say a number that divides the data-parallel ranks")

    @property
    def _replicas(self) -> int:
        """Ranks that hold the same weights of a stage; as many as context ranks before `dp` is put."""
        return int(self.values.get("dp", 1)) * self.job.cp

    def _types(self) -> None:
        """Put the types of views and gradients, and the loss scale.

        A gradient that waits for the last micro-batch is held whole in the framework's own type of gradients; one that
        is reduced at once is made in the type of products, and its shard has the framework's type.
        """
        job, kind = self.job, self.job.compute_dtype
        self.put("view_dtype", kind, "compute_dtype")
        waits = self.values.get("reduce", "last") == "last"
        shards = self.values.get("zero", 0) > 0 and self._replicas > 1
        if not shards or (waits and job.sharding not in FSDP):
            whole = job.gradient_dtype
        else:  # FSDP 2 casts what waits to the type of the reduction (fit/holdings/whole_sums.py)
            whole = job.reduce_dtype if waits and job.sharding is Sharding.FSDP2 else kind
        self.put("grad_dtype", whole, "gradient_dtype", "compute_dtype")
        if shards:
            self.put("grad_shard_dtype", job.gradient_dtype, "gradient_dtype", "reduce_dtype")
        if kind == "f16":
            said = next((each.value for each in job.ignored if bare(each.key) == _SCALE), None)
            scale = as_number(said)
            self.put("loss_scale", scale or "dynamic", "compute_dtype")
        else:
            self.put("loss_scale", 1.0, "compute_dtype")

    def _attention(self) -> None:
        """Put the scores that attention holds, and the mask of packed documents."""
        job = self.job
        if job.attention is Attention.EAGER:
            again = job.checkpointing is Checkpointing.ATTENTION
            self.put("attention", "scores-recomputed" if again else "scores-kept", "attention")
        packed = job.training.packing
        if packed and self._documents_apart():
            self.put("attention_mask", "document", "packing")
        elif packed is False or (packed is None and job.framework in ("axolotl", "trl", "torchtune")):
            text = "each sequence is one sample, padded; 'run' fills sequences with the tokens of several"
            self.leave("packing", False, f'{text} (attention_mask = "document" keeps these apart)', trains=True)

    def _documents_apart(self) -> bool:
        """Tell whether tokens of packed samples see their own sample alone.

        They do in axolotl (docs/multipack.qmd) and torchtune (torchtune/modules/attention_utils.py,
        packed_block_causal_mask); in Megatron-Bridge (src/megatron/bridge/training/gpt_step.py, whose attention takes
        the samples' lengths, cu_seqlens); in LLaMA-Factory with neat_packing alone
        (src/llamafactory/hparams/data_args.py, DataArguments); in TRL with flash attention, unless the strategy is
        `wrapped` (trl/trainer/sft_trainer.py, SFTTrainer.__init__, padding_free).
        """
        job = self.job
        if job.framework == "llama-factory":
            return self.key("packing") == "neat_packing"
        if job.framework == "trl":
            strategy = next((each.value for each in job.ignored if each.key == "packing_strategy"), "bfd")
            return job.attention is Attention.FLASH and strategy != "wrapped"
        return job.framework in ("axolotl", "torchtune", "megatron-bridge")

    def _passes(self) -> None:
        """List the passes that recompute and offload as the job does."""
        job, store = self.job, " store=host" if self.job.offload_activations else ""
        if job.offload_optimizer:
            self.passes.append("offload-state{home=host}")
        elif job.offload_parameters:
            why = "views of zero = 3 are made of masters for each use: 'offload-state' keeps these elsewhere"
            why = why if job.adapter is None else "'offload-state{what=views}' keeps frozen parameters elsewhere"
            self.leave("offload_parameters", True, why)
        if job.checkpointing is Checkpointing.FULL:
            self.passes.append(f"recompute{{policy=full{store}}}")
            if job.checkpoint_layers is not None or job.checkpoint_every > 1:
                value = job.checkpoint_every if job.checkpoint_layers is None else job.checkpoint_layers
                name = "checkpoint_every" if job.checkpoint_layers is None else "checkpoint_layers"
                why = "every layer is computed again from its own input: 'recompute{policy=auto}' chooses"
                self.leave(name, value, why)
        elif store:
            self.passes.append(f"recompute{{policy=none{store}}}")
        if job.checkpointing is Checkpointing.OPS:
            self.leave("checkpointing", job.checkpointing.value, RECOMPUTE)
        if job.checkpointing is Checkpointing.ATTENTION and job.attention is not Attention.EAGER:
            self.leave("checkpointing", job.checkpointing.value, "fused attention keeps no scores in any case")
        if job.optimizer_in_backward:
            self.leave("optimizer_in_backward", True, UPDATES)

    def _told(self, name: str, option: str, value: Any) -> Any:
        """Return a field of the training, or the option that fills it in; report a contradiction with the file."""
        said, origin = getattr(self.job.training, name), self.job.origins.get(name)
        if value is None:
            return said
        if said is not None and said != value and not (origin is not None and origin.default):
            text = f"{option} {shown(value)} contradicts {self.key(name)} {shown(said)}"
            self.wrong(name, text, "leave the option out, or change the file")
        return value

    def _optimizer(self) -> None:
        """Put the optimizer's numbers; keys that nobody says are left out of the plan's file, and named."""
        asked = self.asked
        for name, option, value in (
            ("lr", "--lr", asked.lr),
            ("betas", "", None),
            ("eps", "", None),
            ("weight_decay", "--weight-decay", asked.weight_decay),
        ):
            said = self._told(name, option, value)
            if name == "weight_decay" and value is None and said and self.job.framework == "llm-foundry":
                # DecoupledAdamW shrinks weights by weight_decay * rate / lr, AdamW by weight_decay * rate
                # (composer composer/optim/decoupled_weight_decay.py, DecoupledAdamW.adamw)
                said = said / rate if (rate := self.values.get("lr")) else said
            if said is None:
                self.unsaid.append(name)
            else:
                self.put(name, said, name)
        norm = self._told("max_grad_norm", "--max-norm", asked.max_norm)
        if norm:
            self.put("clip", "global", "max_grad_norm")
            self.put("max_norm", norm, "max_grad_norm")
        elif norm is not None or self.job.framework != "accelerate":
            self.put("clip", "none", "max_grad_norm")
        else:
            self.unsaid.append("clip")
        if self.job.framework == "accelerate" and asked.warmup_steps is None:
            self.unsaid.append("warmup_steps")
        if self.unsaid:
            named = ("lr", "weight_decay", "warmup_steps")
            options = [f"--{key.replace('_', '-')}" for key in self.unsaid if key in named]
            options += ["--max-norm"] * ("clip" in self.unsaid)
            text = f"{until_said(self.unsaid)}: the training script says them; say them in [optimizer]"
            text += f", or give {', '.join(options)}" if options else ""
            self.left.append(Left("optimizer", None, text, trains=True))

    def _rate(self) -> None:
        """Put warm-up and decay of the learning rate."""
        told, asked = self.job.training, self.asked
        whole = self.job.framework != "torchtune"  # there steps are those of an epoch (max_steps_per_epoch)
        steps = self._told("steps", "--steps", asked.steps) if whole else asked.steps
        warm = self._warm_up(steps)
        if warm is not None:
            self.put("warmup_steps", warm, "warmup_steps", "warmup_ratio")
        curve = curve_of(told)
        if curve is not None:
            self._fall(curve, warm or 0, steps)
        elif not stays_level(told):
            self.leave("scheduler", told.scheduler, OTHER_SHAPE, trains=True)
            for name in ("decay_style", "stable_steps", "decay_steps", "min_lr"):
                if (value := getattr(told, name)) and self.key(name) not in {each.key for each in self.left}:
                    self.leave(name, value, OTHER_SHAPE, trains=True)
        elif not told.scheduler and self.job.framework == "accelerate":
            why = "the training script says it: without total_steps the rate stays at lr after the warm-up"
            self.left.append(Left("scheduler", None, why, trains=True))
        used = self._share_of_steps or (curve is not None and needs_end(self.job))
        if asked.steps is not None and not used:
            text = f"--steps {asked.steps} changes nothing: the learning rate depends on no number of steps"
            self.report.error("RT064", text, self.top.location, help="leave it out; 'run --steps' sets a run's length")
        if told.steps is not None and not (curve is not None and needs_end(self.job)):
            self.leave("steps", told.steps, _LENGTH)
        if told.epochs is not None:
            self.leave("epochs", told.epochs, _LENGTH)

    def _fall(self, curve: str, warm: int, steps: int | None) -> None:
        """Put the end, curve and length of a rate that comes down after `warm` steps; report an open length."""
        told, fall = self.job.training, fall_of(self.job, curve, warm, steps)
        said = f"{self.key('scheduler')} {told.scheduler}"
        if fall is None and steps is None:
            text = f"{said} ends at the last step, which the file does not say"
            self.wrong("scheduler", text, "give --steps N", code="RT063")
            return
        if fall is None:
            text = f"{said} needs the number of its last steps, in which the rate comes down: {self.title} stops there"
            self.wrong("scheduler", text, "say it in the file", code="RT063")
            return
        ends_at_0 = fall.decay == LINEAR and self.job.framework in OF_TRAINER and not is_level_first(told)
        if ends_at_0 and told.min_lr is not None:
            text = f"{said} comes down to 0: transformers stops at {self.key('min_lr')}"
            self.wrong("min_lr", text, "take it out of the file")
            return
        self.put("total_steps", fall.total_steps, "steps", "scheduler")
        if fall.decay != Optimizer().decay:
            self.put("decay", fall.decay, "decay_style", "scheduler")
        if fall.decay_steps is not None:
            self.put("decay_steps", fall.decay_steps, "decay_steps", "scheduler")
        if told.min_lr:
            self.put("min_lr", told.min_lr, "min_lr")

    @property
    def _share_of_steps(self) -> bool:
        """True if the warm-up is a share of all steps."""
        if self.asked.warmup_steps is not None or self.job.training.warmup_steps is not None:
            return False
        return self.job.training.warmup_ratio is not None or self.job.framework == "axolotl"

    def _warm_up(self, steps: int | None) -> int | None:
        """Return the steps of the warm-up; None where nothing says them. Report a share of a length that is open."""
        told = self.job.training
        asked = self._told("warmup_steps", "--warmup-steps", self.asked.warmup_steps)
        if not self._share_of_steps:
            if asked is not None and told.warmup_ratio is not None and steps is not None:
                self._check_share(asked, told.warmup_ratio, steps)
            return None if asked is None else self._least(int(asked))
        if steps is None:
            name = "warmup_ratio" if told.warmup_ratio is not None else "warmup_steps"
            share = told.warmup_ratio if told.warmup_ratio is not None else _WARM_UP_SHARE
            text = f"{self.key(name)}: the warm-up is {share:g} of the steps, whose number the file does not say"
            self.wrong(name, text, "give --steps N, or --warmup-steps N", code="RT063")
            return None
        if told.warmup_ratio is None:
            return self._least(min(int(_WARM_UP_SHARE * steps), _MOST_WARM_UP))
        return self._share(told.warmup_ratio, steps)

    def _share(self, ratio: float, steps: int) -> int:
        """Return the steps of a warm-up that is a share of all steps.

        (transformers src/transformers/training_args.py, TrainingArguments.get_warmup_steps; axolotl
        src/axolotl/core/builders/base.py, _configure_warmup_and_logging; composer composer/optim/scheduler.py,
        _convert_time)
        """
        if self.job.framework not in ("axolotl", "llm-foundry"):
            return math.ceil(steps * ratio)
        return self._least(max(int(ratio * steps), 0))

    def _least(self, warm: int) -> int:
        """Return the steps of a warm-up as the framework takes them: axolotl makes two of one."""
        return 2 if self.job.framework == "axolotl" and warm == 1 else warm

    def _check_share(self, asked: int, ratio: float, steps: int) -> None:
        """Report --warmup-steps that contradict the file's share of a known number of steps."""
        if (warm := self._share(ratio, steps)) != asked:
            text = f"--warmup-steps {asked} contradicts {self.key('warmup_ratio')} {ratio:g} of {steps} steps: {warm}"
            self.wrong("warmup_ratio", text, "leave the option out, or change the file")

    # settings that no key carries

    def _elsewhere(self) -> None:
        """List settings whose fields no key of a plan has, and that change neither training nor the plan's state."""
        job = self.job
        whole = job.adapter is None or job.adapter.modules_to_save  # adapters are matrices
        if job.training.weight_decay and job.framework in _DECAYS_ALL and whole:
            why = "norms and biases are decayed there too; a plan decays matrices alone"
            self.leave("weight_decay", job.training.weight_decay, why, trains=True)
        for name, value, why in (
            ("model_name", job.model_name, MODEL),
            ("loss", job.loss.value, "logits are computed by rows (head_chunk), or whole (logits)"),
            ("context", job.context.value, "keys and values are gathered"),
            ("compiled", job.compiled, KERNELS),
            ("sizes", dict(job.sizes), "of the framework's buffers, which a plan does not have"),
        ):
            origin = job.origins.get(name)
            if origin is not None and not origin.default and value != Context.HEADS.value:
                self.leave(name, value, why)
        for note in job.ignored:
            if note.key.endswith("nvme_path") and job.offload_optimizer:
                why = "state waits in the host's memory: 'offload-state{home=file}' keeps it in files"
                self.left.append(Left(note.key, note.value, why))

    def _notes(self) -> None:
        """Carry seed and view groups; refuse or list the other settings that no field of the job carries."""
        for note in self.job.ignored:
            if (note.key.endswith("nvme_path") and self.job.offload_optimizer) or is_carried(self, note.key):
                continue
            rule = rule_of_ignored(note)
            seed = as_integer(note.value) if note.key in _SEEDS else None
            if seed is not None:
                self.values["seed"] = seed
                self.places["seed"] = self._place_of(note.place)
            elif bare(note.key) == _SCALE and self.values["view_dtype"] == "f16":
                continue
            elif not rule.refused:
                self.left += filter(None, [left_of(note, rule)])
            elif not is_off(note.value) and note.value not in rule.agrees:
                self._refuse_note(note.key, note.value, note.place, rule.why, rule.way_out)
        for note in self.job.not_understood:
            if is_carried(self, note.key):
                continue
            rule = rule_of_open(note, self.title)
            if note.key.endswith("zero_hpz_partition_size"):
                self._views(note.key, note.value, note.place)
            elif rule.unknown:
                where = self._place_of(note.place).location
                self.report.error("RT063", f"{note.key} is {rule.why}", where, help="correct its name, or take it out")
            elif rule.refused or "HYBRID" in str(note.value).upper():
                self._refuse_note(note.key, note.value, note.place, rule.why, rule.way_out)
            elif (left := left_of(note, rule)) is not None:
                self.left.append(left)

    def _views(self, key: str, said: Any, place: str) -> None:
        """Put the replicas that share a second copy of the weights (hpZ of DeepSpeed)."""
        size, shards = as_integer(said), self.values.get("shard_group") or self._replicas
        if size is None or size < 1:
            self._refuse_note(key, said, place, "at least 1 is expected")
        elif self.values.get("zero") == 3 and size > 1 and size != shards:
            self.values["view_group"] = size
            self.places["view_group"] = self._place_of(place)
        else:
            self.left.append(Left(key, said, "views are gathered from all that have shards"))

    def _refuse_note(self, key: str, value: Any, place: str, why: str, way_out: str = "take it out") -> None:
        said = "" if value is None or value is True else f" {shown(value)}"
        where = self._place_of(place).location
        self.report.error("RT064", f"{key}{said} is not carried over: {why}", where, help=way_out)
