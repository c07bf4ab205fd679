"""The page of all keys: what each key of a plan, a model and a machine changes, and where one is seen to.

`tests/ratrainc/commands/test_keys.py` changes every key as its entry says and looks whether that shows where the entry says; a key without an
entry fails it. The options of the commands are in `options/`.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.plan import KEYS

DOCS = Path(__file__).resolve().parent

SCHEDULE, TIMES, NUMBERS, REFUSED = "the schedule", "simulated times", "the numbers trained", "what is refused"
STORED = "times with `store =`"
OFFLOADED = "times with `offload-state`"
"""Where a change shows: in the ops, tensors and addresses of a `.rtir`; in what `simulate` says; in losses and weights; nowhere else
than in a refusal."""


@frozen
class Key:
    """What a key changes; a value other than the one it has usually, and what must stand beside it for that."""

    changes: str
    value: Any
    seen: str = SCHEDULE
    given: dict[str, Any] = field(factory=dict)
    taken: dict[str, Any] | None = None
    """what the value is compared with, where that is not `given` alone"""
    model: dict[str, Any] = field(factory=dict)
    """of a plan's key: keys of the config.json of a model that it is for, where not of all"""


_OTHER = {"architectures": None, "head_dim": 4, "initializer_range": 0.5}
_MIXTRAL = _OTHER | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
_FOUR_EXPERTS = _MIXTRAL | {"num_local_experts": 4}
_LORA = {"train.method": "lora"}

PLAN_TRIALS: dict[str, dict[str, Any]] = {
    "parallel.pp": {"value": 1, "given": {"parallel.cuts": "auto"}},
    "parallel.dp": {"value": 1},
    "parallel.cuts": {"value": [2]},
    "parallel.schedule": {"value": "gpipe"},
    "parallel.chunks": {"value": 2, "given": {"parallel.cuts": "auto"}},
    "parallel.layout": {"value": "vee", "given": {"parallel.cuts": "auto", "parallel.chunks": 2}},
    "parallel.tp": {"value": 2},
    "parallel.cp": {"value": 2, "given": {"batch.seq_len": 8}},
    "parallel.context_layout": {"value": "contiguous", "given": {"batch.seq_len": 8, "parallel.cp": 2}},
    "parallel.context_exchange": {"value": "heads", "given": {"batch.seq_len": 8, "parallel.cp": 2}},
    "parallel.context_groups": {
        "value": 2,
        "given": {"batch.seq_len": 8, "parallel.cp": 2},
        "model": {"num_key_value_heads": 2},
    },
    "parallel.ep": {"value": 2, "model": _FOUR_EXPERTS},
    "parallel.sequence_sharding": {"value": False, "given": {"parallel.tp": 2}},
    "parallel.mapping": {"value": "chip 2x1", "seen": TIMES},
    "batch.micro_batch_size": {"value": 2},
    "batch.micro_batches": {"value": 3},
    "batch.seq_len": {"value": 8},
    "batch.head_chunk": {"value": 3},
    "batch.mlp_chunk": {"value": 3},
    "batch.slices": {"value": 2},
    "batch.seed": {"value": 7, "seen": NUMBERS},
    "state.zero": {"value": 3},
    "state.zero_blocks": {"value": "mlp.1 3"},
    "state.view_group": {"value": 2, "given": {"parallel.dp": 4, "state.zero": 3}},
    "state.shard_group": {"value": 2, "given": {"parallel.dp": 4}},
    "numerics.gather_quantised": {"value": "int8-block", "seen": NUMBERS},
    "numerics.reduce_quantised": {"value": "int8-block", "seen": NUMBERS},
    "numerics.accumulate": {"value": "f16-runs", "seen": NUMBERS},
    "state.reduce": {"value": "each-micro-batch", "given": {"state.zero": 2}},
    "state.view_dtype": {"value": "f32", "given": {"state.loss_scale": 1.0, "state.grad_dtype": "f16"}},
    "state.grad_dtype": {"value": "f32", "given": {"state.grad_shard_dtype": "f16"}},
    "state.grad_shard_dtype": {"value": "f32"},
    "state.loss_scale": {"value": 1.0, "seen": NUMBERS},
    "compute.attention": {"value": "scores-kept"},
    "compute.attention_mask": {"value": "document"},
    "compute.logits": {"value": "whole", "given": {"batch.head_chunk": None}},
    "optimizer.lr": {"value": 0.01, "seen": NUMBERS},
    "optimizer.betas": {"value": [0.5, 0.6], "seen": NUMBERS},
    "optimizer.eps": {"value": 0.1, "seen": NUMBERS},
    "optimizer.weight_decay": {"value": 1.0, "seen": NUMBERS},
    "optimizer.warmup_steps": {"value": 2, "seen": NUMBERS},
    "optimizer.total_steps": {"value": 3, "seen": NUMBERS},
    "optimizer.min_lr": {"value": 0.0001, "seen": NUMBERS, "given": {"optimizer.total_steps": 3}},
    "optimizer.decay": {"value": "linear", "seen": NUMBERS, "given": {"optimizer.total_steps": 3}},
    "optimizer.decay_steps": {"value": 1, "seen": NUMBERS, "given": {"optimizer.total_steps": 3}},
    "optimizer.clip": {"value": "global"},
    "optimizer.max_norm": {"value": 0.001, "seen": NUMBERS, "given": {"optimizer.clip": "global"}},
    "train.method": {"value": "lora"},
    "train.rank": {"value": 2, "given": _LORA},
    "train.alpha": {"value": 2.0, "given": _LORA, "seen": NUMBERS},
    "train.rslora": {"value": True, "given": _LORA, "seen": NUMBERS},
    "train.targets": {"value": "q_proj", "given": _LORA},
    "train.rank_pattern": {"value": "q_proj 2", "given": _LORA},
    "train.alpha_pattern": {"value": "q_proj 2", "given": _LORA, "seen": NUMBERS},
    "train.modules_to_save": {"value": "norm", "given": _LORA},
    "train.base": {"value": "int4-block", "given": _LORA},
    "train.freeze": {"value": "model.embed_tokens.*"},
    "experts.balance_loss": {"value": 1.0, "seen": NUMBERS, "model": _MIXTRAL},
    "experts.z_loss": {"value": 1.0, "seen": NUMBERS, "model": _MIXTRAL},
    "experts.dispatch": {"value": "capacity", "given": {"parallel.ep": 2}, "model": _FOUR_EXPERTS},
    "experts.capacity_factor": {
        "value": 0.5,
        "given": {"parallel.ep": 2, "experts.dispatch": "capacity"},
        "model": _FOUR_EXPERTS,
    },
    "experts.bias_update": {"value": 0.5, "model": _MIXTRAL},
}
"""Of each key of a plan: another value than the usual one, and where that is seen."""

