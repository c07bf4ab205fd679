"""A training run as its settings ask for it, in terms that all frameworks share.

A reader of a settings format (`ratrainc/bridge/`) makes a `Job`; the holdings of frameworks (`ratrainc/fit/holdings/`)
turn one into bytes of each rank. Every field that a reader puts has its origin: the key in the file's own words, or the
framework's default and the place in its source. Nothing here is a default of ours: a field that neither the file nor
the framework decides is None, and `fit` asks for it by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from attrs import field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import Location
from ratrain.ratrain_ir.topology import grid


class Sharding(Enum):
    """State that the data-parallel ranks share out, by the mechanism that does it."""

    NONE = "none"
    """one device, no wrapper: gradients are the optimizer's own"""
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DISTRIBUTED_OPTIMIZER = "distributed-optimizer"
    """Megatron-LM's: masters and moments are shared out, main gradients are whole"""


UNSHARDED, FSDP = (Sharding.NONE, Sharding.DDP), (Sharding.FSDP1, Sharding.FSDP2)
"""Ways without shards: every replica has the whole state. And the versions of FSDP."""
ZERO_STAGES = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
"""Sharding by the stage of DeepSpeed's zero_optimization, from 0."""


class Checkpointing(Enum):
    """Activations that forward drops and backward recomputes."""

    NONE = "none"
    FULL = "full"
    """the input of each layer (or of `checkpoint_layers` of them) is kept, everything inside is recomputed"""
    ATTENTION = "attention"
    """the attention core alone: scores, softmax, dropout and the product with values (Megatron-LM's `selective`)"""
    OPS = "ops"
    """torchtitan's per-op policy: results of listed ops are kept, every second matrix product is recomputed"""


class Attention(Enum):
    """Attention implementation, as far as its bytes differ."""

    EAGER = "eager"
    """keeps scores of all heads: probabilities, and what dropout and upcasts add"""
    SDPA = "sdpa"
    """PyTorch's fused kernels: keeps the log of each row's sum"""
    FLASH = "flash"


class Loss(Enum):
    """Loss from logits, as far as its bytes differ."""

    UPCAST = "upcast"
    """whole logits, with a copy in f32"""
    WHOLE = "whole"
    """whole logits in the compute type, no f32 copy"""
    CHUNKED = "chunked"
    """whole logits, upcast in `loss_chunks` pieces"""
    FUSED = "fused"
    """a fused linear cross-entropy: whole logits never exist"""
    VOCAB_PARALLEL = "vocab-parallel"
    """each tensor-parallel rank holds logits of its part of the vocabulary, with a copy in f32"""


class Context(Enum):
    """Form in which context ranks, each with a part of every sequence, attend to all of it."""

    GATHER = "gather"
    """keys and values of all ranks are gathered"""
    RING = "ring"
    """keys and values travel from rank to rank; partial results are merged"""
    HEADS = "heads"
    """for attention each rank has whole sequences of some heads (Ulysses, all-to-all)"""


class Experts(Enum):
    """Code that runs the experts of a layer, as far as its bytes differ."""

    GROUPED = "grouped_mm"
    """all rows in order of their experts, one grouped product a stack of weights: transformers' default since 5.0"""
    EAGER = "eager"
    """stacks of weights, and a loop over the experts that got rows"""
    MODULES = "modules"
    """a module for each expert, and a loop over them: transformers 4"""


OF_TRAINER = frozenset({"axolotl", "llama-factory", "trl", "transformers", "accelerate"})
"""Frameworks that train with transformers' Trainer and accelerate, by the name that a job has."""
WAITS = OF_TRAINER | {"litgpt"}
"""Frameworks whose FSDP reduces gradients after the last micro-batch of a step: they run the others under no_sync.

transformers' Trainer does (src/transformers/trainer.py Trainer._run_epoch; 4.28 in _inner_training_loop) through
accelerate (src/accelerate/accelerator.py Accelerator.no_sync, which does it to FSDP 2 since version 1.11), and
Lightning Fabric (litgpt/finetune/full.py, no_backward_sync; lightning/fabric/strategies/fsdp.py). torchtune, torchtitan
and nanotron reduce each, and Composer does with FSDP (composer/distributed/dist_strategy.py ddp_sync_context)."""


@frozen
class Origin:
    """Origin of a field's value: a key of the file, or a default in the framework's source."""

    key: str
    """key in the file's own words; the framework's name of it for a default"""
    place: str
    """`train.yaml:12`, or `axolotl src/axolotl/utils/schemas/config.py, micro_batch_size` for a default"""
    default: bool = False


def location_of(place: str) -> Location | None:
    """Return the location that an origin or a note names as `file:line`; None for one without a line."""
    match = re.fullmatch(r"(.+):(\d+)", place)
    return None if match is None else Location(match[1], int(match[2]))


ADAPTER, THAWED = "adapter.", "thawed."
"""Beginnings of the names under which a job has the origins of what its adapter has, and of what trains alone."""
NOT_KNOWN = "not known here"
"""Beginning of the reason of a setting whose name a framework is not known to have."""


