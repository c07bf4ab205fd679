"""Answers of `fit`: verdicts within the band, ways out that do what they say, limits that are the last that fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.option_job import option_phrase
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.limits import limits
from ratrain.ratrainc.fit.verdicts import Verdict, most_bytes
from ratrain.ratrainc.fit.ways_out import ways_out
from ratrain.targets.machine.machine import load_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.answer import Fit

PAGE = Path(__file__).parents[3] / "docs" / "fit.md"
GIB = 1 << 30


def example() -> str:
    """The settings file of docs/fit.md."""
    lines = PAGE.read_text().split("# train.yaml, of axolotl\n")[1].split("\n\n")[0]
    return "\n".join(line.removeprefix("    ") for line in lines.splitlines()) + "\n"


def merged(into: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A mapping with another one put into it, table into table."""
    both = dict(into)
    for key, value in new.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def test_from_a_file_that_does_not_fit_to_one_that_does(tmp_path: Path) -> None:
    """The advice of the page's own example is followed: put into the file, each change has the peak that it was said to have."""
    file = tmp_path / "train.yaml"
    file.write_text(example())
    before = api.fit(file, devices=8, memory=79 * GIB)
    assert before.verdict is Verdict.FAILS
    assert before.ways[0].verdict is Verdict.FITS
    for way in before.ways:
        text = yaml.safe_load(example())
        for change in way.changes:
            text = merged(text, yaml.safe_load(change))
        file.write_text(yaml.safe_dump(text))
        after = api.fit(file, devices=8, memory=79 * GIB)
        assert after.peak == way.peak_bytes, way.changes
        assert way.verdict is after.verdict


