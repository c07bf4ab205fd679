"""Every option of every command changes what `docs/options/` says, and is refused where it would change nothing."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from ratrain.ratrainc.cli import _COMMANDS, commands, main

DOCS = Path(__file__).resolve().parents[3] / "docs"
OPTIONS = runpy.run_path(str(DOCS / "options"))["OPTIONS"]
ALL = [(name, flag) for name, command in OPTIONS.items() for flag in command.options]
IDLE = [(name, flag, words) for name, flag in ALL for words in OPTIONS[name].options[flag].idle]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAN = """\
[parallel]
pp = 2
dp = 1
[batch]
micro_batch_size = 1
micro_batches = 4
seq_len = 8
"""
MACHINE = 'base = "mt3000"\nname = "{name}"\n[{key}]\nvalue = {value}\nunit = "{unit}"\ncertainty = "assumed"\nsource = "test"\n'


def call(words: str) -> None:
    assert main(shlex.split(words)) == 0, words


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the table name."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "m.json").write_text(json.dumps(CONFIG))
        (folder / "ds.json").write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}')
        auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
        optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
        scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
        auto |= {"optimizer": optimizer, "scheduler": scheduler, "bf16": {"enabled": "auto"}}
        (folder / "auto.json").write_text(json.dumps(auto))
        (folder / "train.sh").write_text(
            "torchrun x.py --micro-batch-size ${BATCH:-1} --seq-length 8 --lr 1e-3 --train-iters 9\n"
        )
        (folder / "trl.yaml").write_text(
            "model_name_or_path: m.json\ndataset_name: d\nmax_length: 64\nmax_steps: 9\nper_device_train_batch_size: 2\n"
        )
        (folder / "narrow.yaml").write_text((folder / "trl.yaml").read_text() + "optim: adamw_bnb_8bit\n")
        (folder / "freeze.yaml").write_text(
            "model_name_or_path: org/m\nfinetuning_type: freeze\ncutoff_len: 64\ntemplate: llama3\nmax_steps: 9\n"
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nbf16: true\n"
        )
        (folder / "acc.yaml").write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 1\n"
        )
        (folder / "gpt.sh").write_text(
            "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 2 "
            "--seq-length 8 --max-position-embeddings 8 --micro-batch-size ${BATCH:-1} --global-batch-size 4 "
            "--vocab-size 256 --bf16 --lr 1e-3 --train-iters 9\n"
        )
        (folder / "job.toml").write_text("[training]\nglobal_batch_size = 32\nseq_len = 8\n")
        (folder / "m2.json").write_text(json.dumps(CONFIG | {"intermediate_size": 40}))
        experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        (folder / "experts.json").write_text(json.dumps(CONFIG | experts))
        (folder / "p.toml").write_text(PLAN)
        (folder / "z3.toml").write_text(PLAN.replace("dp = 1", "dp = 2") + "[state]\nzero = 3\n")
        (folder / "p2.toml").write_text(PLAN + '[state]\nview_dtype = "f32"\n')
        slow = {"name": "slow", "key": "ddr_bandwidth", "value": 1e9, "unit": "bytes/s"}
        small = {"name": "small", "key": "ddr_capacity", "value": 4096, "unit": "bytes"}
        for machine in (slow, small):
            (folder / f"{machine['name']}.toml").write_text(MACHINE.format(**machine))
        given = "compile --model m.json --plan p.toml"
        call(f"{given} -o x.rtir")
        call(f"{given} -o x.rtx")
        call("compile --model experts.json --plan p.toml -o experts.rtx")
        filed = ["file_capacity = '1 GB'", "file_store = '1 GB/s'", "file_fetch = '1 GB/s'"]
        (folder / "filed.toml").write_text("\n".join(['base = "mt3000"', 'name = "filed"', *filed]))
        storing = "recompute{policy=none store=file},allocate-ddr"
        call(f"{given} --machine filed.toml --passes '{storing}' -o filed.rtx")
        (folder / "clip.toml").write_text(PLAN + '[optimizer]\nclip = "global"\n')
        call("compile --model m.json --plan clip.toml -o clip.rtx")
        call(f"{given} -o other.rtir --strategy full-save")
        call(f"{given} -o placed.rtir --passes place-1f1b")
        call(f"{given} -o tiles.rtx --machine mt3000-tiles")
        call("schedule --kind 1f1b --stages 2 --micro-batches 4 -o s.csv")
        call("schedule --kind zb-h1 --stages 2 --micro-batches 4 -o split.csv")
        (folder / "book.txt").write_text("a book of few words and many letters. " * 20)
        (folder / "other.txt").write_text("other letters make another book. " * 20)
        lines = [json.dumps({"text": f"text {n} of some words", "body": f"body {n} of others"}) for n in range(40)]
        (folder / "d.jsonl").write_text("\n".join(lines))
        pairs = [
            {"prompt": f"what is {n}?", "completion": f"a number, {n}", "text": f"{n}, {n + 1}"} for n in range(40)
        ]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        says = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a number, 3"}]
        chats = [{"messages": says, "talk": says[1:]} for _ in range(60)]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
        (folder / "t.jinja").write_text("{% for message in messages %}{{ message['content'] + '.' }}{% endfor %}")
        np.random.default_rng(0).integers(0, 255, 5000).astype(np.uint16).tofile(folder / "t.bin")
        call(
            "run x.rtx --steps 1 --threads 1 --data book.txt --save ckpt --log log.jsonl --profile prof.json --run-dir where"
        )
        call("export-weights ckpt -o w")
        (folder / "lora.toml").write_text(PLAN + '[train]\nmethod = "lora"\n')
        call("compile --model m.json --plan lora.toml -o lora.rtx")
        call("run lora.rtx --steps 2 --threads 1 --data book.txt --init w --save tuned")
        call("export-weights tuned --adapter -o adapters")
        lines = [f"m.json,p.toml,{count},{0.01 * count}" for count in (2, 3, 4, 5, 6)]
        (folder / "rows.csv").write_text("\n".join(["model,plan,micro_batches,step_seconds", *lines]) + "\n")
        (folder / "rows2.csv").write_text("\n".join(["model,plan,micro_batches,step_seconds", *lines[1:]]) + "\n")
        (folder / "v.csv").write_text(
            "id,class,split,model,plan,dp,micro_batches,step_seconds\n"
            + "".join(f"r{dp},step-time,held-out,m.json,p.toml,{dp},16,0.1\n" for dp in (1, 2, 3))
        )
        (folder / "b.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
        (folder / "mpirun").write_text('#!/bin/sh\necho "started with $2"\n')
        (folder / "mpirun").chmod(0o755)
    return folder


class _Called(Exception):
    """Stands for what is called."""


def masked(text: str, *, wall: bool) -> str:
    """A text without what differs from one call to the next."""
    return re.sub(r"[0-9][0-9.,e+:-]*|\W+|\b(s|ms|us|h|min)\b", " ", text) if wall else text


def outcome(name: str, words: str, files: Path, capfd: pytest.CaptureFixture[str], reaches: str | None) -> Any:
    """Exit code, what is printed and what is written by a command in a copy of the files; or what `reaches` is called with."""
    folder = files.parent / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files, folder)
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if reaches is not None:
            module, _, attribute = reaches.partition(":")

            def record(*args: Any, **kwargs: Any) -> None:
                called.append(re.sub(r"0x[0-9a-f]+|/tmp/\S+", "", repr((args, kwargs))))
                raise _Called

            patch.setattr(import_module(module), attribute, record)
        code = main([name, *shlex.split(words)])
    shown = capfd.readouterr()
    if reaches is not None:
        assert called, f"{reaches} is not called: {shown.err}"
        return called
    before = {path.relative_to(files): path for path in files.rglob("*") if path.is_file()}
    written = {}
    for path in folder.rglob("*"):
        known = before.get(path.relative_to(folder))
        if path.is_file() and (known is None or known.read_bytes() != path.read_bytes()):
            content = path.read_bytes() if path.suffix in (".jsonl", ".rtir", ".toml", ".csv", ".html", ".svg") else b""
            written[str(path.relative_to(folder))] = re.sub(
                r'"(tokens_per_second|mfu|resident_bytes|planned_bytes|\w*seconds)": ([0-9.e+-]+|\[.*?\])',
                "",
                content.decode(),
            )
    wall = OPTIONS[name].wall
    return code, masked(shown.out, wall=wall), masked(shown.err, wall=wall), written


@pytest.fixture(scope="module")
def without_options() -> dict[Any, Any]:
    """The outcomes of commands without the option in question, each had once: they are the same every time."""
    return {}


def without(name: str, flag: str, words: str) -> str:
    """A command's words without those of an option, which is then said with another value; one that may be said again stays."""
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    (option,) = (item for item in command.params if flag in item.opts)
    assert isinstance(option, click.Option)
    rest, kept = iter(shlex.split(words)), []
    for word in rest:
        if word not in (*option.opts, *option.secondary_opts) or option.multiple:
            kept.append(word)
        elif not option.is_flag:
            next(rest)
    return shlex.join(kept)


