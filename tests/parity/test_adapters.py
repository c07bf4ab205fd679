"""Adapters against PEFT, in f32: loss and gradients of tiny models of each family; folders there and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import ALL_LINEAR, Training, split_names
from ratrain.ratrainc.running.weight_export import export_adapter, export_weights
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.weights.adapter_files import adapter_layout
from ratrain.targets.runtime.weights.weights import named_parameters_of
from tests.end_to_end.tiny_runs import start, train
from tests.parity import test_experts, test_families
from tests.parity.test_families import BETA1, GRADIENT, HELD_OUT, LOSS, loss_of, program_of, sequences

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.runtime.weights.weights import Stored

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # peft: a base without a configuration in the same folder
]

PLAIN = Training(method="lora", rank=4, alpha=8.0)
QV = Training(method="lora", rank=3, alpha=3.0, targets="q_proj, v_proj")
RSLORA = Training(method="lora", rank=4, alpha=16.0, rslora=True, targets="o_proj, up_proj, down_proj")
ATTENTION = Training(method="lora", rank=4, alpha=8.0, targets="q_proj, k_proj, v_proj, o_proj")
EXPERTS = Training(method="lora", rank=4, alpha=8.0, targets="q_proj, o_proj, experts.gate_up_proj, experts.down_proj")
PACKED = Training(method="lora", rank=2, alpha=4.0, targets="c_attn")
CASES = [
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
]
"""Models of `test_families` and `test_experts`, and adapters."""
PREFIX = "base_model.model."


def adapted(network: Any, training: Training, folder: Path, modules: list[str]) -> Any:
    """The network with random adapters, saved as PEFT saves them; what is all linear says PEFT."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=training.rank,
        lora_alpha=training.alpha,
        use_rslora=training.rslora,
        target_modules=ALL_LINEAR if training.targets == ALL_LINEAR else modules,
        target_parameters=[each for each in split_names(training.targets) if each.startswith("experts.")],
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
    return sorted({name.partition(".lora_")[0] for name in layout(program) if ".experts." not in name})


def layout(program: Any) -> dict[str, Stored]:
    """The tensors of PEFT's files of a program's adapters."""
    return adapter_layout(program.trained_model)


@pytest.mark.parametrize(
    ("name", "training", "peers"),
    [
        *((*case, 1) for case in CASES),
        ("llama", PLAIN, 2),
        ("llama", RSLORA, 4),
        ("gemma2", PLAIN, 2),
        ("gpt2", PLAIN, 2),
        ("phi3", PLAIN, 4),
        ("gpt-neox-scaled", PLAIN, 4),
        ("qwen2_moe", PLAIN, 2),
        ("qwen3_moe", ATTENTION, 4),
        ("qwen3_moe", EXPERTS, 2),
        ("granitemoe", EXPERTS, 4),
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
        key.replace(".default", ""): each.grad.numpy()
        for key, each in network.named_parameters()
        if each.grad is not None
    }
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[parameter], gradient, rtol=0, atol=GRADIENT * scale, err_msg=parameter)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("llama", PLAIN),
        ("qwen3", RSLORA),
        ("gpt2-exact", PACKED),
        ("gpt2", PLAIN),
        ("phi3", PLAIN),
        ("gpt-neox-scaled", PLAIN),
        ("qwen3_moe", QV),
        ("qwen2_moe", PLAIN),
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
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
