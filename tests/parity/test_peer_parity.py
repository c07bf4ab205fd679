"""Tensor-parallel ranks against PyTorch: losses of some steps, and every gradient of the first, of 2, 4 and 8 peers.

Autograd knows nothing of peers: that a sum of theirs is left out, or added twice, that a gradient of a norm or of a copied head of keys and
values is one peer's alone, or that padding takes part in a softmax, shows in some gradient.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import save_file

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.tiny_runs import OPTIMIZER, losses, make_program, make_stream, start
from tests.parity.harness import show, tiny_config, worst_relative
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.parity.harness import Arrays

pytestmark = pytest.mark.parity

SEQ_LEN, GLOBAL_BATCH, STEPS = 16, 4, 6
LOSS = {"f32": 5e-7, "bf16": 3e-3, "f16": 5e-4}  # of the loss
GRADIENT = {"f32": 5e-6, "bf16": 6e-2, "f16": 8e-3}  # norm of the deviation, of that of the gradient

GENTLE = evolve(OPTIMIZER, eps=1e-5)
"""With a smaller eps a gradient that is only rounding errors decides in which direction a whole update goes."""

WIDE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 10, "num_hidden_layers": 2}
CASES = {
    "llama": tiny_config(**WIDE, intermediate_size=101),
    "grouped-queries": tiny_config(**{**WIDE, "num_key_value_heads": 2}, rope_theta=5e5),
    "one-key": tiny_config(**{**WIDE, "num_key_value_heads": 1}),
    "qwen2-bias-tied": tiny_config(
        **{**WIDE, "head_dim": None, "num_key_value_heads": 4},
        hidden_size=48,
        model_type="qwen2",
        tie_word_embeddings=True,
    ),
    "mistral-window": tiny_config(**{**WIDE, "num_key_value_heads": 4}, model_type="mistral", sliding_window=5),
    "baichuan-alibi": tiny_config(
        **{**WIDE, "num_key_value_heads": None, "head_dim": None},
        hidden_size=48,
        model_type="baichuan",
        position_embedding="alibi",
        normalised_head=False,
    ),
    "baichuan2-normed-head": tiny_config(
        **{**WIDE, "num_key_value_heads": None, "head_dim": None},
        hidden_size=48,
        model_type="baichuan",
        position_embedding="alibi",
        normalised_head=True,
    ),
}
GATE = ("grouped-queries", 4, "f32")


def case_marks() -> list[Any]:
    """Every case under every number of peers in f32, and one in the other types; all but one of them are slow together."""
    rows = [(name, peers, "f32") for name in CASES for peers in (2, 4, 8)]
    rows += [("grouped-queries", peers, dtype) for peers in (2, 8) for dtype in ("f16", "bf16")]
    return [row if row == GATE else pytest.param(*row, marks=pytest.mark.full) for row in rows]


def trained(folder: Path, dtype: str, peers: int) -> tuple[list[float], Arrays]:
    """Our losses, and the gradients of the first step from the moments it leaves."""
    scale = 1024.0 if dtype == "f16" else 1.0
    model = load_model(str(folder / "config.json"))
    keys: dict[str, Any] = {"tp": peers, "sequence_sharding": peers != 4} if peers > 1 else {}
    keys |= {"grad_dtype": "f32", "grad_shard_dtype": "f32", "loss_scale": scale, "zero": 1, "optimizer": GENTLE}
    program = make_program(
        model, "full-save", view_dtype=dtype, seq_len=SEQ_LEN, micro_batches=2, micro_batch_size=1, cuts=(1,), **keys
    )
    run = start(program, STEPS, init=str(folder / "weights.safetensors"), order="sequential", poison=True)
    steps = run.steps()
    next(steps)
    state = training_state(run.engine, 1).blocks
    share = np.float32(1 - GENTLE.betas[0])
    gradients = {
        name: np.array(value)
        for block in state
        for name, value in named_parameters_of(model, block, np.asarray(state[block].m1) / share).items()
    }
    list(steps)
    return losses(run), gradients


@pytest.mark.parametrize(("name", "peers", "dtype"), case_marks())
def test_losses_and_gradients_are_those_of_autograd(name: str, peers: int, dtype: str, tmp_path: Path) -> None:
    from tests.parity import torch_llama

    config = CASES[name]
    weights = torch_llama.random_weights(config, seed=5)
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({key: value.numpy() for key, value in weights.items()}, tmp_path / "weights.safetensors")
    tokens = make_stream(load_model(str(tmp_path / "config.json"))).tokens.tolist()
    keys = ("lr", "betas", "eps", "weight_decay", "warmup_steps")
    expected, autograd = torch_llama.train(
        config,
        weights,
        tokens,
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        optimizer=torch_llama.AdamW(**{key: getattr(GENTLE, key) for key in keys}),
    )
    found, gradients = trained(tmp_path, dtype, peers)
    worst, step = worst_relative(found, expected)
    deviations = {}
    for key, value in autograd.items():
        if "W_pack" in key:
            mine = np.concatenate([gradients[key.replace("W_pack", f"{part}_proj")] for part in "qkv"])
        else:
            mine = gradients[key]
        deviations[key] = float(np.linalg.norm(mine - value.numpy()) / np.linalg.norm(value.numpy()))
    farthest = max(deviations, key=lambda key: deviations[key])
    show(
        f"{name}, {peers} peers, {dtype}: loss within {worst:.1e} (step {step}), {farthest} within {deviations[farthest]:.1e}"
    )
    assert worst <= LOSS[dtype]
    assert deviations[farthest] <= GRADIENT[dtype], farthest