@pytest.mark.parametrize(("name", "flag"), ALL)
@pytest.mark.sampled(6)
def test_an_option_changes_what_it_says(
    name: str, flag: str, files: Path, without_options: dict[Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    option = OPTIONS[name].options[flag]
    words = OPTIONS[name].words if option.beside is None else option.beside
    if (name, words, option.reaches) not in without_options:
        without_options[name, words, option.reaches] = outcome(name, words, files, capfd, option.reaches)
    others = without(name, flag, words)
    both = (
        f"{option.words} {others}" if name == "launch" else f"{others} {option.words}"
    )  # what follows the file is for 'run'
    assert outcome(name, both, files, capfd, option.reaches) != without_options[name, words, option.reaches]


@pytest.mark.parametrize(("name", "flag", "words"), IDLE)
def test_an_option_that_would_change_nothing_is_refused(
    name: str, flag: str, words: str, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    given = OPTIONS[name].options[flag].words
    assert main([name, *shlex.split(words), *shlex.split(given)]) == 2
    assert "Error:" in capfd.readouterr().err


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(6)
def test_what_a_command_prints_is_the_same_again(name: str, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Else a difference would say nothing of an option."""
    words = OPTIONS[name].words
    if name == "precompile":
        outcome(name, words, files, capfd, None)  # compiles the loops of a fresh checkout, and says so
    assert outcome(name, words, files, capfd, None) == outcome(name, words, files, capfd, None)


def test_every_option_of_every_command_has_its_entry() -> None:
    assert list(OPTIONS)
    assert set(OPTIONS) == set(_COMMANDS)
    for name in _COMMANDS:
        found = commands.get_command(click.Context(commands), name)
        assert found is not None
        options = {item.opts[0] for item in found.params if isinstance(item, click.Option)}
        assert set(OPTIONS[name].options) == options, f"of {name}: {set(OPTIONS[name].options) ^ options}"
