"""Broken inputs end in a diagnostic with a code: no traceback, nothing written, no absurd allocation, whatever the file holds."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ratrain.ratrain_ir.support.diagnostics import CODES
from ratrain.ratrainc.cli import main

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PLAN = """\
[parallel]
pp = 2
dp = 2
[batch]
micro_batch_size = 1
micro_batches = 2
seq_len = 16
"""
MACHINE = Path(__file__).resolve().parents[3] / "targets" / "mt3000" / "machines" / "mt3000.toml"
NOISE = bytes(np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sound file of every kind."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "tiny.json").write_text(json.dumps(CONFIG), "utf-8")
    (folder / "plan.toml").write_text(PLAN, "utf-8")
    shutil.copy(MACHINE, folder / "machine.toml")
    model = ["--model", str(folder / "tiny.json"), "--plan", str(folder / "plan.toml")]
    for name in ("a.rtir", "a.rtx"):
        assert main(["compile", *model, "-o", str(folder / name)]) == 0
    np.random.default_rng(2).integers(0, 300, 400).astype("<u2").tofile(folder / "tokens.bin")
    (folder / "text.txt").write_text("some text to train on\n" * 40, "utf-8")
    words = ["run", str(folder / "a.rtx"), "--data", str(folder / "tokens.bin"), "--kernels", "reference"]
    assert main([*words, "--steps", "1", "--save", str(folder / "checkpoint")]) == 0
    state = load_file(folder / "checkpoint" / "state.safetensors")
    weights = {name.removeprefix("p/"): values for name, values in state.items() if name.startswith("p/")}
    save_file(weights, folder / "weights.safetensors")
    assert main([*words, "--steps", "1", "--init", str(folder / "weights.safetensors")]) == 0
    return folder


COMMANDS: dict[str, tuple[str, ...]] = {
    "a.rtir": ("compile", "a.rtir", "-o", "out.rtx"),
    "a.rtx": ("run", "a.rtx", "--data", "tokens.bin", "--steps", "1", "--save", "out", "--log", "out.jsonl"),
    "plan.toml": ("compile", "--model", "tiny.json", "--plan", "plan.toml", "-o", "out.rtx"),
    "tiny.json": ("compile", "--model", "tiny.json", "--plan", "plan.toml", "-o", "out.rtir"),
    "machine.toml": (
        *("compile", "--model", "tiny.json", "--plan", "plan.toml"),
        *("--machine", "machine.toml", "-o", "out.rtx"),
    ),
    "tokens.bin": ("run", "a.rtx", "--data", "tokens.bin", "--steps", "1", "--save", "out", "--log", "out.jsonl"),
    "text.txt": ("run", "a.rtx", "--data", "text.txt", "--steps", "1", "--save", "out", "--log", "out.jsonl"),
    "weights.safetensors": (
        *("run", "a.rtx", "--data", "tokens.bin", "--init", "weights.safetensors"),
        *("--steps", "1", "--save", "out", "--log", "out.jsonl"),
    ),
    "checkpoint": (
        *("run", "a.rtx", "--data", "tokens.bin", "--resume", "checkpoint"),
        *("--steps", "1", "--save", "out", "--log", "out.jsonl"),
    ),
    "checkpoint/manifest.json": (
        *("run", "a.rtx", "--data", "tokens.bin", "--resume", "checkpoint"),
        *("--steps", "1", "--save", "out", "--log", "out.jsonl"),
    ),
}
"""For each input a command that reads it, and would write something."""


class Bench:
    """A copy of the good files, one of which is broken, and the command that reads it."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capture = capture

    def refused(self, name: str, *codes: str) -> str:
        """Run the command of an input: it must end with a diagnostic of one of these codes; the errors it shows."""
        return self.command_refused(COMMANDS[name], *codes)

    def command_refused(self, words: tuple[str, ...], *codes: str) -> str:
        """Run a command that must end with a diagnostic of one of these codes."""
        before = self.snapshot()
        self.capture.readouterr()
        code = main(list(words))
        captured = self.capture.readouterr()
        assert code == 1, f"{words}: exit {code}\n{captured.out}\n{captured.err}"
        assert not captured.out
        assert "Traceback" not in captured.err
        assert "internal error" not in captured.err
        shown = re.findall(r"error\[(RT\d+)\]: \S", captured.err)
        assert shown, captured.err
        assert set(shown) <= set(CODES)
        assert set(shown) & set(codes), captured.err
        assert self.snapshot() == before, "something was written"
        return captured.err

    def snapshot(self) -> dict[str, bytes]:
        """Every file and directory with its content."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            if path.is_file() and os.access(path, os.R_OK)
            else b""
            for path in self.folder.rglob("*")
        }

    def text(self, name: str, old: str, new: str) -> None:
        """Replace the first occurrence of a text in a file, which must have it."""
        path = self.folder / name
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), "utf-8")


@pytest.fixture
def bench(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A fresh copy of the good files, as the current directory."""
    folder = tmp_path / "bench"
    shutil.copytree(good, folder)
    monkeypatch.chdir(folder)
    return Bench(folder, capsys)


