"""Rules by which a plan, or a folder of PEFT, says what has adapters: expressions, patterns of ranks, whole modules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.toml_text import toml_value
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.running.weight_export import export_adapter
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, make_program, start, train

if TYPE_CHECKING:
    from pathlib import Path

LORA = Training(method="lora", rank=4, alpha=8.0)


@pytest.mark.parametrize("pattern", ["q_proj", "q_proj 0", "q_proj 2.5", "( 2", "q_proj 2,k_proj 3", "q 2, q 3", ""])
def test_patterns_that_say_no_ranks_are_refused(pattern: str) -> None:
    text = plan_to_toml(make_plan(training=LORA)).replace("rank = 4", f"rank = 4\nrank_pattern = {toml_value(pattern)}")
    with pytest.raises(DiagnosticError, match=r"rank_pattern.*names and ranks up to 65536"):
        parse_plan(text, file="plan.toml", model=MODEL)


def test_patterns_are_read_from_tables_too() -> None:
    text = plan_to_toml(make_plan(training=LORA))
    table = text.replace(
        "rank = 4", 'rank = 4\nrank_pattern = {q_proj = 2, "mlp.*" = 3}\nalpha_pattern = {k_proj = 0.5}'
    )
    training = parse_plan(table, file="plan.toml", model=MODEL).training
    assert str(training.rank_pattern) == "q_proj 2, mlp.* 3"
    assert str(training.alpha_pattern) == "k_proj 0.5"


@pytest.mark.parametrize("targets", ["re:", "re:(", "re:*"])
def test_expressions_that_do_not_compile_are_refused(targets: str) -> None:
    with pytest.raises(DiagnosticError, match="a regular expression after re:"):
        make_plan(training=evolve(LORA, targets=targets))


OTHER_WORDS = {
    "peft_type": "LoRA",
    "target_modules": "target_modules|does not name",
    "exclude_modules": "does not name .*q_proj",
    "layers_to_transform": "layers_to_transform|does not name",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_dropout", 0.05),
        ("init_lora_weights", "pissa"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("rank_pattern", {"q_proj": "two"}),
        ("alpha_pattern", ["q_proj"]),
        ("lora_alpha", "eight"),
        ("target_modules", "("),
        ("target_modules", 4),
        ("target_modules", ".*q_proj"),
        ("exclude_modules", ["q_proj"]),
        ("layers_to_transform", ["first"]),
        ("layers_to_transform", [0]),
        ("a_new_variant", {"rank": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("r", 8),
        ("peft_type", "IA3"),
    ],
)
def test_a_folder_of_other_adapters_is_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    program = make_program(training=LORA)
    train(program, 1, save=str(tmp_path / "kept"))
    export_adapter(str(tmp_path / "kept"), str(tmp_path / "peft"))
    start(program, 1, init_adapter=str(tmp_path / "peft")).close()
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(DiagnosticError, match=OTHER_WORDS.get(key, key)):
        start(program, 1, init_adapter=str(tmp_path / "peft"))


@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_train_whole_go_on_from_a_folder(tied: bool, tmp_path: Path) -> None:
    model, peft = evolve(MODEL, tied_embeddings=tied), tmp_path / "peft"
    training = evolve(LORA, targets="q_proj", modules_to_save="embed_tokens, lm_head")
    program = make_program(model, training=training)
    train(program, 2, save=str(tmp_path / "kept"))
    export_adapter(str(tmp_path / "kept"), str(peft))
    config = json.loads((peft / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["model.embed_tokens", *(["lm_head"] * (not tied))]
    assert config.get("ensure_weight_tying", False) is tied
    resumed = train(program, 1, resume=str(tmp_path / "kept"))
    again = train(program, 1, init_adapter=str(peft), order="sequential")
    assert losses(again) != losses(train(program, 1, order="sequential"))
    assert np.isfinite(losses(resumed)).all()
    for other in ({"modules_to_save": ["model.norm"]}, {"modules_to_save": None}, {"modules_to_save": "lm_head"}):
        (peft / "adapter_config.json").write_text(json.dumps(config | other))
        with pytest.raises(DiagnosticError, match="modules_to_save"):
            start(program, 1, init_adapter=str(peft))
    if tied:
        (peft / "adapter_config.json").write_text(json.dumps(config | {"ensure_weight_tying": False}))
        with pytest.raises(DiagnosticError, match="trains copies of a tied table apart"):
            start(program, 1, init_adapter=str(peft))
