"""Weights that a run begins with must be of the model that it trains: of each field that changes what a model computes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from attrs import evolve, fields

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Severity
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import MODEL, make_program, start, train
from tests.end_to_end.toys import GPT2, NEOX

BAICHUAN = evolve(MODEL, family="baichuan", kv_heads=4, packed_qkv=True)


def of(family: str, **fields: Any) -> ModelConfig:
    """The toy in another family."""
    return evolve(MODEL, family=family, **{**FAMILY[family].implied, **fields})


def all_of(model: ModelConfig) -> dict[str, Any]:
    """Every field of a model of another family."""
    return {field.name: getattr(model, field.name) for field in fields(ModelConfig)}


GEMMA = {"attention_scale": 0.25, "embedding_scale": MODEL.hidden_size**0.5, "sliding_window": 4}
GEMMA2, GEMMA3 = of("gemma2", **GEMMA), of("gemma3_text", **GEMMA, local_rope_theta=500.0)
GRANITE = of("granite", attention_scale=0.25)
_SIZES = {"experts": 4, "experts_per_token": 2, "expert_size": 8, "shared_expert_size": 12}
EXPERTS = of("qwen2_moe", **_SIZES, router_normalised=False)
# Of every field that changes what a model computes: a model, and another value of the field in an otherwise possible model.
OTHERS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "vocab_size": (MODEL, {"vocab_size": 99}),
    "hidden_size": (MODEL, {"hidden_size": 48, "head_dim": 6}),
    "layers": (MODEL, {"layers": 5}),
    "heads": (MODEL, {"heads": 2, "head_dim": 12, "kv_heads": 1}),
    "kv_heads": (MODEL, {"kv_heads": 1}),
    "head_dim": (MODEL, {"head_dim": 10}),
    "ffn_size": (MODEL, {"ffn_size": 41}),
    "norm_eps": (MODEL, {"norm_eps": 3e-5}),
    "position": (BAICHUAN, {"position": "alibi", "rope_theta": 0.0}),
    "rope_theta": (MODEL, {"rope_theta": 5e5}),
    "sliding_window": (evolve(MODEL, family="mistral"), {"sliding_window": 4}),
    "qkv_bias": (MODEL, {"qkv_bias": True, "family": "qwen2"}),
    "tied_embeddings": (MODEL, {"tied_embeddings": True}),
    "normalised_head": (BAICHUAN, {"normalised_head": True}),
    "learned_positions": (GPT2, {"learned_positions": 20}),
    "norm": (MODEL, all_of(GPT2)),
    "gated_mlp": (MODEL, all_of(GPT2)),
    "norm_placement": (MODEL, all_of(of("olmo2"))),
    "norm_unit_offset": (MODEL, all_of(GEMMA2)),
    "qk_norm": (MODEL, all_of(of("qwen3"))),
    "o_bias": (MODEL, {"qkv_bias": True, "o_bias": True}),
    "mlp_bias": (MODEL, {"mlp_bias": True}),
    "activation": (MODEL, {"activation": "gelu"}),
    "parallel_residual": (NEOX, {"parallel_residual": False}),
    "rotary_dim": (of("phi3"), {"rotary_dim": 4}),
    "rope_scaling": (MODEL, {"rope_scaling": "linear 2"}),
    "local_rope_theta": (GEMMA3, {"local_rope_theta": 600.0}),
    "layer_kinds": (GEMMA2, {"layer_kinds": "w" * (MODEL.layers - 1) + "f"}),
    "attention_scale": (GRANITE, {"attention_scale": 0.5}),
    "attention_softcap": (GEMMA2, {"attention_softcap": 5.0}),
    "logit_softcap": (GEMMA3, {"logit_softcap": 5.0}),
    "embedding_scale": (GRANITE, {"embedding_scale": 12.0}),
    "residual_scale": (GRANITE, {"residual_scale": 0.5}),
    "logit_scale": (GRANITE, {"logit_scale": 0.125}),
    "experts": (EXPERTS, {"experts": 5}),
    "experts_per_token": (EXPERTS, {"experts_per_token": 1}),
    "expert_size": (EXPERTS, {"expert_size": 9}),
    "shared_expert_size": (EXPERTS, {"shared_expert_size": 9}),
    "router_normalised": (EXPERTS, {"router_normalised": True}),
    "mlp_kinds": (EXPERTS, {"mlp_kinds": "d" + "e" * (MODEL.layers - 1)}),
}
SAME = {
    "name": (MODEL, {"name": "another"}),
    "family": (MODEL, {"family": "mistral"}),
    "inert": (MODEL, {"inert": {"max_position_embeddings": 77, "eos_token_id": 3}}),
}
UNSEEN = {
    "packed_qkv",
    "initializer_range",
    "rope_interleaved",
    "padding_token",
    "training",
    "layer_numbers",
    "expert_ranks",
}
"""Fields that need no comparison, each for a reason of its own.

