"""Phrases of readers: each, applied to the file as it stands and read again, gives the field the value that it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from ratrain.ratrainc.bridge.jobs.formats import FORMATS
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat

FOLDER = Path(__file__).parents[2] / "data" / "bridge" / "jobs"
FULL, NONE, CORE, OPS = Checkpointing.FULL, Checkpointing.NONE, Checkpointing.ATTENTION, Checkpointing.OPS
DEVICES = {
    "bridge_sft.yaml": 8,
    "bridge_pretrain.yaml": 32,
    "foundry_mpt.yaml": 8,
    "foundry_lora.yaml": 4,
    "ds_zero3.json": 8,
}

PHRASES: dict[str, list[tuple[str, Any]]] = {
    "tune_qlora.yaml": [
        ("checkpointing", NONE),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 16),
        ("seq_len", 512),
        ("optimizer", "adamw-8bit-paged"),
        ("optimizer", "adamw-fused"),
        ("optimizer", "adamw-foreach-off"),
        ("optimizer", "adamw-paged"),
        ("optimizer", "adamw-4bit"),
        ("optimizer", "sgd"),
        ("optimizer_in_backward", True),
        ("offload_activations", True),
        ("sharding", Sharding.FSDP2),
        ("tp", 2),
        ("loss", Loss.UPCAST),
        ("compiled", True),
    ],
    "tune_full_spread.yaml": [
        ("optimizer", "adamw"),
        ("offload_optimizer", False),
        ("loss", Loss.UPCAST),
        ("tp", 4),
        ("optimizer_in_backward", True),
    ],
    "nano_llama.yaml": [
        ("checkpointing", FULL),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 6),
        ("seq_len", 1024),
        ("optimizer", "adamw-fused"),
        ("optimizer", "sgd"),
        ("sharding", Sharding.ZERO1),
        ("tp", 4),
        ("pp", 2),
        ("sequence_sharding", False),
        ("gradient_dtype", "bf16"),
    ],
    "nano_old_optimizer.yaml": [("optimizer", "adamw"), ("gradient_dtype", "f32"), ("sharding", Sharding.DDP)],
    "titan_hybrid.toml": [
        ("checkpointing", FULL),
        ("checkpointing", NONE),
        ("checkpointing", OPS),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 4),
        ("seq_len", 2048),
        ("optimizer", "adamw-fused"),
        ("optimizer", "adamw-foreach-off"),
        ("offload_parameters", True),
        ("offload_optimizer", True),
        ("sharding", Sharding.FSDP2),
        ("tp", 2),
        ("pp", 4),
        ("compiled", True),
        ("optimizer_in_backward", True),
    ],
    "titan_alone.toml": [("micro_batch_size", 1), ("gradient_accumulation", 2), ("checkpointing", FULL), ("cp", 2)],
    "titan_2024.toml": [
        ("micro_batch_size", 1),
        ("seq_len", 4096),
        ("tp", 4),
        ("cp", 2),
        ("pp", 2),
        ("compiled", True),
        ("checkpointing", NONE),
        ("loss", Loss.UPCAST),
    ],
    "mlm_dense.sh": [
        ("checkpointing", FULL),
        ("checkpointing", CORE),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 2),
        ("seq_len", 2048),
        ("seq_len", 8192),
        ("optimizer", "sgd-momentum"),
        ("optimizer", "muon"),
        ("offload_optimizer", True),
        ("sharding", Sharding.DDP),
        ("sharding", Sharding.FSDP2),
        ("sharding", Sharding.ZERO3),
        ("sharding", Sharding.ZERO2),
        ("sharding", Sharding.ZERO1),
        ("tp", 4),
        ("pp", 2),
        ("cp", 2),
        ("sequence_sharding", False),
        ("gradient_dtype", "bf16"),
        ("attention", Attention.EAGER),
    ],
    "mlm_gpt3.sh": [
        ("checkpointing", FULL),
        ("checkpointing", NONE),
        ("offload_optimizer", False),
        ("attention", Attention.FLASH),
        ("optimizer", "lion"),
    ],
    "bridge_sft.yaml": [
        ("checkpointing", NONE),
        ("checkpointing", CORE),
        ("checkpointing", FULL),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 4),
        ("seq_len", 1024),
        ("optimizer", "sgd-momentum"),
        ("offload_optimizer", False),
        ("sharding", Sharding.DDP),
        ("tp", 2),
        ("pp", 2),
        ("sequence_sharding", False),
    ],
    "bridge_pretrain.yaml": [("cp", 2), ("tp", 8), ("sharding", Sharding.DISTRIBUTED_OPTIMIZER)],
    "ds_zero3.json": [
        ("checkpointing", NONE),
        ("micro_batch_size", 1),
        ("gradient_accumulation", 4),
        ("sharding", Sharding.ZERO2),
        ("sharding", Sharding.DDP),
        ("offload_optimizer", True),
        ("offload_parameters", False),
        ("optimizer", "adamw-fused"),
        ("loss", Loss.FUSED),
        ("seq_len", 512),
        ("tp", 2),
        ("pp", 2),
    ],
    "ds_alone.json": [("sharding", Sharding.ZERO3), ("offload_optimizer", True), ("optimizer", "lion")],
    "foundry_mpt.yaml": [
        ("checkpointing", NONE),
        ("micro_batch_size", 2),
        ("gradient_accumulation", 2),
        ("seq_len", 2048),
        ("optimizer", "adamw-foreach-off"),
        ("offload_activations", True),
        ("sharding", Sharding.DDP),
        ("reduce_dtype", "f32"),
        ("loss", Loss.UPCAST),
        ("tp", 2),
    ],
    "foundry_lora.yaml": [("checkpointing", FULL), ("micro_batch_size", 1), ("sharding", Sharding.FSDP1)],
}
CASES = [(name, field, value) for name, cases in PHRASES.items() for field, value in cases]
NEVER = [
    ("tune_qlora.yaml", "offload_parameters", True),
    ("titan_alone.toml", "offload_parameters", True),
    ("tune_qlora.yaml", "loss", Loss.VOCAB_PARALLEL),
    ("tune_qlora.yaml", "pp", 2),
    ("nano_llama.yaml", "offload_optimizer", True),
    ("nano_llama.yaml", "optimizer", "adamw-8bit"),
    ("titan_alone.toml", "optimizer", "adamw-8bit"),
    ("titan_alone.toml", "checkpointing", CORE),
    ("mlm_dense.sh", "loss", Loss.CHUNKED),
    ("mlm_dense.sh", "checkpointing", OPS),
    ("bridge_sft.yaml", "loss", Loss.FUSED),
    ("ds_alone.json", "checkpointing", FULL),
    ("ds_alone.json", "sharding", Sharding.FSDP2),
    ("foundry_mpt.yaml", "pp", 2),
    ("foundry_mpt.yaml", "sharding", Sharding.ZERO3),
]


def format_of(path: Path, text: str) -> SettingsFormat:
    (found,) = [each for each in FORMATS if each.recognises(path, text)]
    return found


def with_yaml(text: str, phrase: str) -> str:
    """Apply `a.b: 1 and c: true`; comments, which name a recipe, stay."""
    data = yaml.safe_load(text)
    for part in phrase.split(" and "):
        key, said = part.split(": ", 1)
        *tables, last = key.split(".")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = yaml.safe_load(said)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*comments, yaml.safe_dump(data)])


def with_toml(text: str, phrase: str) -> str:
    """Apply `a.b = 1 and a.c = "x"`."""
    for part in phrase.split(" and "):
        key, said = part.split(" = ", 1)
        section, _, name = key.rpartition(".")
        lines = text.splitlines()
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        at = lines.index(f"[{section}]") + 1
        end = next((n for n in range(at, len(lines)) if lines[n].startswith("[")), len(lines))
        lines[at:end] = [f"{name} = {said}", *(line for line in lines[at:end] if line.partition(" = ")[0] != name)]
        text = "\n".join(lines) + "\n"
    return text


def with_script(text: str, phrase: str) -> str:
    """Apply `--a 1 --b without --c --d`: argparse takes the last of two values."""
    more, _, less = phrase.partition("without ")
    for flag in less.split():
        text = re.sub(rf"(?<=\s){re.escape(flag)}(?=\s)(\s+(?!-)[^\s\\\\]+)?", "", text)
    return f"{text.rstrip()} {more.strip()}\n"


def merged(data: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Put the settings of nested objects into others."""
    for key, value in more.items():
        data[key] = merged(data.get(key, {}), value) if isinstance(value, dict) else value
    return data