# What can happen to any file

FILES = {
    "a.rtir": ("RT001", "RT002"),
    "a.rtx": ("RT080", "RT002"),
    "plan.toml": ("RT063", "RT002"),
    "tiny.json": ("RT060", "RT002"),
    "machine.toml": ("RT065", "RT002"),
    "tokens.bin": ("RT090", "RT002"),
    "text.txt": ("RT090", "RT002"),
    "weights.safetensors": ("RT091", "RT002"),
    "checkpoint/manifest.json": ("RT092", "RT002"),
}


def remove(path: Path) -> None:
    """Take a file or directory away."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_directory(path: Path) -> None:
    """Put an empty directory in the place of a file."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": remove,
    "directory": replace_by_directory,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(NOISE),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "cut-off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 | 1]),
    "not-utf-8": lambda path: path.write_bytes(b"# caf\xe9\n" + path.read_bytes()),
}

SOUND = {("text.txt", "cut-off"), ("text.txt", "zeros"), ("tokens.bin", "zeros")}
"""Damages that leave another sound file: zeros are tokens, and half a text is a text."""


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name in FILES for damage in DAMAGES if (name, damage) not in SOUND]
)
@pytest.mark.sampled(4)
def test_damaged_files_are_refused(bench: Bench, name: str, damage: str) -> None:
    DAMAGES[damage](bench.folder / name)
    bench.refused(name, *FILES[name], "RT004")


TEXTS = {"a.rtir", "plan.toml", "tiny.json", "machine.toml", "text.txt", "checkpoint/manifest.json"}
"""Any text is training data, and any bytes are tokens: only the vocabulary tells, which other tests have."""


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (name, other)
        for name in FILES
        for other in FILES
        if name not in (other, "tokens.bin") and not (name == "text.txt" and other in TEXTS)
    ],
)
@pytest.mark.sampled(3)
def test_files_of_another_kind_are_refused(bench: Bench, good: Path, name: str, other: str) -> None:
    """Any file in the place of any other: a program given as a schedule, a plan as a machine, and so on."""
    shutil.copy(good / other, bench.folder / name)
    bench.refused(name, *FILES[name], "RT064")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anything")
@pytest.mark.parametrize("name", FILES)
def test_files_without_permission_are_refused(bench: Bench, name: str) -> None:
    (bench.folder / name).chmod(0)
    bench.refused(name, "RT002")


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "a.rtx/x.rtx"),
        ("verify", "a\0b.rtir"),
        ("verify", "a\0b.rtx"),
        ("verify", "x" * 5000 + ".rtx"),
        ("compile", "--model", "a\0b.json", "--plan", "plan.toml"),
        ("compile", "--model", "tiny.json", "--plan", "a\0b.toml"),
        ("compile", "--model", "tiny.json", "--plan", "plan.toml", "--machine", "a\0b.toml"),
        ("compile", "--model", "tiny.json", "--plan", "plan.toml", "-o", "no/such/folder.rtx"),
        ("compile", "--model", "tiny.json", "--plan", "plan.toml", "-o", "a\0b.rtx"),
        ("run", "a.rtx", "--data", "a\0b.bin"),
        ("run", "a.rtx", "--data", "tokens.bin", "--init", "a\0b"),
        ("run", "a.rtx", "--data", "tokens.bin", "--resume", "a\0b"),
        ("run", "a.rtx", "--data", "tokens.bin", "--save", "a\0b"),
        ("run", "a.rtx", "--data", "tokens.bin", "--log", "a\0b"),
        ("run", "a.rtx", "--data", "tokens.bin", "--save", "no/such/folder"),
        ("run", "a.rtx", "--data", "tokens.bin", "--data-dtype", "uint32"),
        ("run", "a.rtx", "--data", "text.txt", "--data-dtype", "uint16"),
        ("run", "a.rtx", "--data", "tokens.bin", "--save", "a.rtir"),
        ("disasm", "a.rtir/"),
    ],
)
def test_paths_no_file_can_have_are_refused(bench: Bench, words: tuple[str, ...]) -> None:
    bench.command_refused(words, "RT002", "RT004", "RT090", "RT092", "RT080")


