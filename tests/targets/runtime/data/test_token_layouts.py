"""Token files as other programs write them are read by what they say; every advice of a refusal is followed to the right tokens."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.targets.runtime.data.corpus import data_files
from ratrain.targets.runtime.data.data import TokenStream, open_tokens
from ratrain.targets.runtime.data.jsonl import Fields, open_jsonl

GPT2, LLAMA3 = 50257, 128256
TOKENS = {
    "uint16": np.random.default_rng(0).integers(0, GPT2, 700).astype("<u2"),
    "uint32": np.random.default_rng(1).integers(0, LLAMA3, 700).astype("<u4"),
}


def refused(path: Path, vocab: int, dtype: str | None = None) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        open_tokens(str(path), vocab_size=vocab, dtype=dtype)
    problem = caught.value.diagnostics[0]
    assert problem.code == "RT090"
    assert str(path) in str(problem)
    return problem


def llm_c(tokens: Any, magic: int, version: int, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def index_of(tokens: Any, lengths: list[int], documents: list[int], *, code: int, version: int = 1) -> bytes:
    size = np.array(lengths, "<i4")
    starts = np.cumsum([0, *lengths[:-1]]).astype("<i8") * tokens.dtype.itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return head + size.tobytes() + starts.tobytes() + np.array(documents, "<i8").tobytes()


LENGTHS, DOCUMENTS = [100, 250, 0, 350], [0, 1, 3, 4]


def as_llm_c(path: Path, dtype: str) -> None:
    magic, version = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype]
    path.write_bytes(llm_c(TOKENS[dtype], magic, version))


def as_npy(path: Path, dtype: str) -> None:
    with path.open("wb") as stream:
        np.save(stream, TOKENS[dtype])


def as_megatron(path: Path, dtype: str) -> None:
    path.write_bytes(TOKENS[dtype].tobytes())
    code = {"uint16": 8, "uint32": 4}[dtype]
    path.with_suffix(".idx").write_bytes(index_of(TOKENS[dtype], LENGTHS, DOCUMENTS, code=code))


WRITERS: dict[str, Callable[[Path, str], None]] = {"llm.c": as_llm_c, "numpy": as_npy, "megatron": as_megatron}


@pytest.mark.parametrize("dtype", TOKENS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("vocab", [GPT2, LLAMA3])
def test_the_tokens_of_other_programs_are_read(tmp_path: Path, writer: str, dtype: str, vocab: int) -> None:
    """Whatever the vocabulary: what the file says of its type goes before what the vocabulary suggests."""
    path = tmp_path / "t.bin"
    WRITERS[writer](path, dtype)
    if int(TOKENS[dtype].max()) >= vocab:
        help_text = refused(path, vocab).help
        assert help_text == "make the tokens again with the tokenizer of this model"
        return
    stream = open_tokens(str(path), vocab_size=vocab)
    assert stream.tokens[:].tolist() == TOKENS[dtype].tolist()
    assert stream.tokens[13:29].tolist() == TOKENS[dtype][13:29].tolist()
    assert stream.token == f"a {dtype} number"
    (tmp_path / "bare.bin").write_bytes(TOKENS[dtype].tobytes())
    bare = open_tokens(str(tmp_path / "bare.bin"), vocab_size=vocab, dtype=dtype)
    assert stream.documents is not None or stream.digest == bare.digest


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", TOKENS)
def test_a_type_that_contradicts_the_file_is_refused(tmp_path: Path, writer: str, dtype: str) -> None:
    path = tmp_path / "t.bin"
    WRITERS[writer](path, dtype)
    other = next(name for name in TOKENS if name != dtype)
    problem = refused(path, LLAMA3, other)
    assert "leave --data-dtype out" in (problem.help or "")
    for said in (None, dtype):
        assert len(open_tokens(str(path), vocab_size=LLAMA3, dtype=said).tokens) == 700


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("change", [-2, 2, -1, 1])
def test_a_file_that_is_not_as_long_as_it_says_is_refused(tmp_path: Path, writer: str, change: int) -> None:
    path = tmp_path / "t.bin"
    WRITERS[writer](path, "uint16")
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + bytes(change))
    problem = refused(path, GPT2)
    assert "says that" in problem.message
    assert "copy the file again" in (problem.help or "")
    path.write_bytes(whole)
    assert len(open_tokens(str(path), vocab_size=GPT2).tokens) == 700


def test_documents_of_an_index_are_known(tmp_path: Path) -> None:
    as_megatron(tmp_path / "t.bin", "uint16")
    stream = open_tokens(str(tmp_path / "t.bin"), vocab_size=GPT2)
    assert stream.documents is not None
    assert stream.documents.bounds.tolist() == [0, 100, 350, 700]
    assert data_files([str(tmp_path)]) == [str(tmp_path / "t.bin")]
    (tmp_path / "other.idx").touch()
    with pytest.raises(DiagnosticError, match=r"other\.idx"):
        data_files([str(tmp_path)])


@given(st.binary(max_size=120), st.integers(0, 60))
def test_any_index_is_read_or_diagnosed(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("idx") / "t.bin"
    as_megatron(path, "uint16")
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    try:
        stream = open_tokens(str(path), vocab_size=1 << 16)
    except DiagnosticError as error:
        assert {each.code for each in error.diagnostics} == {"RT090"}  # noqa: PT017 - most are refused, not all
    else:
        assert len(stream.tokens) * stream.tokens.dtype.itemsize == 1400


REFUSED: dict[str, tuple[bytes, str]] = {
    "llm.c, evaluation": (llm_c(TOKENS["uint16"], 20240522, 1), "name the .bin of the training data"),
    "llm.c, version": (llm_c(TOKENS["uint16"], 20240520, 2), "bare uint16"),
    "llm.c, count": (llm_c(TOKENS["uint16"], 20240520, 1, -1), "copy the file again"),
    "npy, cut": (b"\x93NUMPY\x01\x00\x76\x00{'descr", "copy the file again"),
    "gzip": (gzip.compress(TOKENS["uint16"].tobytes()), "gunzip"),
    "bzip2": (bz2.compress(TOKENS["uint16"].tobytes()), "bunzip2"),
    "xz": (lzma.compress(TOKENS["uint16"].tobytes()), "unxz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(range(255)) * 4, "zstd -d"),
    "parquet": (b"PAR1" + bytes(range(255)) * 4, "to_json"),
    "index": (index_of(TOKENS["uint16"], LENGTHS, DOCUMENTS, code=8), "name the .bin next to it"),
    "text": (b"plain words of a text, and more of them", "name it *.txt"),
    "text, a character at the end of what is looked at": (("漢" * 40000).encode(), "name it *.txt"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", [None, "uint16", "uint32"])
def test_what_holds_no_token_numbers_is_refused_by_its_name(tmp_path: Path, name: str, dtype: str | None) -> None:
    """Also where a type is given: no option makes tokens of a compressed file."""
    content, way_out = REFUSED[name]
    path = tmp_path / "t.bin"
    path.write_bytes(content)
    problem = refused(path, LLAMA3, dtype)
    assert way_out in (problem.help or "")
    assert "--data-dtype uint" not in (problem.help or "")


@pytest.mark.parametrize("array", [np.arange(40).reshape(4, 10).astype("<u2"), np.arange(40), np.arange(40.0)], ids=str)
def test_other_arrays_are_written_again_as_advised(tmp_path: Path, array: Any) -> None:
    path = tmp_path / "X.npy"
    np.save(path, array)
    path.rename(tmp_path / "Y.bin")
    problem = refused(tmp_path / "Y.bin", GPT2)
    np.save(path, array)
    (code,) = re.findall(r"write it again: (.*), and read it with --data-dtype uint32", problem.help or "")
    subprocess.run([sys.executable, "-c", f"import numpy; {code}"], cwd=tmp_path, check=True)
    stream = open_tokens(str(tmp_path / "X.bin"), vocab_size=GPT2, dtype="uint32")
    assert stream.tokens[:].tolist() == list(range(40))


class TestAdvice:
    """Tests that do what a refusal advises, and then read the tokens that were meant."""

    def test_gzip_is_unpacked(self, tmp_path: Path) -> None:
        path = tmp_path / "t.bin"
        path.write_bytes(gzip.compress(TOKENS["uint16"].tobytes()))
        assert "gunzip" in (refused(path, GPT2).help or "")
        path.write_bytes(gzip.decompress(path.read_bytes()))
        assert open_tokens(str(path), vocab_size=GPT2).tokens[:].tolist() == TOKENS["uint16"].tolist()

    def test_an_array_is_renamed(self, tmp_path: Path) -> None:
        as_npy(tmp_path / "t.npy", "uint16")
        assert "let its name end in .bin" in (refused(tmp_path / "t.npy", GPT2).help or "")
        (tmp_path / "t.npy").rename(tmp_path / "t.bin")
        assert open_tokens(str(tmp_path / "t.bin"), vocab_size=GPT2).tokens[:].tolist() == TOKENS["uint16"].tolist()

    def test_a_type_for_a_text_is_left_out_or_the_file_is_none(self, tmp_path: Path) -> None:
        """Renamed as advised, token numbers are read, and a text is refused again."""
        numbers, text = tmp_path / "tokens.dat", tmp_path / "words.dat"
        numbers.write_bytes(TOKENS["uint32"].tobytes())
        text.write_text("words of a text. " * 9)
        for path in (numbers, text):
            assert "rename it, or leave out" in (refused(path, LLAMA3, "uint32").help or "")
        assert bytes(open_tokens(str(text), vocab_size=256).tokens[:]).startswith(b"words")
        renamed = [path.rename(path.with_suffix(".bin")) for path in (numbers, text)]
        assert open_tokens(str(renamed[0]), vocab_size=LLAMA3).tokens[:].tolist() == TOKENS["uint32"].tolist()
        assert "name it *.txt" in (refused(renamed[1], LLAMA3, "uint32").help or "")

    @pytest.mark.parametrize("dtype", [">u4", "<i8", "<u4"])
    def test_numbers_that_are_wider(self, tmp_path: Path, dtype: str) -> None:
        tokens = TOKENS["uint16"].astype("<u4") % 300
        path = tmp_path / "t.bin"
        path.write_bytes(tokens.astype(dtype).tobytes())
        help_text = refused(path, 300).help or ""
        assert "all the same" not in help_text
        assert "--data-dtype uint32" in help_text
        if dtype != "<u4":
            assert "astype('<u4')" in help_text
            np.fromfile(path, dtype).astype("<u4").tofile(path)
        assert open_tokens(str(path), vocab_size=300, dtype="uint32").tokens[:].tolist() == tokens.tolist()

    def test_narrower_numbers_are_told_by_most_of_them(self, tmp_path: Path) -> None:
        path = tmp_path / "t.bin"
        path.write_bytes(TOKENS["uint16"].tobytes())
        assert "--data-dtype uint16" in (refused(path, 100_000).help or "")
        assert (
            open_tokens(str(path), vocab_size=100_000, dtype="uint16").tokens[:].tolist() == TOKENS["uint16"].tolist()
        )

    def test_tokens_of_another_vocabulary_are_no_halves(self, tmp_path: Path) -> None:
        """Some tokens of 32 bits are outside the vocabulary: read as 16 bits all are inside, and none is a token."""
        path = tmp_path / "t.bin"
        path.write_bytes(TOKENS["uint32"].tobytes())
        assert refused(path, 100_000).help == "make the tokens again with the tokenizer of this model"

    def test_tokens_that_are_cut_short_are_no_halves(self, tmp_path: Path) -> None:
        path = tmp_path / "t.bin"
        path.write_bytes(TOKENS["uint32"].tobytes()[:-2])
        assert refused(path, LLAMA3).help == "copy the file again: it may have been cut short"
        path.write_bytes(TOKENS["uint32"].tobytes())
        assert len(open_tokens(str(path), vocab_size=LLAMA3).tokens) == 700


TEXTS = ["one text \u2028 with odd ends", 'and "another"']


def documents_of(stream: TokenStream) -> list[str]:
    assert stream.documents is not None
    bounds = stream.documents.bounds.tolist()
    return [bytes(stream.tokens[a:b]).decode() for a, b in pairwise(bounds)]


class TestJson:
    @pytest.mark.parametrize("name", ["d.md", "d"])
    @pytest.mark.parametrize("mark", ["", "\ufeff"])
    def test_lines_are_renamed_as_advised(self, tmp_path: Path, name: str, mark: str) -> None:
        path = tmp_path / name
        path.write_text(mark + "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
        assert "rename it to end in .jsonl" in (refused(path, 256).help or "")
        path.rename(tmp_path / "d.jsonl")
        assert documents_of(open_jsonl(str(tmp_path / "d.jsonl"), Fields(("text",)), vocab_size=256)) == TEXTS

    @pytest.mark.parametrize("indent", [None, 1])
    @pytest.mark.parametrize("padding", [0, 100_000])
    @pytest.mark.parametrize("mark", ["", "\ufeff"])
    def test_an_array_is_renamed_as_advised(self, tmp_path: Path, indent: int | None, padding: int, mark: str) -> None:
        path, texts = tmp_path / "it's d", [*TEXTS, "x" * padding]
        path.write_text(mark + json.dumps([{"text": text} for text in texts], indent=indent), "utf-8")
        assert "rename it to end in .json if" in (refused(path, 256).help or "")
        path.rename(f"{path}.json")
        found = documents_of(open_jsonl(f"{path}.json", Fields(("text",)), vocab_size=256))
        assert found == [text for text in texts if text]

    @pytest.mark.parametrize(
        "content", ['{"data": [\n{"a": 1}]}', "[1, 2]", '["a", "b"]', '{\n"a": ' + "[" * 9, "[ words"]
    )
    def test_other_json_is_refused(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "d.json"
        path.write_text(content)
        assert ".jsonl" in (refused(path, 256).help or "")
        path.rename(tmp_path / "d.txt")  # as it is, if that is what is meant
        assert bytes(open_tokens(str(tmp_path / "d.txt"), vocab_size=256).tokens[:]).decode() == content

    @pytest.mark.parametrize("content", ["[1] a footnote\n", "{ x } is a set", "words\n{}", "[[link]] of a page"])
    def test_a_text_with_brackets_is_a_text(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "d.md"
        path.write_text(content)
        assert bytes(open_tokens(str(path), vocab_size=256).tokens[:]).decode() == content


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("t.txt", "words")
    for name in ("t.bin", "t.npz", "t.txt"):
        (tmp_path / name).write_bytes(held.getvalue())
        assert "zip archive" in refused(tmp_path / name, 256).message