def applied(path: Path, phrase: str, folder: Path) -> tuple[str, tuple[Path, ...]]:
    """Return a file's text with a phrase applied, and the files beside it."""
    text, beside = path.read_text(), path.with_suffix(".args.json")
    if path.suffix == ".json":
        data, more = json.loads(text), json.loads(f"{{{phrase}}}")
        if not beside.is_file():
            return json.dumps(merged(data, more)), ()
        arguments = json.loads(beside.read_text())
        own = {"zero_optimization", "optimizer", "tensor_parallel", "pipeline"}
        merged(data, {key: value for key, value in more.items() if key in own})
        merged(arguments, {key: value for key, value in more.items() if key not in own})
        there = folder / "args.json"
        there.write_text(json.dumps(arguments))
        return json.dumps(data), (there,)
    change = {".yaml": with_yaml, ".toml": with_toml, ".sh": with_script}[path.suffix]
    return change(text, phrase), ()


def read(path: Path, text: str, beside: tuple[Path, ...], devices: int | None) -> Job:
    return format_of(path, text).read(path, text, Asked(devices=devices, beside=beside))


def original(name: str) -> tuple[SettingsFormat, Job]:
    path = FOLDER / name
    text, beside = path.read_text(), path.with_suffix(".args.json")
    job = read(path, text, (beside,) if beside.is_file() else (), DEVICES.get(name))
    return format_of(path, text), job


