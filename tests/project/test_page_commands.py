"""The commands in the pages run as they stand there, each page's in one folder that holds what its reader would have.

Only long training is cut to a tenth of its steps, and plans are searched for a small model. Pages whose outputs are shown are sessions (`docs/sessions.py`), and run in the gate. Here the commands of all others run, which takes
minutes; that none is forgotten is seen in the gate.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import copy_examples
from tests.project.test_site import DOCS, PAGES, ROOT, lines_of_commands

MADE_WHEN_WRITTEN = {"commands.md", "json.md", "mistakes.md", "start-here.md"}
"""Pages whose commands run when the page is made, or that are the help of commands."""

SET_ASIDE = {
    r"--device cuda": "needs a GPU",
    r"torch-device|--kernels torch|--engine torch": "needs the extra 'torch'",
    r"^ratrainc launch|^ratrainc postmortem run2": "needs the extra 'mpi'; tests/targets/runtime/ranks/test_mpi.py starts ranks",
    r"--log-to": "needs the extra of that name",
    r"\[--|8\*N|PROGRAM": "is a pattern, not a command",
    r"m\.rtx|roomy1\.toml|--machine here\.toml -o": "takes a file that the page makes of something larger, or by hand",
    r"^ratrainc (?!plan |scale ).*(SmolLM2-135M/|0\.5b|llama-2-70b|qwen2\.5-|published/)": (
        "takes many minutes, or files that are not there; benchmarks/ has it"
    ),
    r"^ratrainc compare ": "searches or compiles for minutes; tests/ratrainc/planner/test_compared_and_scaled.py has it smaller",
    r"^ratrainc explain 7b.rtx$": "tries levers of a large model for a minute; start-here.md has it smaller",
    r"--model llama-2-7b --plan P.toml": "is for the plan that a search of minutes writes",
}
"""What is not run here, by what stands in the command, and why."""

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAN = "[parallel]\npp = 2\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 4\nseq_len = 8\n"
PEERS = PLAN.replace("dp = 1\n", "dp = 2\ntp = 2\n")


def set_aside(line: str) -> str | None:
    """Why a command is not run here; None where it is."""
    return next((why for words, why in SET_ASIDE.items() if re.search(words, line)), None)


def commands_to_run(page: Path) -> list[str]:
    """The commands of a page that are run here."""
    if page.name in MADE_WHEN_WRITTEN:
        return []
    return [line for line in lines_of_commands(page.read_text()) if set_aside(line) is None]


def test_most_commands_are_run() -> None:
    run = sum(len(commands_to_run(page)) for page in PAGES)
    aside = [
        line
        for page in PAGES
        if page.name not in MADE_WHEN_WRITTEN
        for line in lines_of_commands(page.read_text())
        if set_aside(line) is not None
    ]
    assert run > len(aside) / 2
    for words, why in SET_ASIDE.items():
        assert any(re.search(words, line) for line in aside), f"nothing is set aside for: {why}"


def shortened(line: str) -> str:
    """A command of training with a tenth of its steps, and as many held-out losses; a search with a small model, for seconds."""
    if not re.match("ratrainc (plan|scale) ", line):
        return re.sub(r"(--(?:steps|eval-every)) (\d+)0\b", r"\1 \2", line)
    line = re.split(r"\s{2,}", line)[0].replace("plan ...", "plan --model M --clusters 4 --global-batch 16 --seq-len 8")
    line = re.sub(r"--model \S+", "--model m.json", line)
    if line.startswith("ratrainc scale") or {"--quick", "--smallest"} & set(line.split()):
        return line
    return f"{line} --quick" if "--pareto" in line else f"{line} --seconds 3"


def call(words: str) -> None:
    assert main(shlex.split(words)[1:]) == 0, words


def a_folder_of_the_reader() -> None:
    """What pages take for granted in the current folder: a model, plans, text, programs, a checkpoint, tables."""
    copy_examples("examples")
    for name in ("m.json", "M", "MODEL"):
        Path(name).write_text(json.dumps(MODEL))
    for name in ("p.toml", "P.toml"):
        Path(name).write_text(PLAN)
    text = "a book of few words and many letters, again and again. " * 60
    Path("book.txt").write_text(text)
    Path("shards").mkdir()
    for name in ("a.txt", "b.txt"):
        Path("shards", name).write_text(text)
    pairs = [json.dumps({"question": "how many words?", "answer": "a few words, and more letters"})] * 40
    Path("pairs.jsonl").write_text("\n".join(pairs))
    call("ratrainc compile --model m.json --plan p.toml -o tiny.rtx")
    for name in ("1b.rtx", "other.rtx", "x.rtx", "before.rtx", "after.rtx"):
        shutil.copy("tiny.rtx", name)
    for name in ("x.rtir", "X.rtir"):
        call(f"ratrainc compile --model m.json --plan p.toml -o {name}")
    call("ratrainc schedule --kind 1f1b --stages 2 --micro-batches 4 -o schedule.csv")
    call("ratrainc run tiny.rtx --data book.txt --steps 1 --save begin")
    call("ratrainc export-weights begin -o llama")
    trains = (DOCS / "adapters.md").read_text().split("\n\n")[2]
    Path("lora.toml").write_text(PLAN + re.sub("^    ", "", trains, flags=re.MULTILINE) + "\n")
    settings = (DOCS / "fit.md").read_text().split("# train.yaml, of axolotl\n")[1].split("\n\n")[0]
    Path("train.yaml").write_text(re.sub("^    ", "", settings, flags=re.MULTILINE) + "\n")


def for_calibration() -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}
    Path("wide.json").write_text(json.dumps(MODEL | wide))
    Path("wide.toml").write_text(PLAN.replace("seq_len = 8", "seq_len = 1024"))
    rows = "".join(f"wide.json,wide.toml,{dp},{seconds}\n" for dp, seconds in ((1, 4.0), (2, 4.1), (4, 4.2)))
    Path("measured.csv").write_text(f"model,plan,dp,step_seconds\n{rows}")


def for_experts() -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    Path("experts.json").write_text(json.dumps(MODEL | experts))
    Path("experts.toml").write_text(PLAN.replace("dp = 1", "dp = 2\nep = 2"))
    call("ratrainc compile --model experts.json --plan experts.toml -o X.rtx")
    Path("shares.json").write_text(json.dumps({"layers": [[0.4, 0.3, 0.2, 0.1]] * MODEL["num_hidden_layers"]}))


def for_training() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the page trains with a tokenizer: extra 'tokenizer'")
    words = ["[UNK]", "</s>", *sorted(set(re.findall(r"\w+|[^\w\s]", Path("book.txt").read_text())))]
    numbers = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("llama/tokenizer.json")
    Path("llama/tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def for_finetuning() -> None:
    shutil.copytree("llama", "smollm")
    Path("smollm/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    )
    chat = {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}
    Path("chats.jsonl").write_text("\n".join([json.dumps(chat)] * 60))


def for_validation() -> None:
    row = "a,step-time,held-out,m.json,mt3000,p.toml,ratrain,0.006"
    Path("measured.csv").write_text(f"id,class,split,model,machine,plan,strategy,step_seconds\n{row}\n")
    call("ratrainc run tiny.rtx --steps 3 --threads 1 --profile run.json")
    call("ratrainc calibrate --profile run.json -o mine.toml")


def for_strategies() -> None:
    Path("P.toml").write_text(PEERS)


def for_coming_from() -> None:
    for name in ("pretrain.sh", "ds_config.json", "job.toml"):
        shutil.copy(ROOT / "tests" / "data" / "bridge" / name, name)
    shutil.copy(ROOT / "tests" / "data" / "bridge" / "megatron" / "dense.sbatch", "train.sbatch")
    Path("sft.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\nmax_steps: 9\nmax_length: 4096\npacking: true\n"
    )
    sharded = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    Path("fsdp.yaml").write_text(f"{sharded}mixed_precision: bf16\nnum_processes: 8\n")
    job = Path("job.toml").read_text()  # of 32 ranks; the page says 64
    twice = re.sub("(data_parallel_shard_degree) = 4", r"\1 = 8", job)
    Path("job.toml").write_text(twice.replace("global_batch_size = 64", "global_batch_size = 128"))


def for_watching() -> None:
    for name in ("first.jsonl", "second.jsonl", "kept/a.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        call(f"ratrainc run tiny.rtx --data book.txt --steps 2 --log {name}")


def for_plugins() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "plugins.md").read_text(), re.MULTILINE | re.DOTALL)
    for name, word in (("mine.py", "tokens-first"), ("roomy.py", "roomy"), ("eager.py", "eager")):
        Path(name).write_text(next(block for block in blocks if word in block))


BESIDE: dict[str, Callable[[], None]] = {
    "calibration.md": for_calibration,
    "experts.md": for_experts,
    "finetuning.md": for_finetuning,
    "validation-tables.md": for_validation,
    "strategies.md": for_strategies,
    "coming-from.md": for_coming_from,
    "training.md": for_training,
    "data.md": for_training,
    "weights.md": for_training,
    "watch.md": for_watching,
    "plugins.md": for_plugins,
}
"""What a page's reader has beside that."""


