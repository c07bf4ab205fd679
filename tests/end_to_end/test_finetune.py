"""Fine-tuning in one command: what it reads, plans, trains and writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.finetune_choice import Adapting, FinetuneChoice, Judging, Schedule
from ratrain.ratrainc.choices.run_choices import DataChoice, Display
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.running import finetune_plan, finetuning
from ratrain.ratrainc.running.finetune_plan import Amounts
from ratrain.ratrainc.running.finetuning import finetune
from ratrain.ratrainc.running.training_data import open_streams
from ratrain.targets.program.rtx import read_program
from ratrain.targets.runtime.arena.process_memory import resident_bytes
from ratrain.targets.runtime.arena.tensor_file import open_tensors
from ratrain.targets.runtime.settings import Evaluation, RunSettings
from ratrain.targets.runtime.training import preparation

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
PLAN = "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 2\nmicro_batches = 4\nseq_len = 64\n[optimizer]\nlr = 3e-3\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A little model that has seen some text, as a Hugging Face directory with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "m.json").write_text(json.dumps(CONFIG))
    (folder / "p.toml").write_text(PLAN)
    names = {name: str(folder / name) for name in ("m.json", "p.toml", "m.rtx", "state", "hf")}
    assert main(["compile", "--model", names["m.json"], "--plan", names["p.toml"], "-o", names["m.rtx"]]) in (0, None)
    assert main(["run", names["m.rtx"], "--steps", "5", "--save", names["state"], "--threads", "1"]) == 0
    assert main(["export-weights", names["state"], "-o", names["hf"]]) == 0
    return names["hf"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    numbers = np.random.default_rng(0).integers(0, 50, (80, 2)).tolist()
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{a}+{b}?"},
                {"role": "assistant", "content": f"{a + b}"},
            ]
        }
        for a, b in numbers
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def choice(model: str, data: str, output: Path, **more: Any) -> FinetuneChoice:
    """A fine-tuning of a few steps at a rate that such a model learns at."""
    told = FinetuneChoice(
        model,
        str(output),
        DataChoice((data,), chat_template="chatml"),
        Adapting(rank=4),
        Schedule(steps=8, lr=0.02),
        Judging(every=2),
        dtype="f32",
    )
    return evolve(told, **more)


def adapters(folder: Path) -> dict[str, bytes]:
    """Return the adapters that were exported, by name."""
    held = open_tensors(str(folder / "adapter" / "adapter_model.safetensors"), "RT091")
    return {name: tensor.values(0, tensor.elements).tobytes() for name, tensor in held.items()}


def test_what_a_fine_tuning_writes_is_read(model: str, chats: str, tmp_path: Path) -> None:
    done = finetune(choice(model, chats, tmp_path / "out"), Display(quiet=True))
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter",
        "best",
        "last",
        "log.jsonl",
        "plan.toml",
        "program.rtx",
    ]
    losses = [step.eval_loss for step in done.run.steps if step.eval_loss is not None]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert json.loads((out / "best" / "manifest.json").read_text())["step"] == 2 * (losses.index(min(losses)) + 1)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in log if line["eval_loss"] is not None] == losses
    # The plan is that of the program, and the program goes on from what was exported.
    program = read_program(str(out / "program.rtx"))
    assert load_plan(str(out / "plan.toml"), program.model) == program.plan
    for said in (["--chat", "1+2?", "--chat-template", "chatml"], ["--prompt", "1+2"]):
        assert main(["generate", str(out / "best"), "--init", model, *said, "--tokens", "3"]) == 0
    words = ["--init", model, "--init-adapter", str(out / "adapter"), "--data", chats, "--train-on", "answers"]
    words += ["--chat-template", "chatml", "--pack", "whole", "--steps", "1"]
    assert main(["run", str(out / "program.rtx"), *words]) == 0


def test_an_interrupted_fine_tuning_goes_on_to_the_same_bits(model: str, chats: str, tmp_path: Path) -> None:
    finetune(choice(model, chats, tmp_path / "whole"), Display(quiet=True))

    def stop(timed: Any) -> None:
        if timed.report.step == 4:
            raise RuntimeError("stopped")

    cut = choice(model, chats, tmp_path / "cut")
    with pytest.raises(RuntimeError, match="stopped"):
        finetune(cut, Display(quiet=True, each_step=stop))
    with pytest.raises(DiagnosticError, match=r"(?s)holds a run already.*--resume"):
        finetune(cut, Display(quiet=True))
    with pytest.raises(DiagnosticError, match=r"rank = 3, alpha = 6\.0 here, and rank = 4"):
        finetune(evolve(cut, resume=True, adapting=Adapting(rank=3)), Display(quiet=True))
    other = tmp_path / "other.jsonl"
    other.write_text(Path(chats).read_text().replace("+", "-"))
    with pytest.raises(DiagnosticError, match=r"(?s)data differ.*tune on these into another folder"):
        finetune(evolve(cut, resume=True, data=evolve(cut.data, paths=(str(other),))), Display(quiet=True))
    done = finetune(evolve(cut, resume=True), Display(quiet=True))
    assert [step.report.step for step in done.run.steps] == [5, 6, 7]
    whole, resumed = adapters(tmp_path / "whole"), adapters(tmp_path / "cut")
    assert whole == resumed
    with pytest.raises(DiagnosticError, match="has done its 8 steps"):
        finetune(evolve(cut, resume=True), Display(quiet=True))


def test_less_memory_takes_another_form(model: str, chats: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As views while these fit, then packed; and no form holds more than it may."""
    monkeypatch.setattr(finetune_plan, "held_bytes", lambda program, settings: program.stages[0].arena_bytes)
    monkeypatch.setattr(finetune_plan, "resident_bytes", lambda: 0)
    counts = Amounts(seq_len=8, sequences=8, batch=1, steps=1, eval_every=1)
    wide = evolve(load_model(model), hidden_size=256, ffn_size=512, head_dim=128, layers=6)
    forms: list[tuple[str, str]] = []

    def shrink(most: int) -> None:
        while True:
            told = choice(model, chats, tmp_path, ram_bytes=most, dtype="auto")
            plan = (program := finetune_plan.planned(wide, told, counts, RunSettings(1))).plan
            assert program.stages[0].arena_bytes <= most
            forms.append((plan.view_dtype, plan.training.base))
            most = int(0.9 * min(most, program.stages[0].arena_bytes))

    with pytest.raises(DiagnosticError, match=r"(?s)does not fit.*a shorter --seq-len"):
        shrink(64 << 20)
    assert list(dict.fromkeys(forms))[-2:] == [("bf16", "view"), ("bf16", "nf4")]