@pytest.mark.parametrize(("name", "field", "value"), CASES)
def test_a_phrase_says_what_it_does(name: str, field: str, value: Any, tmp_path: Path) -> None:
    known, job = original(name)
    phrase = known.phrase(job, field, value)
    assert phrase is not None
    path = FOLDER / name
    text, beside = applied(path, phrase, tmp_path)
    again = read(path, text, beside, DEVICES.get(name))
    assert getattr(again, field) == value, phrase
    if field != "tp":  # ranks pad the vocabulary
        assert again.model == job.model
    more = {each.key for each in again.not_understood} - {each.key for each in job.not_understood}
    assert more <= {"length", "use-megatron-fsdp"}, phrase  # a name for a value that nothing takes any more


@pytest.mark.parametrize(("name", "field", "value"), NEVER)
def test_what_a_framework_cannot_say_has_no_phrase(name: str, field: str, value: Any) -> None:
    known, job = original(name)
    assert known.phrase(job, field, value) is None


@pytest.mark.parametrize("name", PHRASES)
def test_the_present_value_of_a_field_is_said_too(name: str, tmp_path: Path) -> None:
    known, job = original(name)
    for each in attrs.fields(Job):
        value = getattr(job, each.name)
        if value is None or each.name in ("sizes", "origins", "model"):
            continue
        phrase = known.phrase(job, each.name, value)
        if phrase is not None:
            text, beside = applied(FOLDER / name, phrase, tmp_path)
            again = read(FOLDER / name, text, beside, DEVICES.get(name))
            assert getattr(again, each.name) == value, (each.name, phrase)
