"""Adapters of settings files as keys of [train]: each key, what compiles, what is refused, and PEFT's own matching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.training import ALL_LINEAR, Training
from ratrain.ratrain_ir.model.adapters import is_saved, is_target
from ratrain.ratrain_ir.model.module_names import layers_by_part, parameter_modules
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers, expression_error, is_named
from ratrain.ratrain_ir.support.text import Source
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.bridge.exporting import export_plan
from ratrain.ratrainc.bridge.job_plans.adapter_keys import put_adapter
from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
from ratrain.ratrainc.bridge.jobs.job import Adapter, Job
from ratrain.ratrainc.bridge.settings import Asked
from tests.ratrainc.bridge.test_job_plans import BRIDGE, JOBS, SHARED, SMALL, TRAINER, TUNE

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.importing import Imported

TINY = load_model(str(Path(__file__).parents[3] / "examples" / "tiny.json"))
AXOLOTL = f"{SMALL}adapter: lora\nlora_r: 4\nlora_alpha: 16\n"
NAMED = f"{AXOLOTL}lora_target_modules: [q_proj, v_proj]\n"
QLORA = AXOLOTL.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true\nlora_target_linear: true")
FACTORY = """model_name_or_path: org/unknown
stage: sft
finetuning_type: lora
lora_rank: 4
template: llama3
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
max_steps: 50
"""
FACTORY_MORE = """lora_alpha: 3
lora_target: q_proj,o_proj
use_rslora: true
quantization_bit: 4
additional_target: norm
"""
TRL = f"{TRAINER}use_peft: true\nlora_r: 4\nlora_dropout: 0\nlora_target_modules: all-linear\ndtype: bfloat16\n"
TUNE_LORA = TUNE.replace(
    "llama3_2.llama3_2_1b}",
    "llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, lora_rank: 4}",
)
FOUNDRY = """max_seq_len: 64
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: org/unknown
  use_flash_attention_2: true
  peft_config: {peft_type: LORA, r: 4, lora_alpha: 8, target_modules: [q_proj], layers_to_transform: 1, bias: none}
