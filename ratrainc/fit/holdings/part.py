"""One kind of rank of a job: its share of the model, and the micro-batches that it has in flight.

    pp = 4, tp = 2:   first stage (2 ranks a replica) | middle stages (4) | last stage (2)

Tensor-parallel ranks share out heads, the MLP's width and the vocabulary; norms are whole on each.

A model may have layers of two kinds, with experts and with a dense MLP. What one layer has is then asked of a part as
if all its layers were of that kind: `kinds` has both, `here` the one of the layer in whose backward a moment is.

    layers  d e e d     kinds: (e, 2), (d, 2)     in the backward of layer 2: before e, here e, after d
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrainc.bridge.jobs.context_ranks import copies_result
from ratrain.ratrainc.bridge.jobs.job import FSDP, UNSHARDED, Context, Experts, Job, Sharding
from ratrain.ratrainc.fit.holdings.styles import (
    JOINED_FAMILIES,
    MEGATRON,
    RMS_OF_FAMILY,
    STYLES,
    TRANSFORMERS,
    RmsForm,
    Style,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

VOCABULARY_MULTIPLE = 128
"""Default of Megatron-LM's --make-vocab-size-divisible-by (megatron/training/arguments.py), times tp."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a type, by its name in a job (`f32`, `bf16`, `f16`)."""
    return Dtype(dtype).itemsize


