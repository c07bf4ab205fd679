"""A run goes on with data of its checkpoint, tokens of its tokenizer, and a loss scale of its types, or is refused."""

from __future__ import annotations

import json
import shlex
import sys
from functools import cache
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Severity
from ratrain.ratrainc.choices.run_choices import BYTES, DataChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.run_display import say_start
from ratrain.ratrainc.running.training_data import companion_files, open_data
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.arena.scalars import INITIAL_SCALE
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE, manifest_digest
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Evaluation, Start
from tests.end_to_end.tiny_runs import MODEL, make_program, run_settings, start, train
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TrainingRun

# Data and tokens

WIDE = evolve(MODEL, vocab_size=300)
TEXT = "some words to learn, and to learn again " * 60


class FakeTokenizer:
    """What `ratrain.targets.runtime.data.tokenizer` asks of the package: a token is a word's length and the file's number."""

    def __init__(self, number: int) -> None:
        self.number = number

    @staticmethod
    def from_str(content: str) -> FakeTokenizer:
        return FakeTokenizer(json.loads(content)["number"])

    def token_to_id(self, token: str) -> int | None:
        return 290 + self.number if token == "</s>" else None

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        assert not add_special_tokens
        encoding = type("Encoding", (), {})
        found = []
        for text in texts:
            found.append(encoding())
            found[-1].ids = [(self.number + 7 * len(word) + ord(word[0])) % 300 for word in text.split()]
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data, weights and tokenizers, and the package that reads them."""
    package = ModuleType("tokenizers")
    package.Tokenizer = FakeTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT.upper())
    numbers = np.frombuffer(TEXT.encode(), np.uint8)
    (tmp_path / "narrow.bin").write_bytes(numbers.astype("<u2").tobytes())
    (tmp_path / "wide.bin").write_bytes(numbers.astype("<u4").tobytes())
    for number in (1, 2):
        folder = tmp_path / f"model{number}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"number": number}))
        (folder / "tokenizer_config.json").write_text("{}")
    return tmp_path


Choice = DataChoice | tuple[DataChoice, Evaluation]


def choices(place: Path) -> dict[str, Choice]:
    """Data of as many kinds, no two of which are the same tokens; the name is in what is said of it."""
    book = str(place / "book.txt")
    return {
        "book.txt, 2,400 tokens; a token is a byte": DataChoice((book,), tokenizer=BYTES),
        "other.txt, 2,400": DataChoice((str(place / "other.txt"),), tokenizer=BYTES),
        "without its last 20 %": (DataChoice((book,), tokenizer=BYTES), Evaluation(every=2, fraction=0.2)),
        "model1/tokenizer.json": DataChoice((book,), tokenizer=str(place / "model1" / "tokenizer.json")),
        "model2/tokenizer.json": DataChoice((book,), tokenizer=str(place / "model2" / "tokenizer.json")),
        "narrow.bin, 2,400 tokens; a token is a uint16": DataChoice((str(place / "narrow.bin"),)),
        "wide.bin, 2,400 tokens; a token is a uint32": DataChoice((str(place / "wide.bin"),), dtype="uint32"),
    }


@cache
def wide_program() -> Any:
    return make_program(WIDE, pp=1, dp=1)


def begun(choice: Choice, **words: Any) -> TrainingRun:
    program = wide_program()
    data, evaluation = choice if isinstance(choice, tuple) else (choice, Evaluation())
    settings = evolve(run_settings(1, kernels="reference", **words), evaluation=evaluation)
    stream, held = open_data(program, data, settings.evaluation, settings.start)
    files = companion_files(data, settings.start)
    return prepare(program, stream, settings, kernel_set("reference"), held_out=held, companions=files)


def ran(choice: Choice, **settings: Any) -> TrainingRun:
    run = begun(choice, **settings)
    list(run.steps())
    run.save()
    return run


def test_a_resume_with_other_tokens_is_refused_unless_told(place: Path) -> None:
    known = choices(place)
    for number, choice in enumerate(known.values()):  # single ones, and series
        ran(choice, save=str(place / f"checkpoint{number}"), save_every=1 if number % 2 else None)
    for (then_number, then), (now_number, now) in permutations(enumerate(known), 2):
        checkpoint = str(place / f"checkpoint{then_number}")
        choice = known[now]
        with pytest.raises(DiagnosticError) as caught:
            begun(choice, resume=checkpoint)
        (problem,) = caught.value.diagnostics
        assert problem.code == "RT092"
        said = [note.message for note in problem.notes]
        assert said[0].startswith("then: ")
        assert then in said[0]
        assert said[1].startswith("now: ")
        assert now in said[1]
        assert "--new-data" in (problem.help or "")
        if now_number == 0:
            told = begun(choice, resume=checkpoint, new_data=True)
            assert any(w.severity is Severity.WARNING and problem.message == w.message for w in told.warnings)
    for number, choice in enumerate(known.values()):
        assert not begun(choice, resume=str(place / f"checkpoint{number}")).warnings


WAYS_BACK = {
    "held out": (DataChoice(), Evaluation(every=3, fraction=0.2), "--eval-every 3 --eval-fraction 0.2"),
    "end": (DataChoice(eos="7"), Evaluation(), "--eos 7"),
    "text": (DataChoice(text_key="question"), Evaluation(), "--text-key question"),
    "completion": (
        DataChoice(train_on="completion", prompt_key="question", completion_key="the answer"),
        Evaluation(),
        "--train-on completion --prompt-key question --completion-key 'the answer'",
    ),
    "all": (
        DataChoice(train_on="completion", prompt_key="text", completion_key="question", eos="9"),
        Evaluation(every=1),
        "--eos 9 --train-on completion --prompt-key text --completion-key question --eval-every 1",
    ),
}


@pytest.mark.parametrize("name", WAYS_BACK)
def test_a_resume_without_its_options_names_them_as_they_are_typed(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with these the very command goes on; a run that had none of them is told to leave them out."""
    monkeypatch.setenv("COLUMNS", "1000")
    data, evaluation, options = WAYS_BACK[name]
    line = {"text": TEXT[:400], "question": TEXT[:400].upper(), "the answer": TEXT[:400].title()}
    (place / "lines.jsonl").write_text(f"{json.dumps(line)}\n" * 4)
    program, lines = str(place / "a.rtx"), str(place / "lines.jsonl")
    write_program(wide_program(), program)
    ran((evolve(data, paths=(lines,)), evaluation), save=str(place / "with"))
    ran(DataChoice((lines,)), save=str(place / "without"))
    words = ["run", program, "--data", lines, "--kernels", "reference", "--steps", "1", "--resume"]
    assert main([*words, str(place / "with")]) == 1
    said = capsys.readouterr().err
    assert f"help: give again {options}" in said
    assert ("which trains on what was held out" in said) == (evaluation.every is not None)
    given = shlex.split(said.partition("give again ")[2].partition(";")[0].partition(", and leave out")[0])
    assert main([*words, str(place / "with"), *given]) == 0
    capsys.readouterr()
    assert main([*words, str(place / "without"), *given]) == 1
    back = "give again --text-key text" if name == "text" else "leave out --"
    assert back in capsys.readouterr().err


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("book.txt, 2,400 tokens; a token is a byte", "other.txt, 2,400", "give again --data {}/book.txt;"),
        ("model1/tokenizer.json", "model2/tokenizer.json", "give again --tokenizer {}/model1/tokenizer.json;"),
        (
            "wide.bin, 2,400 tokens; a token is a uint32",
            "book.txt, 2,400 tokens; a token is a byte",
            "give again --data {}/wide.bin --data-dtype uint32;",
        ),
        ("book.txt, 2,400 tokens; a token is a byte", "without its last 20 %", "leave out --eval-every;"),
    ],
)
def test_other_files_and_tokenizers_are_named(then: str, now: str, said: str, place: Path) -> None:
    known = choices(place)
    ran(known[then], save=str(place / "checkpoint"))
    with pytest.raises(DiagnosticError) as caught:
        begun(known[now], resume=str(place / "checkpoint"))
    assert said.format(place) in str(caught.value)