PLAN = {label: Key(KEYS.keys[name].changes, **PLAN_TRIALS[label]) for name, label in KEYS.labels.items()}

_QWEN2 = {"model_type": "qwen2", "architectures": None}
_BAICHUAN = {"model_type": "baichuan", "architectures": None, "num_key_value_heads": None}
_BAICHUAN |= {"position_embedding": "rope", "normalised_head": False}
_GEMMA2 = _OTHER | {"model_type": "gemma2"}
_GEMMA3 = _OTHER | {"model_type": "gemma3_text", "sliding_window": 3}
_GRANITE = _OTHER | {"model_type": "granite"}
_PHI3 = _OTHER | {"model_type": "phi3"}
_SMOLLM3 = _OTHER | {"model_type": "smollm3"}
_QWEN2_MOE = _OTHER | {"model_type": "qwen2_moe", "num_experts": 3, "num_experts_per_tok": 2}
_QWEN2_MOE |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
_NEOX = {"model_type": "gpt_neox", "architectures": None, "num_key_value_heads": None, "rms_norm_eps": None}
_NEOX |= {"rotary_pct": 0.5, "initializer_range": 0.5}
_SLIDES = _QWEN2 | {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}

MODEL = {
    "model_type": Key("the family: biases, the names of stored weights", "qwen2", given={"architectures": None}),
    "architectures": Key(
        "the family, where model_type is absent", ["MistralForCausalLM"], REFUSED, {"model_type": "llama"}
    ),
    "vocab_size": Key("rows of the embedding and the head", 70),
    "hidden_size": Key("the width of the residual stream", 12, given={"head_dim": 4}),
    "num_hidden_layers": Key("layers", 4),
    "num_attention_heads": Key("query heads", 4, given={"head_dim": 4}),
    "num_key_value_heads": Key("heads of keys and values", 2),
    "head_dim": Key("the width of a head; by default hidden_size / num_attention_heads", 6),
    "intermediate_size": Key("the width of the mlp", 12),
    "rms_norm_eps": Key("what norms add to the mean square", 0.1, NUMBERS),
    "norm_eps": Key("another name of rms_norm_eps", 0.1, NUMBERS, {"rms_norm_eps": None}),
    "tie_word_embeddings": Key("embedding and head share one matrix", True),
    "initializer_range": Key("the deviation of initial weights, where `run` is given none", 0.2, NUMBERS),
    "attention_bias": Key("biases in all of attention, where the family has the choice", True),
    "attention_bias_qkv": Key("biases of query, key and value: what the family has", True, REFUSED),
    "hidden_act": Key("the activation of the mlp", "gelu", NUMBERS),
    "hidden_activation": Key("another name of hidden_act", "gelu", NUMBERS),
    "layer_types": Key("which layers have the sliding window", ["full_attention"] * 3, NUMBERS, _SLIDES),
    "max_window_layers": Key("the first layer with a sliding window", 3, NUMBERS, _SLIDES),
    "mlp_bias": Key("biases in the mlp, where the family has the choice", True),
    "normalised_head": Key("the head's rows are scaled to unit length (Baichuan2)", True, NUMBERS, _BAICHUAN),
    "parameters_expected": Key("holds the number of parameters against the model's", 1, REFUSED),
    "partial_rotary_factor": Key("the part of each head that is rotated (phi3)", 0.5, NUMBERS, _PHI3),
    "position_embedding": Key("rope or alibi, where the family leaves it open", "alibi", NUMBERS, _BAICHUAN),
    "rope_parameters": Key("the rotary base, as `rope_theta`", {"rope_theta": 100.0}, NUMBERS),
    "rope_scaling": Key(
        "how rotary frequencies are scaled for longer sequences", {"type": "linear", "factor": 2.0}, NUMBERS
    ),
    "rope_theta": Key("the rotary base", 100.0, NUMBERS),
    "pad_token_id": Key(
        "the token whose row of the embedding gets no gradient where it is looked up, and starts as zeros; a negative one counts from the "
        "end; null: none, as where it is absent, but in gemma2 and gemma3_text (0), olmo2 and olmoe (1), phi3 (32000) and smollm3 (128004)",
        3,
        NUMBERS,
    ),
    "sliding_window": Key("tokens that a token sees", 3, NUMBERS, _SLIDES),
    "use_sliding_window": Key("whether the window of a qwen2 or qwen3 model is in use", False, NUMBERS, _SLIDES),
}