In order: names and shapes of weights tell it; it only draws new weights; no family chooses it; only training sees it; a
plan says it; only the planner has models of some layers.
"""


def test_every_field_of_a_model_is_among_them() -> None:
    assert {field.name for field in fields(ModelConfig)} - UNSEEN == OTHERS.keys() | SAME.keys()


def folder_of(model: ModelConfig, described: ModelConfig, place: Path) -> str:
    """A directory with weights of one model, and the config.json of another."""
    (place / "weights").mkdir()
    for name, data in exported(model).items():
        (place / "weights" / name).write_bytes(data)
    (place / "weights" / "config.json").write_text(json.dumps(hugging_face_config(described)))
    return str(place / "weights")


@cache
def exported(model: ModelConfig) -> dict[str, bytes]:
    """The files of weights that were trained for a step."""
    with TemporaryDirectory() as place:
        train(make_program(model), 1, save=f"{place}/checkpoint")
        export_weights(f"{place}/checkpoint", f"{place}/weights")
        return {path.name: path.read_bytes() for path in Path(place, "weights").iterdir()}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sampled(4)
def test_weights_of_a_model_that_computes_another_thing_are_refused(name: str, tmp_path: Path) -> None:
    model, change = OTHERS[name]
    described = evolve(model, **change)
    weights = folder_of(model, described, tmp_path)
    with pytest.raises(DiagnosticError) as caught:
        start(make_program(model), 1, init=weights)
    differing = {field for field, *_ in described.differences(model)}
    assert name in differing
    assert len(caught.value.diagnostics) == len(differing)
    for problem in caught.value.diagnostics:
        assert problem.code == "RT091"
        assert f"{weights}/config.json" in problem.message
    values = [json.dumps(getattr(each, name)) for each in (described, model)]
    assert any(all(value in problem.message for value in values) for problem in caught.value.diagnostics)


def test_weights_of_another_model_are_named_before_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Name weights of another model first: errors of data read after them would follow from the wrong model."""
    wider = evolve(MODEL, vocab_size=2 * MODEL.vocab_size)
    weights, program, data = folder_of(wider, wider, tmp_path), tmp_path / "m.rtx", tmp_path / "t.bin"
    write_program(make_program(), str(program))
    np.arange(wider.vocab_size, dtype="<u2").tofile(data)
    assert main(["run", str(program), "--init", weights, "--data", str(data), "--steps", "1"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"these weights are of a model with vocab_size = {wider.vocab_size}" in said
    assert "outside the vocabulary" not in said


@pytest.mark.parametrize("name", SAME)
def test_weights_of_a_model_that_computes_the_same_serve(name: str, tmp_path: Path) -> None:
    model, change = SAME[name]
    run = start(make_program(model), 1, init=folder_of(model, evolve(model, **change), tmp_path))
    assert not run.warnings


@pytest.mark.parametrize("named", ["the directory", "its file"])
def test_a_base_of_100_does_not_run_in_a_program_of_10_000(named: str, tmp_path: Path) -> None:
    weights = folder_of(MODEL, evolve(MODEL, rope_theta=100.0), tmp_path)
    with pytest.raises(DiagnosticError, match=r"RT091.*rope_theta = 100.0, the program's has 10000.0\n.*--model"):
        start(make_program(), 1, init=weights if named == "the directory" else f"{weights}/model.safetensors")


def test_another_padding_token_is_said_and_serves(tmp_path: Path) -> None:
    padded, checkpoint = evolve(MODEL, padding_token=3), str(tmp_path / "checkpoint")
    weights = folder_of(MODEL, padded, tmp_path)
    assert not start(make_program(padded), 1, init=weights).warnings
    train(make_program(padded), 1, save=checkpoint)
    assert not start(make_program(padded), 1, resume=checkpoint).warnings
    assert not start(make_program(evolve(MODEL, padding_token=3 - MODEL.vocab_size)), 1, resume=checkpoint).warnings
    for code, given in (("RT091", {"init": weights}), ("RT092", {"resume": checkpoint})):
        (warning,) = start(make_program(), 1, **given).warnings
        assert (warning.code, warning.severity) == (code, Severity.WARNING)
        assert "pad_token_id = 3, this program null" in warning.message


def test_what_could_not_be_checked_is_said(tmp_path: Path) -> None:
    weights = Path(folder_of(MODEL, MODEL, tmp_path))
    (weights / "model.safetensors").with_name("alone.safetensors").hardlink_to(weights / "model.safetensors")
    assert not start(make_program(evolve(MODEL, rope_theta=5e5)), 1, init=str(weights / "alone.safetensors")).warnings
    (weights / "config.json").unlink()
    (warning,) = start(make_program(), 1, init=str(weights)).warnings
    assert (warning.code, warning.severity) == ("RT091", Severity.WARNING)
    assert "config.json" in warning.message
    (weights / "config.json").write_text('{"model_type": "mpt"}')
    with pytest.raises(DiagnosticError, match="RT061"):
        start(make_program(), 1, init=str(weights))