def test_a_checkpoint_knows_the_tokenizer_of_its_run(place: Path) -> None:
    """It is found with the weights, kept in the checkpoint when those are gone, and exported with the trained ones."""
    book, checkpoint = DataChoice((str(place / "book.txt"),)), str(place / "checkpoint")
    train(wide_program(), 1, save=str(place / "first"))
    export_weights(str(place / "first"), str(place / "weights"))
    (place / "weights" / "model.safetensors").rename(place / "model1" / "model.safetensors")
    (place / "weights" / "config.json").rename(place / "model1" / "config.json")
    (place / "model1" / "generation_config.json").write_text('{"eos_token_id": 7}')
    run = ran(book, init=str(place / "model1"), save=checkpoint, save_every=1)
    assert f"{place}/model1/tokenizer.json" in run.stream.token
    (place / "model1" / "tokenizer.json").unlink()
    rest = ran(book, resume=checkpoint, save=checkpoint, save_every=1)
    assert not rest.warnings
    assert rest.stream.token == run.stream.token
    assert np.array_equal(rest.stream.tokens[:], run.stream.tokens[:])
    export_weights(checkpoint, str(place / "exported"))
    assert json.loads((place / "exported" / "tokenizer.json").read_text()) == {"number": 1}
    assert (place / "exported" / "tokenizer_config.json").read_text() == "{}"
    assert (place / "exported" / "generation_config.json").read_text() == '{"eos_token_id": 7}'
    (newest, _) = (folder for _, folder in saved_steps(checkpoint))
    (Path(newest) / "tokenizer.json").write_text('{"number": 2}')
    with pytest.raises(DiagnosticError, match=r"RT092.*changed or damaged"):
        export_weights(checkpoint, str(place / "exported"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("missing", "error[RT002]: cannot read the weights 'missing': No such file"),
        ("model1/model.safetensor", "error[RT002]: cannot read the weights 'model1/model.safetensor'"),
        ("model1", "error[RT091]: the directory 'model1' holds no weights"),
        ("book.txt", "error[RT091]: 'book.txt'"),
    ],
)
def test_weights_that_are_none_are_refused_for_that(
    weights: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not for the tokenizer that is not beside them either, which a vocabulary other than that of bytes asks for."""
    monkeypatch.chdir(place)
    write_program(make_program(evolve(MODEL, vocab_size=300)), "a.rtx")
    assert main(["run", "a.rtx", "--data", "book.txt", "--init", weights]) == 1
    problem = capsys.readouterr().err
    assert said in problem
    assert "--tokenizer" not in problem


def test_bytes_are_taken_where_they_are_asked_for_or_nothing_else_is_there(place: Path) -> None:
    book, weights = DataChoice((str(place / "book.txt"),)), str(place / "model1")
    program = wide_program()

    def token(weights: str | None = None, **keys: Any) -> str:
        return open_data(program, evolve(book, **keys), start=Start(weights))[0].token

    assert token() == token(weights=weights, tokenizer=BYTES) == token(weights=str(place), tokenizer=BYTES) == "a byte"
    assert token(weights=weights) != "a byte"
    for alone in str(place), str(place / "w.safetensors"):
        for texts in book.paths, ():
            with pytest.raises(DiagnosticError, match=r"RT090.*of 300 tokens.*\n.*--tokenizer bytes"):
                token(weights=alone, paths=texts)
        assert token(weights=alone, paths=(str(place / "narrow.bin"),)) == "a uint16 number"
    assert token(weights=f"{weights}/model.safetensors") == token(weights=weights)
    (place / "model1" / "tokenizer.json").rename(place / "model1" / "tokenizer.model")
    with pytest.raises(DiagnosticError, match=r"RT090.*not read here \(tokenizer.model\)"):
        token(weights=weights)
    assert token(weights=weights, tokenizer=BYTES) == "a byte"
    assert token(weights=weights, paths=(str(place / "narrow.bin"),)) == "a uint16 number"


def test_documents_end_with_the_token_of_the_tokenizer(place: Path) -> None:
    """It is found beside the tokenizer, in a checkpoint too; documents are tokenised one by one."""
    texts = ["one document", "", "another of more words", "the last"]
    (place / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = place / "model1" / "tokenizer_config.json"
    choice = DataChoice((str(place / "d.jsonl"), str(place / "book.txt")), eos="tokenizer")
    with pytest.raises(DiagnosticError, match=r"RT090.*no file next to the tokenizer"):
        open_data(wide_program(), choice, start=Start(str(place / "model1")))
    for eos in ("</s>", {"content": "</s>"}):
        config.write_text(json.dumps({"eos_token": eos}))
        stream, _ = open_data(wide_program(), choice, start=Start(str(place / "model1")))
        encode = FakeTokenizer(1).encode_batch
        expected = [[*item.ids, 291] for item in encode([*filter(None, texts), TEXT], add_special_tokens=False)]
        assert stream.tokens[:].tolist() == [token for document in expected for token in document]
        assert stream.documents is not None
        assert np.diff(stream.documents.bounds).tolist() == [len(document) for document in expected]
    config.write_text(json.dumps({"eos_token": "<unheard-of>"}))
    with pytest.raises(DiagnosticError, match="which the tokenizer"):
        open_data(wide_program(), choice, start=Start(str(place / "model1")))
    config.write_text(json.dumps({"eos_token": "</s>"}))
    train(wide_program(), 1, save=str(place / "first"))
    export_weights(str(place / "first"), str(place / "weights"))
    for name in ("model.safetensors", "config.json"):
        (place / "weights" / name).rename(place / "model1" / name)
    weights = str(place / "model1")
    ran(choice, init=weights, save=str(place / "checkpoint"))
    config.unlink()
    resumed = begun(choice, resume=str(place / "checkpoint"))
    assert not resumed.warnings
    assert resumed.stream.facts()["eos"] == 291


def test_a_checkpoint_from_before_data_had_a_name_is_resumed_by_its_content(place: Path) -> None:
    checkpoint = place / "checkpoint"
    book, other = (DataChoice((str(place / f"{name}.txt"),)) for name in ("book", "other"))
    ran(book, save=str(checkpoint))
    path = checkpoint / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    del manifest["run"]["stream"]
    manifest["manifest_sha256"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))
    assert not begun(book, resume=str(checkpoint)).warnings
    with pytest.raises(DiagnosticError, match=r"then: other data \(2400 bytes of tokens\)"):
        begun(other, resume=str(checkpoint))


@pytest.mark.parametrize("odd", ["gone", None, 3, "x", []])
@pytest.mark.parametrize(
    "where", ["stream", "stream.name", "stream.part", "stream.tokens", "stream.token", "plan.loss_scale"]
)
@pytest.mark.sampled(2)
def test_records_of_a_run_that_are_not_whole_are_no_internal_error(place: Path, where: str, odd: object) -> None:
    checkpoint = place / "checkpoint"
    book, other = (DataChoice((str(place / f"{name}.txt"),)) for name in ("book", "other"))
    ran(book, save=str(checkpoint))
    path = checkpoint / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    *folders, key = where.split(".")
    held = manifest["run"]
    for folder in folders:
        held = held[folder]
    if odd == "gone":
        del held[key]
    else:
        held[key] = odd
    manifest["manifest_sha256"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))
    begun(book, resume=str(checkpoint))
    with pytest.raises(DiagnosticError, match="RT092"):
        begun(other, resume=str(checkpoint))


def test_a_run_says_what_a_token_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, book = str(place / "a.rtx"), str(place / "book.txt")
    write_program(wide_program(), program)
    tokenizer = ["--tokenizer", str(place / "model1" / "tokenizer.json")]
    for words, token in ([], "a byte"), (tokenizer, f"one of the tokenizer '{tokenizer[1]}'"):
        assert main(["run", program, "--data", book, "--steps", "1", *words]) == 0
        assert f"tokens; a token is {token}\n" in capsys.readouterr().out
    assert main(["run", program, "--data", str(place / "narrow.bin"), "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token"] == "a uint16 number"
    assert main(["run", program, "--data", book, "--new-data"]) == 2
    assert "--resume is missing" in capsys.readouterr().err


# The loss scale

F32 = {"view_dtype": "f32", "loss_scale": 1.0, "grad_dtype": "f32", "grad_shard_dtype": "f32"}
SCALES: dict[str, dict[str, Any]] = {
    "f32": F32,
    "bf16": {"view_dtype": "bf16"},
    "f16, dynamic": {},
    "f16, fixed": {"loss_scale": 256.0},
    "f16, gradients in f32": {"grad_dtype": "f32", "grad_shard_dtype": "f32"},
}
UNSCALED = {"f32", "bf16"}


@pytest.mark.parametrize(("then", "now"), [(then, now) for then in SCALES for now in SCALES])
@pytest.mark.sampled(5)
def test_a_loss_scale_goes_on_only_where_it_means_the_same(then: str, now: str, tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoint")
    first = start(make_program(**SCALES[then]), 2, save=place)
    grown = first.program.plan.loss_scale or 4096.0
    for rank in (rank for ranks in first.engine.ranks for rank in ranks):
        rank.fill("scale", "", (grown, 0.0))
    list(first.steps())
    first.save()
    run = start(make_program(**SCALES[now]), 1, resume=place)
    fixed = run.program.plan.loss_scale
    expected = fixed if fixed is not None else grown if then == now else INITIAL_SCALE
    assert run.engine.loss_scale[0] == expected
    said = [warning.message for warning in run.warnings if "loss scale" in warning.message]
    if then == now or {then, now} == UNSCALED:
        assert said == []
    else:
        assert said == [f"the loss scale starts anew at {expected:g}: {said[0].partition(': ')[2]}"]


def test_data_shorter_than_a_step_are_said_to_be_used_twice(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = wide_program().plan
    for spare, said in ((1, True), (0, False)):
        tokens = (plan.global_batch - spare) * plan.seq_len + 1
        path = place / f"{tokens}.txt"
        path.write_text("a" * tokens)
        run = begun(DataChoice((str(path),), tokenizer=BYTES))
        say_start(run)
        run.close()
        wanted = f"it has {plan.global_batch - 1} sequences, and a step takes {plan.global_batch}"
        assert (wanted in " ".join(capsys.readouterr().out.split())) is said


def test_lines_of_prompts_and_completions_lead_to_the_option_that_trains_on_them(place: Path) -> None:
    path = place / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 200, "completion": "b" * 200}) + "\n")
    with pytest.raises(DiagnosticError) as refused:
        begun(DataChoice((str(path),), tokenizer=BYTES))
    assert "'ratrainc run --train-on completion' trains on prompts and completions" in str(refused.value)
    begun(DataChoice((str(path),), tokenizer=BYTES, train_on="completion")).close()
