"""What a run trains and is evaluated on: held-out parts, tokenizers, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.data import tokenizer as tokenizer_module
from ratrain.targets.runtime.data.data import builtin_text_tokens
from ratrain.targets.runtime.data.tokenizer import TokenizerChoice, encoder_of, tokenized
from ratrain.targets.runtime.settings import Evaluation
from tests.end_to_end.tiny_runs import MODEL, make_program

TEXT = "".join(f"line {number}: the quick brown fox, naïve and 狐; jumps\n\n" for number in range(400))
WIDE = evolve(MODEL, vocab_size=300)


@pytest.fixture(scope="module")
def program() -> Any:
    return make_program(WIDE)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, "utf-8")
    return str(path)


def test_nothing_is_held_out_unless_asked(program: Any, text: str) -> None:
    stream, held = open_data(program, DataChoice((text,)))
    assert held is None
    assert bytes(stream.tokens[:]) == TEXT.encode()


def test_the_held_out_part_is_not_trained_on(program: Any, text: str) -> None:
    stream, held = open_data(program, DataChoice((text,)), Evaluation(every=1, fraction=0.1, batches=2))
    assert held is not None
    assert bytes(stream.tokens[:]) + bytes(held.batches.stream.tokens[:]) == TEXT.encode()
    assert len(held.batches.stream.tokens) == round(0.1 * len(TEXT.encode()))
    assert held.count == 2


def test_held_out_data_of_its_own(program: Any, text: str, tmp_path: Path) -> None:
    np.arange(2000, dtype="<u4").__mod__(300).tofile(tmp_path / "held.bin")
    choice = DataChoice((text,), dtype="uint32")
    evaluation = Evaluation(every=1, paths=(str(tmp_path / "held.bin"),))
    with pytest.raises(DiagnosticError, match="is read as text"):
        open_data(program, choice, evaluation)
    np.arange(2000).__mod__(300).astype("<u2").tofile(tmp_path / "held.bin")
    stream, held = open_data(program, evolve(choice, dtype=None), evaluation)
    assert held is not None
    assert len(stream.tokens) == len(TEXT.encode())
    assert held.batches.stream.tokens[:].tolist() == [number % 300 for number in range(2000)]


def test_a_tokenizer_without_its_package(monkeypatch: pytest.MonkeyPatch, program: Any, text: str) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DiagnosticError, match=r"ratrain\[tokenizer\]"):
        open_data(program, DataChoice((text,), tokenizer="tokenizer.json"))


def test_a_tokenizer_for_token_numbers(program: Any) -> None:
    with pytest.raises(DiagnosticError, match="holds token numbers already"):
        open_data(program, DataChoice(("tokens.bin",), tokenizer="tokenizer.json"))


@pytest.mark.parity
class TestTokenizer:
    """With the package `tokenizers`, which comes with `transformers`."""

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Any:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            [TEXT], trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
        )
        made.enable_truncation(5)  # a file may hold this; a training text is never cut
        made.save(str(tmp_path / "tokenizer.json"))
        made.no_truncation()
        return made

    def test_tokens_are_those_of_the_package(self, program: Any, tokenizer: Any, text: str, tmp_path: Path) -> None:
        stream, _ = open_data(program, DataChoice((text,), tokenizer=str(tmp_path / "tokenizer.json")))
        assert stream.tokens[:].tolist() == tokenizer.encode(TEXT).ids
        assert len(stream.tokens) < len(TEXT.encode()) / 2

    def test_documents_are_tokenised_one_by_one(self, program: Any, tokenizer: Any, tmp_path: Path) -> None:
        texts = [*TEXT.split("\n\n")[:90], ""]
        (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        choice = DataChoice((str(tmp_path / "d.jsonl"),), tokenizer=str(tmp_path / "tokenizer.json"), eos="3")
        stream, _ = open_data(program, choice)
        assert stream.tokens[:].tolist() == [token for text in texts[:-1] for token in [*tokenizer.encode(text).ids, 3]]

    @pytest.mark.parametrize("piece", [7, 60, 1000])
    def test_pieces_end_with_lines(
        self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, text: str, tmp_path: Path, piece: int
    ) -> None:
        monkeypatch.setattr(tokenizer_module, "_PIECE", piece)
        path = str(tmp_path / "tokenizer.json")
        stream, _ = open_data(make_program(WIDE), DataChoice((text,), tokenizer=path))
        assert tokenizer.decode(stream.tokens[:].tolist()) == TEXT

    def test_tokens_outside_the_vocabulary(self, tokenizer: Any, tmp_path: Path) -> None:
        path = TokenizerChoice(str(tmp_path / "tokenizer.json"), "tokenizer.json")
        text = builtin_text_tokens()
        most = max(tokenizer.encode(bytes(text.tokens).decode()).ids)
        assert len(tokenized(text, encoder_of(path), vocab_size=most + 1).tokens) > 1000
        with pytest.raises(DiagnosticError, match=f"token {most} at position .* outside the vocabulary of {most}"):
            tokenized(text, encoder_of(path), vocab_size=most)

    @pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": 3}'])
    def test_no_tokenizer(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(content)
        with pytest.raises(DiagnosticError, match="is no tokenizer"):
            tokenized(builtin_text_tokens(), encoder_of(TokenizerChoice(str(path), "other")), vocab_size=300)

    def test_a_tokenizer_that_cannot_take_a_text(self, tokenizer: Any, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"]["unk_token"] = "nowhere"
        content["model"]["vocab"] = {"a": 0}
        content["model"]["merges"] = []
        path.write_text(json.dumps(content))
        with pytest.raises(DiagnosticError, match="RT090"):
            tokenized(builtin_text_tokens(), encoder_of(TokenizerChoice(str(path), "odd")), vocab_size=300)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(DiagnosticError, match="RT002"):
            tokenized(
                builtin_text_tokens(), encoder_of(TokenizerChoice(str(tmp_path / "none.json"), "none")), vocab_size=300
            )


class TestWhatIsHeldOutIsNotTrainedOn:
    """However the two are named: the loss of held-out text would else be that of text the model has seen."""

    @pytest.fixture
    def folder(self, text: str, tmp_path: Path) -> Path:
        folder = tmp_path / "folder"
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "a.txt").write_text(TEXT, "utf-8")
        (folder / "b.txt").write_text(TEXT[::-1], "utf-8")
        (tmp_path / "link.txt").symlink_to(text)
        (tmp_path / "hard.txt").hardlink_to(text)
        (tmp_path / "copy.txt").write_text(TEXT, "utf-8")
        return folder

    @pytest.mark.usefixtures("folder")
    @pytest.mark.parametrize(
        ("data", "held"),
        [
            ("book.txt", "book.txt"),
            ("book.txt", "./book.txt"),
            ("book.txt", "link.txt"),
            ("hard.txt", "book.txt"),
            ("copy.txt", "book.txt"),
            ("folder", "folder"),
            ("folder", "folder/inner"),
            ("folder/b.txt", "folder"),
            ("folder", "copy.txt"),
        ],
    )
    def test_one_file_is_not_both(
        self, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, held: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DiagnosticError, match="is held out, and trained on as") as caught:
            open_data(program, DataChoice((data,)), Evaluation(every=1, paths=(held,)))
        way_out = caught.value.diagnostics[0].help
        assert way_out is not None
        assert "--eval-fraction" in way_out

    def test_other_data_are_held_out(self, program: Any, folder: Path, text: str) -> None:
        _, held = open_data(program, DataChoice((text,)), Evaluation(every=1, paths=(str(folder / "b.txt"),)))
        assert held is not None

    def test_the_way_out_is_one(self, program: Any, text: str) -> None:
        _, held = open_data(program, DataChoice((text,)), Evaluation(every=1, fraction=0.05))
        assert held is not None


@pytest.mark.parametrize("other", ["hard.txt", "link.txt", "book.txt"])
def test_one_file_named_twice_is_refused(program: Any, text: str, other: str) -> None:
    path = Path(text).with_name(other)
    if other == "hard.txt":
        path.hardlink_to(text)
    elif other == "link.txt":
        path.symlink_to(text)
    same = text if other == "book.txt" else str(path)  # one object twice, for the last
    with pytest.raises(DiagnosticError, match="is named twice"):
        open_data(program, DataChoice((text, same)))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (DataChoice(dtype="uint16"), "the built-in text, which stands in for data, has none"),
        (DataChoice(("book.txt",), dtype="uint16"), "'book.txt' is read as text"),
        (DataChoice(("d.jsonl",), dtype="uint16"), "'d.jsonl' is read as text"),
        (DataChoice(("d.jsonl",), prompt_key="p"), 'prompt_key = "p" changes nothing'),
        (DataChoice(("d.jsonl",), completion_key="c"), 'completion_key = "c" changes nothing'),
        (DataChoice(("d.jsonl",), text_key="t", train_on="completion"), 'text_key = "t" changes nothing'),
        (DataChoice(text_key="t"), "none of the data is JSONL"),
    ],
)
def test_what_none_of_the_data_is_read_by_is_refused(program: Any, choice: DataChoice, words: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        open_data(program, choice)
    (problem,) = caught.value.diagnostics
    assert words in problem.message
    assert problem.code == "RT090"
    assert problem.help is not None


def test_the_type_of_tokens_may_be_that_of_held_out_data_alone(program: Any, tmp_path: Path) -> None:
    np.arange(2000, dtype="<u4").__mod__(300).tofile(tmp_path / "held.bin")
    evaluation = Evaluation(every=1, paths=(str(tmp_path / "held.bin"),))
    _, held = open_data(program, DataChoice(dtype="uint32"), evaluation)
    assert held is not None
    assert held.batches.stream.tokens[:].tolist() == [number % 300 for number in range(2000)]