@frozen
class Note:
    """A setting that no field carries."""

    key: str
    value: Any
    place: str
    why: str
    less: bool = False
    """true if the setting may lower memory, and is counted as if it did not"""


@frozen
class Adapter:
    """A low-rank adapter that trains in place of the weights."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """names of linears as the file has them, or `ALL_LINEAR` alone"""
    dropout: float = 0.0
    base_bits: int | None = None
    """bits a base weight if it is quantised: 4 or 8"""
    double_quantised: bool = False
    kind: str = ""
    """another kind than plain low-rank products, by the file's word: `use_dora: true`; empty for LoRA and rsLoRA"""
    rslora: bool = False
    """true if products are scaled by alpha / sqrt(rank)"""
    quantisation: str = ""
    """type of a base in 4 bits, by bitsandbytes' name: `nf4`, `fp4`; empty for others"""
    start: str = ""
    """setting by which the matrices start otherwise than PEFT's do, in the file's words; empty: they start so"""
    further_targets: tuple[str, ...] = ()
    """names of linears that the file has beside `ALL_LINEAR`"""
    target_parameters: tuple[str, ...] = ()
    """names of parameters that take one, such as stacks of experts"""
    excluded: tuple[str, ...] = ()
    """names of linears that take none though `targets` names them, or one expression for whole names after `re:`"""
    layers: tuple[int, ...] = ()
    """layers whose linears take one; empty: all"""
    layers_pattern: tuple[str, ...] = ()
    """names of the list that `layers` counts in; empty: of any"""
    rank_pattern: tuple[tuple[str, float], ...] = ()
    """ranks of linears that have others than `rank`, by ends of their names or expressions for them"""
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """as `rank_pattern` has ranks"""
    modules_to_save: tuple[str, ...] = ()
    """modules that train whole beside adapters, by ends of their names"""
    ensure_weight_tying: bool = False
    """true if a table that is tied stays so where it trains whole"""


@frozen
class Thawed:
    """Layers and modules that train alone, as LLaMA-Factory's `finetuning_type: freeze` names them.

    axolotl's `unfrozen_parameters` has expressions of names in place of numbers, which `chosen` and `extra_modules` say
    of a model that is known.
    """

    layers: int = 0
    """number of the last layers that train; below 0, of the first"""
    modules: tuple[str, ...] = ("all",)
    """modules that train in these layers, by the names after a layer's number; `all`: every one"""
    extra_modules: tuple[str, ...] = ()
    """modules outside of layers that train too"""
    spread: bool = False
    """true if the layers are spread evenly over the model (LLaMA Pro)"""
    expressions: tuple[str, ...] = ()
    """expressions of the names of parameters that train"""
    parameters: tuple[str, ...] = ()
    """names of parameters that the expressions choose"""
    chosen: tuple[int, ...] = ()
    """numbers of the layers of which they choose everything"""
    odd: str = ""
    """name of a parameter that they choose without the rest of its layer; empty without one"""
    rows: bool = False
    """true if of some parameter they choose some rows alone, the others having gradients of zero"""

    def numbers(self, count: int) -> Sequence[int]:
        """Return the numbers of the layers that train, of `count`; those that are spread must divide them."""
        if self.expressions:
            return self.chosen
        if self.spread:
            stride = count // self.layers
            return range(stride - 1, count, stride)
        return range(max(0, count - self.layers), count) if self.layers > 0 else range(min(-self.layers, count))


@frozen
class Training:
    """Settings of training that memory does not depend on: for `import-plan`, and shown with `--json`."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    """None: no clipping"""
    scheduler: str | None = None
    """learning-rate schedule, in the file's own words"""
    decay_style: str | None = None
    """curve of the last steps of a schedule that stays level first, in the file's own words"""
    stable_steps: int | None = None
    """steps at `lr` between warm-up and decay; None: all that the decay leaves"""
    decay_steps: int | None = None
    """steps in which the learning rate comes down; None: all after the warm-up"""
    min_lr: float | None = None
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    steps: int | None = None
    epochs: float | None = None
    packing: bool | None = None


