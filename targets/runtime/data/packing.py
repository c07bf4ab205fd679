"""Whole documents in sequences: as many in each as fit, the rest of it filled with tokens that count nowhere.

    lengths 5 4 3 2, sequences of 8          5 3 | 4 2 . .

Best-fit decreasing (Johnson, 1973): the longest document first, each into the fullest sequence that still holds it; at
most 11/9 of the fewest sequences, and one more. The search for that sequence is a search for a bit: bit r of a number
is set if some sequence has r tokens left.

A document's first token is the label of nothing: the token before it belongs to another document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.runtime.data.data import TokenStream, digest_of
from ratrain.targets.runtime.data.documents import Documents, bounds_of, pieced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.data.documents import Positions

_FILLING = 0
"""Token that fills a sequence; none of its labels counts."""


def sequences_of(lengths: NDArray[np.int64], most: int) -> list[list[int]]:
    """Return the numbers of the documents in each sequence of `most` tokens; `lengths` are 1 to `most`.

    Sequences ascend by their lowest document, and documents within one.
    """
    sequences: list[list[int]] = []
    open_with: list[list[int]] = [[] for _ in range(most + 1)]
    rooms = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = open_with[room].pop()
            if not open_with[room]:
                rooms ^= 1 << room
        else:
            room, place = most, len(sequences)
            sequences.append([])
        sequences[place].append(number)
        if room > length:
            open_with[room - length].append(place)
            rooms |= 1 << (room - length)
    return sorted(sorted(each) for each in sequences)


def packed_whole(stream: TokenStream, length: int, multiple: int = 1) -> TokenStream:
    """Return a stream whose sequences of `length` tokens hold whole documents.

    A longer document that counts whole is cut into pieces, each a document; of another one the first `length` tokens
    are taken. The number of sequences is rounded up to a `multiple` with filling alone. Raises `DiagnosticError` RT090
    where the ends of documents are unknown.
    """
    documents = stream.documents
    if documents is None:
        text = f"'{stream.name}' does not say where its documents end: whole ones cannot be packed"
        fail("RT090", text, help="say which token ends a document, --eos 2; or take --pack cut")
    long = int(np.count_nonzero(np.diff(documents.bounds) > length))
    documents = in_pieces(documents, length)
    whole = np.diff(documents.bounds)
    taken = np.minimum(whole, length)
    present = np.flatnonzero(taken)
    sequences = sequences_of(taken[present], length)
    sequences += [[] for _ in range(-len(sequences) % multiple)]
    pieces: list[int] = []  # numbers of documents, -1 for filling
    lengths: list[int] = []
    for each in sequences:
        own = present[each].tolist()
        pieces += own
        lengths += taken[own].tolist()
        rest = length - int(taken[own].sum())
        if rest:
            pieces.append(-1)
            lengths.append(rest)
    # Labels are one token later, so one token follows the last sequence.
    pieces.append(-1)
    lengths.append(1)
    packed = _packed(stream, documents, np.array(pieces, np.int64), np.array(lengths, np.int64))
    filling = int(packed.documents.bounds[-1]) - int(taken.sum()) - 1 if packed.documents is not None else 0
    lost = int((whole - taken).sum())
    facts = {"pack": "whole", "sequences": len(sequences), "filling": filling, "cut_documents": long, "left_out": lost}
    return evolve(packed, reading={**stream.reading, **facts})


def in_pieces(documents: Documents, length: int) -> Documents:
    """Return documents of at most `length` tokens, if all of their tokens count; else the same ones."""
    if documents.answers is not None:
        return documents
    starts = [np.arange(low, high, length) for low, high in zip(documents.bounds, documents.bounds[1:], strict=False)]
    return Documents(np.append(np.concatenate([np.empty(0, np.int64), *starts]), documents.bounds[-1]))


def _packed(stream: TokenStream, documents: Documents, pieces: Positions, lengths: NDArray[np.int64]) -> TokenStream:
    tokens, firsts = stream.tokens, documents.bounds

    def read(place: int, low: int, high: int) -> NDArray[Any]:
        number = int(pieces[place])
        if number < 0:
            return np.full(high - low, _FILLING, tokens.dtype)
        first = int(firsts[number])
        return tokens[first + low : first + high]

    bounds = bounds_of(lengths)
    places = np.flatnonzero(pieces >= 0)
    moved = np.full(len(documents), -1, np.int64)
    moved[pieces[places]] = places
    answers = _answers(documents, moved, bounds)
    whole = pieced(lengths, read, tokens.dtype)
    found = Documents(bounds, answers)
    return evolve(stream, tokens=whole, documents=found, digest=digest_of(whole, found))


def _answers(documents: Documents, moved: Positions, bounds: Positions) -> Positions:
    """Return the runs that count, where document i is piece `moved[i]`; the first token of a document does not."""
    answers = documents.answers
    if answers is None:
        answers = np.stack([documents.bounds[:-1], documents.bounds[1:]], axis=1)
        answers = answers[answers[:, 0] < answers[:, 1]]
    numbers = np.searchsorted(documents.bounds, answers[:, 0], "right") - 1
    within = answers - documents.bounds[numbers][:, None]
    places = moved[numbers]
    shifted = within + bounds[places][:, None]
    shifted[:, 0] = np.maximum(shifted[:, 0], bounds[places] + 1)
    shifted[:, 1] = np.minimum(shifted[:, 1], bounds[places + 1])
    kept = shifted[shifted[:, 0] < shifted[:, 1]]
    return kept[np.argsort(kept[:, 0], kind="stable")]