train_loader: {name: text, dataset: {local: d, max_seq_len: 64}}
scheduler: {name: constant_with_warmup, t_warmup: 5ba}
optimizer: {name: decoupled_adamw, lr: 2.0e-4}
max_duration: 100ba
global_train_batch_size: 16
device_train_microbatch_size: 2
precision: amp_bf16
"""
LORA4 = Training(method="lora", rank=4, alpha=16.0)
WHOLE_STATE: dict[str, Any] = {"f32_state": True}
KEYS: dict[str, tuple[str, str, dict[str, Any], Training]] = {
    "names": (NAMED, "axolotl", {}, evolve(LORA4, targets="q_proj, v_proj")),
    "names in a text": (
        f"{AXOLOTL}lora_target_modules: 'q_proj, self_attn.v_proj'\n",
        "axolotl",
        {},
        evolve(LORA4, targets="q_proj, self_attn.v_proj"),
    ),
    "all linear layers": (f"{AXOLOTL}lora_target_linear: true\n", "axolotl", {}, LORA4),
    "all linear layers, and some of them": (
        f"{AXOLOTL}lora_target_linear: true\nlora_target_modules: [gate_proj]\n",
        "axolotl",
        {},
        LORA4,
    ),
    "another scale": (
        f"{NAMED}peft_use_rslora: true\n",
        "axolotl",
        {},
        evolve(LORA4, targets="q_proj, v_proj", rslora=True),
    ),
    "an expression": (
        AXOLOTL + r"lora_target_modules: 'model\.layers\.[0-9]{1,2}\.self_attn\.(q|v)_proj'" + "\n",
        "axolotl",
        {},
        evolve(LORA4, targets=r"re:model\.layers\.[0-9]{1,2}\.self_attn\.(q|v)_proj"),
    ),
    "some layers": (
        f"{NAMED}peft_layers_to_transform: [0, 2]\n",
        "axolotl",
        {},
        evolve(LORA4, targets=r"re:(?=(?:[a-z_]\w*\.)*[a-z_]\w*\.(?:0|2)\.)(?:.*\.)?(?:q_proj|v_proj)"),
    ),
    "all but some": (
        f"{NAMED}lora_exclude_modules: [v_proj, lm_head]\n",
        "axolotl",
        {},
        evolve(LORA4, targets="q_proj"),
    ),
    "all but some layers": (
        f"{NAMED}lora_exclude_modules: [layers.0.self_attn.v_proj]\n",
        "axolotl",
        {},
        evolve(LORA4, targets=r"re:(?!(?:(?:.*\.)?(?:layers\.0\.self_attn\.v_proj))\Z)(?:(?:.*\.)?(?:q_proj|v_proj))"),
    ),
    "all but an expression": (
        NAMED + r"lora_exclude_modules: '.*\.[0-1]\..*'" + "\n",
        "axolotl",
        {},
        evolve(LORA4, targets=r"re:(?!(?:.*\.[0-1]\..*)\Z)(?:(?:.*\.)?(?:q_proj|v_proj))"),
    ),
    "ranks of some": (
        f"{NAMED}lora_rank_pattern: {{q_proj: 2, 'layers.1.self_attn.v_proj': 8}}\nlora_alpha_pattern: {{q_proj: 4}}\n",
        "axolotl",
        {},
        evolve(
            LORA4,
            targets="q_proj, v_proj",
            rank_pattern=ModuleNumbers((("q_proj", 2), ("layers.1.self_attn.v_proj", 8))),
            alpha_pattern=ModuleNumbers((("q_proj", 4),)),
        ),
    ),
    "modules that train whole": (
        f"{NAMED}lora_modules_to_save: [embed_tokens, lm_head]\n",
        "axolotl",
        {},
        evolve(LORA4, targets="q_proj, v_proj", modules_to_save="embed_tokens, lm_head"),
    ),
    "a base in 4 bits": (QLORA, "axolotl", {}, evolve(LORA4, base="nf4")),
    "a base in 4 bits, moments in 8": (
        QLORA.replace("adamw_torch_fused", "adamw_bnb_8bit"),
        "axolotl",
        WHOLE_STATE,
        evolve(LORA4, base="nf4"),
    ),
    "LLaMA-Factory's defaults": (FACTORY, "llama-factory", {}, Training(method="lora", rank=4, alpha=8.0)),
    "LLaMA-Factory": (
        f"{FACTORY}{FACTORY_MORE}",
        "llama-factory",
        {},
        Training(
            method="lora", rank=4, alpha=3.0, rslora=True, targets="q_proj, o_proj", base="nf4", modules_to_save="norm"
        ),
    ),
    "TRL": (TRL, "trl", {}, Training(method="lora", rank=4, alpha=32.0)),
    "TRL, a base in 4 bits": (
        f"{TRL}load_in_4bit: true\nuse_rslora: true\n",
        "trl",
        WHOLE_STATE,
        Training(method="lora", rank=4, alpha=32.0, rslora=True, base="nf4"),
    ),
    "torchtune": (
        TUNE_LORA,
        "torchtune",
        {"clusters": 1},
        Training(method="lora", rank=4, alpha=16.0, targets="q_proj, o_proj, gate_proj, up_proj, down_proj"),
    ),
    "torchtune, a base in 4 bits": (
        TUNE_LORA.replace(".lora_llama", ".qlora_llama").replace("fp32", "bf16"),
        "torchtune",
        {"clusters": 1, **WHOLE_STATE},
        Training(
            method="lora", rank=4, alpha=16.0, targets="q_proj, o_proj, gate_proj, up_proj, down_proj", base="nf4"
        ),
    ),
    "LLM Foundry": (
        FOUNDRY,
        "llm-foundry",
        {"clusters": 2},
        Training(
            method="lora",
            rank=4,
            alpha=8.0,
            targets=r"re:(?=(?:[a-z_]\w*\.)*[a-z_]\w*\.(?:1)\.)(?:.*\.)?(?:q_proj)",
        ),
    ),
    "Megatron-Bridge": (
        f"{BRIDGE}peft: {{dim: 4, alpha: 8, target_modules: [linear_proj, linear_fc2]}}\n",
        "megatron-bridge",
        {"clusters": 8},
        Training(method="lora", rank=4, alpha=8.0, targets="o_proj, down_proj"),
    ),
}


def imported(folder: Path, text: str, framework: str | None, **options: Any) -> Imported:
    (folder / "a.yaml").write_text(text)
    return api.import_plan(framework, folder / "a.yaml", **{"clusters": 2, **options})


def compiles(made: Imported, model: ModelConfig) -> None:
    """Read a plan's file for a model, and compile it for short sequences."""
    plan = parse_plan(made.text(), file="P.toml", model=model)
    check_plan(plan, model)
    assert plan.training == made.plan.training
    short = evolve(plan, seq_len=32, micro_batches=min(plan.micro_batches, 2))
    api.compile(model, short, machine="h100-node")


