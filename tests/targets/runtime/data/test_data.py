"""Token streams from files, and the sequences that each micro-batch trains on."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.ops.base import Part
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.runtime.data import data
from ratrain.targets.runtime.data.data import Batches, TokenStream, builtin_text_tokens, open_tokens


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    return caught.value.diagnostics


def make_plan(*, dp: int = 1, size: int = 1, micro_batches: int = 1, seq_len: int = 4) -> Plan:
    return Plan(pp=1, dp=dp, cuts=(), micro_batch_size=size, micro_batches=micro_batches, seq_len=seq_len)


def counting(length: int) -> TokenStream:
    return TokenStream("counting", np.arange(length, dtype=np.uint32), "none")


class TestBinFiles:
    @pytest.mark.parametrize(("vocab", "dtype"), [(65536, "<u2"), (65537, "<u4"), (300, "<u2")])
    def test_token_type_follows_the_vocabulary(self, tmp_path, vocab, dtype):
        values = np.array([0, vocab - 1, 7, 299], dtype)
        path = tmp_path / "t.bin"
        path.write_bytes(values.tobytes())
        stream = open_tokens(str(path), vocab_size=vocab)
        assert stream.tokens.dtype == np.dtype(dtype)
        assert stream.tokens[:].tolist() == values.tolist()
        assert stream.name == str(path)

    @pytest.mark.parametrize("dtype", ["uint16", "uint32"])
    def test_token_type_can_be_named(self, tmp_path, dtype):
        path = tmp_path / "t.BIN"
        path.write_bytes(np.array([5, 6, 7], dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        for vocab in (100, 1 << 20):
            assert open_tokens(str(path), vocab_size=vocab, dtype=dtype).tokens[:].tolist() == [5, 6, 7]

    @pytest.mark.parametrize(("size", "vocab", "shown"), [(7, 100, "uint16"), (6, 100_000, "uint32")])
    def test_part_of_a_token_is_refused(self, tmp_path, size, vocab, shown):
        path = tmp_path / "t.bin"
        path.write_bytes(bytes(size))
        (problem,) = refusal(open_tokens, str(path), vocab_size=vocab)
        assert problem.code == "RT090"
        assert f"{size} bytes" in problem.message
        assert shown in problem.message

    def test_tokens_outside_the_vocabulary_are_named_by_position(self, tmp_path, monkeypatch):
        monkeypatch.setattr(data, "_CHUNK", 8)
        values = np.zeros(50, "<u2")
        values[[0, 7, 8, 31, 49]] = [100, 101, 102, 65535, 99]
        path = tmp_path / "t.bin"
        path.write_bytes(values.tobytes())
        problems = refusal(open_tokens, str(path), vocab_size=100)
        assert {problem.code for problem in problems} == {"RT090"}
        for problem, (token, position) in zip(problems, [(100, 0), (101, 7), (102, 8), (65535, 31)], strict=True):
            assert f"token {token} at position {position} " in problem.message

    def test_many_bad_tokens_are_counted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(data, "_CHUNK", 16)
        path = tmp_path / "t.bin"
        path.write_bytes(np.full(100, 9, "<u2").tobytes())
        problems = refusal(open_tokens, str(path), vocab_size=9)
        assert len(problems) == 9
        assert "position 7 " in problems[7].message
        assert "92 more" in problems[8].message

    def test_unknown_token_type(self, tmp_path):
        (problem,) = refusal(open_tokens, str(tmp_path / "t.bin"), vocab_size=9, dtype="int8")
        assert problem.code == "RT090"
        assert "uint16" in problem.help


class TestText:
    def test_one_token_a_byte(self, tmp_path):
        text = "a\nzß漢😀\n"
        path = tmp_path / "t.txt"
        path.write_text(text, encoding="utf-8")
        stream = open_tokens(str(path), vocab_size=256)
        assert stream.tokens.dtype == np.uint8
        assert bytes(stream.tokens[:]) == text.encode()

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
    def test_characters_may_cross_chunks(self, tmp_path, monkeypatch, chunk):
        monkeypatch.setattr(data, "_CHUNK", chunk)
        text = "aß漢😀b" * 5
        path = tmp_path / "t.txt"
        path.write_bytes(text.encode())
        assert bytes(open_tokens(str(path), vocab_size=300).tokens[:]) == text.encode()

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
    @pytest.mark.parametrize(
        ("content", "position", "line", "column"),
        [
            (b"\xff", 0, 1, 1),
            (b"ab\ncd\xe6\xbcxy", 5, 2, 3),  # a character cut short by another one
            ("漢".encode() + b"\n\n\x80", 5, 3, 1),
            (b"one\ntwo\xf0\x9f\x98", 7, 2, 4),  # cut short by the end
            (b"\x93NUMPY\x01", 0, 1, 1),
        ],
    )
    def test_what_is_not_utf8_is_placed(self, tmp_path, monkeypatch, chunk, content, position, line, column):
        monkeypatch.setattr(data, "_CHUNK", chunk)
        path = tmp_path / "t.txt"
        path.write_bytes(content)
        (problem,) = refusal(open_tokens, str(path), vocab_size=256)
        assert problem.code == "RT090"
        assert f"byte {content[position]:#04x} at position {position}" in problem.message
        assert (problem.location.file, problem.location.line, problem.location.column) == (str(path), line, column)

    def test_small_vocabulary(self, tmp_path):
        path = tmp_path / "t.txt"
        path.write_text("abc")
        (problem,) = refusal(open_tokens, str(path), vocab_size=255)
        assert problem.code == "RT090"
        assert "256" in problem.message
        assert "255" in problem.message
        assert len(open_tokens(str(path), vocab_size=256).tokens) == 3

    def test_token_type_is_for_bin_files(self, tmp_path):
        path = tmp_path / "tokens.dat"
        path.write_bytes(b"abcd")
        (problem,) = refusal(open_tokens, str(path), vocab_size=256, dtype="uint16")
        assert ".bin" in problem.help

    def test_builtin_text(self):
        stream = builtin_text_tokens()
        text = bytes(stream.tokens[:]).decode()
        assert len(text) > 300_000
        assert "statement" in text
        assert "function" in text
        again = builtin_text_tokens(vocab_size=4096)
        assert again.digest == stream.digest
        assert np.array_equal(again.tokens, stream.tokens)
        assert refusal(builtin_text_tokens, vocab_size=255)[0].code == "RT090"


@pytest.mark.parametrize("name", ["t.bin", "t.txt"])
class TestUnreadable:
    def test_missing(self, tmp_path, name):
        (problem,) = refusal(open_tokens, str(tmp_path / name), vocab_size=256)
        assert problem.code == "RT002"
        assert "No such file" in problem.message

    def test_directory(self, tmp_path, name):
        (tmp_path / name).mkdir()
        (problem,) = refusal(open_tokens, str(tmp_path / name), vocab_size=256)
        assert problem.code == "RT002"
        assert "directory" in problem.message

    def test_pipe_does_not_block(self, tmp_path, name):
        os.mkfifo(tmp_path / name)
        (problem,) = refusal(open_tokens, str(tmp_path / name), vocab_size=256)
        assert problem.code == "RT002"

    def test_empty(self, tmp_path, name):
        (tmp_path / name).touch()
        (problem,) = refusal(open_tokens, str(tmp_path / name), vocab_size=256)
        assert problem.code == "RT090"
        assert "empty" in problem.message

    def test_zero_byte_in_the_name(self, name):
        assert refusal(open_tokens, f"\0{name}", vocab_size=256)[0].code == "RT002"


class TestDigest:
    def digest(self, path, content: bytes, **options) -> str:
        path.write_bytes(content)
        return open_tokens(str(path), vocab_size=1 << 16, **options).digest

    def test_tells_content_size_and_type(self, tmp_path):
        path = tmp_path / "t.bin"
        base = self.digest(path, bytes(8))
        assert self.digest(tmp_path / "other.bin", bytes(8)) == base
        others = {
            self.digest(path, bytes(12)),
            self.digest(path, b"\1" + bytes(7)),
            self.digest(path, bytes(7) + b"\1"),
            self.digest(path, bytes(8), dtype="uint32"),
        }
        assert len(others | {base}) == 5

    def test_covers_both_ends_of_a_large_file(self, tmp_path):
        path = tmp_path / "t.bin"
        content = bytearray(3 << 20)
        base = self.digest(path, content)
        for position in (0, (1 << 20) - 1, 2 << 20, (3 << 20) - 1):
            content[position] = 1
            assert self.digest(path, content) != base
            content[position] = 0


class TestBatches:
    @pytest.mark.parametrize(("tokens", "sequences"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
    def test_labels_need_one_token_more(self, tokens, sequences):
        assert Batches(counting(tokens), make_plan(), "sequential", 0).sequences == sequences

    @pytest.mark.parametrize("tokens", [0, 1, 4])
    def test_too_short(self, tokens):
        (problem,) = refusal(Batches, counting(tokens), make_plan(), "shuffled", 0)
        assert problem.code == "RT090"
        assert f"has {number_of(tokens, 'token')}:" in problem.message
        assert "take 5" in problem.message

    def test_sequential_goes_round(self):
        batches = Batches(counting(4 * 5 + 1), make_plan(micro_batches=3), "sequential", 0)
        taken = [batches.sequence_of(step, i) for step in range(4) for i in range(3)]
        assert taken == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]

    def test_fill_lays_out_replicas_micro_batches_and_rows(self):
        plan = make_plan(dp=3, size=2, micro_batches=4, seq_len=5)
        batches = Batches(counting(5 * 100 + 1), plan, "sequential", 0)
        out = np.full(10, -1, np.int32)
        batches.fill(2, 1, 3, Part.TOKENS, out)
        # step 2 starts at sequence 2 * 24; replica 1 has 8 .. 15 of them, its last micro-batch 14 and 15
        first = (48 + 14) * 5
        assert out.tolist() == list(range(first, first + 10))
        batches.fill(2, 1, 3, Part.LABELS, out)
        assert out.tolist() == list(range(first + 1, first + 11))

    def test_last_label_is_the_last_token(self):
        batches = Batches(counting(9), make_plan(), "sequential", 0)
        out = np.empty(4, np.int32)
        batches.fill(1, 0, 0, Part.LABELS, out)
        assert out.tolist() == [5, 6, 7, 8]

    @settings(max_examples=40)
    @given(data=st.data())
    def test_fill_follows_sequence_of(self, data):
        plan = make_plan(
            dp=data.draw(st.integers(1, 3)),
            size=data.draw(st.integers(1, 3)),
            micro_batches=data.draw(st.integers(1, 3)),
            seq_len=data.draw(st.integers(1, 6)),
        )
        tokens = data.draw(st.integers(plan.seq_len + 1, 200))
        order = data.draw(st.sampled_from(["shuffled", "sequential"]))
        batches = Batches(counting(tokens), plan, order, data.draw(st.integers(0, 2**63 - 1)))
        step = data.draw(st.integers(0, 50))
        size = plan.micro_batch_size
        for index in range(plan.global_batch):
            replica, local = divmod(index, plan.micro_batches * size)
            micro_batch, row = divmod(local, size)
            out = np.empty(size * plan.seq_len, np.int32)
            batches.fill(step, replica, micro_batch, Part.TOKENS, out)
            start = batches.sequence_of(step, index) * plan.seq_len
            found = out[row * plan.seq_len : (row + 1) * plan.seq_len]
            assert found.tolist() == list(range(start, start + plan.seq_len))

    @settings(max_examples=60)
    @given(
        sequences=st.integers(1, 40),
        batch=st.integers(1, 50),
        epochs=st.integers(1, 3),
        seed=st.integers(0, 2**63 - 1),
        order=st.sampled_from(["shuffled", "sequential"]),
    )
    def test_each_sequence_once_an_epoch(self, sequences, batch, epochs, seed, order):
        batches = Batches(counting(4 * sequences + 1), make_plan(micro_batches=batch), order, seed)
        steps = -(-sequences * epochs // batch)
        taken = [batches.sequence_of(step, i) for step in range(steps) for i in range(batch)]
        for epoch in range(epochs):
            assert sorted(taken[epoch * sequences : (epoch + 1) * sequences]) == list(range(sequences))

    @settings(max_examples=60)
    @given(
        sequences=st.integers(1, 30),
        batch=st.integers(1, 40),
        seed=st.integers(0, 2**63 - 1),
        visits=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 39)), min_size=1, max_size=12),
    )
    def test_a_function_of_step_and_number_only(self, sequences, batch, seed, visits):
        stream, plan = counting(4 * sequences + 1), make_plan(micro_batches=batch)
        used = Batches(stream, plan, "shuffled", seed)
        for step, index in visits:
            fresh = Batches(stream, plan, "shuffled", seed)
            assert used.sequence_of(step, index % batch) == fresh.sequence_of(step, index % batch)

    @settings(max_examples=30)
    @given(seed=st.integers(0, 1000), shape=st.sampled_from([(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)]))
    def test_the_global_batch_does_not_depend_on_replicas(self, seed, shape):
        dp, micro_batches = shape
        stream = counting(4 * 100 + 1)
        one = Batches(stream, make_plan(micro_batches=12), "shuffled", seed)
        many = Batches(stream, make_plan(dp=dp, micro_batches=micro_batches), "shuffled", seed)
        assert [one.sequence_of(3, i) for i in range(12)] == [many.sequence_of(3, i) for i in range(12)]

    def test_epochs_and_seeds_differ(self):
        def epoch(seed: int, number: int) -> tuple[int, ...]:
            batches = Batches(counting(401), make_plan(micro_batches=100), "shuffled", seed)
            return tuple(batches.sequence_of(number, i) for i in range(100))

        orders = {epoch(seed, number) for seed in (0, 1, 1 << 32, (1 << 63) - 1) for number in range(3)}
        assert len(orders) == 12
        assert tuple(range(100)) not in orders

    def test_every_position_is_equally_likely(self):
        """Where sequence 0 of 8 comes in 4000 epochs: chi-square with 7 degrees of freedom, beyond 29.9 once in 10^4."""
        batches = Batches(counting(33), make_plan(micro_batches=8), "shuffled", 5)
        places = [next(i for i in range(8) if batches.sequence_of(epoch, i) == 0) for epoch in range(4000)]
        counts = np.bincount(places, minlength=8)
        assert ((counts - 500) ** 2 / 500).sum() < 29.9

    def test_the_order_is_pinned(self):
        """A run resumed years later takes the same sequences: these were written down once."""
        batches = Batches(counting(33), make_plan(micro_batches=8), "shuffled", 42)
        assert [batches.sequence_of(0, i) for i in range(8)] == [3, 4, 7, 5, 1, 2, 0, 6]
        assert [batches.sequence_of(1, i) for i in range(8)] == [6, 3, 4, 1, 5, 2, 0, 7]

    def test_epochs_are_kept_only_near_the_current_one(self):
        batches = Batches(counting(33), make_plan(micro_batches=8), "shuffled", 0)
        for step in (0, 1, 2, 1, 2, 9, 3):
            batches.sequence_of(step, 0)
            assert len(batches._permutations) <= 2

    def test_threads_see_the_same(self):
        plan = make_plan(dp=4, micro_batches=6)
        batches = Batches(counting(4 * 37 + 1), plan, "shuffled", 3)
        alone = Batches(counting(4 * 37 + 1), plan, "shuffled", 3)
        expected = [[alone.sequence_of(step, i) for i in range(24)] for step in range(40)]
        found: dict[int, list[list[int]]] = {}

        def work(number: int) -> None:
            found[number] = [[batches.sequence_of(step, i) for i in range(24)] for step in range(40)]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(4), expected)
