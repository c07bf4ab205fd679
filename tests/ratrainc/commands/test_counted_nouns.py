"""One of a thing is said in the singular, by every command and of everything that is counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.cli import main

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAN = "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 1\nseq_len = 8\n"
NOUNS = (
    "actions|chunks|clusters|devices|epochs|errors|instructions|layers|micro-batches|ops|parameters|passes|plans|ranks|"
    "replicas|routines|runs|schedules|sequences|slices|stages|steps|tokens|tensors"
)
ONE_OF_SEVERAL = re.compile(rf"(?<![\d.,@:=/x-])\b1 (?:[\w-]+ )?(?:{NOUNS})\b")
"""A number 1, perhaps an adjective, and a plural."""
COMMANDS = (
    "compile --model m.json --plan p.toml -o m.rtir",
    "compile --model m.json --plan p.toml -o m.rtx",
    "compile --model m.json --plan p.toml --capacity 10KiB",
    "verify m.rtir",
    "verify m.rtx",
    "explain m.rtx",
    "simulate m.rtx",
    "report m.rtx -o m.svg",
    "run m.rtx --steps 1 --save state",
    "plan --model m.json --clusters 1 --global-batch 1 --seq-len 8 --quick",
    "plan --model m.json --clusters 2 --global-batch 1 --seq-len 8 --quick",
    "plan --model m.json --clusters 1 --global-batch 1 --seq-len 8 --capacity 10KiB",
    "plan --model m.json --clusters 1 --global-batch 1 --seq-len 8 --capacity 10KiB --pareto memory",
    "scale --model m.json --plan p.toml --clusters 1",
    "schedule --kind 1f1b --stages 1 --micro-batches 1 -o s.csv --draw s.svg",
    "lint s.csv",
)


def test_no_command_counts_one_in_the_plural(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_text(json.dumps(MODEL))
    Path("p.toml").write_text(PLAN)
    wrong = {}
    for command in COMMANDS:
        assert main(command.split()) in (0, 1), command
        said = "".join(capsys.readouterr())
        wrong[command] = ONE_OF_SEVERAL.findall(" ".join(said.split(" ")))
    for picture in ("m.svg", "s.svg"):
        wrong[picture] = ONE_OF_SEVERAL.findall(Path(picture).read_text("utf-8"))
    assert {command: found for command, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "said", ["1 clusters stay idle", "on 1 sequences", "1 stages x 2", "1 micro-batches", "fits 1 equal runs"]
)
def test_a_plural_of_one_is_found(said: str) -> None:
    assert ONE_OF_SEVERAL.search(said)


@given(st.integers(0, 10**9), st.sampled_from(["stage", "entry", "micro-batch", "process", "shared core"]))
def test_a_number_and_its_noun_agree(count: int, noun: str) -> None:
    plurals = {"entry": "entries", "micro-batch": "micro-batches", "process": "processes"}
    expected = noun if count == 1 else plurals.get(noun, f"{noun}s")
    assert number_of(count, noun) == f"{count} {expected}"
    assert number_of(count, noun, ",") == f"{count:,} {expected}"