def test_a_setting_that_is_not_understood_makes_the_answer_a_lower_bound(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(example() + "keeps_everything_twice: true\n")
    found = api.fit(file, devices=8, memory=8000 * GIB)
    assert found.verdict is Verdict.CLOSE
    assert "at least" in repr(found)
    assert "keeps_everything_twice" in repr(found)
    assert found.to_json()["lower_bound"]


def test_check_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--model", "tinyllama-1.1b", "--check", "--memory"]
    assert main([*words, "79GiB"]) == 0
    assert "fits: needs" in capsys.readouterr().out
    assert main([*words, "16GiB"]) == 1
    assert "does not fit: needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "NODES=4"], "--set is about the variables of a launch script"),
        (["--memory", "0"], "'0' is no memory at all"),
        (["--model", "qwen2.5-7b"], "--model qwen2.5-7b has layers 28"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text(example())
    assert main(["fit", str(tmp_path / "train.yaml"), "--devices", "8", *options]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_is_open_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    open_ = {"format": "deepspeed", "model": "llama-3-8b", "devices": 8, "seq_len": 512, "micro_batch_size": 1}
    with pytest.raises(DiagnosticError, match=r"gradient_accumulation: .*\n  help: say it in the file"):
        api.fit(tmp_path / "ds.json", **open_)


def test_hub_names_are_models() -> None:
    by_hub = api.fit(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0", memory=79 * GIB)
    assert by_hub.peak == api.fit(model="tinyllama-1.1b", memory=79 * GIB).peak


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["wq"]}, "adapter: the target 'wq'"),
        ({"base_model": "somebody/something-3b"}, "model"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(merged(yaml.safe_load(example()), change)))
    with pytest.raises(DiagnosticError, match=reason) as caught:
        api.fit(file, devices=8, memory=79 * GIB)
    assert caught.value.diagnostics[0].help


def test_json_has_what_scripts_read(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(example())
    found = api.fit(file, devices=8, memory=79 * GIB)
    data = found.to_json()
    assert data["fits"] is False
    assert data["peak_bytes"] - data["capacity_bytes"] == -data["margin_bytes"] > 0
    owned = sum(each["bytes"] for each in data["owners"])
    assert owned == data["allocated_bytes"]
    assert owned + sum(each["bytes"] for each in data["overhead"]) == data["peak_bytes"]
    assert data["job"]["micro_batch_size"] == {
        "value": 4,
        "from": "micro_batch_size",
        "place": f"{file}:3",
        "default": False,
    }


JOBS = st.builds(
    Job,
    framework=st.sampled_from(["pytorch", "torchtitan", "torchtune"]),
    model_name=st.just("tinyllama-1.1b"),
    model=st.just(load_model("tinyllama-1.1b")),
    seq_len=st.sampled_from([128, 640, 2048]),
    micro_batch_size=st.sampled_from([1, 3, 8]),
    gradient_accumulation=st.sampled_from([1, 2]),
    devices=st.sampled_from([2, 4, 8]),
    sharding=st.sampled_from([Sharding.DDP, Sharding.FSDP1, Sharding.FSDP2]),
    compute_dtype=st.sampled_from(["f32", "bf16"]),
    checkpointing=st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
    attention=st.sampled_from([Attention.SDPA, Attention.EAGER]),
    loss=st.sampled_from([Loss.UPCAST, Loss.FUSED]),
)


@settings(max_examples=25)
@given(JOBS, st.integers(4, 80))
def test_limits_are_the_last_that_fit(job: Job, gigabytes: int) -> None:
    capacity = gigabytes * GIB
    most = limits(job, lambda changed: most_bytes(changed) <= capacity, option_phrase)
    if most.longest_sequence is not None:
        assert most_bytes(evolve(job, seq_len=most.longest_sequence)) <= capacity
        assert job.model is not None
        if most.longest_sequence < 1 << 22:
            assert most_bytes(evolve(job, seq_len=most.longest_sequence + 64)) > capacity
    if most.largest_micro_batch is not None:
        assert most_bytes(evolve(job, micro_batch_size=most.largest_micro_batch)) <= capacity
        assert most_bytes(evolve(job, micro_batch_size=most.largest_micro_batch + 1)) > capacity
    if most.fewest_devices is not None and not most.sharding:
        assert most_bytes(evolve(job, devices=most.fewest_devices)) <= capacity


@settings(max_examples=25)
@given(JOBS, st.integers(4, 80))
def test_ways_out_lower_the_peak_and_stand_in_order(job: Job, gigabytes: int) -> None:
    capacity = gigabytes * GIB
    ways = ways_out(job, capacity, load_machine("a100-node"), option_phrase)
    now = most_bytes(job)
    assert all(way.peak_bytes < now for way in ways)
    keys = [(way.verdict.place, bool(way.alters), way.slower) for way in ways]
    assert keys == sorted(keys)
    assert len({way.text for way in ways}) == len(ways)


def test_a_band_is_between_fits_and_does_not() -> None:
    found = api.fit(model="tinyllama-1.1b", memory=79 * GIB)
    peak, error = found.peak, found.band.error

    def at(capacity: float) -> Fit:
        return evolve(found, capacity=int(capacity))

    assert at(peak * (1 - error) - 1).verdict is Verdict.FAILS
    assert at(peak).verdict is Verdict.CLOSE
    assert at(peak * (1 + error) + 1).verdict is Verdict.FITS
    assert evolve(found, capacity=None).verdict is Verdict.OPEN


def test_exact_adds_a_plan_of_ours_that_its_command_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    Path("m.json").write_text(json.dumps(small))
    found = api.fit(model="m.json", devices=2, memory=8 * GIB, seq_len=64, exact=True)
    assert found.ours is not None
    assert found.ours.plan in repr(found)
    words = shlex.split(found.ours.command)
    assert main([*words[1:], "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert (best["predicted_step_seconds"], best["peak_bytes"]) == (found.ours.step_seconds, found.ours.peak_bytes)
    assert api.fit(model="m.json", devices=2, memory=8 * GIB, seq_len=64).ours is None


def test_verdicts_of_ways_out_and_limits_agree(tmp_path: Path) -> None:
    """Smaller micro-batches stand in both: those that fit for sure, those that may and those that do not are the same."""
    file = tmp_path / "train.yaml"
    file.write_text(example())
    seen = set()
    for gibibytes in range(16, 80, 4):
        found = api.fit(file, devices=8, memory=gibibytes * GIB)
        assert found.limits is not None
        assert found.perhaps is not None
        for way in found.ways:
            size = next((yaml.safe_load(each).get("micro_batch_size") for each in way.changes), None)
            if size is None or any("gradient_checkpointing" in each or "fsdp" in each for each in way.changes):
                continue
            own = [each for each in way.changes if "gradient_accumulation" in each]
            if len(way.changes) > 1 + len(own) or not any("sync_each_batch" in each for each in own):
                continue
            seen.add(way.verdict)
            assert (size <= (found.limits.largest_micro_batch or 0)) == (way.verdict is Verdict.FITS)
            assert (size > (found.perhaps.largest_micro_batch or 0)) == (way.verdict is Verdict.FAILS)
        order = [way.verdict.place for way in found.ways]
        assert order == sorted(order)
        data = found.to_json()
        assert all((way["fits"] is True) == (way["verdict"] == Verdict.FITS.value) for way in data["ways_out"])
    assert seen == {Verdict.FITS, Verdict.CLOSE, Verdict.FAILS}


def test_following_a_way_out_has_its_verdict_whatever_error_its_settings_have() -> None:
    """Adapters have another error than full training: the verdict on a change is that of the changed job."""
    for gibibytes in range(2, 40, 3):
        found = api.fit(model="tinyllama-1.1b", devices=2, memory=gibibytes * GIB)
        for way in ways_out(found.job, gibibytes * GIB, load_machine("a100-node"), lambda *_: "changed"):
            if "another training" in " ".join(way.alters) and way.verdict is Verdict.FITS:
                assert way.peak_bytes * 1.152 <= gibibytes * GIB


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge", "deepspeed", "trl"])
@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3])
def test_buffers_are_named_by_the_framework_that_holds_them(framework: str, sharding: Sharding) -> None:
    base = Job(framework, "tinyllama-1.1b", load_model("tinyllama-1.1b"), 128, 1, 1, devices=8)
    names = [each.name for rank in holdings(evolve(base, sharding=sharding)) for each in rank.owners]
    buffers = {name.removeprefix("buffers of ").split(":")[0] for name in names if name.startswith("buffers of ")}
    assert ("DeepSpeed" in buffers) == (not framework.startswith("megatron"))
    assert ("Megatron-LM" in buffers) == framework.startswith("megatron")
