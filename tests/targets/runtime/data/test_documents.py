"""Documents: JSONL, several files and folders, tokens at their ends, their order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import Part, Slice
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.data import data as data_module
from ratrain.targets.runtime.data.data import Batches, TokenStream, in_words
from ratrain.targets.runtime.data.documents import Documents, bounds_of, pieced
from ratrain.targets.runtime.data.jsonl import Fields, open_jsonl
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Evaluation
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, run_settings, same_bits
from tests.program_files import prepare
from tests.targets.runtime.data.test_data import make_plan

WIDE = evolve(MODEL, vocab_size=300)
EOS = 257
TEXTS = [f"document {number}: " + 'naïve words, 狐 and \\n "quotes"\n' * (number % 4) for number in range(40)]


@pytest.fixture(scope="module")
def program() -> Any:
    return make_program(WIDE)


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({"id": 7, key: text}) + "\n" for text in texts))
    return str(path)


def tokens_of(texts: list[str], eos: int | None = EOS) -> list[int]:
    return [token for text in texts for token in [*text.encode(), *([] if eos is None else [eos])]]


def opened(program: Any, *paths: str | Path, **keys: Any) -> TokenStream:
    return open_data(program, DataChoice(tuple(map(str, paths)), **keys))[0]


def refusal(program: Any, *paths: str | Path, **keys: Any) -> Any:
    with pytest.raises(DiagnosticError) as caught:
        opened(program, *paths, **keys)
    (problem,) = caught.value.diagnostics
    assert problem.help
    return problem


def test_data_in_words_say_each_thing_of_what_it_is() -> None:
    facts = {"name": "a", "part": "", "tokens": 9, "token": "one of 'x'", "documents": 2, "completion_key": "answer"}
    assert in_words(facts, "of the weights") == (
        "a, 9 tokens; a token is one of 'x' (of the weights); documents: 2, nothing between them; "
        "only tokens of the field 'answer' are in the loss"
    )


class TestJsonl:
    @pytest.mark.parametrize("eos", [None, 0, EOS])
    def test_tokens_are_those_of_the_texts(self, program: Any, tmp_path: Path, eos: int | None) -> None:
        path = write_jsonl(tmp_path / "docs.jsonl", TEXTS)
        stream = opened(program, path, eos=None if eos is None else str(eos))
        expected = tokens_of(TEXTS, eos)
        assert stream.tokens[:].tolist() == expected
        assert [stream.tokens[i : i + 11].tolist() for i in range(0, 300, 7)] == [
            expected[i : i + 11] for i in range(0, 300, 7)
        ]
        assert stream.documents is not None
        assert len(stream.documents) == len(TEXTS)
        facts = stream.facts()
        assert (facts["documents"], facts["eos"], facts["text_key"]) == (len(TEXTS), eos, "text")
        assert facts["files"] == [[path, stream.digest]]

    def test_no_text_is_kept(self, program: Any, tmp_path: Path) -> None:
        path = tmp_path / "docs.jsonl"
        write_jsonl(path, TEXTS)
        stream = opened(program, path)
        content = path.read_bytes()
        path.write_bytes(content[::-1])
        with pytest.raises(DiagnosticError, match="has changed since this run opened it"):
            stream.tokens[0:4]

    @pytest.mark.parametrize("chunk", [1, 5, 64, 1000])
    def test_lines_may_cross_chunks_and_be_empty(
        self, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
    ) -> None:
        path = tmp_path / "docs.jsonl"
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS[:6]]
        path.write_text("\n\r\n".join([*lines, '{"text": ""}', "  "]), "utf-8", newline="")
        monkeypatch.setattr(data_module, "_CHUNK", chunk)
        stream = opened(program, path, eos=str(EOS))
        assert stream.tokens[:].tolist() == tokens_of(TEXTS[:6])

    def test_another_key(self, program: Any, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "docs.jsonl", TEXTS, "content")
        assert opened(program, path, text_key="content").tokens[:].tolist() == tokens_of(TEXTS, None)
        problem = refusal(program, path)
        assert 'no field "text"; it has "id", "content"' in problem.message
        assert "--text-key" in problem.help

    @pytest.mark.parametrize(
        ("key", "keys"),
        [
            ("messages", {}),
            ("messages", {"text_key": "messages"}),
            ("text", {}),
            ("conversations", {"train_on": "completion"}),
            ("prompt", {"train_on": "completion"}),
        ],
    )
    def test_a_chat_is_no_text_whatever_key_is_given(
        self, program: Any, tmp_path: Path, key: str, keys: dict[str, Any]
    ) -> None:
        path = tmp_path / "docs.jsonl"
        path.write_text(json.dumps({"id": 1, key: [{"role": "user", "content": "a"}]}) + "\n")
        problem = refusal(program, str(path), **keys)
        assert f'a list of messages in its field "{key}"' in problem.message
        assert "--train-on answers" in problem.help
        assert "-key" not in problem.help

    @pytest.mark.parametrize(
        ("line", "said", "column"),
        [
            (b'{"text": "a",}', "is no JSON", 14),
            (b'["text"]', "is no JSON object", 1),
            (b'{"text": 3}', "has no text in its field", 1),
            (b'{"text": null}', "has no text in its field", 1),
            (b'{"text": "\\ud800"}', "surrogate", 1),
            (b'{"text": "\xff"}', "is not UTF-8", 11),
            (b'{"text": ' + b"[" * 100_000, "is no JSON", 1),
            (b'{"n": ' + b"9" * 5000 + b"}", "is no JSON", 1),
        ],
    )
    def test_a_line_that_is_no_document(
        self, program: Any, tmp_path: Path, line: bytes, said: str, column: int
    ) -> None:
        path = tmp_path / "docs.jsonl"
        path.write_bytes(b'{"text": "one"}\n\n' + line + b"\n")
        problem = refusal(program, path)
        assert problem.code == "RT090"
        assert said in problem.message
        assert "line 3" in problem.message
        assert (problem.location.file, problem.location.line, problem.location.column) == (str(path), 3, column)

    def test_no_document(self, program: Any, tmp_path: Path) -> None:
        path = tmp_path / "docs.jsonl"
        path.write_text('{"text": ""}\n')
        assert "no document" in refusal(program, path).message


ODD = st.text(st.sampled_from('ab []{},:"\\\n\t狐\u2028'), max_size=12)


class TestArray:
    @given(
        st.lists(ODD, min_size=1, max_size=6).filter(any),
        st.sampled_from((None, 0, 3)),
        st.booleans(),
        st.sampled_from(("", "\ufeff", "\n \n")),
    )
    def test_an_array_is_read_as_its_objects_on_lines(
        self, tmp_path_factory: Any, texts: list[str], indent: int | None, escapes: bool, before: str
    ) -> None:
        folder = tmp_path_factory.mktemp("array")
        held = [{"n": [1, {"m": []}], "text": text} for text in texts]
        array, lines = folder / "d.json", folder / "d.jsonl"
        array.write_text(before + json.dumps(held, indent=indent, ensure_ascii=escapes) + "\n", "utf-8")
        lines.write_text("".join(json.dumps(each) + "\n" for each in held), "utf-8")
        one, other = (open_jsonl(str(path), Fields(("text",)), vocab_size=256) for path in (array, lines))
        assert one.tokens[:].tolist() == other.tokens[:].tolist()
        assert one.documents is not None
        assert other.documents is not None
        assert one.documents.bounds.tolist() == other.documents.bounds.tolist()

    @pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.ndjson", "D.JSON"])
    def test_files_are_read_by_what_they_begin_with(self, program: Any, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
        assert opened(program, path, eos=str(EOS)).tokens[:].tolist() == tokens_of(TEXTS)
        assert opened(program, write_jsonl(path, TEXTS), eos=str(EOS)).tokens[:].tolist() == tokens_of(TEXTS)

    @pytest.mark.parametrize(
        ("content", "said", "place"),
        [
            ('[{"text": "a"},\n  {"text": 3}]', 'has no text in its field "text": 3', (2, 3)),
            ('[{"text": "a"},\n {"text": \n  b}]', "is no JSON", (3, 3)),
            ('[{"text": "a"}, {"text" "b"}]', "is no JSON", (1, 25)),
            ('[\n{"text": "a"},\n]', "an array without an element", (3, 1)),
            ('[,{"text": "a"}]', "an array without an element", (1, 2)),
            ('[{"text": "a"},\n{"text": "b"}', "begin an element of an array that does not end", (1, 1)),
            ('[{"text": "a"}]\n[{"text": "b"}]', "have more behind their array", (1, 1)),
            ('["a", "b"]', "is no JSON object", (1, 2)),
            ("[[1] a footnote", "begin an element of an array that does not end", (1, 1)),
        ],
    )
    def test_a_broken_array_is_refused_at_its_place(
        self, program: Any, tmp_path: Path, content: str, said: str, place: tuple[int, int]
    ) -> None:
        path = tmp_path / "d.json"
        path.write_text(content)
        problem = refusal(program, path)
        assert said in problem.message
        assert (problem.location.line, problem.location.column) == place

    def test_no_document(self, program: Any, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text("[ ]")
        assert "no document" in refusal(program, path).message


class TestFiles:
    def test_files_and_folders_follow_each_other(self, program: Any, tmp_path: Path) -> None:
        folder = tmp_path / "corpus"
        (folder / "b").mkdir(parents=True)
        (folder / ".hidden").mkdir()
        (folder / ".hidden" / "x.txt").write_text("x")
        (folder / "c.txt").write_text(TEXTS[2])
        write_jsonl(folder / "b" / "a.jsonl", TEXTS[3:6])
        (folder / "a.txt").write_text(TEXTS[1])
        (tmp_path / "first.txt").write_text(TEXTS[0])
        stream = opened(program, tmp_path / "first.txt", folder, eos=str(EOS))
        order = [TEXTS[0], TEXTS[1], TEXTS[2], *TEXTS[3:6]]
        assert stream.tokens[:].tolist() == tokens_of(order)
        assert stream.documents is not None
        assert stream.documents.bounds.tolist() == bounds_of([len(t.encode()) + 1 for t in order]).tolist()
        assert [Path(name).name for name, _ in stream.facts()["files"]] == ["first.txt", "a.txt", "c.txt", "a.jsonl"]
        assert "and 1 more (4 files)" in stream.name

    def test_token_files_follow_each_other(self, program: Any, tmp_path: Path) -> None:
        for name, values in (("b", range(5)), ("a", range(100, 110))):
            np.array(values, "<u2").tofile(tmp_path / f"{name}.bin")
        stream = opened(program, tmp_path)
        assert stream.tokens[:].tolist() == [*range(100, 110), *range(5)]
        assert stream.documents is None

    def test_what_is_in_any_file_is_in_the_digest(self, program: Any, tmp_path: Path) -> None:
        seen = set()
        for change in range(4):
            for number in range(3):
                write_jsonl(
                    tmp_path / f"{number}.jsonl", [text.upper() if number == change else text for text in TEXTS]
                )
            seen.add(opened(program, tmp_path).digest)
        assert len(seen) == 4

    def test_what_does_not_go_together(self, program: Any, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / "README.md").write_text("x")
        (tmp_path / "a.txt").write_text("text")
        np.zeros(9, "<u2").tofile(tmp_path / "t.bin")
        (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
        docs = write_jsonl(tmp_path / "d.jsonl", TEXTS)
        text, tokens = tmp_path / "a.txt", tmp_path / "t.bin"
        cases = [
            ((tmp_path / "empty",), {}, "has no data in it"),
            ((tmp_path / "odd",), {}, "no data by their names"),
            ((text, tmp_path / "link.txt"), {}, "named twice"),
            ((tokens, text), {}, "holds token numbers, and"),
            ((docs, tokens), {}, "holds token numbers, and"),
            ((tokens,), {"eos": "2"}, "has no token 2, which shall end its documents"),
            ((tokens,), {"eos": "tokenizer"}, "holds token numbers"),
            ((tokens,), {"tokenizer": "bytes"}, "holds token numbers already"),
            ((text,), {"text_key": "content"}, "none of the data is JSONL"),
            ((docs,), {"dtype": "uint16"}, "is read as text"),
            ((docs,), {"eos": "300"}, "outside the vocabulary of 300"),
            ((docs,), {"eos": "</s>"}, "is no token"),
            ((docs,), {"eos": "tokenizer"}, "needs a tokenizer"),
        ]
        for paths, keys, said in cases:
            problem = refusal(program, *paths, **keys)
            assert problem.code == "RT090"
            assert said in problem.message, problem.message

    def test_the_held_out_part_begins_with_a_document(self, program: Any, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", TEXTS)
        stream, held = open_data(program, DataChoice((path,), eos=str(EOS)), Evaluation(every=1, fraction=0.3))
        assert held is not None
        own = held.batches.stream
        assert [*stream.tokens[:].tolist(), *own.tokens[:].tolist()] == tokens_of(TEXTS)
        assert stream.tokens[-1:].tolist() == [EOS]
        assert own.tokens[:8].tobytes() == np.frombuffer(b"document", np.uint8).astype(own.tokens.dtype).tobytes()
        assert stream.documents is not None
        assert own.documents is not None
        assert len(stream.documents) + len(own.documents) == len(TEXTS)

    def test_held_out_data_may_be_of_another_kind(self, program: Any, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", TEXTS, "content")
        (tmp_path / "a.txt").write_text(TEXTS[3] * 9)
        choice = DataChoice((str(tmp_path / "a.txt"),), text_key="content")
        stream, held = open_data(program, choice, Evaluation(every=1, paths=(path,)))
        assert held is not None
        assert stream.tokens[:].tobytes() == (TEXTS[3] * 9).encode()
        assert held.batches.stream.tokens[:].tolist() == tokens_of(TEXTS, None)


@st.composite
def streams(draw: st.DrawFn) -> TokenStream:
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=12))
    bounds = bounds_of(lengths)
    tokens = np.arange(int(bounds[-1]), dtype=np.uint32)
    kind = draw(st.sampled_from(["all", "completions", "answers"]))
    if kind == "all":
        documents = Documents(bounds)
    elif kind == "completions":
        prompts = np.array([draw(st.integers(0, length)) for length in lengths])
        documents = Documents.ending_in_answers(bounds, bounds[:-1] + prompts)
    else:
        counts = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        documents = Documents(bounds, runs_of(counts, bounds))
    return TokenStream("drawn", tokens, "", documents=documents)


def runs_of(counts: list[bool], bounds: Any) -> Any:
    """Return first and last + 1 of each run of true values, none across a bound."""
    runs: list[list[int]] = []
    for place, is_counted in enumerate(counts):
        if is_counted and runs and runs[-1][1] == place and place not in bounds:
            runs[-1][1] = place + 1
        elif is_counted:
            runs.append([place, place + 1])
    return np.array(runs, np.int64).reshape(-1, 2)


class TestOrder:
    @settings(max_examples=60, deadline=None)
    @given(stream=streams(), seed=st.integers(0, 3), seq_len=st.integers(1, 6), data=st.data())
    def test_documents_are_whole_in_another_order_each_pass(
        self, stream: TokenStream, seed: int, seq_len: int, data: st.DataObject
    ) -> None:
        plan = make_plan(size=2, seq_len=min(seq_len, len(stream.tokens) - 1))
        batches = Batches(stream, plan, "documents", seed)
        sequences, length = batches.sequences, plan.seq_len
        documents = stream.documents
        assert documents is not None
        whole = [range(a, b) for a, b in zip(documents.bounds[:-1], documents.bounds[1:], strict=True)]
        out = np.empty(2 * length, np.int32)
        passes: list[list[int]] = [[], [], []]
        for step in range((3 * sequences + 1) // 2):
            batches.fill(step, 0, 0, Part.TOKENS, out)
            for row in range(2):
                if (epoch := (2 * step + row) // sequences) < 3:
                    passes[epoch] += out[row * length : (row + 1) * length].tolist()
        for number, taken in enumerate(passes):
            order = batches._permutation(number, len(whole))
            expected = [token for item in order for token in whole[item]]
            assert taken == expected[: len(taken)]
        step = data.draw(st.integers(0, 3 * sequences))
        again = np.empty_like(out)
        Batches(stream, plan, "documents", seed).fill(step, 0, 0, Part.TOKENS, again)
        batches.fill(step, 0, 0, Part.TOKENS, out)
        assert out.tolist() == again.tolist()

    @settings(max_examples=60, deadline=None)
    @given(stream=streams(), order=st.sampled_from(["shuffled", "sequential", "documents"]), step=st.integers(0, 30))
    def test_labels_that_count(self, stream: TokenStream, order: Any, step: int) -> None:
        plan = make_plan(size=3, seq_len=min(4, len(stream.tokens) - 1))
        batches = Batches(stream, plan, order, 1)
        tokens, labels = np.empty(3 * plan.seq_len, np.int32), np.empty(3 * plan.seq_len, np.int32)
        batches.fill(step, 0, 0, Part.TOKENS, tokens)
        batches.fill(step, 0, 0, Part.LABELS, labels)
        assert batches.counted(step) == int((labels >= 0).sum())
        documents = stream.documents
        assert documents is not None
        for label in labels[labels >= 0].tolist():
            assert documents.answers is None or any(low <= label < high for low, high in documents.answers)
        if documents.answers is None:
            assert batches.counted(step) == plan.tokens_per_step

    @settings(max_examples=60, deadline=None)
    @given(counts=st.lists(st.booleans(), min_size=1, max_size=30), data=st.data())
    def test_runs_of_answers(self, counts: list[bool], data: st.DataObject) -> None:
        """Documents in any order count what they counted before."""
        cuts = sorted(data.draw(st.sets(st.integers(1, len(counts)), max_size=5)) | {0, len(counts)})
        bounds = np.array(cuts, np.int64)
        documents = Documents(bounds, runs_of(counts, bounds))
        assert documents.is_counted(0, len(counts)).tolist() == counts
        order = np.array(data.draw(st.permutations(range(len(documents)))))
        expected = [each for item in order for each in counts[bounds[item] : bounds[item + 1]]]
        assert documents.in_order(order).is_counted(0, len(counts)).tolist() == expected

    @settings(max_examples=60, deadline=None)
    @given(stream=streams(), data=st.data())
    def test_a_part_of_documents(self, stream: TokenStream, data: st.DataObject) -> None:
        documents, count = stream.documents, len(stream.tokens)
        assert documents is not None
        start = data.draw(st.integers(0, count - 1))
        stop = data.draw(st.integers(start + 1, count))
        part = documents.part(start, stop)
        assert part.is_counted(0, stop - start).tolist() == documents.is_counted(start, stop).tolist()
        inside = [int(bound) - start for bound in documents.bounds if start < bound < stop]
        assert part.bounds.tolist() == [0, *inside, stop - start]

    def test_one_document_or_none_is_refused(self, program: Any, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a text of one document, " * 9)
        stream = opened(program, tmp_path / "a.txt")
        with pytest.raises(DiagnosticError, match="is one document"):
            Batches(stream, program.plan, "documents", 0)
        with pytest.raises(DiagnosticError, match="does not say where its documents end"):
            Batches(evolve(stream, documents=None), program.plan, "documents", 0)

    def test_a_resumed_run_goes_on_in_the_same_order(self, program: Any, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", TEXTS[:12])
        choice = DataChoice((path,), eos=str(EOS))

        def run(steps: int, **words: Any) -> Any:
            stream = open_data(program, choice)[0]
            chosen = run_settings(steps, order="documents", kernels="reference", **words)
            made = prepare(program, stream, chosen, kernel_set("reference"))
            list(made.steps())
            made.save()
            return made

        whole = run(4)
        first = run(2, save=str(tmp_path / "ckpt"))
        rest = run(2, resume=str(tmp_path / "ckpt"))
        assert not rest.warnings
        assert losses(first) + losses(rest) == losses(whole)
        same_bits(whole, rest)
        saved = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())["run"]
        assert saved["order"] == "documents"
        assert saved["stream"]["eos"] == EOS
        choice = evolve(choice, eos=None)
        with pytest.raises(DiagnosticError, match=r"token 257 at the end of each[\s\S]*nothing between them"):
            run(1, resume=str(tmp_path / "ckpt"))


def test_pieces_are_read_as_one() -> None:
    parts = [np.arange(3, dtype=np.uint8), np.arange(0, dtype=np.uint8), np.arange(10, 14, dtype=np.uint8)]
    tokens = pieced([len(part) for part in parts], lambda number, low, high: parts[number][low:high], np.uint8)
    expected = [0, 1, 2, 10, 11, 12, 13]
    for low in range(8):
        for high in range(low, 8):
            assert tokens[low:high].tolist() == expected[low:high]
            assert tokens.part(low, high)[:].tolist() == expected[low:high]
    with pytest.raises(IndexError):
        tokens[::2]


class TestStarts:
    """Where documents start, as programs that keep attention inside them are told."""

    @settings(max_examples=80, deadline=None)
    @given(
        stream=streams(),
        order=st.sampled_from(["shuffled", "sequential", "documents"]),
        step=st.integers(0, 30),
        data=st.data(),
    )
    def test_a_row_has_the_start_of_its_document_or_of_its_sequence(
        self, stream: TokenStream, order: Any, step: int, data: st.DataObject
    ) -> None:
        length = min(data.draw(st.integers(1, 6)), len(stream.tokens) - 1)
        plan = evolve(make_plan(size=3, seq_len=length), attention_mask="document")
        batches = Batches(stream, plan, order, 1)
        starts = np.empty(3 * length, np.int32)
        batches.fill(step, 0, 0, Part.DOCUMENTS, starts)
        for row in range(3):
            found = starts[row * length : (row + 1) * length].tolist()
            documents = batches._pass(batches._epoch_of(step, row)).documents
            assert documents is not None
            first = batches.sequence_of(step, row) * length
            begins = {int(bound) - first for bound in documents.bounds[:-1]}
            expected = [max(at for at in {0, *begins} if 0 <= at <= position) for position in range(length)]
            assert found == expected

    def test_slices_have_their_rows_of_the_sequences(self) -> None:
        stream = TokenStream("x", np.zeros(50, np.uint8), "x", documents=Documents(np.array([0, 3, 14, 17, 28, 50])))
        plan = evolve(make_plan(size=2, seq_len=12), attention_mask="document", slices=(5, 4, 3))
        batches = Batches(stream, plan, "sequential", 0)
        whole = np.empty(24, np.int32)
        Batches(stream, evolve(plan, slices=()), "sequential", 0).fill(0, 0, 0, Part.DOCUMENTS, whole)
        assert whole.reshape(2, 12).tolist() == [[0] * 3 + [3] * 9, [0] * 2 + [2] * 3 + [5] * 7]
        for number, (low, high) in enumerate(((0, 5), (5, 9), (9, 12))):
            part = np.empty(2 * (high - low), np.int32)
            batches.fill(0, 0, Slice(0, number), Part.DOCUMENTS, part)
            assert part.reshape(2, -1).tolist() == whole.reshape(2, 12)[:, low:high].tolist()

    def test_token_numbers_have_documents_where_it_is_said_what_ends_one(self, program: Any, tmp_path: Path) -> None:
        paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
        np.array([5, 9, 7, 7, 9, 9, 4], "<u2").tofile(paths[0])
        np.array([1, 2, 3], "<u2").tofile(paths[1])
        stream = opened(program, *paths, eos="9")
        assert stream.documents is not None
        assert stream.documents.bounds.tolist() == [0, 2, 5, 6, 7, 10]
        assert stream.tokens[:].tolist() == [5, 9, 7, 7, 9, 9, 4, 1, 2, 3]
        assert stream.digest != opened(program, *paths).digest
        assert stream.digest != opened(program, *paths, eos="7").digest
        assert opened(program, *paths).documents is None
        assert stream.facts()["eos"] == 9