# What can stand in a file


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("rtir 2", "rtir 3", "RT003"),
        ("rtir 2", "rtir 99999999999999999999", "RT003"),
        ("level allocated", "level finished", "RT004"),
        ("level allocated", "level placed", "RT051"),
        ("hidden_size = 24", "hidden_size = 25", "RT025"),
        ("hidden_size = 24", 'hidden_size = "24"', "RT062"),
        ("hidden_size = 24", "hidden_size = -24", "RT062"),
        ("hidden_size = 24", "hidden_size = " + "9" * 5000, "RT062"),
        ("layers = 2", "layers = 16000", "RT030"),
        ("layers = 2", "layers = 1000000000", "RT062"),
        ("micro_batches = 2", "micro_batches = 65536", "RT030"),
        ("pp = 2", "pp = 60000", "RT064"),
        ("dp = 2", "dp = 65536", "RT025"),
        ("cuts = [1]", "cuts = [99]", "RT064"),
        ("cuts = [1]", "cuts = 1", "RT064"),
        ("zero = 1", "zero = 4", "RT064"),
        ("capacity = 20000000000", "capacity = 64", "RT052"),
        ("capacity = 20000000000", 'capacity = "much"', "RT005"),
        ("forward embed m0", "forward embed m" + "9" * 40, "RT005"),
        ("forward embed m0", "forward attention." + "9" * 5000 + " m0", "RT005"),
        ("forward embed m0", "forward embed m1", "RT030"),
        ("forward embed m0", "froward embed m0", "RT004"),
        ("activation m0 @1", "activation m0 @" + "9" * 5000, "RT005"),
        ("activation m0 @1", "activation m0 @7", "RT027"),
        (": i32[16]", ": i32[17]", "RT025"),
        (": i32[16]", ": i99[16]", "RT005"),
        (": i32[16]", ": i32[" + "9" * 30 + "]", "RT005"),
        (": i32[16]", ": i32[0]", "RT005"),
        (" at 0x", " at 0x" + "f" * 5000, "RT051"),
        (" carried at", " at", "RT020"),
        ("  stage @1 {", "  stage @2 {", "RT005"),
        ("  stage @1 {", "  stage {", "RT001"),
    ],
)
def test_wrong_values_in_a_schedule(bench: Bench, old: str, new: str, code: str) -> None:
    bench.text("a.rtir", old, new)
    bench.refused("a.rtir", code)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("pp = 2", 'pp = "2"', "RT063"),
        ("pp = 2", "pp = 0", "RT063"),
        ("pp = 2", "pp = 1e3", "RT063"),
        ("pp = 2", "pp = " + "9" * 5000, "RT063"),
        ("pp = 2", "pp = 3", "RT064"),
        ("pp = 2", "pp = 2\npp = 2", "RT063"),
        ("pp = 2", "pq = 2", "RT063"),
        ("dp = 2", "dp = []", "RT063"),
        ("dp = 2", "dp = 65536000", "RT063"),
        ("[batch]", "[bach]", "RT063"),
        ("seq_len = 16", "seq_len = -16", "RT063"),
        ("seq_len = 16", "seq_len = nan", "RT063"),
        ("micro_batches = 2", "micro_batches = true", "RT063"),
        ("[batch]", "[optimizer]\nlr = inf\n[batch]", "RT063"),
        ("[batch]", "[optimizer]\nbetas = [0.9]\n[batch]", "RT063"),
        ("[batch]", "[state]\nloss_scale = 1e-300\n[batch]", "RT063"),
        ("[batch]", "x = " + "[" * 3000 + "\n[batch]", "RT063"),
    ],
)
def test_wrong_values_in_a_plan(bench: Bench, old: str, new: str, code: str) -> None:
    bench.text("plan.toml", old, new)
    bench.refused("plan.toml", code)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hidden_size": "24"}, "RT060"),
        ({"hidden_size": 10**40}, "RT060"),
        ({"hidden_size": -1}, "RT060"),
        ({"hidden_size": None}, "RT060"),
        ({"num_attention_heads": 5}, "RT062"),
        ({"num_hidden_layers": [2]}, "RT060"),
        ({"model_type": "mpt"}, "RT061"),
        ({"model_type": "gpt2"}, "RT061"),
        ({"model_type": {}}, "RT060"),
        ({"hidden_act": "relu"}, "RT061"),
        ({"rms_norm_eps": 1e400}, "RT060"),
        ({"vocab_size": True}, "RT060"),
    ],
)
def test_wrong_values_in_a_config(bench: Bench, changes: dict[str, Any], code: str) -> None:
    (bench.folder / "tiny.json").write_text(json.dumps(CONFIG | changes), "utf-8")
    bench.refused("tiny.json", code, "RT060")


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        (r"value = [^\n]*", "value = 0"),
        (r"value = [^\n]*", "value = -1"),
        (r"value = [^\n]*", "value = nan"),
        (r"value = [^\n]*", "value = 1e300"),
        (r"value = [^\n]*", "value = " + "9" * 5000),
        (r"value = [^\n]*", 'value = "much"'),
        (r"value = [^\n]*", "value = 1.5"),
        (r"value = [^\n]*", ""),
        (r"unit = [^\n]*", 'unit = "furlong"'),
        (r"certainty = [^\n]*", 'certainty = "sure"'),
        (r"source = [^\n]*", "source = 7"),
        (r"source = [^\n]*", 'sauce = "x"\nsource = "y"'),
        (r"name = [^\n]*", 'name = ""'),
        (r"\[ddr_capacity\]", "[ddr_capacitance]"),
    ],
)
def test_wrong_values_in_a_machine(bench: Bench, pattern: str, new: str) -> None:
    path = bench.folder / "machine.toml"
    changed, count = re.subn(pattern, lambda _match: new, path.read_text("utf-8"), count=1)
    assert count == 1
    path.write_text(changed, "utf-8")
    bench.refused("machine.toml", "RT065")


