"""Models by their names on the Hub: the preset that each stands for, and what is near an unknown one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain.ratrain_ir.config.model_files import load_model, preset_of_hub_name
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError


def test_a_name_on_the_hub_is_a_preset_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "NousResearch/Llama-2-7b-hf"
    assert load_model(name) == load_model("llama-2-7b") == load_model(name.upper())
    assert (preset_of_hub_name(name), preset_of_hub_name("llama-2-7b")) == ("llama-2-7b", None)
    assert preset_of_hub_name("gpt2") is None
    (tmp_path / name).mkdir(parents=True)
    assert preset_of_hub_name(name) is None
    with pytest.raises(DiagnosticError, match="holds no config"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("Qwen/Qwen2.5-7", "Qwen/Qwen2.5-7B"), ("somebody/gpt2", "gpt2"), ("meta/llama-2-7b", "llama-2-7b")],
)
def test_an_unknown_name_on_the_hub_fails_with_a_near_one(name: str, near: str) -> None:
    with pytest.raises(DiagnosticError, match="none on the Hub that is known here") as caught:
        load_model(name)
    assert f"did you mean '{near}'" in (caught.value.diagnostics[0].help or "")