@cache
def pages_to_run() -> list[Path]:
    """The pages with commands that are run here."""
    return [page for page in PAGES if commands_to_run(page)]


@pytest.mark.full
@pytest.mark.parametrize("page", pages_to_run(), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_folder_of_the_reader()
    BESIDE.get(page.name, lambda: None)()
    for line in commands_to_run(page):
        call(shortened(line))


def blocks_of_the_readme() -> tuple[str, str]:
    """What its demo prints, shortened, and what its verifier says of an edited schedule."""
    fenced = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    demo, edited = fenced
    return demo, edited


def test_what_the_readme_shows_of_the_verifier_is_what_it_says() -> None:
    """It stands in the start page too, which is written from what comes out."""
    assert blocks_of_the_readme()[1] in (DOCS / "start-here.md").read_text()


@pytest.mark.full
def test_the_demo_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is compiled and simulated exactly; of what is trained all but its figures, which a processor and a clock give."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    call("ratrainc quickstart")
    out = capsys.readouterr().out
    exact, trained = blocks_of_the_readme()[0].split("...\n")
    assert [line for line in exact.splitlines() if line not in out.splitlines()] == []
    without_figures = runpy.run_path(str(DOCS / "sessions.py"))["_without_figures"]
    printed = {without_figures(line) for line in out.splitlines()}
    shown = [line for line in trained.splitlines() if not re.search("[┤└]", line)]
    assert [line for line in shown if without_figures(line) not in printed] == []
    assert len(re.findall("┤", trained)) == len(re.findall("┤", out))
