"""Tiny trainings through the command line: the files they read, the commands, what the commands leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

SEQ_LEN = 48
STEPS = 20
TIMEOUT = 120  # seconds for one command, which takes a few

OPTIMIZER: dict[str, Any] = {
    "lr": 5e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "warmup_steps": 4,
}

Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Layout:
    """How a step of `global_batch` sequences is spread over stages, replicas and micro-batches."""

    pp: int
    dp: int
    micro_batches: int
    micro_batch_size: int = 2
    slices: str = ""
    """what the plan says of slices: a number, lengths, or of even work"""

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batches * self.micro_batch_size


def tiny_config(**keys: Any) -> dict[str, Any]:
    """A `config.json` of 4 layers. No width is a multiple of 64, so that a wrong stride or padding is not hidden."""
    common = {
        "model_type": "llama",
        "vocab_size": 199,
        "hidden_size": 56,
        "intermediate_size": 104,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in {**common, **keys}.items() if value is not None}


def tiny_gpt2(**keys: Any) -> dict[str, Any]:
    """The same as a GPT-2; there are more positions than a sequence has tokens."""
    common = {"model_type": "gpt2", "vocab_size": 199, "n_embd": 56, "n_inner": 104, "n_layer": 4, "n_head": 4}
    return {**common, "n_positions": SEQ_LEN + 5, "layer_norm_epsilon": 1e-5, **keys}


def token_stream(vocab: int, count: int) -> npt.NDArray[np.uint16]:
    """Tokens with something to learn: three in four follow from the one before."""
    random = np.random.default_rng(11)
    successor = random.permutation(vocab)
    stray = random.integers(0, vocab, count)
    follows = random.random(count) < 0.75
    tokens = np.empty(count, np.uint16)
    tokens[0] = stray[0]
    for i in range(1, count):
        tokens[i] = successor[tokens[i - 1]] if follows[i] else stray[i]
    return tokens


def plan_text(layout: Layout, view_dtype: str) -> str:
    """The plan as TOML. The loss scale is fixed: a dynamic one may skip steps, which are then no steps to compare."""
    scale = 1024.0 if view_dtype == "f16" else 1.0
    lines = [
        "[parallel]",
        f"pp = {layout.pp}",
        f"dp = {layout.dp}",
        "[batch]",
        f"micro_batch_size = {layout.micro_batch_size}",
        f"micro_batches = {layout.micro_batches}",
        f"seq_len = {SEQ_LEN}",
        *([f"slices = {layout.slices}"] if layout.slices else []),
        "[state]",
        f'view_dtype = "{view_dtype}"',
        f"loss_scale = {scale}",
        "[optimizer]",
        *(f"{key} = {list(value) if isinstance(value, tuple) else value}" for key, value in OPTIMIZER.items()),
    ]
    return "\n".join(lines) + "\n"


def ratrainc(folder: Path, *arguments: str) -> None:
    """Run the command line in a folder; fail with all it said unless it ends well."""
    command = [sys.executable, "-m", "ratrain", *arguments]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"


def read_losses(log: Path, steps: int) -> list[float]:
    """The losses of a run's log, which has one line for each step, in order."""
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert len(lines) == steps
    first = lines[0]["step"]
    assert [line["step"] for line in lines] == list(range(first, first + steps))
    return [line["loss"] for line in lines]


def worst_relative(got: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """The largest relative deviation, and the step it is at."""
    deviations = [abs(one - other) / abs(other) for one, other in zip(got, expected, strict=True)]
    worst = int(np.argmax(deviations))
    return deviations[worst], worst


def show(figures: str) -> None:
    """Print measured figures; `pytest -rP` lists them."""
    print(figures)  # noqa: T201


@dataclass
class Trainer:
    """Trains one model on one token stream from one set of weights, in a folder of its own."""

    folder: Path
    programs: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls, folder: Path, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[np.float32]], sequences: int
    ) -> Trainer:
        """Write the model, its initial weights by Hugging Face names, and exactly the tokens of so many sequences."""
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        save_file(dict(weights), folder / "weights.safetensors")
        token_stream(config["vocab_size"], sequences * SEQ_LEN + 1).astype("<u2").tofile(folder / "tokens.bin")
        return cls(folder)

    @property
    def tokens(self) -> list[int]:
        """The token stream."""
        return [int(token) for token in np.fromfile(self.folder / "tokens.bin", "<u2")]

    def compile(self, layout: Layout, view_dtype: str, strategy: str) -> Path:
        """The program of a plan; compiled once."""
        cut = "".join(character for character in layout.slices if character.isalnum())
        name = f"{strategy}-{view_dtype}-p{layout.pp}-d{layout.dp}" + (f"-s{cut}" if cut else "")
        if name not in self.programs:
            (self.folder / f"{name}.toml").write_text(plan_text(layout, view_dtype), "utf-8")
            arguments = ["--model", "config.json", "--plan", f"{name}.toml", "--strategy", strategy]
            ratrainc(self.folder, "compile", *arguments, "-o", f"{name}.rtx")
            self.programs[name] = self.folder / f"{name}.rtx"
        return self.programs[name]

    def run(self, program: Path, steps: int, *, kernels: str = "fast", save: Path | None = None) -> list[float]:
        """The losses of the first steps, in sequential order."""
        log = program.with_name(f"{program.stem}-{kernels}-{steps}.jsonl")
        arguments = [program.name, "--data", "tokens.bin", "--steps", str(steps), "--order", "sequential"]
        arguments += ["--init", "weights.safetensors", "--log", log.name, "--kernels", kernels]
        ratrainc(self.folder, "run", *arguments, *(["--save", save.name] if save else []))
        return read_losses(log, steps)

    def first_gradients(self, program: Path, kernels: str = "fast") -> Arrays:
        """The gradients of the first step by Hugging Face name, from the moments it leaves: m1 = (1 - beta1) * g."""
        checkpoint = self.folder / f"{program.stem}-{kernels}-checkpoint"
        self.run(program, 1, kernels=kernels, save=checkpoint)
        state = load_file(checkpoint / "state.safetensors")
        share = 1 - OPTIMIZER["betas"][0]
        return {key.removeprefix("m1/"): value / share for key, value in state.items() if key.startswith("m1/")}