def share(count: int, parts: int) -> int:
    """Return the largest part of a count shared out evenly."""
    return -(-count // parts)


def stage_layers(job: Job, stage: int) -> int | None:
    """Return the layers of a pipeline stage, all chunks together; None if they do not share out evenly.

    Megatron-LM gives the first and last stage other numbers by --decoder-first-pipeline-num-layers and
    --decoder-last-pipeline-num-layers, or counts embedding and loss as a layer each by
    --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split (core/transformer/
    transformer_block.py get_num_layers_to_build). `Job.sizes` has them with underscores.
    """
    assert job.model is not None
    sizes, layers, stages = job.sizes, job.model.layers, job.pp
    given = {
        0: sizes.get("decoder_first_pipeline_num_layers"),
        job.last_stage: sizes.get("decoder_last_pipeline_num_layers"),
    }
    fixed = {index: number for index, number in given.items() if number is not None}
    counted = {0: sizes.get("account_for_embedding_in_pipeline_split", 0)}
    counted[job.last_stage] = counted.get(job.last_stage, 0) + sizes.get("account_for_loss_in_pipeline_split", 0)
    if stages == 1:
        return layers
    if fixed:
        rest, others = layers - sum(fixed.values()), stages - len(fixed)
        if rest < 0 or (others and rest % (others * job.virtual_stages)):
            return None
        return fixed.get(stage, rest // others if others else 0)
    each, odd = divmod(layers + sum(counted.values()), stages * job.virtual_stages)
    return None if odd else each * job.virtual_stages - counted.get(stage, 0)


@cache
def _of_one_kind(model: ModelConfig, letter: str) -> ModelConfig:
    """Return a model all of whose layers have the MLP of a letter: `e` experts, `d` a dense one."""
    if letter == "e":
        return evolve(model, mlp_kinds="")
    return evolve(model, mlp_kinds="", experts=None, experts_per_token=None, expert_size=None, shared_expert_size=None)


@frozen
class Part:
    """The ranks of one pipeline stage."""

    job: Job
    stage: int
    number: int | None = None
    """layer in whose backward a moment is, where layers are of two kinds; None: in none, or they are alike"""

    @property
    def model(self) -> ModelConfig:
        """The job's model."""
        assert self.job.model is not None
        return self.job.model

    @property
    def style(self) -> Style:
        """Model code of the framework."""
        return STYLES[self.job.framework]

    @property
    def rms(self) -> RmsForm:
        """Form of the family's RMSNorm in the framework's model code."""
        family = RMS_OF_FAMILY.get(self.model.family) if self.job.framework in TRANSFORMERS else None
        return family or self.style.rms

    @property
    def packed(self) -> bool:
        """True if query, key and value are views of one projection's result."""
        return self.model.packed_qkv if self.job.framework in TRANSFORMERS else self.style.packed

    @property
    def joined_rotation(self) -> bool:
        """True if rotated queries are joined with `cat`."""
        if self.job.framework in TRANSFORMERS:
            return self.model.family in JOINED_FAMILIES
        return self.style.joined_rotation

    @property
    def first(self) -> bool:
        """True if the stage has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True if the stage has the head."""
        return self.stage == self.job.last_stage

    @property
    def sharded(self) -> bool:
        """True if weights are shared out and gathered for use."""
        return self.job.sharding in (*FSDP, Sharding.ZERO3)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        if self.job.sharding in UNSHARDED:
            return 1
        assert self.job.replicas is not None
        return self.job.shard_size or self.job.replicas

    # Layers of two kinds

    def at(self, number: int) -> Part:
        """Return the part as if all its layers were of the kind of one of them."""
        letters = self.model.mlp_kinds
        if not letters:
            return self
        return Part(evolve(self.job, model=_of_one_kind(self.model, letters[number])), self.stage)

    @property
    def kinds(self) -> tuple[tuple[Part, int], ...]:
        """Kinds of layers, each as the part that has no other, with the number of its layers."""
        return self.first_layers(self.layers)

    def first_layers(self, count: int) -> tuple[tuple[Part, int], ...]:
        """Return how many of the first `count` layers are of each kind; more than there are count again."""
        letters = self.model.mlp_kinds
        if not letters:
            return ((self, count),)
        passes, rest = divmod(count, len(letters))
        return tuple(
            (self.at(letters.index(letter)), passes * letters.count(letter) + letters[:rest].count(letter))
            for letter in sorted(set(letters))
        )

    @property
    def here(self) -> Part:
        """The part of the layer in whose backward a moment is; of the last one where it is in none."""
        return self.at(self.layers - 1 if self.number is None else self.number)

    @property
    def before(self) -> Part | None:
        """The part of the layer that is next in the backward; None if there is none."""
        if self.number is None:
            return self.here
        return self.at(self.number - 1) if self.number else None

    @property
    def after(self) -> Part | None:
        """The part of the layer that was before in the backward; None if there was none."""
        if self.number is None:
            return self.here
        return self.at(self.number + 1) if self.number + 1 < self.layers else None

    # Element types

    @property
    def item(self) -> int:
        """Bytes of an element of the products' inputs and results."""
        return itemsize(self.job.compute_dtype)

    @property
    def casts(self) -> bool:
        """True if torch.autocast casts weights and inputs op by op: weights are wider than the products' inputs.

        Of layers that train beside frozen ones their own weights count.
        """
        held = self.job.trained_dtype if self.job.thawed is not None else self.job.weight_dtype
        return self.job.autocast and not self.sharded and itemsize(held) > self.item

    @property
    def stream_item(self) -> int:
        """Bytes of an element of the residual stream: under autocast the embedding's type, which no op casts.

        A frozen embedding is not of the type in which the layers train.
        """
        held = itemsize(self.job.weight_dtype)
        return max(held, self.item) if self.casts else self.item

    @property
    def result_item(self) -> int:
        """Bytes of an element that a projection returns: of a quantised one the type of its input.

        (bitsandbytes nn/modules.py Linear4bit.forward)
        """
        quantised = self.job.adapter is not None and self.job.adapter.base_bits is not None
        return self.stream_item if quantised else self.item

    # Sizes

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context rank."""
        assert self.job.micro_batch_size is not None
        assert self.job.seq_len is not None
        return self.job.micro_batch_size * share(self.job.seq_len, self.job.cp)

    @property
    def rows(self) -> int:
        """Rows of the residual stream on one rank."""
        return share(self.tokens, self.job.tp if self.job.sequence_sharding else 1)

    @property
    def heads(self) -> int:
        """Query heads of one tensor-parallel rank."""
        return share(self.model.heads, self.job.tp)

    @property
    def query(self) -> int:
        """Width of the queries of one tensor-parallel rank."""
        return self.heads * self.model.head_dim

    @property
    def key(self) -> int:
        """Width of the keys (and of the values) of one tensor-parallel rank; each rank has at least one head."""
        return share(self.model.kv_heads, self.job.tp) * self.model.head_dim

    @property
    def exchanged_key(self) -> int:
        """Width of the keys (and of the values) that a context rank exchanges, and then attends to, a token of its own.

        Where ranks have heads of whole sequences, each has at least one.
        """
        if self.style.repeats_heads:
            return self.query
        if self.job.context is not Context.HEADS:
            return self.key
        return share(share(self.model.kv_heads, self.job.tp), self.job.cp) * self.job.cp * self.model.head_dim

    @property
    def copies_result(self) -> bool:
        """True if the attention's result is kept in two layouts: a kernel's own, and that of the projection."""
        joined = self.joined_rotation and not self.job.compiled
        return joined or copies_result(self.job)

    @property
    def ffn(self) -> int:
        """Width of the MLP on one tensor-parallel rank."""
        return share(self.model.ffn_size, self.job.tp)

    @property
    def rows_of_experts(self) -> int:
        """Rows that all experts of a layer get together: each token goes to as many, whatever its router chooses."""
        return self.tokens * (self.model.experts_per_token or 0)

    @property
    def expert_item(self) -> int:
        """Bytes of an element of the experts' products: autocast leaves grouped ones in the weights' type.

        (transformers integrations/moe.py _grouped_mm)
        """
        return self.stream_item if self.job.experts is Experts.GROUPED else self.item

    @property
    def vocabulary(self) -> int:
        """Rows of the vocabulary on one tensor-parallel rank; Megatron-LM pads them."""
        if self.job.framework not in MEGATRON:
            return share(self.model.vocab_size, self.job.tp)
        multiple = self.job.sizes.get("make_vocab_size_divisible_by", VOCABULARY_MULTIPLE) * self.job.tp
        return share(self.model.vocab_size, multiple) * multiple // self.job.tp

    # Parameters

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer's parameters."""
        model = self.model
        assert not model.mlp_kinds, "one kind of layer is asked for"
        if model.experts is not None:  # whole on each rank: no formula of tensor-parallel experts is known here
            return model.layer_parameters(0)
        matrices = model.hidden_size * (2 * self.query + 2 * self.key + len(model.mlp_matrices) * self.ffn)
        return matrices + self.layer_vectors

    @property
    def layer_vectors(self) -> int:
        """Elements of one layer's norms and biases."""
        model = self.model
        wide = (self.query + 2 * self.key if model.qkv_bias else 0) + (
            (len(model.mlp_matrices) - 1) * self.ffn if model.mlp_bias else 0
        )
        narrow = model.hidden_size * (model.o_bias + model.mlp_bias)
        blocks = 2 * (model.has_pre_norm + model.has_post_norm) * model.norm_parameters
        normed = {"none": 0, "head": 2 * model.head_dim, "whole": self.query + self.key}[model.qk_norm]
        return wide + narrow + blocks + normed

    @property
    def expert_parameters(self) -> int:
        """Elements of the experts that the stage's routers choose from; 0 without."""
        return sum(count * each.layer_experts for each, count in self.kinds)

    @property
    def layer_experts(self) -> int:
        """Elements of the experts of one layer that has some; 0 without."""
        return self.model.expert_parameters // max(1, self.model.expert_layers)

    @property
    def largest_module(self) -> int:
        """Elements of the largest set of parameters that one module computes with: a matrix, or a layer's experts."""
        return max(self.largest_matrix, self.layer_experts)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding on this stage: tokens, and learned positions if any; 0 if it is elsewhere."""
        if not self.first:
            return 0
        return (self.vocabulary + (self.model.learned_positions or 0)) * self.model.hidden_size

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that makes logits; 0 if the head is on another stage."""
        return self.vocabulary * self.model.hidden_size if self.last else 0

    @property
    def tied_here(self) -> bool:
        """True if the head's matrix is the embedding of this same stage."""
        return self.model.tied_embeddings and self.first and self.last

    @property
    def outer_parameters(self) -> int:
        """Elements outside layers: embedding, final norm and head; a matrix that both use counts once."""
        head = self.head_matrix if not self.tied_here else 0
        return self.embedding_parameters + head + (self.model.norm_parameters if self.last else 0)

    @property
    def parameters(self) -> int:
        """Elements of the rank's parameters before data-parallel ranks share them out."""
        return sum(count * each.layer_parameters for each, count in self.kinds) + self.outer_parameters

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest parameter."""
        return max(self.layer_matrix, self.model.hidden_size * self.query, self.embedding_parameters, self.head_matrix)

    @property
    def layer_matrix(self) -> int:
        """Elements of the largest parameter of an MLP: of experts in stacks that of gate and up, of all of them.

        (transformers models/mixtral/modeling_mixtral.py MixtralExperts; the other families have the same stacks)
        """
        model = self.model
        if model.mlp_kinds:
            return max(each.layer_matrix for each, _ in self.kinds)
        if model.experts is None:
            return model.hidden_size * self.ffn
        one = model.hidden_size * model.expert_width
        own = one if self.job.experts is Experts.MODULES else 2 * model.experts * one
        return max(own, model.hidden_size * (model.shared_expert_size or 0))

    # Schedule

    @property
    def layers(self) -> int:
        """Layers of the stage, all chunks together."""
        layers = stage_layers(self.job, self.stage)
        assert layers is not None
        return layers

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one replica."""
        return self.job.gradient_accumulation or 1

    @property
    def layers_in_flight(self) -> int:
        """Layers whose activations are kept at once, counted once a micro-batch in flight.

        1F1B: stage r warms up with p - r micro-batches. Interleaved with v chunks a stage: 2 (p - r - 1) + (v - 1) p
        forwards of a chunk before the first backward, and one more (Megatron-LM core/pipeline_parallel/schedules.py,
        get_pp_rank_microbatches and num_warmup_microbatches). GPipe: all.
        """
        job, chunks = self.job, self.job.virtual_stages
        if job.schedule == "gpipe":
            passes = self.micro_batches
        elif chunks == 1:
            passes = job.pp - self.stage
        else:
            passes = 2 * (job.pp - self.stage - 1) + (chunks - 1) * job.pp + 1
        return min(passes, self.micro_batches * chunks) * (self.layers // chunks)

    @property
    def sums_whole(self) -> bool:
        """True if FSDP keeps whole gradients until the last micro-batch of a step."""
        return self.job.sums_whole

    @property
    def accumulates(self) -> bool:
        """True if gradients of earlier micro-batches are there while a later one runs."""
        return self.micro_batches > 1
