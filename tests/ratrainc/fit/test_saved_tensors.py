"""Count by storage the tensors that autograd saves of real layers: the formulas give the same bytes.

The layers are those of `transformers` where it is installed, and blocks written here as other frameworks write theirs.
"""

from __future__ import annotations

import pytest

from ratrain.ratrainc.bridge.jobs.job import Attention
from ratrain.ratrainc.fit.holdings.activations import layer_kept
from ratrain.ratrainc.fit.holdings.part import Part
from tests.ratrainc.fit.jobs import job_of, model_of

torch = pytest.importorskip("torch")
F = torch.nn.functional
BATCH, SEQ = 2, 32


class Saved:
    """Bytes of the storages that autograd saves, without parameters, casts of them, and what is `shared`."""

    def __init__(self, module, shared=()):
        self.parameters = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *shared)}
        self.storages = {}
        self.alive = []

    def pack(self, tensor):
        self.alive.append(tensor)  # so that no address is used twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters and not _of_a_weight(tensor.grad_fn):
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(self.storages.values())

    def watch(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


def _of_a_weight(node) -> bool:
    """A view or a cast of a leaf."""
    while node is not None and node.name() in {"TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0"}:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def kept(job) -> int:
    return sum(each.bytes for each in layer_kept(Part(job, 0)))


# transformers


CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "gpt2": "GPT2Config",
    "gpt_neox": "GPTNeoXConfig",
}


def _theirs(family: str, attention: str, dtype):
    """Return the second layer of a model, and a function that runs the whole model."""
    transformers = pytest.importorskip("transformers")
    model = model_of(family, **_equal_heads(family))
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    }
    if family == "gpt2":
        sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": model.ffn_size}
    config = getattr(transformers, CONFIGS[family])(attn_implementation=attention, **sizes)
    module = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    layers = (
        module.transformer.h
        if family == "gpt2"
        else module.gpt_neox.layers
        if family == "gpt_neox"
        else module.model.layers
    )
    return model, module, layers[1]


def _equal_heads(family: str):
    return {"kv_heads": 4} if family in {"gpt2", "gpt_neox"} else {}


def _count(module, layer, autocast=False) -> int:
    """Return the bytes saved inside one layer, tables of rotations aside: all layers share them."""
    tables = []
    layer.register_forward_pre_hook(
        lambda _, args, named: tables.extend(named.get("position_embeddings") or ()), with_kwargs=True
    )
    tokens = torch.randint(0, 96, (BATCH, SEQ))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(input_ids=tokens, use_cache=False)
        saved = Saved(module)
        hooks = []

        def before(*_):
            saved.parameters |= {each.untyped_storage().data_ptr() for each in tables}
            hooks.append(saved.watch())
            hooks[0].__enter__()

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(lambda *_: hooks[0].__exit__(None, None, None))
        module(input_ids=tokens, use_cache=False)
    return saved.bytes


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
@pytest.mark.parametrize("family", CONFIGS)
def test_layers_of_transformers_save_what_the_formulas_say(family, attention, dtype):
    if family == "gemma2" and attention is Attention.SDPA:
        pytest.skip("its capped scores need eager attention")
    kind = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    model, module, layer = _theirs(family, attention.value, kind)
    if family == "gemma2":
        model = model_of("gemma2", attention_softcap=50.0)
    job = job_of("transformers", model, attention=attention, weight_dtype=dtype, compute_dtype=dtype)
    narrow = BATCH * SEQ * 2 * 2 * 2 if model.has_layer_norm and dtype == "bf16" else 0  # statistics are bf16 on a CPU
    assert _count(module, layer) == kept(job) - narrow


@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
def test_autocast_keeps_a_stream_of_f32_and_an_input_a_projection(attention):
    model, module, layer = _theirs("llama", attention.value, torch.float32)
    job = job_of("transformers", model, attention=attention, weight_dtype="f32", autocast=True)
    assert _count(module, layer, autocast=True) == kept(job)


# Blocks as other frameworks write them