def test_an_end_before_the_first_evaluation_is_saved(model: str, chats: str, tmp_path: Path) -> None:
    def stop(timed: Any) -> None:
        raise RuntimeError(f"stopped after {timed.report.step}")

    cut = choice(model, chats, tmp_path / "cut", judging=Judging(every=4))
    with pytest.raises(RuntimeError, match="stopped after 0"):
        finetune(cut, Display(quiet=True, each_step=stop))
    done = finetune(evolve(cut, resume=True, schedule=evolve(cut.schedule)), Display(quiet=True))
    assert done.run.steps[0].report.step == 1


def test_ctrl_c_says_whether_resume_goes_on(model: str, chats: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Before a state is saved there is nothing to go on with; what is said then is true of both ways."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    cut = choice(model, chats, tmp_path / "cut")
    for place in ("planned", "run_training"):
        with monkeypatch.context() as patched:
            patched.setattr(finetuning, place, interrupted)
            with pytest.raises(KeyboardInterrupt, match=r"(?s)nothing to go on with.*without --resume, begins again"):
                finetune(cut, Display(quiet=True))
        with pytest.raises(DiagnosticError, match="holds no run to go on with"):
            finetune(evolve(cut, resume=True), Display(quiet=True))
    finetune(cut, Display(quiet=True))
    with monkeypatch.context() as patched:
        patched.setattr(finetuning, "_resumed", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            finetune(evolve(cut, resume=True), Display(quiet=True))
        assert not str(caught.value), "the run is there as it was"


def test_a_device_that_is_not_there_is_named(model: str, chats: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(DiagnosticError, match="cuda:77"):
        finetune(choice(model, chats, tmp_path / "o", device="cuda:77"), Display(quiet=True))


def test_the_models_own_folder_is_no_output(model: str, chats: str) -> None:
    with pytest.raises(DiagnosticError, match="-o is the folder of the model itself"):
        api.finetune(choice(model, chats, Path(model)))


def test_targets_and_texts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several targets are adapted; of a long text nothing is left out; the adapters stand beside their tokenizer."""
    (tmp_path / "book.txt").write_text("a long text of many words, again and again. " * 60)
    command = ["finetune", "--model", model, "--data", str(tmp_path / "book.txt"), "-o", str(tmp_path / "o")]
    assert main([*command, "--targets", "q_proj,v_proj", "--seq-len", "64", "--steps", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 longer ones cut into pieces" in said
    assert "40 sequences of 64 tokens" in said
    names = {name.split(".")[-3] for name in adapters(tmp_path / "o")}
    assert names == {"q_proj", "v_proj"}
    config = json.loads((tmp_path / "o" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(Path(model).resolve())
    assert (tmp_path / "o" / "adapter" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"text": "one"}, {"text": "two words"}], "documents: 32, nothing between them; whole documents"),
        ([{"prompt": "a", "completion": "b"}], "only answers are in the loss"),
        ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], "only answers are in"),
    ],
)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_the_first_line_tells_what_is_trained_on(
    lines: list[Any], words: str, form: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = tmp_path / ("d.jsonl" if form == "lines" else "d.json"), lines * (40 // len(lines))
    path.write_text("\n".join(map(json.dumps, lines)) if form == "lines" else json.dumps(lines, indent=2))
    kind = [] if "text" in lines[0] else ["--chat-template", "chatml"]
    command = ["finetune", "--model", model, "--data", str(path), "-o", str(tmp_path / "o"), "--steps", "1", *kind]
    assert main([*command, "--seq-len", "64", "--eval-fraction", "0.2"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "text"), [("hi.txt", "hi"), ("d.csv", "a,b\n1,2\n"), ("d.jsonl", '{"text": "a"}')])
def test_data_too_short_to_hold_out_are_named(name: str, text: str, model: str, tmp_path: Path, capsys: Any) -> None:
    """Neither of the two parts may be empty, whatever the data are."""
    (tmp_path / name).write_text(text)
    command = ["finetune", "--model", model, "--data", str(tmp_path / name), "-o", str(tmp_path / "o")]
    assert main([*command, "--steps", "1"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert name in said
    assert "its last 5 % are none of them" in said
    assert "--eval-fraction" in said


def _options_of(command: str) -> set[str]:
    found = commands.get_command(click.Context(commands), command)
    assert found is not None
    return {option for each in found.params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text-key", "foo"], "no field of texts is named"),
        (["--text-key", "messages"], "no field of texts is named"),
        (["--chat-key", "talk", "--chat-template", "chatml"], "has no messages"),
        (["--seq-len", "8", "--chat-template", "chatml"], "end before an answer begins"),
        (["--text"], "all documents are single tokens"),
        (["--text", "--chat-template", "chatml"], "leave it out"),
    ],
)
def test_refusals_name_options_that_there_are(
    words: list[str], said: str, model: str, chats: str, tmp_path: Path, capsys: Any
) -> None:
    """Each option named is one of finetune, or stands with the command that has it."""
    if words[0] == "--text":
        (tmp_path / "d.txt").write_text("a short line of text")
        chats, words = str(tmp_path / "d.txt"), words[1:]
    command = ["finetune", "--model", model, "--data", chats, "-o", str(tmp_path / "o"), "--steps", "1"]
    assert main([*command, *words]) in (1, 2)
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "belong to prompts" not in error, "neither texts nor these chats have long ones"
    for command_name, option in re.findall(r"(?:(\w+) )?(--[a-z-]+)", error):
        assert option in _options_of(command_name if command_name == "run" else "finetune"), error


def test_tokens_and_documents_told_are_those_of_each_part(model: str, chats: str, tmp_path: Path, capsys: Any) -> None:
    """Filling is no token of the data, and what is held out is not trained on."""
    text = chat_text(chats)
    command = ["finetune", "--model", model, "--data", chats, "-o", str(tmp_path / "o"), "--steps", "1"]
    assert main([*command, "--chat-template", "chatml", "--eval-fraction", "0.1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    trained, documents = re.search(r"without its last 10 %, (\S+) tokens.*?documents: (\d+)", said).groups()
    (held,) = re.search(r"an evaluation takes (\S+) tokens of it", said).groups()
    assert int(documents) < 80
    assert int(trained.replace(",", "")) + int(held.replace(",", "")) == text


def chat_text(chats: str) -> int:
    """Return the bytes of all chats by the template chatml."""
    stream, _ = open_streams(256, DataChoice((chats,), chat_template="chatml", train_on="answers"), Evaluation())
    return len(stream.tokens)


def test_pairs_without_a_template_are_joined_as_they_are(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "a", "completion": "b"})] * 40))
    command = ["finetune", "--model", model, "--data", str(path), "-o", str(tmp_path / "o"), "--steps", "1"]
    assert main([*command, "--seq-len", "64", "--eval-fraction", "0.2", "--full"]) == 0
    assert "only tokens of the field 'completion' are in the loss" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "o" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--full", "--merge"], "--merge is for adapters"),
        (["--full", "--lora", "3"], "is for adapters, and --full"),
        (["--schedule", "constant", "--decay-steps", "1", "--warmup-steps", "0"], "--decay-steps is for a rate that"),
        (["--warmup-steps", "9"], "9 of warm-up do not fit into 1 step"),
        (["--resume"], "holds no run to go on with"),
        (["--targets", "nonsense"], "no linear layer"),
        (["--prompt-key", "question"], 'has no fields "question"'),
        (["--chat-key", "talk"], 'has no messages in "talk"'),
    ],
)
def test_refused(words: list[str], said: str, model: str, chats: str, tmp_path: Path, capsys: Any) -> None:
    if "--prompt-key" in words:
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text("\n".join([json.dumps({"prompt": "a", "completion": "b"})] * 40))
        chats = str(pairs)
    command = ["finetune", "--model", model, "--data", chats, "-o", str(tmp_path / "o"), "--chat-template", "chatml"]
    assert main([*command, "--steps", "1", *words]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "o").exists()


def test_the_memory_that_a_refusal_names_is_enough_with_no_loop_on_disk(model: str, chats: str, tmp_path: Path) -> None:
    """The plan counts what the run counts, also a first kernel that must be compiled: one answer to one --ram."""

    def tuned(name: str, ram: str) -> subprocess.CompletedProcess[str]:
        words = ["finetune", "--model", model, "--data", chats, "--chat-template", "chatml", "--steps", "1"]
        words += ["-o", str(tmp_path / name), "--ram", ram]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / f"loops of {name}")}
        command = [sys.executable, "-m", "ratrain", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    refused = tuned("refused", "250MiB")
    assert "does not fit: it holds" in refused.stderr
    assert not (tmp_path / "refused" / "program.rtx").exists()
    advised = re.search(r"--ram (\d+MiB), if this machine has it", " ".join(refused.stderr.split()))
    assert advised is not None
    done = tuned("advised", advised[1])
    assert done.returncode == 0, done.stderr
    assert "both include the one-time compilation of" in " ".join(done.stdout.split())


@pytest.mark.parametrize("small", [True, False])
def test_a_plan_counts_no_less_than_its_run(
    small: bool, model: str, chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In little memory, where PyTorch's libraries are left out, and in more."""
    ram = (resident_bytes() or 0) + (1 << 30)  # this process may hold much from tests before
    monkeypatch.setattr(finetune_plan, "_FOR_TORCH", ram + 1 if small else 0)
    counted: dict[str, list[int]] = {"plan": [], "run": []}
    held_bytes, check_ram = finetune_plan.held_bytes, preparation._check_ram

    def held(*given: Any) -> int:
        counted["plan"].append(held_bytes(*given))
        return counted["plan"][-1]

    def checked(memory: Any, most: int) -> None:
        counted["run"].append(memory.planned_bytes)
        check_ram(memory, most)

    monkeypatch.setattr(finetune_plan, "held_bytes", held)
    monkeypatch.setattr(preparation, "_check_ram", checked)
    finetune(choice(model, chats, tmp_path / "tuned", ram_bytes=ram, dtype="auto"), Display(quiet=True))
    assert counted["run"][0] <= counted["plan"][-1] <= ram