@pytest.mark.parametrize("name", KEYS)
def test_an_adapter_becomes_the_keys_that_it_is(name: str, tmp_path: Path) -> None:
    text, framework, options, training = KEYS[name]
    made = imported(tmp_path, text, framework, **options)
    assert made.plan.training == training
    left = {each.key for each in made.left}
    assert not any(word in key for key in left for word in ("lora_r", "rslora", "target_modules", "to_save", "pattern"))
    compiles(made, TINY)


def test_what_a_base_has_otherwise_is_named(tmp_path: Path) -> None:
    made = imported(tmp_path, f"{TRL}load_in_4bit: true\n", "trl", f32_state=True)
    named = {each.key: each.why for each in made.left if each.trains}
    assert "stay in f32" in named["use_bnb_nested_quant"]
    assert "adapters and moments are held in bf16" in named["use_peft"]
    assert {"lora_alpha", "use_bnb_nested_quant"} <= made.defaults.keys()
    kwargs = "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n"
    single = {each.key for each in imported(tmp_path, QLORA + kwargs, "axolotl").left if each.trains}
    assert "bnb_config_kwargs.bnb_4bit_use_double_quant" in single


def family(model: ModelConfig) -> ModelConfig:
    """Return a small model of the same family."""
    small = {
        "vocab_size": 128,
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
    }
    return evolve(model, **small)


