"""Weights travel to Hugging Face `transformers` and back: its models compute the losses that runs here log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.runtime.data.data import Batches
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights, read_weights
from tests.end_to_end.tiny_runs import MODEL, make_program, make_stream, start, train
from tests.end_to_end.toys import GPT2
from tests.parity.harness import show

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

F32_LOSS = 1e-5  # of the loss

MODELS = {
    "llama": MODEL,
    "llama-wide-heads": evolve(MODEL, head_dim=10, rope_theta=5e5),
    "mistral-window": evolve(MODEL, family="mistral", sliding_window=4),
    "qwen2": evolve(MODEL, family="qwen2", qkv_bias=True),
    "qwen2-tied": evolve(MODEL, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "gpt2": GPT2,
    "gpt2-untied": evolve(GPT2, tied_embeddings=False),
    "qwen2-window": evolve(MODEL, family="qwen2", qkv_bias=True, sliding_window=4),
}


def loaded(folder: Path, **options: Any) -> Any:
    """The directory's model as `transformers` makes it; every weight comes from the file."""
    import transformers

    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **options
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    return model.float()


def loss_of(model: Any, config: ModelConfig, step: int) -> float:
    """What a model of `transformers` says of a step's sequences, as the plan of `program_of` takes them."""
    import torch

    plan = program_of(config).plan
    batches = Batches(make_stream(config), plan, "sequential", 0)
    first = np.array([batches.sequence_of(step, index) for index in range(plan.global_batch)]) * plan.seq_len
    rows = make_stream(config).tokens[first[:, None] + np.arange(plan.seq_len + 1)].astype(np.int64)
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def program_of(config: ModelConfig) -> Any:
    return make_program(config, view_dtype="f32", grad_dtype="f32", grad_shard_dtype="f32", loss_scale=1.0)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_has_the_loss_of_the_run(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    checkpoint, exported = str(tmp_path / "checkpoint"), tmp_path / "exported"
    train(program_of(config), 3, order="sequential", save=checkpoint)
    export_weights(checkpoint, str(exported))
    (following,) = start(program_of(config), 1, order="sequential", resume=checkpoint).steps()
    expected = following.report.loss
    got = loss_of(loaded(exported), config, 3)
    show(f"{name}: transformers {got:.7f}, here {expected:.7f}: {abs(got - expected) / expected:.1e}")
    assert abs(got - expected) <= F32_LOSS * expected


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_starts_a_run(name: str, tmp_path: Path) -> None:
    """Written by `transformers` in bf16 and in several files with an index, from weights it drew itself."""
    import torch
    import transformers

    config, first, second = MODELS[name], tmp_path / "first", tmp_path / "second"
    train(program_of(config), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(first))
    torch.manual_seed(3)
    drawn = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(first))
    with torch.no_grad():
        for parameter in drawn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    drawn.to(torch.bfloat16).save_pretrained(second, max_shard_size="5KB")
    assert len(list(second.glob("model-*.safetensors"))) > 2, "the weights should be in several files"
    read = load_model(str(second))
    assert evolve(read, name=config.name) == config
    (only,) = start(program_of(config), 1, order="sequential", init=str(second)).steps()
    expected = loss_of(loaded(second), config, 0)
    show(f"{name}: transformers {expected:.7f}, here {only.report.loss:.7f}")
    assert abs(only.report.loss - expected) <= F32_LOSS * expected


FAMILIES = {
    model.family: evolve(model, vocab_size=260) for model in (GPT2, MODELS["qwen2"], MODELS["mistral-window"], MODEL)
}
TEXT = "naïve 狐 fox\n\n  x\x00\x7f"


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_a_user_needs_is_exported(family: str, tmp_path: Path) -> None:
    """Weights in several files, the token numbers, and a tokenizer whose tokens are the bytes that the run was trained on."""
    import torch
    import transformers

    lengths = {} if family == "gpt2" else {"max_position_embeddings": 77}
    config = evolve(FAMILIES[family], inert={"bos_token_id": 3, "eos_token_id": [7, 8], **lengths})
    train(program_of(config), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(tmp_path / "exported"), most_shard_bytes=20_000)
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 2
    model = loaded(tmp_path / "exported")
    assert model.config.dtype == torch.float32
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (3, [7, 8])
    assert all(getattr(model.config, key) == value for key, value in lengths.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
    numbers = tokenizer(TEXT)["input_ids"]
    assert numbers == list(TEXT.encode())
    assert tokenizer.decode(numbers) == TEXT
    (only,) = start(program_of(config), 1, order="sequential", init=str(tmp_path / "exported")).steps()
    assert abs(only.report.loss - loss_of(model, config, 0)) <= F32_LOSS * only.report.loss


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_have_the_deviations_of_the_family(family: str, tmp_path: Path) -> None:
    """Two samples of one distribution: their deviations differ by few of their standard errors, their means too."""
    import transformers

    sizes = {"hidden_size": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn_size": 96, "layers": 6}
    model = evolve(FAMILIES[family], **sizes, initializer_range=0.05)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(model)))
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs.save_pretrained(tmp_path)
    drawn, read = random_weights(model, 1), read_weights(str(tmp_path), model)
    for name, parameter in named_parameters(model).items():
        one, other = (source(name).astype(np.float64) for source in (drawn, read))
        error = 1 / np.sqrt(parameter.elements)
        assert abs(one.std() - other.std()) <= 5 * error * other.std(), name
        assert abs(one.mean() - other.mean()) <= 8 * error * other.std(), name