OTHERS = {
    "query_pre_attn_scalar": Key("scores are divided by its root (gemma2, gemma3_text)", 1, NUMBERS, _GEMMA2),
    "attn_logit_softcapping": Key("the soft cap of scores (gemma2)", 0.01, NUMBERS, _GEMMA2),
    "final_logit_softcapping": Key("the soft cap of logits (gemma2, gemma3_text)", 0.1, NUMBERS, _GEMMA2),
    "sliding_window_pattern": Key("every layer of that number has no window (gemma3_text)", 2, NUMBERS, _GEMMA3),
    "rope_local_base_freq": Key("the rotary base of layers with a window (gemma3_text)", 10.0, NUMBERS, _GEMMA3),
    "attention_multiplier": Key("what scores are multiplied by (granite, granitemoe)", 9.0, NUMBERS, _GRANITE),
    "embedding_multiplier": Key("what embedded tokens are multiplied by (granite, granitemoe)", 9.0, NUMBERS, _GRANITE),
    "residual_multiplier": Key("what blocks add is multiplied by (granite, granitemoe)", 0.5, NUMBERS, _GRANITE),
    "logits_scaling": Key("what logits are divided by (granite, granitemoe)", 8.0, NUMBERS, _GRANITE),
    "bias": Key(
        "biases in all of attention (internlm2)", True, SCHEDULE, {"model_type": "internlm2", "architectures": None}
    ),
    "use_parallel_residual": Key("attention and mlp side by side (gpt_neox)", False, SCHEDULE, _NEOX),
    "rotary_emb_base": Key("the rotary base (gpt_neox)", 10.0, NUMBERS, _NEOX | {"rotary_pct": 1.0}),
    "rotary_pct": Key("the part of each head that is rotated (gpt_neox)", 1.0, NUMBERS, _NEOX),
    "layer_norm_eps": Key("what norms add to the variance (gpt_neox)", 0.1, NUMBERS, _NEOX),
    **{
        name: Key(f"experts of each layer ({of})", 4, SCHEDULE, base)
        for name, of, base in (
            ("num_local_experts", "mixtral, granitemoe; qwen3_moe and olmoe read it too", _MIXTRAL),
            ("num_experts", "qwen2_moe, qwen3_moe, olmoe; mixtral reads it too", _QWEN2_MOE),
        )
    },
    "num_experts_per_tok": Key("experts that a token goes to (families with experts)", 1, SCHEDULE, _MIXTRAL),
    "moe_intermediate_size": Key("the inner width of an expert (qwen2_moe, qwen3_moe)", 12, SCHEDULE, _QWEN2_MOE),
    "shared_expert_intermediate_size": Key(
        "the inner width of the expert that all tokens pass through (qwen2_moe)", 12, SCHEDULE, _QWEN2_MOE
    ),
    "norm_topk_prob": Key(
        "whether the weights of a token's experts sum to 1 (qwen2_moe, qwen3_moe, olmoe)", True, NUMBERS, _QWEN2_MOE
    ),
    "decoder_sparse_step": Key(
        "every layer of that number has experts, the others a dense mlp (qwen2_moe, qwen3_moe)", 2, SCHEDULE, _QWEN2_MOE
    ),
    "mlp_only_layers": Key(
        "numbers of layers with a dense mlp, from 0 on (qwen2_moe, qwen3_moe)", [1], SCHEDULE, _QWEN2_MOE
    ),
    "qkv_bias": Key("biases of query, key and value (qwen2_moe)", False, SCHEDULE, _QWEN2_MOE),
    "no_rope_layers": Key("a 0 for each layer that rotates nothing (smollm3)", [0, 1, 1], NUMBERS, _SMOLLM3),
    "no_rope_layer_interval": Key("every layer of that number rotates nothing (smollm3)", 2, NUMBERS, _SMOLLM3),
}
"""Keys that some of the other families have beside those of LLaMA."""