@pytest.mark.parametrize(
    ("name", "tokens", "words"),
    [
        ("out of the vocabulary", np.full(400, 300, "<u2"), "token 300 at position 0"),
        ("too few for a sequence", np.zeros(16, "<u2"), "16 tokens"),
        ("one byte too many", np.zeros(801, "<u1"), "801 bytes"),
    ],
)
def test_wrong_tokens(bench: Bench, name: str, tokens: np.ndarray[Any, Any], words: str) -> None:
    tokens.tofile(bench.folder / "tokens.bin")
    assert words in bench.refused("tokens.bin", "RT090"), name


def test_text_for_a_vocabulary_that_is_too_small(bench: Bench) -> None:
    (bench.folder / "tiny.json").write_text(json.dumps(CONFIG | {"vocab_size": 255}), "utf-8")
    assert main(list(COMMANDS["plan.toml"])) == 0
    words = ("run", "out.rtx", "--data", "text.txt", "--steps", "1", "--log", "out.jsonl")
    bench.command_refused(words, "RT090")


WEIGHTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "one tensor missing": lambda weights: weights.popitem(),
    "one too many": lambda weights: weights.update(extra=np.zeros(3, np.float32)),
    "another shape": lambda weights: weights.update({"model.norm.weight": np.ones(23, np.float32)}),
    "another type": lambda weights: weights.update({"model.norm.weight": np.ones(24, np.int64)}),
    "not finite": lambda weights: weights.update({"model.norm.weight": np.full(24, np.nan, np.float32)}),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_wrong_weights(bench: Bench, change: str) -> None:
    path = bench.folder / "weights.safetensors"
    weights = load_file(path)
    WEIGHTS[change](weights)
    save_file(weights, path)
    bench.refused("weights.safetensors", "RT091")


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The digest a checkpoint's manifest carries of itself."""
    from ratrain.targets.runtime.checkpoint import checkpoint

    return checkpoint.manifest_digest(manifest)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", 10**30),
        ("step", "3"),
        ("scale", [0.0, 0.0]),
        ("scale", [1e300, 0.0]),
        ("scale", [1.0]),
        ("updates", {}),
        ("updates", {"embed": 10**30}),
        ("model", {}),
        ("files", {}),
        ("run", 7),
        ("version", 2),
        ("format", "other"),
    ],
)
@pytest.mark.sampled(3)
def test_a_checkpoint_that_contradicts_itself(bench: Bench, key: str, value: object) -> None:
    """The digest is right: whoever wrote this meant it, or made a mistake."""
    path = bench.folder / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    if key == "updates" and value:
        value = {**manifest["updates"], **dict(value)}  # type: ignore[call-overload]
    manifest[key] = value
    manifest["manifest_sha256"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest), "utf-8")
    bench.refused("checkpoint", "RT092")


@pytest.mark.parametrize("damage", ["missing", "empty", "noise", "cut-off"])
def test_a_checkpoint_with_a_damaged_state(bench: Bench, damage: str) -> None:
    DAMAGES[damage](bench.folder / "checkpoint" / "state.safetensors")
    bench.refused("checkpoint", "RT092", "RT002")


def test_a_checkpoint_of_another_model(bench: Bench) -> None:
    (bench.folder / "tiny.json").write_text(json.dumps(CONFIG | {"intermediate_size": 48}), "utf-8")
    assert main(list(COMMANDS["plan.toml"])) == 0
    words = ("run", "out.rtx", "--data", "tokens.bin", "--steps", "1", "--resume", "checkpoint", "--log", "out.jsonl")
    assert "ffn_size = 40, the model 48" in bench.command_refused(words, "RT092")


def test_the_good_files_are_good(bench: Bench) -> None:
    """Otherwise the tests above would pass for another reason."""
    for name, words in COMMANDS.items():
        assert main(list(words)) == 0, name
