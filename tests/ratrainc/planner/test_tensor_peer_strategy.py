"""The strategy for tensor-parallel ranks: refused at tp 1, left out of comparisons there, trains like every other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, make_program, same_bits, train

if TYPE_CHECKING:
    from pathlib import Path

PLAN = """
[parallel]
pp = 2
dp = 1
tp = {tp}
cuts = [1]

[batch]
micro_batch_size = 1
micro_batches = 2
seq_len = 8
"""
SIZES = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "rms_norm_eps": 1e-5}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def files(folder: Path, tp: int) -> list[str]:
    """A model and a plan, as options."""
    (folder / "model.json").write_text(json.dumps({**SIZES, **HEADS, "architectures": ["LlamaForCausalLM"]}))
    (folder / "plan.toml").write_text(PLAN.format(tp=tp))
    return ["--model", str(folder / "model.json"), "--plan", str(folder / "plan.toml")]


def test_a_plan_without_peers_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "the strategy 'tp-heavy' is about tensor-parallel ranks"
    for command in (["compile", "-o", str(tmp_path / "x.rtx"), "--strategy"], ["compare", "--strategies"]):
        name, *rest = command
        assert main([name, *files(tmp_path, 1), *rest, "tp-heavy"]) == 1
        error = capsys.readouterr().err
        assert refused in error
        assert "say tp in [parallel]" in error
    sizes = ["--global-batch", "8", "--seq-len", "8", "--strategy", "tp-heavy", "--quick", "--json"]
    assert main(["plan", *files(tmp_path, 1)[:2], *sizes, "--clusters", "1"]) == 1
    assert refused in capsys.readouterr().err
    assert main(["plan", *files(tmp_path, 1)[:2], *sizes, "--clusters", "4"]) == 0
    assert {plan["tp"] for plan in json.loads(capsys.readouterr().out)["plans"]} <= {2, 4}
    with pytest.raises(DiagnosticError, match="tensor-parallel ranks"):
        strategy("tp-heavy").adapted(make_plan(MODEL), MODEL, load_machine(None))


@pytest.mark.parametrize("tp", [1, 2])
def test_comparisons_have_it_where_there_are_peers(tp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *files(tmp_path, tp), "--json"]) == 0
    shown = capsys.readouterr()
    names = [row["name"] for row in json.loads(shown.out)["strategies"]]
    assert ("tp-heavy" in names) == (tp > 1)
    assert ("left out: tp-heavy" in shown.err) == (tp == 1)


def test_it_trains_as_the_others_do() -> None:
    runs = [train(make_program(MODEL, name, tp=2, sequence_sharding=True), 2) for name in ("ratrain", "tp-heavy")]
    assert len(losses(runs[0])) == 2
    assert losses(runs[0]) == losses(runs[1])
    same_bits(*runs)
