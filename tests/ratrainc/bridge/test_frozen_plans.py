"""LLaMA-Factory's `finetuning_type: freeze` as `freeze` of [train]: what trains there trains here, and nothing else."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import Training, split_names
from ratrain.ratrain_ir.model.adapters import trains_parameter
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.text import Source
from ratrain.ratrainc.bridge.job_plans.frozen_keys import patterns_of, put_thawed
from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
from ratrain.ratrainc.bridge.jobs.job import Job, Thawed
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.cli import main
from tests.ratrainc.bridge.test_adapter_plans import FACTORY, TINY, compiles, family, imported
from tests.ratrainc.bridge.test_job_plans import FSDP, SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig

NORMS = "model.layers.*.input_layernorm.*, model.layers.*.post_attention_layernorm.*"
PLAIN = f"{SMALL}{FSDP}max_steps: 50\n"
FREEZE = FACTORY.replace("finetuning_type: lora\nlora_rank: 4", "finetuning_type: freeze")
MODELS = {name: family(load_model(name)) for name in ("llama-2-7b", "qwen2.5-0.5b", "gpt2", "qwen3-0.6b", "gemma-2-9b")}


def names_of(model: ModelConfig) -> list[str]:
    return list(dict.fromkeys(each.name for owner in block_chain(model) for each in parameters(model, owner)))


def keys_of(thawed: Thawed, model: ModelConfig | None) -> dict[str, Any]:
    job = Job("llama-factory", None, model, 64, 1, 1, thawed=thawed, method="frozen")
    made = JobPlan(job, "it", Source("a.yaml", "").top(), Asked())
    put_thawed(made)
    made.report.check()
    return made.values


def trained_there(thawed: Thawed, model: ModelConfig) -> set[str]:
    """Return what LLaMA-Factory trains: src/llamafactory/model/adapter.py, _setup_freeze_tuning, word by word."""
    if thawed.spread:
        stride = model.layers // thawed.layers
        layers = list(range(stride - 1, model.layers + stride - 1, stride))
    elif thawed.layers > 0:
        layers = list(range(max(0, model.layers - thawed.layers), model.layers))
    else:
        layers = list(range(min(-thawed.layers, model.layers)))
    texts = [f".{layer}.{'' if each == 'all' else each}" for each in thawed.modules for layer in layers]
    return {name for name in names_of(model) if any(text in name for text in (*texts, *thawed.extra_modules))}


@st.composite
def thawings(draw: st.DrawFn, model: ModelConfig) -> Thawed:
    names = names_of(model)
    inside = sorted({each.split(".0.")[-1].split(".")[0] for each in names if ".0." in each})
    outside = sorted({each.split(".")[-2] for each in names if re.search(r"\.\d+\.", each) is None})
    modules = draw(st.lists(st.sampled_from(["all", *inside]), min_size=1, max_size=2, unique=True))
    extra = draw(st.lists(st.sampled_from(outside), max_size=2, unique=True))
    divisors = [number for number in range(1, model.layers + 1) if model.layers % number == 0]
    spread = draw(st.booleans())
    layers = draw(st.sampled_from(divisors) if spread else st.integers(-model.layers - 1, model.layers + 1))
    return Thawed(layers, tuple(modules), tuple(extra), spread)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(sorted(MODELS)), st.integers(1, 24))
def test_what_trains_there_trains_here(data: st.DataObject, name: str, layers: int) -> None:
    model = evolve(MODELS[name], layers=layers)
    thawed = data.draw(thawings(model))
    expected = trained_there(thawed, model)
    if not expected:
        with pytest.raises(DiagnosticError, match="nothing of"):
            keys_of(thawed, model)
        return
    freeze = keys_of(thawed, model).get("freeze", "")
    training = Training(freeze=freeze)
    assert {each for each in names_of(model) if trains_parameter(training, each, adapter=False)} == expected
    rows = -(-layers // 10)
    assert len(split_names(freeze)) <= rows * 12 + len(names_of(evolve(model, layers=1))), "a row for ten layers"


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(sorted(MODELS)), st.integers(1, 13))
def test_patterns_match_the_names_that_they_are_of(data: st.DataObject, name: str, layers: int) -> None:
    names = names_of(evolve(MODELS[name], layers=layers))
    chosen = data.draw(st.sets(st.sampled_from(names)))
    if data.draw(st.booleans()):
        chosen = {*names} - chosen
    patterns = patterns_of([each for each in names if each in chosen], names)
    assert {each for each in names if any(fnmatchcase(each, pattern) for pattern in patterns)} == chosen


def test_layers_become_keys_of_a_plan_that_compiles(tmp_path: Path) -> None:
    for said, freeze in (
        ("", "model.embed_tokens.*, model.layers.[01].*, lm_head.*, model.norm.*"),
        ("freeze_trainable_layers: -1\n", "model.embed_tokens.*, model.layers.[1-3].*, lm_head.*, model.norm.*"),
        (
            "freeze_trainable_layers: 4\nfreeze_trainable_modules: self_attn, mlp\nfreeze_extra_modules: lm_head\n",
            f"model.embed_tokens.*, {NORMS}, model.norm.*",
        ),
        (
            "use_llama_pro: true\nfreeze_trainable_layers: 2\n",
            "model.embed_tokens.*, model.layers.[02].*, lm_head.*, model.norm.*",
        ),
    ):
        made = imported(tmp_path, f"{FREEZE}{said}", "llama-factory", model=TINY)
        assert made.plan.training == Training(freeze=freeze)
        assert ("freeze_trainable_layers" in made.defaults) == (not said)
        assert not any("freeze" in each.key or "pro" in each.key for each in made.left)
        compiles(made, TINY)


@pytest.mark.parametrize(
    ("expressions", "freeze"),
    [
        (["model.layers.[23]."], "model.embed_tokens.*, model.layers.[01].*, lm_head.*, model.norm.*"),
        (["^model.layers.1.", "^lm_head"], "model.embed_tokens.*, model.layers.[023].*, model.norm.*"),
        (
            ["model.layers.[0-9]+.(self_attn|mlp).", "model.embed_tokens", "lm_head"],
            f"{NORMS}, model.norm.*",
        ),
    ],
)
def test_expressions_of_axolotl_become_keys_of_a_plan(tmp_path: Path, expressions: list[str], freeze: str) -> None:
    made = imported(tmp_path, f"{PLAIN}unfrozen_parameters: {expressions}\n", "axolotl", model=TINY)
    assert made.plan.training == Training(freeze=freeze)
    compiles(made, TINY)


@pytest.mark.parametrize(
    ("said", "model", "text"),
    [
        ("[model.layers.1]", None, "unfrozen_parameters: which parameters stay frozen depends on the model"),
        ("['model.embed_tokens.weight$[:32]']", TINY, "unfrozen_parameters: of some parameters it trains some rows"),
        ("[transformer.h]", TINY, "unfrozen_parameters: nothing of tiny is left to train"),
    ],
)
def test_expressions_that_no_plan_has_are_refused(tmp_path: Path, said: str, model: ModelConfig, text: str) -> None:
    with pytest.raises(DiagnosticError, match=text):
        imported(tmp_path, f"{PLAIN}unfrozen_parameters: {said}\n", "axolotl", model=model)


def test_layers_that_all_train_are_a_full_training(tmp_path: Path) -> None:
    more = "freeze_trainable_layers: 9\nfreeze_extra_modules: [embed_tokens, norm, lm_head]\n"
    made = imported(tmp_path, f"{FREEZE}{more}", "llama-factory", model=TINY)
    assert made.plan.training == Training()


EXPERTS = load_model("mixtral-8x7b")
REFUSED: dict[str, tuple[str, ModelConfig | None, str, str]] = {
    "an unknown model": ("", None, "freeze_trainable_layers: which parameters", "--model"),
    "experts": ("", EXPERTS, "freeze_trainable_layers: names of experts", "say freeze"),
    "nothing": ("freeze_trainable_layers: 0\n", TINY, "freeze_trainable_layers: nothing of tiny", "let a layer"),
    "no module": ("freeze_trainable_modules: atn\n", TINY, "freeze_trainable_modules: tiny has no module atn", "mlp"),
    "no module outside": ("freeze_extra_modules: mlp\n", TINY, "freeze_extra_modules: tiny has no", "lm_head"),
    "a half": ("freeze_trainable_layers: 1.5\n", TINY, "a whole number is expected", "-2: the first two"),
    "a word": ("freeze_trainable_layers: two\n", TINY, "freeze_trainable_layers is", ""),
    "unequal parts": (
        "use_llama_pro: true\nfreeze_trainable_layers: 3\n",
        TINY,
        "freeze_trainable_layers: 4 layers of tiny do not come in 3 equal parts",
        "divides the layers",
    ),
    "no parts": (
        "use_llama_pro: true\nfreeze_trainable_layers: -2\n",
        TINY,
        "do not come in -2 equal parts",
        "divides the layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_by_name(name: str, tmp_path: Path) -> None:
    more, model, message, way_out = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        imported(tmp_path, f"{FREEZE}{more}", "llama-factory", model=model)
    found = [each for each in caught.value.diagnostics if message in each.message]
    assert found, [each.message for each in caught.value.diagnostics]
    assert way_out in (found[0].help or "")


def test_the_command_takes_a_model_for_files_of_trainers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "a.yaml", tmp_path / "ds.json"
    file.write_text(FREEZE)
    other.write_text("{}")
    words = ["--devices", "2", "--model", "meta-llama/Llama-3.2-1B"]
    assert main(["import-plan", str(file), *words]) == 0
    shown = capsys.readouterr()
    assert 'freeze = "model.embed_tokens.*, model.layers.[0-9].*, model.layers.1[0-3].*, model.norm.*"' in shown.out
    assert "the preset llama-3.2-1b" in shown.err
    assert main(["import-plan", "--from", "deepspeed", str(other), *words]) == 2
    assert "--model is for files of trainers" in " ".join(capsys.readouterr().err.split())
