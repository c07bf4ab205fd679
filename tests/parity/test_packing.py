"""Documents packed into sequences: loss and gradients are those of `transformers` under block-diagonal masks and positions of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import load_file

from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.runtime.data.data import Batches
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, losses, make_program, stream_for, train
from tests.end_to_end.toys import GPT2
from tests.parity.harness import show

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program

pytestmark = [
    pytest.mark.full,
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

F32_LOSS = 1e-6  # of the loss
F32_GRADIENT = 1e-5  # of the tensor's largest absolute value
MODELS = {
    "llama": MODEL,
    "mistral-window": evolve(MODEL, family="mistral", sliding_window=4),
    "qwen2-tied": evolve(MODEL, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "gpt2": GPT2,
}


def packed_program(config: ModelConfig, **keys: Any) -> Program:
    dtypes = {"view_dtype": "f32", "grad_dtype": "f32", "grad_shard_dtype": "f32", "loss_scale": 1.0}
    return make_program(config, attention_mask="document", zero=0, **dtypes, **keys)


def by_transformers(folder: Path, program: Program) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the program's first step; every row of a mask is made from where documents begin in the stream."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    plan, stream = program.plan, stream_for(program)
    batches = Batches(stream, plan, "sequential", 0)
    first = np.array([batches.sequence_of(0, index) for index in range(plan.global_batch)]) * plan.seq_len
    at = first[:, None] + np.arange(plan.seq_len + 1)
    tokens = torch.from_numpy(stream.tokens[at].astype(np.int64))
    assert stream.documents is not None
    number = np.searchsorted(stream.documents.bounds, at[:, :-1], "right")
    i, j = np.arange(plan.seq_len)[:, None], np.arange(plan.seq_len)[None, :]
    seen = (
        (number[:, :, None] == number[:, None, :]) & (j <= i) & (j > i - (program.model.sliding_window or plan.seq_len))
    )
    assert not seen.all()
    begins = np.diff(number, axis=1, prepend=-1) != 0
    positions = np.arange(plan.seq_len) - np.maximum.accumulate(np.where(begins, np.arange(plan.seq_len), 0), axis=1)
    mask = torch.from_numpy(np.where(seen, 0.0, -np.inf)[:, None].astype(np.float32))
    logits = model(tokens[:, :-1], attention_mask=mask, position_ids=torch.from_numpy(positions)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(loss)
    return loss.item(), {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("keys", [{}, {"slices": (3, 3, 4), "name": "seq1f1b"}], ids=["whole", "slices"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_packed_documents(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    program = packed_program(MODELS[name], **keys)
    train(program, 1, save=str(tmp_path / "first"))
    export_weights(str(tmp_path / "first"), str(tmp_path / "model"))
    run = train(program, 1, order="sequential", init=str(tmp_path / "model"), save=str(tmp_path / "second"))
    loss, gradients = by_transformers(tmp_path / "model", program)
    assert losses(run)[0] == pytest.approx(loss, rel=F32_LOSS)
    moments = load_file(tmp_path / "second" / "state.safetensors")
    compared = 0
    for key, expected in gradients.items():
        if key.startswith("transformer.h.") and expected.ndim == 2:
            continue  # GPT-2's linear layers are stored transposed, queries, keys and values in one
        found = moments.get(f"m1/{key}")
        if found is None or key.endswith("k_proj.bias"):  # gradients of keys' biases are rounding errors
            continue
        room = F32_GRADIENT * np.abs(expected).max()
        np.testing.assert_allclose(found / (1 - OPTIMIZER.betas[0]), expected, rtol=0, atol=room, err_msg=key)
        compared += 1
    assert compared > 10
    assert "transformer.wpe.weight" in gradients or compared == len(gradients) - sum(
        "k_proj.bias" in k for k in gradients
    )
    show(f"{name}: loss {loss:.6f}, deviation {abs(losses(run)[0] - loss) / loss:.1e}; {compared} gradients")
