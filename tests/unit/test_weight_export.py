"""Checkpoints written as Hugging Face model directories: what is written is what starts the next run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import load_file

from ratrain_ir.diagnostics import DiagnosticError
from ratrain_ir.frontend.hf_export import hugging_face_config
from ratrain_ir.frontend.model_config import load_model, parse_config, preset_names
from ratrainc.cli import main
from ratrainc.weight_export import export_weights
from targets.runtime.weights import read_weights
from tests.unit.tiny_runs import MODEL, make_program, train

BAICHUAN = evolve(
    MODEL, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0, normalised_head=True
)
MODELS = {
    "llama": MODEL,
    "mistral": evolve(MODEL, family="mistral", sliding_window=4, head_dim=10),
    "qwen2": evolve(MODEL, family="qwen2", qkv_bias=True, tied_embeddings=True, sliding_window=4),
    "baichuan-alibi": BAICHUAN,
    "baichuan-rope": evolve(BAICHUAN, position="rope", rope_theta=10000.0, normalised_head=False),
}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_s_config_reads_back(name):
    model = load_model(name)
    assert parse_config(hugging_face_config(model), name=name, file="config.json") == model


@pytest.mark.parametrize("name", MODELS)
def test_every_family_travels(tmp_path: Path, name: str):
    model = MODELS[name]
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / model.name
    train(make_program(model, zero=2, reduce="each-micro-batch"), 2, save=str(checkpoint))
    assert export_weights(str(checkpoint), str(folder)) == model
    assert load_model(str(folder)) == model
    saved = load_file(checkpoint / "state.safetensors")
    source = read_weights(str(folder), model)
    masters = [key for key in saved if key.startswith("p/")]
    assert len(masters) > 10
    for key in masters:
        assert source(key.removeprefix("p/")).tobytes() == saved[key].tobytes(), key
    if model.packed_qkv:
        stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.W_pack.weight"]
        parts = [saved[f"p/model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert np.array_equal(stored, np.concatenate(parts))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    assert main(["export-weights", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "a" / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == MODEL.parameters
    assert main(["export-weights", str(tmp_path / "none"), "-o", str(tmp_path / "c")]) == 1
    assert "RT002" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_weights_do_not_go_into_a_checkpoint(tmp_path: Path):
    place = str(tmp_path / "checkpoint")
    train(make_program(), 1, save=place)
    with pytest.raises(DiagnosticError, match="RT092"):
        export_weights(place, place)
    train(make_program(), 1, save=place)


def test_another_model_is_refused_tensor_by_tensor(tmp_path: Path):
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(tmp_path / "exported"))
    with pytest.raises(DiagnosticError) as caught:
        read_weights(str(tmp_path / "exported"), evolve(MODEL, family="qwen2", qkv_bias=True, ffn_size=48))
    text = str(caught.value)
    assert 'lacks "model.layers.0.self_attn.q_proj.bias", shape [24]' in text
    assert '"model.layers.0.mlp.gate_proj.weight" has shape [40, 24], but the model\'s is [48, 24]' in text
