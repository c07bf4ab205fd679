"""Arguments of Megatron-LM that say a model: read as Megatron-LM reads them they are the model again, or the difference is named."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.config.rope_scaling import RopeScaling, parse_scaling
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.exporting import Exported, export_plan
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.megatron_flags import GROUPS
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.cli import main
from tests.whole_cases import odd_models, odd_plans

PLAN = Plan(pp=2, dp=2, cuts=(1,), micro_batch_size=1, micro_batches=4, seq_len=64, view_dtype="bf16", loss_scale=1.0)
PLAN = evolve(PLAN, schedule="1f1b", grad_dtype="f32", grad_shard_dtype="f32")
MEGATRON = FRAMEWORKS["megatron"]


def arguments(exported: Exported) -> dict[str, Any]:
    settings_ = MEGATRON.settings_of("x", exported.text, Asked())
    return {name: each.value for name, each in settings_.items()}


def back(exported: Exported) -> Imported:
    return imported(MEGATRON, "x", exported.text, Asked())


def activation(said: dict[str, Any]) -> tuple[str, bool]:
    biases = "disable-bias-linear" not in said
    if "swiglu" in said:
        return "silu", True
    if "squared-relu" in said:
        assert not biases or "no-bias-gelu-fusion" in said  # else Megatron-LM stops
        return "relu2", False
    return "gelu-tanh" if biases and "no-bias-gelu-fusion" not in said else "gelu", False


def scaling(said: dict[str, Any]) -> str:
    if said["position-embedding-type"] == "yarn":
        factor = float(said["rotary-scaling-factor"])
        attention = 1 + 0.1 * float(said.get("mscale", 1)) * math.log(factor)
        fast, slow = float(said["yarn-beta-fast"]), float(said["yarn-beta-slow"])
        length = float(said["yarn-original-max-position-embeddings"])
        whole = float("yarn-correction-range-round-to-int" in said)
        return str(RopeScaling("yarn", (factor, fast, slow, length, round(attention, 6), whole)))
    if "rotary-seq-len-interpolation-factor" in said:
        return str(RopeScaling("linear", (float(int(said["rotary-seq-len-interpolation-factor"])),)))
    if "use-rope-scaling" in said:
        return str(RopeScaling("llama3", (float(said["rope-scaling-factor"]), 1.0, 4.0, 8192.0)))
    return ""


def kinds(said: dict[str, Any], name: str, letter: str) -> str:
    pattern = ast.literal_eval(said[name]) if name in said else []
    return "".join(letter if each else "f" for each in pattern)


def model_of(said: dict[str, Any], tp: int) -> ModelConfig:
    """Make the model that Megatron-LM makes of its arguments, by its own defaults where one is left out."""
    heads, width = int(said["num-attention-heads"]), int(said["kv-channels"])
    position = {"rope": "rope", "yarn": "rope", "learned_absolute": "learned", "none": "none"}
    place = position[said["position-embedding-type"]]
    biases = "disable-bias-linear" not in said
    kind, gated = activation(said)
    each = int(said["make-vocab-size-divisible-by"]) * tp
    share = int(width * float(said.get("rotary-percent", 1.0)))
    return ModelConfig(
        name="x",
        family="llama",
        vocab_size=-(-int(said["vocab-size"]) // each) * each,
        hidden_size=int(said["hidden-size"]),
        layers=int(said["num-layers"]),
        heads=heads,
        kv_heads=int(said["num-query-groups"]) if "group-query-attention" in said else heads,
        head_dim=width,
        ffn_size=int(said["ffn-hidden-size"]),
        norm_eps=float(said["norm-epsilon"]),
        position=place,
        rope_theta=float(int(said["rotary-base"])) if place == "rope" else 0.0,
        sliding_window=int(said["window-size"].split(",")[0]) + 1 if "window-size" in said else None,
        qkv_bias=biases or "add-qkv-bias" in said,
        o_bias=biases,
        mlp_bias=biases,
        tied_embeddings="untie-embeddings-and-output-weights" not in said,
        learned_positions=int(said["max-position-embeddings"]) if place == "learned" else None,
        norm={"RMSNorm": "rms", "LayerNorm": "layer"}[said["normalization"]],
        norm_unit_offset="apply-layernorm-1p" in said,
        qk_norm="head" if "qk-layernorm" in said else "none",
        activation=kind,
        gated_mlp=gated,
        rotary_dim=None if "rotary-percent" not in said else share,
        rope_interleaved="rotary-interleaved" in said,
        rope_scaling=scaling(said),
        layer_kinds=kinds(said, "window-attn-skip-freq", "w") or kinds(said, "no-rope-freq", "n"),
    )


def rounded(model: ModelConfig) -> ModelConfig:
    """The model with its factor of attention to six digits, which a logarithm and its inverse give back."""
    known = parse_scaling(model.rope_scaling) if model.rope_scaling else None
    if known is None or known.kind != "yarn":
        return model
    values = (*known.values[:4], round(known.values[4], 6), known.values[5])
    return evolve(model, rope_scaling=str(RopeScaling("yarn", values)))


def check(model: ModelConfig, plan: Plan) -> None:
    exported = export_plan("megatron", plan, model)
    said = arguments(exported)
    missing = {each.key for each in exported.missing}
    assert said.keys() <= GROUPS.keys() | {"WORLD_SIZE"}
    differ = {name for name, _, _ in rounded(model).differences(rounded(model_of(said, plan.tp)))}
    assert differ == {each for each in missing if hasattr(model, each)} - {"padding_token"}  # of no mathematics
    made = back(exported)
    found, wanted = plan_words(made.plan), plan_words(plan)
    idle = {"schedule", "layout", "zero", "max_norm"}
    assert {name for name in {**found, **wanted} if found.get(name) != wanted.get(name)} <= missing | idle
    assert all("not known" not in each.why for each in made.left)
    assert all(f"# Not expressed: {each}" in exported.text for each in exported.missing)


@pytest.mark.parametrize("name", [each for each in preset_names() if load_model(each).experts is None])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_known_model_comes_back_from_its_arguments(name: str, tp: int) -> None:
    model = load_model(name)
    check(model, evolve(PLAN, tp=tp, seq_len=1024))
    exported = export_plan("megatron", evolve(PLAN, tp=tp, seq_len=1024), model)
    lacks = {"position", "normalised_head", "padding_token", "vocab_size"}
    if model.family.startswith("gemma"):  # no argument says these
        lacks |= {"activation", "norm_placement", "embedding_scale", "attention_scale", "local_rope_theta"}
        lacks |= {"attention_softcap", "logit_softcap"}
    assert {each.key for each in exported.missing} <= lacks
    assert back(exported).plan == evolve(PLAN, tp=tp, seq_len=1024)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_model_and_plan_comes_back_or_its_difference_is_named(data: st.DataObject) -> None:
    model = data.draw(odd_models().filter(lambda model: model.experts is None))
    check(model, data.draw(odd_plans(model)))


@pytest.mark.parametrize(
    ("changes", "flags", "missing"),
    [
        ({}, {"swiglu": True, "disable-bias-linear": True, "rotary-base": "10000"}, {}),
        ({"rope_theta": 1234.5}, {"rotary-base": "1234"}, {"rope_theta": "1234"}),
        ({"rope_scaling": "linear 4"}, {"rotary-seq-len-interpolation-factor": "4"}, {}),
        ({"rope_scaling": "linear 2.5"}, {}, {"rope_scaling": '""'}),
        ({"rope_scaling": "llama3 32 1 4 8192"}, {"rope-scaling-factor": "32.0"}, {}),
        ({"rope_scaling": "llama3 32 1 4 4096"}, {}, {"rope_scaling": '""'}),
        ({"sliding_window": 16}, {"window-size": "15,0"}, {}),
        ({"sliding_window": 16, "layer_kinds": "fwfw"}, {"window-attn-skip-freq": "[0,1,0,1]"}, {}),
        ({"layer_kinds": "fffn"}, {"no-rope-freq": "[0,0,0,1]"}, {}),
        ({"qkv_bias": True}, {"add-qkv-bias": True, "disable-bias-linear": True}, {}),
        ({"o_bias": True}, {"disable-bias-linear": True}, {"o_bias": "false"}),
        ({"activation": "gelu-tanh"}, {"swiglu": True}, {"activation": '"silu"'}),
        ({"activation": "gelu-tanh", "gated_mlp": False}, {}, {"activation": '"gelu"'}),
        ({"activation": "gelu", "gated_mlp": False}, {}, {}),
        ({"activation": "relu2", "gated_mlp": False}, {"squared-relu": True}, {}),
        (
            {"qkv_bias": True, "mlp_bias": True, "activation": "gelu-tanh", "gated_mlp": False},
            {"add-qkv-bias": True},
            {"mlp_bias": "false", "activation": '"gelu"'},
        ),
        ({"qk_norm": "whole"}, {}, {"qk_norm": "none"}),
        ({"norm_placement": "post"}, {}, {"norm_placement": '"pre"'}),
        ({"attention_softcap": 50.0}, {}, {"attention_softcap": None}),
        ({"vocab_size": 61}, {"vocab-size": "61", "make-vocab-size-divisible-by": "1"}, {}),
        ({"rotary_dim": 4}, {"rotary-percent": "0.5"}, {}),
    ],
)
def test_a_part_of_a_model_is_said_or_named(
    changes: dict[str, Any], flags: dict[str, Any], missing: dict[str, str | None]
) -> None:
    model = ModelConfig("x", "llama", 128, 32, 4, 4, 2, 8, 64, 1e-5)
    exported = export_plan("megatron", PLAN, evolve(model, **changes))
    assert arguments(exported).items() >= flags.items()
    assert {each.key: each.instead for each in exported.missing if hasattr(model, each.key)} == {
        key: None if value is None else value.replace("none", '"none"') for key, value in missing.items()
    }


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_a_model_with_experts_becomes_no_settings_of_a_dense_model(framework: str) -> None:
    with pytest.raises(DiagnosticError, match="mixtral-8x7b has experts") as caught:
        export_plan(framework, PLAN, load_model("mixtral-8x7b"))
    assert "--format torch-csv" in (caught.value.diagnostics[0].help or "")


def test_what_neither_model_nor_plan_says_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[3] / "examples"
    module = str(tmp_path / "t.rtir")
    model, plan = str(examples / "tiny.json"), str(examples / "tiny.toml")
    assert main(["compile", "--model", model, "--plan", plan, "-o", module]) == 0
    capsys.readouterr()
    for kind, names in (("megatron", ("--train-iters", "--tokenizer-type")), ("torchtitan", ("flavor", "[model]"))):
        assert main(["export", module, "--format", kind]) == 0
        printed = capsys.readouterr()
        for name in names:
            assert name in next(line for line in printed.out.splitlines() if line.startswith("# To add: "))
            assert name in next(line for line in printed.err.splitlines() if line.startswith("to add: "))
    assert main(["export", module, "--format", "megatron", "-o", str(tmp_path / "a.sh")]) == 0
    capsys.readouterr()
    assert main(["import-plan", "--from", "megatron", str(tmp_path / "a.sh"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["cuts"] == [2]
