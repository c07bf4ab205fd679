"""Whole documents in sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import Part
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.data.documents import Documents, bounds_of
from ratrain.targets.runtime.data.packing import in_pieces, packed_whole, sequences_of
from tests.targets.runtime.data.test_documents import make_plan, streams

SETTINGS = settings(max_examples=120, deadline=None)


@SETTINGS
@given(lengths=st.lists(st.integers(1, 17), min_size=1, max_size=60), most=st.integers(17, 40))
def test_documents_fill_sequences(lengths: list[int], most: int) -> None:
    sequences = sequences_of(np.array(lengths, np.int64), most)
    assert sorted(number for each in sequences for number in each) == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in each) for each in sequences]
    assert max(sizes) <= most
    assert sequences == sorted(sequences)
    # No two sequences would go into one: the bound of any fit.
    assert len(sizes) < 2 or min(a + b for k, a in enumerate(sizes) for b in sizes[:k]) > most
    assert len(sequences) <= 11 / 9 * np.ceil(sum(lengths) / most) * 2 + 1


@SETTINGS
@given(stream=streams(), length=st.integers(3, 12), multiple=st.integers(1, 3))
def test_each_sequence_holds_whole_documents(stream: TokenStream, length: int, multiple: int) -> None:
    """Tokens are their own places in the stream, so that what is read tells where it is from."""
    packed = packed_whole(stream, length, multiple)
    plan = evolve(make_plan(size=1, seq_len=length), attention_mask="document")
    batches = Batches(packed, plan, "sequential", 0)
    documents = stream.documents
    assert documents is not None
    assert batches.sequences % multiple == 0
    assert batches.sequences == packed.reading["sequences"]
    expected = set()
    pieces = in_pieces(documents, length).bounds
    if documents.answers is None:
        assert packed.reading["left_out"] == 0
        assert set(documents.bounds) <= set(pieces)
    for start, stop in pairwise(pieces):
        counts = documents.is_counted(int(start), int(stop))
        kept = min(int(stop - start), length)
        expected |= {(int(start) + k - 1, int(start) + k) for k in range(1, kept) if counts[k]}
    found = set()
    tokens, labels, starts = (np.empty(length, np.int32) for _ in range(3))
    for step in range(batches.sequences):
        batches.fill(step, 0, 0, Part.TOKENS, tokens)
        batches.fill(step, 0, 0, Part.LABELS, labels)
        batches.fill(step, 0, 0, Part.DOCUMENTS, starts)
        for token, label, start, place in zip(tokens, labels, starts, range(length), strict=True):
            if label >= 0:
                found.add((int(token), int(label)))
                first = int(pieces[np.searchsorted(pieces, token, "right") - 1])
                assert place - start == token - first  # positions count from where its document begins
    assert found == expected
    assert sum(batches.counted(step) for step in range(batches.sequences)) == len(expected)
    assert packed.reading["cut_documents"] == int((np.diff(documents.bounds) > length).sum())


def test_unknown_ends_are_refused() -> None:
    stream = TokenStream("x", np.zeros(9, np.uint8), "x")
    with pytest.raises(DiagnosticError, match="does not say where its documents end"):
        packed_whole(stream, 4)


def test_many_documents_are_packed_at_once() -> None:
    """A hundred thousand documents: nothing is quadratic."""
    lengths = np.random.default_rng(0).integers(1, 2048, 100_000)
    stream = TokenStream("x", np.zeros(int(lengths.sum()), np.uint8), "x", documents=Documents(bounds_of(lengths)))
    packed = packed_whole(stream, 2048)
    assert packed.reading["filling"] < 0.01 * lengths.sum()
