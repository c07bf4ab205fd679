"""Facts of models with experts: active parameters, and the rows below which weights bind an expert."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.facts.expert_facts import expert_rows_note, experts_json, experts_text
from ratrain.ratrainc.facts.model_facts import model_facts, model_parts
from ratrain.targets.machine.machine import load_machine

PLAN = Plan(pp=1, dp=1, cuts=(), micro_batch_size=2, micro_batches=1, seq_len=2048)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.35), ("mixtral-8x7b", 12.88), ("olmoe-1b-7b", 1.28), ("granite-3.1-1b-a400m", 0.43)],
)
def test_active_parameters_are_those_that_are_published(name: str, billions: float) -> None:
    assert load_model(name).active_parameters / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize("name", ["qwen1.5-moe-a2.7b", "mixtral-8x7b", "llama-3.2-1b"])
def test_parameters_of_experts_are_those_of_their_stacks(name: str) -> None:
    model = load_model(name)
    every = [each for block in block_chain(model) for each in parameters(model, block)]
    stacks = sum(each.elements for each in every if each.weight.endswith("_experts"))
    assert model.expert_parameters == stacks
    if model.experts is None:
        assert model.active_parameters == model.parameters
    else:
        chosen = (model.experts_per_token or 0) / model.experts
        assert model.active_parameters == model.parameters - stacks + round(stacks * chosen)


def test_rows_of_experts_are_noted_with_a_way_out() -> None:
    """On an MT-3000 a weight of f16 binds below 189 rows."""
    model, machine = load_model("qwen3-30b-a3b"), load_machine(None)
    assert "get 256 rows each in a micro-batch (4,096 tokens, 8 of 128" in expert_rows_note(model, PLAN, machine)
    assert "below" not in expert_rows_note(model, PLAN, machine)
    few = expert_rows_note(model, evolve(PLAN, micro_batch_size=1), machine)
    assert "get 128 rows" in few
    assert "below 189 rows" in few
    assert "larger micro-batches have more" in few
    sliced = expert_rows_note(model, evolve(PLAN, slices=(1024, 1024)), machine)
    assert "128 rows each in the shortest slice" in sliced
    assert "fewer slices, have more" in sliced
    dense = load_model("llama-3.2-1b")
    assert expert_rows_note(dense, PLAN, machine) == experts_text(dense) == ""
    assert experts_json(dense) is None


def test_layers_of_both_kinds_are_counted_apart() -> None:
    """Of a layer with experts, and of one without; what a layer keeps is that of the one that keeps more."""
    whole = load_model("qwen3-30b-a3b")
    model = evolve(whole, mlp_kinds="de" * 24)
    assert model.layer_parameters(1) - model.layer_parameters(0) == 128 * (2048 + 3 * 2048 * 768) - 3 * 2048 * 6144
    assert model.parameters == whole.parameters - 24 * (model.layer_parameters(1) - model.layer_parameters(0))
    assert model.expert_parameters == whole.expert_parameters // 2
    assert "experts: 128 in 24 of 48 layers, 768 wide" in experts_text(model)
    facts = model_facts(model)
    assert facts.saved_bytes_per_layer == model_facts(whole).saved_bytes_per_layer
    (blocks, kept, *_) = model_parts(facts)
    assert [row[:2] for row in blocks.rows if row[0].startswith("mlp")] == [["mlp", "24"], ["mlp of 128 experts", "24"]]
    assert "at most" in kept.title
    assert experts_json(model)["layers"] == 24


def test_commands_say_what_experts_get(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "qwen2_moe", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    model, program = tmp_path / "m.json", str(tmp_path / "m.rtx")
    model.write_text(json.dumps(config))
    (tmp_path / "p.toml").write_text(
        "[parallel]\npp = 1\ndp = 1\ncuts = []\n[batch]\nmicro_batch_size = 1\nmicro_batches = 2\nseq_len = 32\n"
        "[experts]\nbalance_loss = 0.01\n"
    )

    def said(*words: str) -> str:
        assert main(list(words)) == 0
        return " ".join(capsys.readouterr().out.split())

    described = said("model", str(model))
    assert "mlp of 4 experts" in described
    assert "experts: 4 a layer, 8 wide, 2 for each token, and one of 8 for all tokens" in described
    assert json.loads(said("model", str(model), "--json"))["experts"]["experts_per_token"] == 2
    rows = "experts get 16 rows each in a micro-batch"
    assert rows in said("compile", "--model", str(model), "--plan", str(tmp_path / "p.toml"), "-o", program)
    assert rows in said("simulate", program)
    assert rows in said("explain", program, "--no-levers")
    assert "as if routers sent all experts as many rows" in said("explain", program, "--time")
    words = ("--clusters", "1", "--global-batch", "2", "--seq-len", "32", "--quick", "--json")
    assert "experts get" in json.loads(said("plan", "--model", str(model), *words))["notes"][0]