@frozen
class Job:
    """One training run on devices of one kind."""

    framework: str
    """`axolotl`, `llama-factory`, `trl`, `transformers`, `accelerate`, `torchtune`, `megatron-lm`, `megatron-bridge`,
    `deepspeed`, `torchtitan`, `nanotron`, `llm-foundry`, `litgpt`, or `pytorch` for a job given by options alone"""
    model_name: str | None
    """as the file has it: a hub name, a path, a flavour"""
    model: ModelConfig | None
    """None if the name is not known and the file does not describe the model: `fit` asks for --model"""
    seq_len: int | None
    micro_batch_size: int | None
    """sequences a device and forward"""
    gradient_accumulation: int | None
    """micro-batches a step and device"""
    whole_batch: int | None = None
    """sequences of a step over all ranks, if the settings fix them; None: they grow with the devices"""
    follows: str = "gradient_accumulation"
    """field that follows from `whole_batch` and the devices: this one, `micro_batch_size`, or empty if the settings fix
    all of them, so that no other number of devices is accepted"""

    devices: int | None = None
    device_bytes: int | None = None
    """None if the file does not say (most do not)"""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    context: Context = Context.GATHER
    """counts only with several context ranks"""
    ep: int = 1
    virtual_stages: int = 1
    """chunks of layers a pipeline rank"""
    schedule: str = "1f1b"
    sequence_sharding: bool = False
    """true if tensor-parallel ranks share out rows between blocks (Megatron-LM's and torchtitan's sequence parallel)"""
    sharding: Sharding = Sharding.NONE
    shard_size: int | None = None
    """ranks that share one copy of the state (hybrid sharding), context ranks among them; None: all data-parallel and
    context ranks"""
    reshard_after_forward: bool = True
    """false if gathered weights stay for the backward"""

    weight_dtype: str = "f32"
    """weights as held between steps"""
    compute_dtype: str = "f32"
    """products' inputs: a cast of the weights if it differs (autocast, FSDP's param_dtype)"""
    autocast: bool = False
    """true if weights are cast op by op (torch.autocast) and not in a gathered copy"""
    gradient_dtype: str = "f32"
    """gradients as held until the optimizer's step"""
    reduce_dtype: str = "f32"
    reduces_each: bool = False
    """true if the settings have gradients reduced after each micro-batch where the framework waits for the last"""
    master_dtype: str | None = None
    """master weights apart from `weight_dtype`; None: the optimizer updates the weights themselves"""

    optimizer: str = "adamw"
    """`adamw`, `adamw-fused`, `adamw-foreach-off`, `adamw-8bit`, `adamw-8bit-paged`, `adamw-4bit`, `adamw-paged`,
    `adafactor`, `sgd`, `sgd-momentum`, `lion`, `lion-8bit`, `muon`"""
    state_dtype: str | None = None
    """type of the moments; None: the optimizer's own rule"""
    optimizer_in_backward: bool = False
    """true if each parameter is updated as soon as its gradient is there, and the gradient freed"""

    checkpointing: Checkpointing = Checkpointing.NONE
    checkpoint_layers: int | None = None
    """layers that are recomputed; None: all"""
    checkpoint_stride: int | None = None
    """N if these are each N-th layer, counted from 1; None: the settings choose them otherwise"""
    checkpoint_every: int = 1
    """layers a kept input"""
    attention: Attention = Attention.SDPA
    experts: Experts = Experts.GROUPED
    """counts only for a model with experts"""
    router_logits: bool = False
    """true if the routers' logits of all layers stay for an auxiliary loss"""
    loss: Loss = Loss.UPCAST
    loss_chunks: int | None = None
    dropout: float = 0.0
    """largest dropout rate of the layers: above 0 masks are kept"""
    compiled: bool = False
    """true if torch.compile or fused elementwise kernels keep fewer results"""
    fp8: bool = False

    offload_parameters: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False
    sizes: Mapping[str, int] = field(factory=dict)
    """bytes or elements of the framework's own buffers, by the framework's name (`reduce_bucket_size`, ...), and other
    numbers that decide them (`heads_k_stride`)"""

    method: str = "full"
    """`pretrain`, `full`, `lora`, `frozen` (parts do not train)"""
    adapter: Adapter | None = None
    thawed: Thawed | None = None
    """None unless `method` is `frozen`"""

    training: Training = Training()
    origins: Mapping[str, Origin] = field(factory=dict)
    """origin of each field above that the file or a default of the framework decides, by its name; of what an adapter
    has by `adapter.` and the name of it, of what trains alone by `thawed.`"""
    not_understood: tuple[Note, ...] = ()
    """settings that may change memory, and that no field carries: the answer says "at least" """
    ignored: tuple[Note, ...] = ()
    """settings that change no byte of a device, with the reason"""

    @property
    def trained_dtype(self) -> str:
        """Type of what trains, as held between steps.

        Adapters, and what trains beside frozen weights, have that of their gradients; an engine with master weights
        holds one type for all.
        """
        return self.gradient_dtype if self.trains_part and not self.master_dtype else self.weight_dtype

    @property
    def trains_part(self) -> bool:
        """True if weights are frozen: adapters train in their place, or some layers alone."""
        return self.adapter is not None or self.thawed is not None

    @property
    def sums_whole(self) -> bool:
        """True if whole gradients of earlier micro-batches wait on each rank of FSDP for the last one."""
        fully = self.sharding in FSDP
        waits = fully and self.framework in WAITS and not self.reduces_each
        return waits and (self.gradient_accumulation or 1) > 1

    @property
    def model_ranks(self) -> int:
        """Devices that hold one copy of the model's computation: tensor, pipeline and context ranks."""
        return self.tp * self.pp * self.cp

    @property
    def last_stage(self) -> int:
        """Number of the pipeline stage that has the head."""
        return grid(self.pp, 1, self.tp).last_stage

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks; None while the number of devices is not known."""
        return None if self.devices is None else self.devices // self.model_ranks

    @property
    def replicas(self) -> int | None:
        """Ranks that hold the same weights, context ranks among them; None while the number of devices is not known."""
        return None if self.dp is None else self.dp * self.cp
