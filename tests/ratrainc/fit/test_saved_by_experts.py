"""Count by storage what layers with experts of `transformers` save, and what their backward makes, against the formulas."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrainc.bridge.jobs.job import Adapter, Experts
from ratrain.ratrainc.fit.holdings.activations import layer_kept
from ratrain.ratrainc.fit.holdings.experts import gradients_inside, hot_expert
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from tests.ratrainc.fit.jobs import expert_model, job_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")
# after these: the modules skip too, and a module that has skipped has no names
from tests.ratrainc.fit.test_saved_by_adapters import RANK, adapt  # noqa: E402
from tests.ratrainc.fit.test_saved_tensors import _count  # noqa: E402

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

F = torch.nn.functional
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
CLASSES = {
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "granitemoe": "GraniteMoeConfig",
}
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def theirs(model: ModelConfig, experts: Experts, dtype: str):
    """Return a model of theirs with the sizes of ours, and the second of its layers."""
    named = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size if model.mlp_kinds else model.expert_width,
        "moe_intermediate_size": model.expert_width,
        "mlp_only_layers": [number for number, letter in enumerate(model.mlp_kinds) if letter == "d"],
        "shared_expert_intermediate_size": model.shared_expert_size,
        "num_experts": model.experts,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalised,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    kind = getattr(transformers, CLASSES[model.family])
    config = kind(attn_implementation="sdpa", experts_implementation=experts.value, **named)
    module = transformers.AutoModelForCausalLM.from_config(config).to(TYPES[dtype]).train()
    return module, module.model.layers[1]


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("experts", [Experts.GROUPED, Experts.EAGER])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_experts_save_what_the_formulas_say(family, experts, dtype):
    model = expert_model(family)
    module, layer = theirs(model, experts, dtype)
    job = job_of("transformers", model, experts=experts, weight_dtype=dtype, compute_dtype=dtype)
    kept = layer_kept(Part(job, 0))
    assert _count(module, layer) == sum(each.bytes for each in kept), kept


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_leaves_grouped_products_in_f32(family):
    model = expert_model(family)
    module, layer = theirs(model, Experts.GROUPED, "f32")
    job = job_of("transformers", model, weight_dtype="f32", autocast=True)
    kept = layer_kept(Part(job, 0))
    assert _count(module, layer, autocast=True) == sum(each.bytes for each in kept), kept


@pytest.mark.parametrize("normalised", [True, False])
def test_routers_that_normalise_keep_what_they_divide(normalised):
    model = evolve(expert_model("qwen3_moe"), router_normalised=normalised)
    module, layer = theirs(model, Experts.GROUPED, "bf16")
    kept = layer_kept(Part(job_of("transformers", model), 0))
    assert _count(module, layer) == sum(each.bytes for each in kept), kept


def test_the_parameters_are_those_of_the_model():
    for family in FAMILIES:
        model = expert_model(family)
        module, _ = theirs(model, Experts.GROUPED, "f32")
        part = Part(job_of("transformers", model), 0)
        assert part.parameters == sum(each.numel() for each in module.parameters())
        named = [each.numel() for name, each in module.named_parameters() if ".experts." in name]
        assert part.expert_parameters == sum(named)
        assert part.layer_matrix == max(named)


# Layers of both kinds


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("experts", [Experts.GROUPED, Experts.EAGER])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_layers_of_both_kinds_in_one_model_save_what_the_formulas_say(family, experts, dtype):
    model = expert_model(family, layers=4, mlp_kinds="deed", ffn_size=112)
    module, _ = theirs(model, experts, dtype)
    part = Part(job_of("transformers", model, experts=experts, weight_dtype=dtype, compute_dtype=dtype), 0)
    assert part.parameters == sum(each.numel() for each in module.parameters())
    assert part.expert_parameters == sum(n.numel() for name, n in module.named_parameters() if ".experts." in name)
    for number, layer in enumerate(module.model.layers):
        assert part.at(number).layer_parameters == sum(each.numel() for each in layer.parameters())
        kept = layer_kept(part.at(number))
        assert _count(module, layer) == sum(each.bytes for each in kept), kept


def test_adapters_of_attention_in_both_kinds_save_what_the_formulas_say():
    """The input of the first layer asks for no gradient, so that it keeps less."""
    model = expert_model("qwen3_moe", layers=4, mlp_kinds="deed", ffn_size=112)
    module, _ = theirs(model, Experts.GROUPED, "bf16")
    adapter = Adapter(RANK, 8.0, ("q_proj", "v_proj", "o_proj"))
    part = Part(job_of("transformers", model, adapter=adapter, method="lora"), 0)
    assert refusal(part.job) == ""
    adapt(module, module.model.layers, part.at(0), torch.bfloat16)
    for number, layer in enumerate(module.model.layers[1:], 1):
        kept = layer_kept(part.at(number))
        assert _count(module, layer) == sum(each.bytes for each in kept), kept


# What a backward makes


def _peak_class():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Made(TorchDispatchMode):
        """Largest sum of the storages that ops make while the mode is on."""

        def __init__(self, before):
            super().__init__()
            self.live = {each.untyped_storage()._cdata: 0 for each in before}
            self.now = self.peak = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self._note(each.untyped_storage())
            return result

        def _note(self, storage):
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata)

        def _forget(self, place):
            self.now -= self.live.pop(place, 0)

    return Made


@pytest.mark.parametrize(("family", "inner"), [("mixtral", 48), ("mixtral", 512), ("qwen3_moe", 48), ("qwen3_moe", 24)])
@pytest.mark.parametrize("experts", [Experts.GROUPED, Experts.EAGER])
def test_the_backward_of_a_block_makes_what_the_formulas_say(family, inner, experts):
    """Of eager experts every token goes to the same ones, so that one has as many rows as there are tokens."""
    model = evolve(expert_model(family), expert_size=inner, ffn_size=inner, experts=2, experts_per_token=2)
    module, layer = theirs(model, experts, "bf16")
    batch, length = 8, 256
    entry = torch.randn(batch, length, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        result = layer.mlp(entry)
    gradient = torch.randn_like(result)
    with _peak_class()([*module.parameters(), entry, result, gradient, *saved]) as made:
        result.backward(gradient)
    job = job_of("transformers", model, experts=experts, seq_len=length, micro_batch_size=batch)
    part = Part(job, 0)
    rows = part.rows_of_experts if experts is Experts.GROUPED else part.tokens
    weights = part.item * part.expert_parameters // part.layers * (1 if experts is Experts.GROUPED else 3)
    told = gradients_inside(part, rows)
    assert told * 0.98 <= made.peak <= told * 1.02 + weights
    assert hot_expert(part) == 0  # two of two experts: each token goes to both


# Adapters on attention


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_experts_save_what_the_formulas_say(family, mixed):
    model = expert_model(family)
    module, layer = theirs(model, Experts.GROUPED, "bf16")
    adapter = Adapter(RANK, 8.0, ("q_proj", "v_proj", "o_proj"))
    types = {"autocast": True, "gradient_dtype": "f32"} if mixed else {}
    job = job_of("transformers", model, adapter=adapter, method="lora", **types)
    assert refusal(job) == ""
    adapt(module, module.model.layers, Part(job, 0), torch.float32 if mixed else torch.bfloat16)
    kept = layer_kept(Part(job, 0))
    assert _count(module, layer, autocast=mixed) == sum(each.bytes for each in kept), kept


# Transformers 4


class ModuleMlp(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, inner, bias=False)
        self.up = torch.nn.Linear(hidden, inner, bias=False)
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ModuleBlock(torch.nn.Module):
    """A block with a module for each expert, and a loop over those that got rows."""

    def __init__(self, model):
        super().__init__()
        self.chosen, self.normalised = model.experts_per_token, model.router_normalised
        self.router = torch.nn.Linear(model.hidden_size, model.experts, bias=False)
        each = [ModuleMlp(model.hidden_size, model.expert_width) for _ in range(model.experts)]
        self.experts = torch.nn.ModuleList(each)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        scores = F.softmax(self.router(rows), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.chosen, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(rows.dtype)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(chosen.T.eq(number))
            total.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return total.reshape(x.shape)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_module_for_each_expert_saves_what_the_formulas_say(family):
    model = expert_model(family)
    module, layer = theirs(model, Experts.EAGER, "bf16")
    layer.mlp = ModuleBlock(model).to(torch.bfloat16)
    job = job_of("transformers", model, experts=Experts.MODULES)
    kept = layer_kept(Part(job, 0))
    assert _count(module, layer) == sum(each.bytes for each in kept), kept
