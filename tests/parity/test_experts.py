"""Families with experts against their classes in `transformers`: loss, every gradient, and models exported to them, in f32.

The classes run their experts one after the other (`eager`); their usual product over groups adds in another order.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrainc.running.weight_export import export_weights
from tests.end_to_end.tiny_runs import start, train
from tests.parity.test_families import (
    HELD_OUT,
    LOSS,
    SIZES,
    gradients,
    loss_of,
    program_of,
    same_gradients,
    sequences,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from ratrain.targets.program.program import Program

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FEW = {**SIZES, "head_dim": None, "num_experts": 4, "num_experts_per_tok": 2}
QWEN = {**FEW, "moe_intermediate_size": 20}
LOCAL = {**{key: value for key, value in FEW.items() if key != "num_experts"}, "num_local_experts": 4}
GRANITE = {
    **LOCAL,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 8.0,
}
SHARED = {**QWEN, "shared_expert_intermediate_size": 28}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", LOCAL),
    "mixtral-window": ("mixtral", {**LOCAL, "sliding_window": 6, "head_dim": 10, "tie_word_embeddings": True}),
    "mixtral-all-chosen": ("mixtral", {**LOCAL, "num_experts_per_tok": 4}),
    "mixtral-one-expert": ("mixtral", {**LOCAL, "num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", {**SHARED, "qkv_bias": False}),
    "qwen2_moe-normalised": ("qwen2_moe", {**SHARED, "norm_topk_prob": True}),
    "qwen2_moe-tied": ("qwen2_moe", {**SHARED, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_moe-normalised": ("qwen3_moe", {**QWEN, "norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe-all-chosen": ("qwen3_moe", {**QWEN, "num_experts_per_tok": 4}),
    "qwen3_moe-one-dense": ("qwen3_moe", {**QWEN, "mlp_only_layers": [1]}),
    "qwen3_moe-first-dense": (
        "qwen3_moe",
        {**QWEN, "mlp_only_layers": [0], "num_hidden_layers": 4, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe-every-second": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen2_moe-every-second": ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2}),
    "qwen2_moe-both-rules": (
        "qwen2_moe",
        {**SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4},
    ),
    "olmoe": ("olmoe", FEW),
    "olmoe-normalised": ("olmoe", {**FEW, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "granitemoe": ("granitemoe", GRANITE),
    "granitemoe-tied": (
        "granitemoe",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "num_experts_per_tok": 3},
    ),
}
ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight", ".router.layer.weight")
"""Ends of the routers' names in files."""


def saved(name: str, folder: Path) -> Any:
    """A model of `transformers` with random weights, saved in a folder. Routers are drawn wider, so none has ties."""
    import torch
    import transformers

    model_type, keys = MODELS[name]
    given = {key: value for key, value in keys.items() if value is not None or key == "pad_token_id"}
    config = transformers.AutoConfig.for_model(model_type, **deepcopy(given))
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if parameter_name.endswith((".gate.weight", ".router.weight", ".shared_expert_gate.weight")):
                parameter.mul_(5.0)
    network.save_pretrained(folder)
    return network


def loaded(folder: Path) -> Any:
    """A directory's model as `transformers` makes it in f64; every weight comes from the file."""
    import transformers

    network, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        local_files_only=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    return network.double()


def reference(network: Any, program: Program) -> tuple[float, dict[str, npt.NDArray[np.float64]]]:
    """Loss and gradients of the first step's sequences in f64, in the form in which its class writes weights to files."""
    from transformers.core_model_loading import revert_weight_conversion

    network = network.double()
    loss = loss_of(network, sequences(program, 0))
    loss.backward()
    found = revert_weight_conversion(network, {name: p.grad for name, p in network.named_parameters()})
    return float(loss.detach()), {name: gradient.numpy() for name, gradient in found.items()}


def margin(network: Any, program: Program) -> float:
    """The least distance, over all tokens and layers, of the last chosen expert's logit to the first one not chosen."""
    import torch

    distances = []

    def seen(chosen: int, logits: Any) -> None:
        if chosen < logits.shape[-1]:
            ordered = logits.detach().sort(dim=-1, descending=True).values
            distances.append(float((ordered[..., chosen - 1] - ordered[..., chosen]).min()))

    handles = [
        module.register_forward_hook(
            lambda router, inputs, _: seen(
                network.config.num_experts_per_tok,
                torch.nn.functional.linear(inputs[0].reshape(-1, router.weight.shape[1]), router.weight),
            )
        )
        for name, module in network.named_modules()
        if name.endswith((".mlp.gate", ".block_sparse_moe.router"))
    ]
    assert handles
    with torch.no_grad():
        network(sequences(program, 0)[:, :-1])
    for handle in handles:
        handle.remove()
    return min(distances, default=1.0)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    network = saved(name, tmp_path)
    model = load_model(str(tmp_path))
    assert model.parameters == sum(p.numel() for p in network.parameters())
    program = program_of(model)
    run = start(program, 1, init=str(tmp_path), order="sequential", kernels="reference")
    (step,) = run.steps()
    loss, wanted = reference(network, program)
    assert margin(network, program) > 1e-4, "a tie: another expert may be chosen by rounding"
    assert step.report.loss == pytest.approx(loss, rel=LOSS)
    found = gradients(run, model)
    same_gradients(found, wanted)
    routers = [gradient for name, gradient in wanted.items() if name.endswith(ROUTERS)]
    assert len(routers) == model.expert_layers
    assert model.experts == 1 or all(gradient.any() for gradient in routers)


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_has_its_loss_after_export(name: str, tmp_path: Path) -> None:
    """Some steps, exported, loaded here and by `transformers`: the loss of sequences that none of the steps saw."""
    import torch

    saved(name, tmp_path / "first")
    program = program_of(load_model(str(tmp_path / "first")))
    checkpoint, exported = str(tmp_path / "checkpoint"), tmp_path / "exported"
    settings: dict[str, Any] = {"order": "sequential", "kernels": "reference"}
    train(program, 5, init=str(tmp_path / "first"), save=checkpoint, **settings)
    (following,) = start(program, 1, resume=checkpoint, **settings).steps()
    export_weights(checkpoint, str(exported))
    network = loaded(exported)
    with torch.no_grad():
        loss = float(loss_of(network, sequences(program, 5)))
    assert following.report.loss == pytest.approx(loss, rel=HELD_OUT)
    again = load_model(str(exported))
    assert not [*again.differences(program.model)]
    (first,) = start(program_of(again), 1, init=str(exported), **settings).steps()
    with torch.no_grad():
        assert first.report.loss == pytest.approx(float(loss_of(network, sequences(program, 0))), rel=HELD_OUT)