GPT2 = {
    "n_embd": Key("the width of the residual stream", 12),
    "n_layer": Key("layers", 4),
    "n_head": Key("heads", 4),
    "activation_function": Key("the activation of the mlp", "gelu", NUMBERS, {"initializer_range": 0.5}),
    "n_inner": Key("the width of the mlp; by default 4 * n_embd", 12),
    "n_positions": Key("rows of the table of learned positions: the longest sequence", 40),
    "n_ctx": Key("another name of n_positions, in older files", 40, REFUSED),
    "max_position_embeddings": Key("another name of n_positions", 40, REFUSED),
    "learned_position_embeddings": Key("another name of n_positions", 40, REFUSED),
    "layer_norm_epsilon": Key("what norms add to the variance", 0.1, NUMBERS),
}

_TILES = {"cost": "tiles"}
_HOST = {"update_engine": "host"}
_CHIP = {"clusters_per_chip": 2}
_OF_A_STORE = {
    "capacity": ("bytes that a rank may store in the memory", 256),
    "store": ("bytes a second to the memory", 1e6),
    "fetch": ("bytes a second from the memory", 1e6),
    "latency": ("seconds of a transfer to or from the memory, bytes apart", 1e-2),
}


def _usual(home: str) -> dict[str, float]:
    """What a file says of a memory."""
    return {f"{home}_{key}": 1e9 for key in ("capacity", "store", "fetch")}


def _other_keys(home: str, name: str) -> dict[str, float]:
    """What a file says of a memory whose one key is changed."""
    return {key: value for key, value in _usual(home).items() if key != f"{home}_{name}"}


