"""Count by storage the tensors that autograd saves of real layers with adapters: the formulas give the same bytes.

The layers are those of `transformers`; the adapters are written here as PEFT runs them (tuners/lora/layer.py).
"""

from __future__ import annotations

import pytest

from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention
from ratrain.ratrainc.fit.holdings.adapters import adapted, trained
from ratrain.ratrainc.fit.holdings.part import Part
from tests.ratrainc.fit.jobs import job_of
from tests.ratrainc.fit.test_saved_tensors import _count, _theirs, kept

torch = pytest.importorskip("torch")
RANK = 4


class LoraLinear(torch.nn.Module):
    def __init__(self, base, rank, dropout, dtype):
        super().__init__()
        self.base = base
        inputs, outputs = (base.nx, base.nf) if hasattr(base, "nx") else (base.in_features, base.out_features)
        self.a = torch.nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.b = torch.nn.Linear(rank, outputs, bias=False, dtype=dtype)
        self.rate = dropout

    def forward(self, x):
        result, cast = self.base(x), x.to(self.a.weight.dtype)
        if self.rate:  # as GPUs run it: a mask of bytes
            cast = torch.native_dropout(cast, self.rate, True)[0]
        return (result + self.b(self.a(cast)) * 2.0).to(result.dtype)


def adapt(module, layers, part, dtype):
    module.requires_grad_(False)
    for layer in layers:
        for linear in adapted(part):
            parent, _, name = linear.path.rpartition(".")
            owner = layer.get_submodule(parent)
            setattr(owner, name, LoraLinear(getattr(owner, name), RANK, part.job.adapter.dropout, dtype))


ALL = ("all-linear",)
CASES = [
    ("llama", ALL),
    ("llama", ("q_proj", "v_proj")),
    ("llama", ("o_proj", "down_proj")),
    ("llama", ("gate_proj",)),
    ("mistral", ("up_proj", "k_proj")),
    ("qwen3", ALL),
    ("olmo2", ALL),
    ("phi3", ALL),
    ("phi3", ("qkv_proj",)),
    ("granite", ("v_proj",)),
]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
@pytest.mark.parametrize(("family", "targets"), CASES)
@pytest.mark.parametrize("mixed", [False, True])
def test_layers_with_adapters_save_what_the_formulas_say(family, targets, attention, dropout, mixed):
    model, module, layer = _theirs(family, attention.value, torch.bfloat16)
    adapter = Adapter(RANK, 8.0, targets, dropout)
    types = {"autocast": True, "gradient_dtype": "f32"} if mixed else {}
    job = job_of("transformers", model, attention=attention, adapter=adapter, method="lora", **types)
    adapt(module, module.model.layers, Part(job, 0), torch.float32 if mixed else torch.bfloat16)
    assert _count(module, layer, autocast=mixed) == kept(job)
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == trained(Part(job, 0))