PUBLISHED = {
    "04-llamafactory-lora-sft/train.yaml": ("qwen2.5-7b", "", {"steps": 100}, {"rank": 16, "alpha": 32.0}),
    "06-trl-sft-lora-accelerate-fsdp2/sft.yaml": (
        "llama-3.2-3b",
        "lora_dropout: 0\n",
        {"steps": 100, "f32_state": False},
        {"rank": 32, "alpha": 32.0, "targets": ALL_LINEAR},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.skipif(SHARED is None, reason="no settings of others here")
def test_the_adapters_of_samples_become_keys(name: str, tmp_path: Path) -> None:
    assert SHARED is not None
    model, more, options, expected = PUBLISHED[name]
    file = SHARED / name
    beside = [path for path in file.parent.glob("*.yaml") if path != file]
    copy = tmp_path / file.name
    copy.write_text(file.read_text() + more)
    made = api.import_plan(None, copy, beside=beside, clusters=16 if beside else 2, **options)
    assert {key: getattr(made.plan.training, key) for key in expected} == expected
    compiles(made, family(load_model(model)))


def test_the_adapter_of_a_config_of_torchtune_becomes_keys(tmp_path: Path) -> None:
    text = (JOBS / "tune_qlora.yaml").read_text().replace("lora_dropout: 0.1", "lora_dropout: 0.0")
    text = text.replace("my_own_switch: 3\n", "")
    made = imported(tmp_path, text, "torchtune", clusters=1, f32_state=True, steps=100)
    assert (made.plan.training.rank, made.plan.training.base) == (32, "nf4")
    assert made.plan.training.targets == "q_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    compiles(made, family(load_model("qwen2.5-7b")))


QWEN = "base_model: Qwen/Qwen2.5-0.5B"
REFUSED: dict[str, tuple[str, str, str, str]] = {
    "dropout": (f"{NAMED}lora_dropout: 0.1\n", "axolotl", "lora_dropout: adapters drop 0.1", "say 0"),
    "dropout by default": (TRL.replace("lora_dropout: 0\n", ""), "trl", "lora_dropout: adapters drop 0.05", "say 0"),
    "DoRA": (f"{NAMED}peft_use_dora: true\n", "axolotl", "DoRA (peft_use_dora)", "take it out"),
    "LoftQ": (f"{NAMED}peft: {{loftq_config: {{loftq_bits: 4}}}}\n", "axolotl", "LoftQ", "take it out"),
    "another start": (f"{NAMED}peft_init_lora_weights: pissa\n", "axolotl", "peft_init_lora_weights: ", "take it out"),
    "no start at zero": (f"{NAMED}peft_init_lora_weights: false\n", "axolotl", "peft_init_lora_weights", "take it out"),
    "PiSSA": (f"{FACTORY}pissa_init: true\n", "llama-factory", "PiSSA (pissa_init)", "take it out"),
    "two rates": (f"{NAMED}loraplus_lr_ratio: 16\n", "axolotl", "loraplus_lr_ratio 16", "take it out"),
    "fp4": (f"{TRL}load_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "trl", "bnb_4bit_quant_type: adapters", "say nf4"),
    "fp4 of axolotl": (
        f"{QLORA}bnb_config_kwargs: {{bnb_4bit_quant_type: fp4}}\n",
        "axolotl",
        "bnb_4bit_quant_type: adapters",
        "say nf4",
    ),
    "8 bits": (f"{NAMED}load_in_8bit: true\n", "axolotl", "load_in_8bit: a base in 8 bits", "4 bits (nf4)"),
    "adapters in bf16": (
        f"{TRL}load_in_4bit: true\n",
        "trl",
        "use_peft: adapters and moments are held in bf16",
        "--f32-state",
    ),
    "the head": (
        f"{AXOLOTL}lora_target_modules: [q_proj, lm_head]\n",
        "axolotl",
        "lm_head would get",
        "modules_to_save",
    ),
    "torchtune's head": (
        TUNE_LORA.replace("apply_lora_to_mlp", "apply_lora_to_output"),
        "torchtune",
        "model.apply_lora_to_output: lm_head",
        "leave it out",
    ),
    "an expression among names": (
        AXOLOTL + "lora_target_modules: [q_proj, '.*v_proj']\n",
        "axolotl",
        'lora_target_modules: ".*v_proj" is a regular expression',
        "one expression",
    ),
    "no expression": (
        AXOLOTL + "lora_target_modules: ['(q_proj']\n",
        "axolotl",
        "is no regular expression",
        "correct it",
    ),
    "names of no layer": (
        NAMED.replace("base_model: org/unknown", QWEN).replace("v_proj", "w_proj"),
        "axolotl",
        'lora_target_modules: no linear layer of qwen2.5-0.5b is named "w_proj"',
        "q_proj",
    ),
    "a rank of no layer": (
        NAMED.replace("base_model: org/unknown", QWEN) + "lora_rank_pattern: {o_proj: 2}\n",
        "axolotl",
        "lora_rank_pattern: no layer with an adapter",
        "names are like",
    ),
    "one of tied tables": (
        NAMED.replace("base_model: org/unknown", QWEN) + "lora_modules_to_save: [lm_head]\n",
        "axolotl",
        "lora_modules_to_save names one of",
        "name both or neither",
    ),
    "all linear layers of experts": (
        QLORA.replace("base_model: org/unknown", "base_model: mistralai/Mixtral-8x7B-v0.1"),
        "axolotl",
        "lora_target_linear: which layers of a model with experts",
        "name them",
    ),
    "layers of an unknown model": (
        f"{QLORA}peft_layers_to_transform: [0]\n",
        "axolotl",
        "lora_target_linear: names of the linear layers are needed",
        "name them",
    ),
    "all left out": (
        f"{NAMED}lora_exclude_modules: [q_proj, self_attn.v_proj, v_proj]\n",
        "axolotl",
        "lora_exclude_modules: no layer is left",
        "leave one out",
    ),
    "an expression of what is left out": (
        f"{NAMED}lora_exclude_modules: '(q'\n",
        "axolotl",
        'lora_exclude_modules: "(q" is no regular expression',
        "correct it",
    ),
    "groups of what is left out": (
        AXOLOTL + r"lora_target_modules: '.*(q|v)_\1?proj'" + "\nlora_exclude_modules: '.*(0|1).*'\n",
        "axolotl",
        "its groups change the numbers",
        "correct it",
    ),
    "layers left out of an unknown model": (
        f"{QLORA}lora_exclude_modules: [down_proj]\n",
        "axolotl",
        "lora_target_linear: names of the linear layers are needed",
        "name them",
    ),
    "layers left out beside experts": (
        f"{NAMED}lora_target_parameters: [mlp.experts.down_proj]\nlora_exclude_modules: [layers.0.self_attn.q_proj]\n",
        "axolotl",
        "lora_exclude_modules: it leaves out some of the layers of a name",
        "leave names out whole",
    ),
    "layers left out of a model with experts": (
        FOUNDRY.replace("org/unknown", "mistralai/Mixtral-8x7B-v0.1").replace(
            "target_modules: [q_proj], layers_to_transform: 1", "target_modules: all-linear, exclude_modules: [gate]"
        ),
        "llm-foundry",
        "which layers are left out of a model with experts",
        "name the others",
    ),
    "layers left out in Megatron-Bridge": (
        f"{BRIDGE}peft: {{dim: 4, alpha: 8, target_modules: [linear_proj], exclude_modules: [linear_fc2]}}\n",
        "megatron-bridge",
        "peft.exclude_modules ['linear_fc2'] is not carried over: Megatron-Bridge stops",
        "name target_modules alone",
    ),
    "layers left out in TRL": (
        f"{TRL}lora_exclude_modules: [q_proj]\n",
        "trl",
        "lora_exclude_modules is not known here as a setting of TRL",
        "take it out",
    ),
    "targets that nobody says": (AXOLOTL, "axolotl", "lora_target_modules is not carried over", "name them"),
    "biases": (FOUNDRY.replace("bias: none", "bias: all"), "llm-foundry", "model.peft_config.bias", "take it out"),
    "numbers that are none": (
        f"{NAMED}lora_rank_pattern: {{q_proj: a}}\n",
        "axolotl",
        "a number is expected",
        "q_proj: 8",
    ),
    "layers that are none": (f"{NAMED}peft_layers_to_transform: [a]\n", "axolotl", "numbers of layers", "[0, 1]"),
    "modules that are none": (f"{NAMED}lora_modules_to_save: 3\n", "axolotl", "names of modules", "[q_proj, v_proj]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(name: str, tmp_path: Path) -> None:
    text, framework, message, way_out = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        imported(tmp_path, text, framework, clusters=1 if framework == "torchtune" else 2)
    found = [each for each in caught.value.diagnostics if message in each.message]
    assert found, [each.message for each in caught.value.diagnostics]
    assert way_out in (found[0].help or "")
    assert found[0].location is not None


def keys_of(adapter: Adapter, model: ModelConfig | None, framework: str = "axolotl") -> dict[str, Any]:
    job = Job(framework, None, model, 64, 1, 1, adapter=adapter, method="lora")
    made = JobPlan(job, "it", Source("a.yaml", "").top(), Asked())
    put_adapter(made)
    made.report.check()
    return made.values


def test_all_linear_layers_but_some_are_named() -> None:
    adapter = Adapter(4, 8.0, (ALL_LINEAR,), excluded=("down_proj", "lm_head"))
    for framework in ("axolotl", "llm-foundry"):
        assert keys_of(adapter, TINY, framework)["targets"] == "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"


def test_all_linear_layers_of_some_layers_are_named() -> None:
    adapter = Adapter(4, 8.0, (ALL_LINEAR,), layers=(1,))
    training = Training(method="lora", targets=keys_of(adapter, TINY)["targets"])
    adapted = {module for module in layers_by_part(TINY).values() if is_target(training, module)}
    assert adapted == {module for module in layers_by_part(TINY).values() if ".layers.1." in module}


def test_experts_are_named_as_parameters() -> None:
    model = load_model("qwen3-30b-a3b")
    parameters = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
    adapter = Adapter(4, 8.0, ("q_proj",), target_parameters=parameters)
    training = Training(method="lora", targets=keys_of(adapter, model, "trl")["targets"])
    adapted = {
        module.rpartition(".layers.0.")[2] for module in layers_by_part(model).values() if is_target(training, module)
    }
    assert {each for each in adapted if not each.startswith("model.")} >= {
        "self_attn.q_proj",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.gate",
    }


@pytest.mark.parametrize("names", [("norm",), ("layernorm", "lm_head"), ("embed_tokens", "lm_head"), ("model.norm",)])
def test_modules_that_train_whole_are_those_whose_names_end_so(names: tuple[str, ...]) -> None:
    saved = keys_of(Adapter(4, 8.0, ("q_proj",), modules_to_save=names), TINY)["modules_to_save"]
    training = Training(method="lora", targets="q_proj", modules_to_save=saved)
    found = {module for module in parameter_modules(TINY) if is_saved(training, module)}
    assert found == {module for module in parameter_modules(TINY) if module.endswith(names)}  # peft, _set_trainable


def test_a_tied_table_is_one_or_named_as_two() -> None:
    model = load_model("qwen2.5-0.5b")
    tied = Adapter(4, 8.0, ("q_proj",), modules_to_save=("embed_tokens",), ensure_weight_tying=True)
    assert keys_of(tied, model)["modules_to_save"] == "embed_tokens, lm_head"


NAMES = ("q_proj", "self_attn.o_proj", "mlp.down_proj", "layers.2.mlp.up_proj", "model.layers.1.mlp.gate_proj")


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
    layers=st.sets(st.integers(0, 3)),
    pattern=st.sampled_from((None, "layers", "h")),
    excluded=st.one_of(
        st.lists(st.sampled_from((*NAMES, "mlp.up_proj", "layers.0.self_attn.q_proj", "head")), max_size=3),
        st.sampled_from((r".*\.[02]\..*_proj", r"model\.layers\.(1|3)\.mlp\.\w+|.*q_proj", "o_proj")),
    ),
    known=st.booleans(),
)
def test_targets_match_what_peft_matches(
    names: list[str], layers: set[int], pattern: str | None, excluded: list[str] | str, known: bool
) -> None:
    peft = pytest.importorskip("peft")
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    pattern = pattern if layers else None
    left_out = (f"re:{excluded}",) if isinstance(excluded, str) else tuple(excluded)
    ours = Adapter(
        *(4, 8.0, tuple(names)),
        excluded=left_out,
        layers=tuple(sorted(layers)),
        layers_pattern=(pattern,) if pattern else (),
    )
    theirs = peft.LoraConfig(
        target_modules=names,
        exclude_modules=excluded,
        layers_to_transform=sorted(layers) or None,
        layers_pattern=pattern,
    )
    matched = {each: utils.check_target_module_exists(theirs, each) for each in layers_by_part(TINY).values()}
    model = TINY if known else None
    if not any(matched.values()) and all(any(is_named(name, each) for each in left_out) for name in names):
        with pytest.raises(DiagnosticError, match="no layer is left to get an adapter"):
            keys_of(ours, model)
        return
    targets = keys_of(ours, model)["targets"]
    training = Training(method="lora", targets=targets)
    assert expression_error(targets.removeprefix("re:")) is None
    assert {each for each in matched if is_target(training, each)} == {each for each in matched if matched[each]}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_an_export_names_each_key_of_adapters(framework: str, tmp_path: Path) -> None:
    plan = parse_plan(imported(tmp_path, QLORA, "axolotl").text(), file="P.toml", model=TINY)
    missing = {each.key: each.why for each in export_plan(framework, plan, TINY).missing}
    assert {missing[key] for key in ("method", "rank", "alpha", "targets", "base")} == {"the whole model trains there"}


SHARDED = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"


def test_a_packed_base_under_fsdp_is_shared_out(tmp_path: Path) -> None:
    made = imported(tmp_path, QLORA + SHARDED, "axolotl", f32_state=True)
    assert (made.plan.zero, made.plan.training.base) == (3, "nf4")
    compiles(made, TINY)


OLD_NAMES = {
    "mixtral-8x7b": ("w1", "w2", "w3", "gate", "q_proj"),
    "qwen3-30b-a3b": ("gate_proj", "up_proj", "down_proj", "gate", "q_proj"),
    "olmoe-1b-7b": ("gate_proj", "mlp.experts.0.up_proj", "down_proj", "gate", "q_proj"),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_of_experts_are_their_parameters_with_twice_the_rank(name: str) -> None:
    """As PEFT takes them for the classes of transformers 5 (`_convert_peft_config_moe`)."""
    model = load_model(name)
    values = keys_of(Adapter(4, 8.0, OLD_NAMES[name]), model, "trl")
    assert values["targets"] == "q_proj, gate_up_proj, down_proj, gate"
    assert (values["rank_pattern"], values["alpha_pattern"]) == ({"gate_up_proj": 8}, {"gate_up_proj": 16.0})


@pytest.mark.parametrize(("targets", "said"), [(("w1", "q_proj"), "w3 is missing"), ((".*w[123]",), "names experts")])
def test_old_names_that_peft_does_not_take_alike_are_refused(targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(DiagnosticError, match=said):
        keys_of(Adapter(4, 8.0, targets), load_model("mixtral-8x7b"), "trl")


def test_all_linear_beside_a_parameter_means_all_experts_too() -> None:
    adapter = Adapter(4, 8.0, (ALL_LINEAR,), target_parameters=("mlp.experts.down_proj",))
    values = keys_of(adapter, load_model("qwen3-30b-a3b"), "trl")
    assert {*values["targets"].split(", ")} >= {"q_proj", "o_proj", "mlp.experts.down_proj", "gate_up_proj", "gate"}
    assert values["rank_pattern"] == {"gate_up_proj": 8}