MACHINE = {
    "base": Key("the built-in machine that says what the file does not", "mt3000-1.2ghz", TIMES),
    "name": Key("what schedules and programs are compiled for", "other", SCHEDULE),
    "cost": Key("where the seconds of products and attention come from", "tiles", TIMES),
    "update_engine": Key("where shards are updated", "host"),
    "target": Key("what makes its programs: the MT-3000, or a target of a plugin", "another", SCHEDULE),
    "op": Key('the measured ops of cost = "table"; refused with any other', [], REFUSED, {"cost": "table"}),
    "link_group": Key("links by groups of clusters, in place of `link_bandwidth` and what goes with it", None, TIMES),
    "collectives": Key("the ways its transport does collectives: a list; all where it is missing", ["tree"], TIMES),
    "ddr_capacity": Key("the bytes a stage must fit", 2**16),
    "ddr_bandwidth": Key("bytes a second of memory", 1e9, TIMES),
    "fp16_peak": Key("the rate of products, whatever the type of their operands and sums", 1e12, TIMES),
    "fp32_sum_peak": Key(
        "the rate of products that are summed in f32: all but those that `numerics.accumulate` sums in f16; `fp16_peak` where missing",
        1e10,
        TIMES,
    ),
    "gemm_efficiency": Key("the part of the peak that products reach", 0.1, TIMES, {"fp16_peak": 1e6}),
    "attention_efficiency": Key("the part of the peak that attention reaches", 0.1, TIMES, {"fp16_peak": 1e6}),
    "link_bandwidth": Key("bytes a second between clusters", 1e6, TIMES),
    "link_latency": Key("seconds of a message, bytes apart", 1e-3, TIMES),
    "launch": Key("seconds to start a kernel", 1e-3, TIMES),
    "collective_chunk": Key("bytes that a reduction moves at a time: the staging buffers of collectives", 4096),
    "cores": Key("cores of a cluster", 12, TIMES, _TILES | {"fp16_peak": 8.1e12 / 2, "clock": 878.9e6}, _TILES),
    "gsm_capacity": Key("bytes shared by the cores: the tiles", 2**16, TIMES, _TILES | {"large": True}),
    "am_capacity": Key("bytes of a core's array memory: the tiles", 2**15, TIMES, _TILES | {"large": True}),
    "sm_capacity": Key("bytes of a core's scalar memory: the tiles", 2**12, TIMES, _TILES | {"large": True}),
    "clock": Key(
        "cycles a second; cores and clock make the peak", 439.45e6, TIMES, _TILES | {"fp16_peak": 8.1e12 / 2}, _TILES
    ),
    "gsm_bandwidth": Key("bytes a second of the shared memory", 1e6, TIMES, _TILES),
    "am_load": Key("bytes a cycle from array memory", 1, TIMES, _TILES),
    "dma_start": Key("cycles to start a transfer", 1e5, TIMES, _TILES),
    "micro_kernel_start": Key("cycles to start a micro-kernel", 1e6, TIMES, _TILES),
    "transpose_rate": Key("elements a cycle", 1e-3, TIMES, _TILES),
    "exp_operations": Key("operations of an exponential", 1e6, TIMES, _TILES),
    "host_bandwidth": Key("bytes a second of the host", 1e6, TIMES, _HOST),
    "host_handover": Key("seconds to hand a task to the host and back", 1e-2, TIMES, _HOST),
    "clusters_per_chip": Key(
        "clusters that talk over the chip's link", 2, TIMES, {"chip_bandwidth": 1e6}, {"clusters_per_chip": 1}
    ),
    "chip_bandwidth": Key("bytes a second within a chip", 1e6, TIMES, _CHIP),
    "chip_latency": Key("seconds of a message within a chip", 1e-3, TIMES, _CHIP),
    "chip_uplink": Key(
        "bytes a second by which the clusters of a chip together leave it", 1e3, TIMES, {"clusters_per_chip": 2}
    ),
    "message_cost": Key("seconds of the host's work for a message, beside its latency", 1e-3, TIMES),
    "round_skew": Key("seconds that the partners of a round of a collective arrive apart", 1e-3, TIMES),
    "part_copy": Key("seconds of a copy of a member's part, in gathers and reduce-scatters", 1e-3, TIMES),
    "rank_jitter": Key(
        "the standard deviation of a rank's compute time: a step takes as long as the slowest rank", 0.1, TIMES
    ),
    "dispatch": Key("the least seconds of a block op", 1e-2, TIMES),
    "engine_gap": Key(
        "seconds between instructions where engines take turns: `simulate --one-core`", 1e-2, "simulate --one-core"
    ),
    "core_sharing": Key(
        "what an op takes more where ranks share a core: `simulate --cores N` of more ranks than N",
        0.1,
        "simulate --cores 2",
    ),
    "gemm_half_extent": Key(
        "the extent at which products run at half their efficiency", 1000, TIMES, {"fp16_peak": 1e9}
    ),
    "head_efficiency": Key("the part of the peak that the head's products reach", 0.01, TIMES, {"fp16_peak": 1e6}),
    "runtime_overhead": Key("bytes of a rank that no program sees: what is left for tensors", 1e9),
    "transport_overhead": Key("bytes of communication buffers of a rank that talks to others", 1e9),
    "transport_overhead_per_group": Key("the same for each communicator that it is a member of", 1e9),
    "allocator_slack": Key("the part of `ddr_capacity` that a caching allocator loses", 0.1),
    "step_error": Key("the error of simulated against published steps, which answers state", 0.1, TIMES),
    **{
        f"{home}_{name}": Key(f"{what} '{home}'", value, f"{STORED} {home}", _other_keys(home, name), _usual(home))
        for home in ("host", "file")
        for name, (what, value) in _OF_A_STORE.items()
    },
    "host_update": Key(
        "bytes a second that a processor beside the memory 'host' passes over: it updates what is there",
        1e3,
        f"{OFFLOADED} host",
        _usual("host"),
        _usual("host"),
    ),
}

