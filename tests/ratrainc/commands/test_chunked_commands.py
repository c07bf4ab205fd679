"""Commands on schedules and programs whose stages hold several chunks: each chunk is said, and nothing is taken for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrainc.choices.levers import CompileSetting, levers_of
from ratrain.ratrainc.cli import main
from ratrain.targets.machine.machine import load_machine

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
}
PLAN = """
[parallel]
pp = 2
dp = 2
schedule = "{schedule}"
cuts = [2, 4, 6]
[batch]
micro_batches = 4
micro_batch_size = 1
seq_len = 16
"""


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """The model, and the plan of a vee."""
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    for schedule in ("zb-v", "interleaved"):
        (tmp_path / f"{schedule}.toml").write_text(PLAN.format(schedule=schedule))
    return ["--model", str(tmp_path / "m.json"), "--plan", str(tmp_path / "zb-v.toml")]


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Both outputs of a command, its lines joined where tables break them."""
    capsys.readouterr()
    assert main(list(words)) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_compiled_schedules_and_programs_say_their_chunks_and_are_proved(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text, program, trace = (str(tmp_path / f"p.{suffix}") for suffix in ("rtir", "rtx", "json"))
    shown = printed(capsys, "compile", *sources, "-o", text)
    assert "embed - mlp.1, attention.6 - head" in shown
    assert "attention.2 - mlp.3, attention.4 - mlp.5" in shown
    printed(capsys, "compile", text, "-o", program)
    assert "sound" in printed(capsys, "verify", text)
    assert "sound" in printed(capsys, "verify", program)
    assert printed(capsys, "export", text).startswith("0F0,")
    printed(capsys, "simulate", program, "--trace", trace)
    arrows: dict[int, set[tuple[str, int]]] = {}
    for event in json.loads(Path(trace).read_text())["traceEvents"]:
        if event.get("cat") == "message":
            arrows.setdefault(event["id"], set()).add((event["ph"], event["pid"]))
    assert arrows
    assert len(arrows) % (4 * 2 * 2) == 0  # micro-batches, edges between stages, activation and gradient
    assert all(ends in ({("s", 0), ("f", 1)}, {("s", 1), ("f", 0)}) for ends in arrows.values())

    lines = Path(text).read_text()
    for wrong, said in (
        (lines.replace("recv activation m0 c3 @1", "recv activation m0 c1 @1"), "names c1 @1: expected c3 @1"),
        (
            lines.replace("forward attention.6 m1", "forward attention.2 m1"),
            "stage @0, which holds embed to mlp.1 and attention.6 to head",
        ),
    ):
        Path(text).write_text(wrong)
        assert said in " ".join(printed(capsys, "verify", text, code=1).split())


def test_explain_tries_a_module_again_under_its_schedule(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "p.rtir")
    printed(capsys, "compile", *sources, "-o", out)
    assert main(["explain", out, "--json", "--seconds", "0"]) == 0
    now = json.loads(capsys.readouterr().out)["levers"][0]
    assert (now["name"], now["fits"], now["freed_bytes"]) == ("unchanged", True, 0)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_levers_give_plans_that_are_allowed(schedule: str, sources: list[str], tmp_path: Path) -> None:
    model, plan = api.resolved(sources[1], str(tmp_path / f"{schedule}.toml"))
    setting = CompileSetting(model, plan, "joint-order,allocate-ddr", load_machine(None))
    found = {
        (lever.name, stage): changed.plan
        for stage in range(plan.pp)
        for lever in levers_of(stage)
        if (changed := lever.apply(setting)) is not None
    }
    for changed in found.values():
        check_plan(changed, model)
    moved = {key[1]: changed.cuts for key, changed in found.items() if key[0].startswith("one layer from")}
    assert moved.keys() == {0, 1}
    for stage, cuts in moved.items():
        layers = [
            sum(len(evolve(plan, cuts=c).chunk_layers(chunk, model)) for chunk in plan.shape.chunks_of(stage))
            for c in (plan.cuts, cuts)
        ]
        assert layers[1] == layers[0] - 1
    more = found["twice the stages, half the replicas", 0]
    assert (more.pp, more.dp, more.cuts) == (4, 1, (1, 2, 3, 4, 5, 6, 7))


def test_another_schedule_than_the_plan_s_is_refused_by_the_name_of_the_pass(
    sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "compile", *sources, "--passes", "place-schedule{kind=v-half},allocate-ddr", code=1)
    assert "'place-schedule{kind=v-half}' in --passes places v-half" in shown
    assert "wrote" not in printed(capsys, "compile", *sources, "--passes", "place-schedule{kind=zb-v},allocate-ddr")
