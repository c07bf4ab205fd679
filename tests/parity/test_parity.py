"""Training through the command line agrees with PyTorch: losses of 20 steps, and every gradient of the first."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.parity.harness import (
    OPTIMIZER,
    SEQ_LEN,
    STEPS,
    Arrays,
    Layout,
    Trainer,
    show,
    tiny_config,
    tiny_gpt2,
    worst_relative,
)

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.parity

LAYOUT = Layout(pp=2, dp=2, micro_batches=4)
SLICED = Layout(pp=2, dp=2, micro_batches=4, slices="[19, 8, 21]")
STRATEGY = "full-save"

F32_LOSS = 1e-5  # of the loss
F32_GRADIENT = 1e-4  # of the tensor's largest absolute value
F16_LOSS = 1e-2  # of the loss
BF16_LOSS = 5e-3  # of the loss

CASES = {
    "llama": tiny_config(),
    "grouped-queries": tiny_config(num_attention_heads=8, num_key_value_heads=2, head_dim=12, rope_theta=5e5),
    "qwen2-bias-tied": tiny_config(model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    "baichuan-alibi-normalised-head": tiny_config(
        model_type="baichuan",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=None,
        position_embedding="alibi",
        normalised_head=True,
    ),
    "gpt2": tiny_gpt2(),
    "gpt2-untied-wide-mlp": tiny_gpt2(tie_word_embeddings=False, n_inner=None, layer_norm_epsilon=0.01),
    "mistral-window": tiny_config(model_type="mistral", num_key_value_heads=2, sliding_window=13),
}


class Case:
    """One model, trained by both; PyTorch trains it once."""

    def __init__(self, name: str, folder: Path) -> None:
        from tests.parity import torch_gpt2, torch_llama

        self.name = name
        self.config = CASES[name]
        self.model = torch_gpt2 if self.config["model_type"] == "gpt2" else torch_llama
        self.weights: dict[str, Tensor] = self.model.random_weights(self.config, seed=5)
        arrays = {key: value.numpy() for key, value in self.weights.items()}
        self.trainer = Trainer.prepare(folder, self.config, arrays, STEPS * LAYOUT.global_batch)

    @cached_property
    def reference(self) -> tuple[list[float], Arrays]:
        """PyTorch's losses, and its gradients of the first step."""
        return self._trained_by_torch("float32")

    @cached_property
    def bf16_reference(self) -> tuple[list[float], Arrays]:
        """The same of PyTorch that computes in bf16, on copies of float32 parameters."""
        return self._trained_by_torch("bfloat16")

    def _trained_by_torch(self, views: str) -> tuple[list[float], Arrays]:
        import torch

        from tests.parity import torch_llama

        losses, gradients = torch_llama.train(
            self.config,
            self.weights,
            self.trainer.tokens,
            seq_len=SEQ_LEN,
            global_batch=LAYOUT.global_batch,
            steps=STEPS,
            optimizer=torch_llama.AdamW(**OPTIMIZER),
            views=getattr(torch, views),
            loss_of=self.model.mean_loss,
        )
        assert losses[-1] < losses[0] - 1, "the model does not learn: equal losses would say little"
        return losses, {name: value.numpy() for name, value in gradients.items()}

    def deviation(
        self, kernels: str, view_dtype: str, layout: Layout = LAYOUT, expected: list[float] | None = None
    ) -> float:
        """The worst relative deviation of a loss from PyTorch's, in float32 where `expected` does not say otherwise."""
        losses = self.trainer.run(self.trainer.compile(layout, view_dtype, STRATEGY), STEPS, kernels=kernels)
        expected = self.reference[0] if expected is None else expected
        worst, step = worst_relative(losses, expected)
        show(
            f"{self.name}, {kernels}, {view_dtype}: loss {expected[0]:.4f} -> {expected[-1]:.4f},"
            f" worst relative deviation {worst:.1e} in step {step}"
        )
        return worst


