"""Adapters against PEFT, in f32: loss and gradients of tiny models of each family; folders there and back."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import ALL_LINEAR, Training, split_names
from ratrain.ratrain_ir.model.parameter_names import is_router_module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers
from ratrain.ratrainc.running.weight_export import export_adapter, export_weights
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.weights.adapter_config import COMPARED, INERT
from ratrain.targets.runtime.weights.adapter_config import PLAIN as PLAIN_KEYS
from ratrain.targets.runtime.weights.adapter_files import adapter_layout
from tests.end_to_end.tiny_runs import start, train
from tests.parity import test_experts, test_families
from tests.parity.test_families import BETA1, HELD_OUT, LOSS, loss_of, program_of, same_gradients, sequences
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.runtime.weights.weights import Stored

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # of target parameters
    pytest.mark.filterwarnings("ignore::UserWarning"),  # peft: a base without a configuration in the same folder
]

PLAIN = Training(method="lora", rank=4, alpha=8.0)
QV = Training(method="lora", rank=3, alpha=3.0, targets="q_proj, v_proj")
RSLORA = Training(method="lora", rank=4, alpha=16.0, rslora=True, targets="o_proj, up_proj, down_proj")
ATTENTION = Training(method="lora", rank=4, alpha=8.0, targets="q_proj, k_proj, v_proj, o_proj")
EXPERTS = Training(method="lora", rank=4, alpha=8.0, targets="q_proj, o_proj, experts.gate_up_proj, experts.down_proj")
PACKED = Training(method="lora", rank=2, alpha=4.0, targets="c_attn")
SOME_LAYERS = Training(method="lora", rank=4, alpha=8.0, targets=r"re:.*\.[02]\..*\.(q|v|down)_proj")
PATTERNS = ModuleNumbers((("q_proj", 2), ("layers.1.mlp.down_proj", 3), (r".*\.[23]\.mlp\.(down|up)_proj", 5)))
ALPHAS = ModuleNumbers((("v_proj", 0.5), (r"layers\.[02]\.mlp\.down_proj", 3)))
RANKED = evolve(PLAIN, rank_pattern=PATTERNS, alpha_pattern=ALPHAS)
RANKED_ROOTS = evolve(RANKED, rslora=True)
PACKED_RANKS = evolve(PLAIN, rank_pattern=ModuleNumbers((("h.1.attn.c_attn", 2), ("h.3.mlp.c_fc", 1))))
EXPERT_RANKS = evolve(
    EXPERTS,
    rank_pattern=ModuleNumbers((("experts.down_proj", 2), ("1.mlp.experts.gate_up_proj", 3), ("o_proj", 1))),
    alpha_pattern=ModuleNumbers((("experts.gate_up_proj", 5),)),
)
SAVED = evolve(QV, modules_to_save="embed_tokens, lm_head, model.norm")
SAVED_NORMS = evolve(QV, modules_to_save="input_layernorm, mlp.down_proj")
CASES = [
    ("llama", SAVED),
    ("llama", SAVED_NORMS),
    ("gpt2", evolve(PACKED, modules_to_save="wte, lm_head, wpe")),
    ("qwen2", evolve(QV, modules_to_save="embed_tokens, lm_head")),
    ("llama", SOME_LAYERS),
    ("llama", RANKED),
    ("qwen3", RANKED_ROOTS),
    ("gpt2-exact", PACKED_RANKS),
    ("gpt2", evolve(PACKED, targets=r"re:transformer\.h\.[13]\.attn\.c_(attn|proj)")),
    ("qwen3_moe", EXPERT_RANKS),
    *(("llama", training) for training in (PLAIN, QV, RSLORA)),
    ("llama-biased", PLAIN),
    ("mistral-window", RSLORA),
    ("qwen2", PLAIN),
    ("qwen3", PLAIN),
    ("gemma2", PLAIN),
    ("gemma3", QV),
    ("olmo2", PLAIN),
    ("granite", PLAIN),
    ("phi3", Training(method="lora", rank=4, alpha=8.0, targets="o_proj, down_proj")),
    ("phi3", PLAIN),
    ("phi3-partial", Training(method="lora", rank=2, alpha=6.0, targets="qkv_proj, gate_up_proj")),
    ("gpt2-exact", Training(method="lora", rank=2, alpha=4.0, targets="attn.c_proj, mlp.c_fc")),
    ("gpt2-exact", PACKED),
    ("gpt2", PLAIN),
    ("gpt-neox-scaled", Training(method="lora", rank=4, alpha=8.0, targets="dense, dense_4h_to_h")),
    ("gpt-neox-scaled", PLAIN),
    ("gpt-neox-serial", Training(method="lora", rank=3, alpha=2.0, rslora=True, targets="query_key_value")),
    ("mixtral-window", QV),
    ("qwen3_moe", QV),
    ("qwen3_moe-normalised", ATTENTION),
    ("olmoe", ATTENTION),
    ("qwen2_moe", PLAIN),
    ("qwen2_moe-tied", Training(method="lora", rank=4, alpha=8.0, targets="shared_expert.down_proj, o_proj")),
    ("granitemoe", PLAIN),
    ("mixtral", EXPERTS),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe-normalised", Training(method="lora", rank=3, alpha=2.0, rslora=True, targets="experts.gate_up_proj")),
    ("olmoe", Training(method="lora", rank=2, alpha=4.0, targets="q_proj, experts.down_proj")),
    ("qwen2_moe", Training(method="lora", rank=2, alpha=4.0, targets="experts.down_proj, shared_expert.up_proj")),
    ("granitemoe", EXPERTS),
    *((name, PLAIN) for name in ("mixtral", "qwen3_moe-normalised", "olmoe")),
    ("qwen3_moe", evolve(PLAIN, rslora=True)),
    ("qwen3_moe", evolve(QV, targets="gate")),
    ("qwen2_moe", evolve(ATTENTION, targets="v_proj, gate", rank_pattern=ModuleNumbers((("gate", 2),)))),
    ("granitemoe", evolve(ATTENTION, targets="v_proj, router")),
]
"""Models of `test_families` and `test_experts`, and adapters."""
PREFIX = "base_model.model."
ROUTERS = ("gate", "router")
"""Targets that are parameters in PEFT: `gate.weight`."""


def adapted(network: Any, training: Training, folder: Path, modules: list[str]) -> Any:
    """The network with random adapters, saved as PEFT saves them; what is all linear says PEFT."""
    import peft
    import torch

    targets = training.targets.removeprefix("re:")
    config = peft.LoraConfig(
        r=training.rank,
        lora_alpha=training.alpha,
        use_rslora=training.rslora,
        target_modules=targets if training.targets == ALL_LINEAR or training.targets != targets else modules,
        modules_to_save=list(split_names(training.modules_to_save)) or None,
        ensure_weight_tying=bool(training.modules_to_save) and network.config.tie_word_embeddings,
        rank_pattern={
            f"{key}.weight" * (key in ROUTERS) or key: int(rank) for key, rank in training.rank_pattern or ()
        },
        alpha_pattern=dict(training.alpha_pattern or ()),
        target_parameters=[
            f"{each}.weight" if each in ROUTERS else each
            for each in split_names(training.targets)
            if each.startswith("experts.") or each in ROUTERS
        ],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        fan_in_fan_out=network.config.model_type == "gpt2",
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(network, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def base_of(name: str, folder: Path) -> Any:
    """A model of `transformers` with random weights, saved in a folder."""
    return (test_experts if name in test_experts.MODELS else test_families).saved(name, folder)


def modules_of(program: Any) -> list[str]:
    """The linear layers that have an adapter, by the names in `transformers`."""
    modules = [name.partition(".lora_")[0] for name in layout(program) if ".lora_" in name]
    return sorted({module for module in modules if ".experts." not in f"{module}." and not is_router_module(module)})


def layout(program: Any) -> dict[str, Stored]:
    """The tensors of PEFT's files of a program's adapters."""
    return adapter_layout(program.trained_model)


@pytest.mark.parametrize(
    ("name", "training", "peers"),
    [
        *((*case, 1) for case in CASES),
        ("llama", PLAIN, 2),
        ("llama", RSLORA, 4),
        ("llama", RANKED, 2),
        ("llama", SAVED, 2),
        ("qwen3_moe", EXPERT_RANKS, 2),
        ("gemma2", PLAIN, 2),
        ("gpt2", PLAIN, 2),
        ("phi3", PLAIN, 4),
        ("gpt-neox-scaled", PLAIN, 4),
        ("qwen2_moe", PLAIN, 2),
        ("qwen3_moe", ATTENTION, 4),
        ("qwen3_moe", EXPERTS, 2),
        ("granitemoe", EXPERTS, 4),
        ("mixtral", PLAIN, 2),
    ],
)
def test_loss_and_gradients_are_those_of_peft(name: str, training: Training, peers: int, tmp_path: Path) -> None:
    network = base_of(name, tmp_path / "base")
    program = program_of(load_model(str(tmp_path / "base")), training=training, tp=peers)
    network = adapted(network, training, tmp_path / "adapter", modules_of(program))
    run = start(program, 1, init=str(tmp_path / "base"), init_adapter=str(tmp_path / "adapter"), order="sequential")
    (step,) = run.steps()
    network = network.double()
    loss = loss_of(network, sequences(program, 0))
    loss.backward()
    assert step.report.loss == pytest.approx(float(loss.detach()), rel=LOSS)
    blocks = training_state(run.engine, 1).blocks
    parts = {
        name: part
        for block in blocks
        for name, part in named_parameters_of(
            program.trained_model, block, blocks[block].m1 / np.float32(1 - BETA1)
        ).items()
    }
    found = {
        f"{PREFIX}{name}": held.joined([parts[part.name] for part in held.parts])
        for name, held in layout(program).items()
    }
    wanted = {
        key.replace(".modules_to_save", "").replace(".default", ""): each.grad.numpy()
        for key, each in network.named_parameters()
        if each.grad is not None
    }
    same_gradients(found, wanted)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("llama", PLAIN),
        ("llama", SOME_LAYERS),
        ("llama", SAVED),
        ("qwen2", evolve(QV, modules_to_save="embed_tokens, lm_head")),
        ("llama", RANKED_ROOTS),
        ("gpt2-exact", PACKED_RANKS),
        ("qwen3_moe", EXPERT_RANKS),
        ("qwen3", RSLORA),
        ("gpt2-exact", PACKED),
        ("gpt2", PLAIN),
        ("phi3", PLAIN),
        ("gpt-neox-scaled", PLAIN),
        ("qwen3_moe", QV),
        ("qwen2_moe", PLAIN),
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
        ("olmoe", PLAIN),
        ("qwen2_moe", evolve(ATTENTION, targets="v_proj, gate", rank_pattern=ModuleNumbers((("gate", 2),)))),
    ],
)
def test_trained_adapters_have_their_loss_in_peft_and_merged(name: str, training: Training, tmp_path: Path) -> None:
    import peft
    import torch

    base_of(name, tmp_path / "base")
    program = program_of(load_model(str(tmp_path / "base")), training=training)
    checkpoint, base = str(tmp_path / "checkpoint"), str(tmp_path / "base")
    train(program, 20, init=base, order="sequential", save=checkpoint)
    (following,) = start(program, 1, order="sequential", init=base, resume=checkpoint).steps()
    export_adapter(checkpoint, str(tmp_path / "adapter"), base)
    network = test_experts.loaded(tmp_path / "base")
    beside = peft.PeftModel.from_pretrained(network, tmp_path / "adapter").double()
    export_weights(checkpoint, str(tmp_path / "merged"), init=base)
    whole = test_experts.loaded(tmp_path / "merged")
    with torch.no_grad():
        for model in (beside, whole):
            loss = float(loss_of(model, sequences(program, 20)))
            assert following.report.loss == pytest.approx(loss, rel=HELD_OUT)


def test_every_key_of_peft_is_compared_refused_or_inert() -> None:
    """A key that a later PEFT adds is in none of the tables."""
    import peft

    keys = {each.name for each in dataclasses.fields(peft.LoraConfig)}
    assert keys == COMPARED | PLAIN_KEYS.keys() | INERT.keys()
    usual = peft.LoraConfig().to_dict()
    assert [key for key, plain in PLAIN_KEYS.items() if usual[key] not in plain] == []
    assert len(COMPARED) + len(PLAIN_KEYS) + len(INERT) == len(keys)


@pytest.mark.parametrize("said", [r".*\.[02]\..*\.(down|q|v)_proj", "list", "layers", "layers of a name", "exclude"])
def test_a_folder_is_taken_by_the_layers_that_it_names(said: str, tmp_path: Path) -> None:
    network = base_of("llama", tmp_path / "base")
    program = program_of(load_model(str(tmp_path / "base")), training=SOME_LAYERS)
    adapted(network, SOME_LAYERS, tmp_path / "adapter", [])
    names = ["q_proj", "v_proj", "down_proj"]
    forms: dict[str, dict[str, Any]] = {
        "list": {"target_modules": modules_of(program)},
        "layers": {"target_modules": names, "layers_to_transform": [0, 2]},
        "layers of a name": {"target_modules": names, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        "exclude": {"target_modules": names, "exclude_modules": r".*\.[13]\..*"},
    }
    place = tmp_path / "adapter" / "adapter_config.json"
    usual = json.loads(place.read_text())
    place.write_text(json.dumps(usual | forms.get(said, {"target_modules": said})))
    start(program, 1, init=str(tmp_path / "base"), init_adapter=str(tmp_path / "adapter")).close()
    place.write_text(json.dumps(usual | {"target_modules": [*names, "o_proj"]}))
    with pytest.raises(DiagnosticError, match=r"layers\.0\.self_attn\.o_proj, which has no adapter in the program"):
        start(program, 1, init=str(tmp_path / "base"), init_adapter=str(tmp_path / "adapter"))
