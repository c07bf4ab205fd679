"""What a run trains and is evaluated on: held-out parts, tokenizers, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrainc.run_choices import DataChoice
from ratrain.ratrainc.training_data import open_data
from ratrain.targets.runtime import tokenizer as tokenizer_module
from ratrain.targets.runtime.data import builtin_text_tokens
from ratrain.targets.runtime.settings import Evaluation
from ratrain.targets.runtime.tokenizer import TokenizerChoice, encoder_of, tokenized
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