# A group of tests goes to one process: what PyTorch trained for a case is trained once.
@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each model in turn."""
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["fast", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch", "torch-device"))])
def kernels(request: pytest.FixtureRequest) -> str:
    """Each kernel set that a run may take its products from."""
    name: str = request.param
    return name


def unpacked(arrays: Arrays) -> Arrays:
    """The tensors of Hugging Face as blocks have them: `W_pack` and `c_attn` cut into query, key and value, `Conv1D` transposed."""
    found: Arrays = {}
    for name, value in arrays.items():
        if ".h." in name and value.ndim == 2:
            if ".c_attn." in name:
                parts = np.split(value.T, 3)
                found.update(
                    {name.replace("c_attn", f"{part}_proj"): rows for part, rows in zip("qkv", parts, strict=True)}
                )
            else:
                found[name] = value.T
        elif ".W_pack." in name:
            parts = np.split(value, 3)
            found.update(
                {name.replace("W_pack", f"{part}_proj"): rows for part, rows in zip("qkv", parts, strict=True)}
            )
        else:
            found[name] = value
    return found


def joined_biases(arrays: Arrays) -> Arrays:
    """With the biases of query, key and value as one tensor: those of keys alone have no gradient, only its rounding errors."""
    parts = {name for name in arrays if name.endswith(tuple(f".attn.{part}_proj.bias" for part in "qkv"))}
    found = {name: value for name, value in arrays.items() if name not in parts}
    for name in parts:
        if name.endswith(".q_proj.bias"):
            thirds = [arrays[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "c_attn")] = np.concatenate(thirds)
    return found


@pytest.mark.sampled(7, first=3)
def test_f32_losses(case: Case, kernels: str) -> None:
    assert case.deviation(kernels, "f32") <= F32_LOSS


@pytest.mark.sampled(7, first=1)
def test_f32_losses_of_slices(case: Case, kernels: str) -> None:
    """The window of one case spans slices, and is longer than one of them."""
    assert case.deviation(kernels, "f32", SLICED) <= F32_LOSS


def first_gradients(case: Case, kernels: str, layout: Layout, view_dtype: str) -> Arrays:
    """Our gradients of the first step."""
    return joined_biases(case.trainer.first_gradients(case.trainer.compile(layout, view_dtype, STRATEGY), kernels))


@pytest.mark.parametrize("layout", [LAYOUT, SLICED], ids=["whole", "slices"])
@pytest.mark.sampled(12, first=2)
def test_f32_gradients(case: Case, kernels: str, layout: Layout) -> None:
    got = first_gradients(case, kernels, layout, "f32")
    expected = unpacked(case.reference[1])
    assert sorted(got) == sorted(expected)
    deviations = {}
    for name, gradient in expected.items():
        assert got[name].shape == gradient.shape, name
        deviations[name] = float(np.abs(got[name] - gradient).max() / np.abs(gradient).max())
    worst = max(deviations, key=lambda name: deviations[name])
    show(
        f"{case.name}, {kernels}, f32: worst gradient deviation {deviations[worst]:.1e} of the largest value, in {worst}"
    )
    assert {name: value for name, value in deviations.items() if not value <= F32_GRADIENT} == {}


@pytest.mark.sampled(7, first=4)
def test_f16_losses(case: Case, kernels: str) -> None:
    assert case.deviation(kernels, "f16") <= F16_LOSS


@pytest.mark.sampled(7)
def test_bf16_losses(case: Case, kernels: str) -> None:
    assert case.deviation(kernels, "bf16") <= BF16_LOSS
    assert case.deviation(kernels, "bf16", expected=case.bf16_reference[0]) <= BF16_LOSS


@pytest.mark.sampled(7, first=5)
def test_bf16_gradients(case: Case, kernels: str) -> None:
    """No farther from float32 than PyTorch's in bf16: norms of the deviations, as parts of those of the gradients, on average."""
    got, exact = first_gradients(case, kernels, LAYOUT, "bf16"), unpacked(case.reference[1])
    theirs = unpacked(case.bf16_reference[1])
    assert sorted(got) == sorted(exact) == sorted(theirs)
    ours, of_torch = (
        float(
            np.mean([np.linalg.norm(found[name] - values) / np.linalg.norm(values) for name, values in exact.items()])
        )
        for found in (got, theirs)
    )
    show(f"{case.name}, {kernels}, bf16: gradients deviate by {ours:.1e} from float32, PyTorch's by {of_torch:.1e}")
    assert 0 < ours <= of_torch