GROUP = {
    "name": "what a plan's mapping calls the group",
    "clusters": "clusters of one group; all there are in the outermost",
    "bandwidth": "bytes a second of a cluster's link within the group",
    "latency": "seconds of a message within the group",
    "uplink": "bytes a second by which all clusters of a group together leave it",
}
CONSTANT = {
    "value": 'the number, or a text with its unit like "80 GB"; alone, without a table, it is the constant',
    "unit": "held against the unit of the constant; needed where bytes, seconds or rates are bare numbers",
    "certainty": "shown in reports; one of a few words, assumed where it is missing",
    "source": "shown in reports; must be said of what is not assumed",
}


_OF_OTHERS = """\
`router_aux_loss_coef` of a file with experts changes nothing: `output_router_logits` must be false, so the router has no loss of its own.
`attention_dropout` of a Granite file is a probability of dropout as well, and may be what it is. `pad_token_id` of a GPT-NeoX file
changes nothing: its class gives the row of that token a gradient. `sliding_window_size` of a gemma2 file is another name of its
window, and held against it.
"""


_MADE_FOR = """A plan's file may have a table `[made_for]` too: `machine` and `capacity` say what it is for
where a command is given no `--machine` ([machines travel](machine.md#it-travels-with-what-is-compiled)).
"""


def page() -> str:
    """The text of `docs/keys.md`."""
    options = runpy.run_path(str(DOCS / "options"))
    llama, gpt2 = keys_of("llama"), keys_of("gpt2")
    experts = {**keys_of("qwen3_moe").neutral, **keys_of("mixtral").neutral}
    parts = [
        (
            "# Keys and options\n\nEvery key and option with the one thing that it changes, and where the change shows. Tests change each of them. A key or\n"
            "an option that would change nothing where it stands is refused.\n\n<!-- written by docs/generate.py from docs/keys.py and docs/options/ -->\n"
        ),
        _table("A plan", PLAN),
        _MADE_FOR,
        _table("A model's config.json", MODEL),
        _refused(llama.neutral.items()),
        _kept(llama.harmless),
        _table("A GPT-2 config.json, beside these", GPT2),
        _refused((key, entry) for key, entry in gpt2.neutral.items() if llama.neutral.get(key) != entry),
        _kept(gpt2.harmless - llama.harmless)
        + "\nThe three `_pdrop` are probabilities of dropout, 0.1 in the published files: training here has none.\n",
        _table("The config.json of other families, beside these", OTHERS),
        _OF_OTHERS,
        "In families with experts, beside these. "
        + _refused((key, entry) for key, entry in experts.items() if llama.neutral.get(key) != entry),
        _table("A machine file", MACHINE),
        _list("Of a `[[link_group]]`", GROUP),
        _list("Of a constant", CONSTANT),
        options["text"](),
    ]
    return "\n".join(parts)


def _refused(keys: Iterable[tuple[str, tuple[tuple[object, ...], str]]]) -> str:
    lines = "\n".join(f"- `{key}`: {what}" for key, (_, what) in keys)
    return f"Refused unless they are switched off:\n\n{lines}\n"


def _kept(keys: Iterable[str]) -> str:
    names = ", ".join(f"`{key}`" for key in sorted(keys))
    return f"Known to change nothing that is trained here; kept, and exported as they came in: {names}.\n"


def _table(title: str, keys: dict[str, Key]) -> str:
    rows = "\n".join(f"| `{name}` | {key.changes} | {key.seen} |" for name, key in keys.items())
    return f"## {title}\n\n| key | changes | seen in |\n|---|---|---|\n{rows}\n"


def _list(title: str, keys: dict[str, str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- `{name}`: {what}" for name, what in keys.items()) + "\n"
