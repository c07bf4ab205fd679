"""`ratrainc model`: what a configuration is, held against counts that are known and against what is lowered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.passes.recovery.layer_choice import CHOICES, same_for_all
from ratrain.passes.recovery.rewriting import rewritten
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.compute import BlockOp, Forward
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.facts.model_facts import model_facts, summary
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.end_to_end.toys import GPT2, NEOX

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

BAICHUAN = evolve(MODEL, family="baichuan", kv_heads=4, packed_qkv=True)
PUBLISHED = {"llama-2-7b": 6_738_415_616, "gpt2": 124_439_808, "qwen2.5-0.5b": 494_032_768}
"""Parameters that the models are published with."""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["model", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", preset_names())
def test_blocks_add_up_to_the_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(printed(capsys, name, "--json"))
    model = load_model(name)
    assert facts["parameters"] == model.parameters == PUBLISHED.get(name, model.parameters)
    assert sum(block["parameters"] for block in facts["blocks"]) == model.parameters
    assert len(facts["blocks"]) == 2 * model.layers + 2
    assert facts["layers"] == model.layers
    assert facts["unsupported"] == []
    assert facts["kv_bytes_per_token"] == 2 * 2 * facts["kv_width"] * model.layers
    text = printed(capsys, name)
    assert f"{model.parameters:,} parameters" in text
    assert all(words in text for words in facts["unusual"])


def kept_of_a_layer(model: ModelConfig, policy: str, seq_len: int) -> int:
    """Bytes of what forwards leave for the recovery and the backward of one layer, counted in the op list of a stage."""
    plan = make_plan(model, pp=1, dp=1, micro_batches=1, micro_batch_size=1, seq_len=seq_len)
    stage = rewritten(lower(evolve(model, layers=1), plan).stages[0], same_for_all(*CHOICES[policy]))
    made = {tensor for op in stage.ops if type(op) is Forward for tensor in op.writes}
    later = [op for op in stage.ops if isinstance(op, BlockOp) and type(op) is not Forward and op.block.layer == 0]
    return sum(aligned(tensor.type.nbytes) for tensor in made & {tensor for op in later for tensor in op.reads})


@pytest.mark.parametrize("model", [MODEL, GPT2, NEOX], ids=["llama", "gpt2", "neox"])
@pytest.mark.parametrize("policy", ["full", "attention", "mlp", "none"])
def test_what_a_layer_keeps_is_what_its_forwards_leave(model: ModelConfig, policy: str) -> None:
    assert model_facts(model, 20).saved_bytes_per_layer[policy] == kept_of_a_layer(model, policy, 20)


CHANGES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "rotary base is 500,000": (MODEL, {"rope_theta": 5e5}),
    "4 heads share 2": (MODEL, {"kv_heads": 2}),
    "queries are 40 wide": (MODEL, {"head_dim": 10}),
    "sees 4 tokens": (MODEL, {"family": "mistral", "sliding_window": 4}),
    "biases of queries": (MODEL, {"family": "qwen2", "qkv_bias": True}),
    "one matrix": (MODEL, {"tied_embeddings": True}),
    "ALiBi": (BAICHUAN, {"position": "alibi", "rope_theta": 0.0}),
    "unit length": (BAICHUAN, {"normalised_head": True}),
    "deviation of 0.1": (MODEL, {"initializer_range": 0.1}),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_is_unusual_is_said(words: str) -> None:
    base, change = CHANGES[words]
    plain = evolve(base, kv_heads=4)
    assert model_facts(plain).unusual == ()
    (said,) = model_facts(evolve(plain, **change)).unusual
    assert words in said
    assert said in summary(model_facts(evolve(plain, **change)))[1]


def test_what_stands_side_by_side_is_said() -> None:
    serial = model_facts(evolve(NEOX, parallel_residual=False))
    (said,) = set(model_facts(NEOX).unusual) - set(serial.unusual)
    assert said == "attention and MLP side by side: both are computed of the layer's input"


def test_a_sequence_is_as_long_as_asked_and_as_positions_allow(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "gpt2", "--json"))["seq_len"] == 1024
    short, long = (json.loads(printed(capsys, "llama-2-7b", "--json", "--seq-len", n)) for n in ("1024", "4096"))
    assert short["flops_per_token"] < long["flops_per_token"]
    assert main(["model", "gpt2", "--seq-len", "1025"]) == 1
    assert "RT064" in capsys.readouterr().err


def test_what_is_not_supported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "config.json")
    odd = {"rope_scaling": {"rope_type": "longrope"}, "qk_norm": True, "novelty": 1, "vocab_size": "many"}
    Path(path).write_text(json.dumps(hugging_face_config(MODEL) | odd))
    assert main(["model", path, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert {reason["key"] for reason in facts["unsupported"]} == odd.keys() - {"vocab_size"}
    assert all(reason["help"] for reason in facts["unsupported"])
    assert sorted({problem["code"] for problem in facts["diagnostics"]}) == ["RT060", "RT061"]
    assert main(["model", path]) == 1
    shown = capsys.readouterr()
    assert "is not supported, for: rope_scaling, qk_norm, novelty" in shown.out
    assert shown.err.count("RT06") == 4
    assert main(["model", str(tmp_path / "none.json")]) == 1
    assert "RT002" in capsys.readouterr().err


def test_plan_says_what_it_plans_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen2.5-0.5b", "--clusters", "2", "--seq-len", "128"]
    for more in (["--global-batch", "4", "--quick"], ["--smallest"]):
        assert main([*words, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == summary(model_facts(load_model("qwen2.5-0.5b"), 128))


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_dropout_of_granite_that_is_not_applied_is_said(
    dropout: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    granite = evolve(MODEL, family="granite", attention_scale=0.25)
    config = {**hugging_face_config(granite), "attention_dropout": dropout}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "plan.toml").write_text(plan_to_toml(make_plan(granite)), "utf-8")
    assert main(["compile", "--model", str(tmp_path), "--plan", str(tmp_path / "plan.toml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("attention_dropout 0.1 of its config.json: without effect" in said) is (dropout > 0)


def test_a_scale_of_scores_that_is_the_usual_one_is_not_unusual() -> None:
    assert model_facts(evolve(MODEL, attention_scale=MODEL.head_dim**-0.5)).unusual == model_facts(MODEL).unusual
    assert any("scores" in line for line in model_facts(evolve(MODEL, attention_scale=0.3)).unusual)


PLAN = "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 1\nseq_len = 32\n"


@pytest.mark.parametrize(
    "words",
    [
        "model {}",
        "plan --model {} --clusters 1 --global-batch 1 --seq-len 32 --capacity 64GiB --quick",
        "compile --model {} --plan p.toml --capacity 64GiB -o x.rtir",
        "compare --model {} --plan p.toml --capacity 64GiB --strategies 1f1b",
        "fit --model {}",
    ],
)
def test_a_name_on_the_hub_stands_for_a_preset_that_is_said(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text(PLAN)
    said = "model Qwen/Qwen2.5-0.5B: the preset qwen2.5-0.5b"
    assert main(words.format("Qwen/Qwen2.5-0.5B").split()) == 0
    assert said in capsys.readouterr().err
    assert main(words.format("qwen2.5-0.5b").split()) == 0
    assert said not in capsys.readouterr().err
    assert main(words.format("Qwen/Qwen2.5-0.6B").split()) == 1
    assert "did you mean 'Qwen/Qwen2.5-0.5B'" in " ".join(capsys.readouterr().err.split())