class Block(torch.nn.Module):
    """A gated block in the manner of litgpt (one projection) or torchtune (three), with a choice of norm."""

    def __init__(self, model, packed, whole):
        super().__init__()
        hidden, ffn = model.hidden_size, model.ffn_size
        self.model, self.packed, self.whole = model, packed, whole
        self.qkv = torch.nn.Linear(hidden, model.q_size + 2 * model.kv_size, bias=False)
        self.q, self.k, self.v = (
            torch.nn.Linear(hidden, n, bias=False) for n in (model.q_size, model.kv_size, model.kv_size)
        )
        self.o = torch.nn.Linear(model.q_size, hidden, bias=False)
        self.gate, self.up = (torch.nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(ffn, hidden, bias=False)
        self.n1, self.n2 = (torch.nn.Parameter(torch.ones(hidden)) for _ in range(2))

    def norm(self, x, weight):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normed * weight.float()).to(x.dtype) if self.whole else normed.to(x.dtype) * weight

    def heads(self, x, count):
        return x.view(BATCH, SEQ, count, self.model.head_dim).transpose(1, 2)

    def forward(self, x, cos, sin):
        model = self.model
        normed = self.norm(x, self.n1)
        if self.packed:
            q, k, v = self.qkv(normed).split((model.q_size, model.kv_size, model.kv_size), dim=-1)
        else:
            q, k, v = self.q(normed), self.k(normed), self.v(normed)
        q, k, v = self.heads(q, model.heads), self.heads(k, model.kv_heads), self.heads(v, model.kv_heads)
        q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        if self.packed:
            q, k = torch.cat((q, q[..., :0]), -1), torch.cat((k, k[..., :0]), -1)
        if model.heads != model.kv_heads:
            times = model.heads // model.kv_heads
            k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, SEQ, -1)
        x = x + self.o(out)
        normed = self.norm(x, self.n2)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("framework", ["litgpt", "torchtune"])
def test_blocks_of_other_frameworks_save_what_the_formulas_say(framework, kv_heads):
    model = model_of("llama", kv_heads=kv_heads)
    block = Block(model, packed=framework == "litgpt", whole=framework == "litgpt").to(torch.bfloat16)
    cos, sin = torch.randn(2, SEQ, model.head_dim).to(torch.bfloat16)
    x = torch.randn(BATCH, SEQ, model.hidden_size, dtype=torch.bfloat16, requires_grad=True) * 1
    # the f32 copy of a norm's weights belongs to no token: litgpt makes one
    saved = Saved(block, (cos, sin))
    with saved.watch():
        block(x, cos, sin)
    assert saved.bytes == kept(job_of(framework, model))


# Megatron-LM


class ByteDropout(torch.autograd.Function):
    """Dropout as on a GPU: it keeps a byte an element."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand(x.shape) > 0.1
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class SwiGlu(torch.autograd.Function):
    """The fused activation: it keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        return grad.repeat(1, 1, 2)


def _drop(x, rate):
    return ByteDropout.apply(x) if rate else x


class Megatron(torch.nn.Module):
    def __init__(self, model, rate):
        super().__init__()
        hidden = model.hidden_size
        self.model, self.rate = model, rate
        wide = (2 if model.gated_mlp else 1) * model.ffn_size
        self.n1, self.n2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = torch.nn.Linear(hidden, wide), torch.nn.Linear(model.ffn_size, hidden)

    def heads(self, x):
        return x.view(BATCH, SEQ, self.model.heads, -1).transpose(1, 2).reshape(BATCH * self.model.heads, SEQ, -1)

    def forward(self, x):
        normed = self.n1(x)
        q, k, v = self.heads(self.q(normed)), self.heads(self.k(normed)), self.heads(self.v(normed))
        scores = _drop(torch.bmm(q, k.transpose(1, 2)).softmax(-1), self.rate)
        out = torch.bmm(scores, v).view(BATCH, -1, SEQ, self.model.head_dim).transpose(1, 2).reshape(BATCH, SEQ, -1)
        x = x + _drop(self.o(out), self.rate)
        up = self.up(self.n2(x))
        activated = SwiGlu.apply(up) if self.model.gated_mlp else F.gelu(up)
        return x + _drop(self.down(activated), self.rate)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_of_megatron_saves_what_the_formulas_say(gated, rate):
    model = model_of("gpt2", kv_heads=4, gated_mlp=gated, learned_positions=64)
    layer = Megatron(model, rate).to(torch.bfloat16)
    x = torch.randn(BATCH, SEQ, model.hidden_size, dtype=torch.bfloat16, requires_grad=True) * 1
    saved = Saved(layer)
    with saved.watch():
        layer(x)
    job = job_of("megatron-lm", model, attention=Attention.EAGER, dropout=rate)
    assert saved.bytes == kept(job) - BATCH * SEQ * 2 * 2 * 2
