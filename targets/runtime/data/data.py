"""Training data: a stream of tokens, and the sequences of it that each micro-batch of each step trains on.

A file named `*.bin` holds token numbers, little-endian, two or four bytes each; one named `*.jsonl` documents
(`jsonl`); any other is UTF-8 text, read as one token a byte. Files are read when they are used (`token_file`), so only
the disk bounds their size.

Packing: the stream is cut every S = `seq_len` tokens, across ends of documents; the labels are the same tokens, one
later.

    tokens       a a a a b b b c | c c c d d d d d | d ...        S = 8, documents a, b, c, d
    labels         a a a b b b c c | c c d d d d d d | ...
    starts       0 0 0 0 4 4 4 7 | 0 0 0 3 3 3 3 3 | ...          where each token's document begins in its sequence

Order: `Batches` numbers the sequences of a run 0, 1, 2, ... (step * G + index); number i belongs to pass i div n, of n
sequences. Each pass has its own permutation, a pure function of seed and pass. A resumed run, or one on other ranks,
therefore trains on the same sequences without any saved state.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.context_rows import positions_of, run_length, run_of
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.ops.base import Part, Piece
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, Note, fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.data.documents import Documents, PiecedTokens, Positions, bounds_of, pieced
from ratrain.targets.runtime.data.token_file import FileTokens, better_type, check_width, file_bytes, text_bytes
from ratrain.targets.runtime.data.token_layouts import check_said_type, layout_of, refuse_containers, refuse_json
from ratrain.targets.runtime.settings import Order

Tokens = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32] | FileTokens | PiecedTokens

TEXT_VOCABULARY = 256
"""Number of tokens of byte-level text."""

BUILTIN = "the built-in text"
"""Name of the text that a run without data has."""

WITHOUT_ITS_LAST = "without its last"
"""Beginning of the part of a stream whose end is held out; its percentage follows."""

TOKEN_DTYPES = ("uint16", "uint32")
"""Types of a token in a .bin file."""

BYTE = "a byte"
"""Description of a token of text that is read without a tokenizer."""

_CHUNK = 1 << 22  # tokens scanned together, so that a scan of a large file needs little memory
_DIGESTED = 1 << 20  # bytes at each end of a stream that its digest covers
_SHOWN = 8  # bad tokens named one by one
_HEAD = 64  # first bytes, which tell files of other kinds
_LINE_FEED = 0x0A
_ORDER_KEY = 0  # keeps the random numbers of the data order apart from those of the weights


@frozen(eq=False)
class TokenStream:
    """Sequence of tokens, all below the vocabulary size it was opened with."""

    name: str
    """File, or description of the text."""
    tokens: Tokens
    """One-dimensional; read slice by slice where it comes from a file."""
    digest: str
    """Byte count, token type, and a BLAKE2 hash of the first and last MiB and of the document bounds: cheap for
    large files."""
    token: str = BYTE
    """Description of a token."""
    part: str = ""
    """Description of the part of `name` that is used; empty: all of it."""
    tokenizer: str | None = None
    """Tokenizer that made the tokens of a text."""
    found: str = ""
    """Description of where the tokenizer was found, if nobody named it."""
    documents: Documents | None = None
    """Bounds of its documents; None if unknown, as for token numbers without a known end token."""
    reading: Mapping[str, Any] = field(factory=dict)
    """Further facts of how its documents were read, as a checkpoint records them: files, keys, the token at their
    ends."""

    @property
    def counts_all(self) -> bool:
        """True if every token is a label of the loss."""
        return self.documents is None or self.documents.answers is None

    @property
    def given_tokens(self) -> int:
        """Number of its tokens, without those that fill sequences of whole documents."""
        filled = self.reading.get("pack") == "whole"
        return len(self.tokens) - (int(self.reading["filling"]) + 1 if filled else 0)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records, so that a later run can name what it was."""
        return {
            "name": self.name,
            "part": self.part,
            "tokens": len(self.tokens),
            "token": self.token,
            "tokenizer": self.tokenizer,
            **self.reading,
        }


def in_words(facts: Mapping[str, Any], found: str = "") -> str:
    """Describe data by its `facts`: name, size, kind of token, documents; `found` tells where the tokenizer was."""
    part = f", {facts['part']}" if facts["part"] else ""
    # a label needs the token behind it, so one more fills the end
    filling = facts["filling"] + 1 if facts.get("pack") == "whole" else 0
    words = f"{facts['name']}{part}, {facts['tokens'] - filling:,} tokens; a token is {facts['token']}"
    words += f" ({found})" if found else ""
    if isinstance(facts.get("documents"), int):
        end = facts.get("eos")
        ended = "nothing between them" if end is None else f"token {end} at the end of each"
        words += f"; documents: {facts['documents']:,}, {ended}"
    if isinstance(facts.get("completion_key"), str):
        words += f"; only tokens of the field '{facts['completion_key']}' are in the loss"
    if isinstance(facts.get("chat_template"), str):
        alone = {"answers": "; only answers are in the loss", "last-answer": "; only last answers are in the loss"}
        words += f"; chats, by {facts['chat_template']}{alone.get(str(facts.get('train_on')), '')}"
    if facts.get("pack") == "whole":
        cut = facts["cut_documents"]
        words += f"; whole documents in {facts['sequences']:,} sequences, {facts['filling']:,} tokens of filling"
        lost = f": {facts['left_out']:,} tokens are left out" if facts["left_out"] else " into pieces"
        words += f", {cut:,} longer ones cut{lost}" if cut else ""
    return words


def open_tokens(path: str, *, vocab_size: int, dtype: str | None = None) -> TokenStream:
    """Open a file as a stream of tokens, in .bin files of type `dtype` (default: by the vocabulary size).

    Raises RT002 (cannot be read) and RT090: empty, not a whole number of tokens, tokens outside the vocabulary (with
    their positions), not UTF-8 (with the place), or text for a vocabulary of fewer than 256 tokens.
    """
    if dtype is not None and dtype not in TOKEN_DTYPES:
        fail("RT090", f"'{dtype}' is not a token type", help=f"known are {' and '.join(TOKEN_DTYPES)}")
    if Path(path).suffix.lower() != ".bin":
        if dtype is not None:
            fail(
                "RT090",
                f"a token type ({dtype}) is given, but '{path}' is read as text",
                help="only a file whose name ends in .bin holds token numbers: rename it, or leave out the token type",
            )
        return _open_text(path, vocab_size)
    raw = file_bytes(path)
    layout = layout_of(raw)
    if layout is not None:
        check_said_type(path, layout, dtype)
        stream = checked_stream(path, layout.tokens(raw), vocab_size, f"a {layout.dtype} number", layout.what)
        documents = None if layout.bounds is None else Documents(layout.bounds)
        return evolve(stream, documents=documents, digest=digest_of(stream.tokens, documents))
    bits = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    tokens = raw.as_type(np.dtype(bits).newbyteorder("<"))
    size = tokens.dtype.itemsize
    if len(raw) % size:
        better = better_type(tokens, TOKEN_DTYPES, vocab_size, _CHUNK)
        fail(
            "RT090",
            f"'{path}' has {len(raw)} bytes: that is no whole number of {bits} tokens ({size} bytes each)",
            help="copy the file again: it may have been cut short" if better is None else _named(better),
        )
    # Only a guessed type is doubted.
    if dtype is None:
        check_width(tokens, _CHUNK)
    return checked_stream(path, tokens, vocab_size, f"a {bits} number")


def checked_stream(name: str, tokens: Tokens, vocab_size: int, token: str, said_by: str | None = None) -> TokenStream:
    """Return a stream of tokens; `said_by` describes what declares their type, if anything does.

    Raises RT090 where some are outside the vocabulary, with their positions.
    """
    _check_vocabulary(name, tokens, vocab_size, said_by)
    return TokenStream(name, tokens, digest_of(tokens), token)


def builtin_text_tokens(*, vocab_size: int = TEXT_VOCABULARY) -> TokenStream:
    """Return the language reference that comes with every Python (half a megabyte of English), one token a byte.

    It differs a little from one Python version to the next, and so does the digest. Raises RT090 where the vocabulary
    has fewer than 256 tokens.
    """
    from pydoc_data.topics import topics

    check_text_vocabulary(BUILTIN, vocab_size)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = np.frombuffer(text.encode(), np.uint8)
    return TokenStream(BUILTIN, tokens, digest_of(tokens))


def part_of_stream(stream: TokenStream, start: int, stop: int, words: str) -> TokenStream:
    """Return tokens [start, stop) of a stream, with a digest of their own; `words` describe the part."""
    tokens = _part(stream.tokens, start, stop)
    documents = None if stream.documents is None else stream.documents.part(start, stop)
    reading = dict(stream.reading)
    if documents is not None and "documents" in reading:
        reading["documents"] = len(documents)
    digest = digest_of(tokens, documents)
    return evolve(stream, tokens=tokens, digest=digest, part=words, documents=documents, reading=reading)


def _part(tokens: Tokens, start: int, stop: int) -> Tokens:
    return tokens[start:stop] if isinstance(tokens, np.ndarray) else tokens.part(start, stop)


def digest_of(tokens: Tokens, documents: Documents | None = None) -> str:
    """Return the digest of tokens and of documents in them: `TokenStream.digest`."""
    size = tokens.dtype.itemsize
    count = _DIGESTED // size
    ends = hashlib.blake2b(tokens[:count].tobytes(), digest_size=16)
    ends.update(tokens[max(count, len(tokens) - count) :].tobytes())
    # One document that counts whole says nothing: the digest is then that of the bare tokens.
    if documents is not None and (len(documents) > 1 or documents.answers is not None):
        ends.update(documents.bounds.tobytes())
        if documents.answers is not None:
            firsts = documents.counted_from  # as checkpoints of completions have it
            ends.update((documents.answers if firsts is None else firsts).tobytes())
    return f"{len(tokens) * size}-{tokens.dtype.name}-{ends.hexdigest()}"


def chunks_of(tokens: Tokens) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield tokens in chunks, each with the position of its first token."""
    for start in range(0, len(tokens), _CHUNK):
        yield start, tokens[start : start + _CHUNK]


def _check_vocabulary(path: str, tokens: Tokens, vocab_size: int, said_by: str | None) -> None:
    """Report the first tokens that are not below `vocab_size`, by position, and the number of further ones."""
    if vocab_size > int(np.iinfo(tokens.dtype).max):
        return
    report = Diagnostics()
    total = 0
    help_text = ""
    for start, chunk in chunks_of(tokens):
        if int(chunk.max()) < vocab_size:
            continue
        bad = np.flatnonzero(chunk >= vocab_size)
        help_text = help_text or _other_type(tokens, vocab_size, said_by)
        for index in bad[: max(0, _SHOWN - total)]:
            where, token = start + int(index), int(chunk[index])
            report.error(
                "RT090",
                f"'{path}': token {token} at position {where} is outside the vocabulary of {vocab_size} tokens",
                help=help_text,
            )
        total += len(bad)
    if total > _SHOWN:
        report.error("RT090", f"'{path}': {total - _SHOWN} more tokens are outside the vocabulary")
    report.check()


def _other_type(tokens: Tokens, vocab_size: int, said_by: str | None) -> str:
    """Return advice for tokens outside the vocabulary: another type only if the numbers themselves suggest it."""
    if isinstance(tokens, FileTokens) and said_by is None:
        better = better_type(tokens, TOKEN_DTYPES, vocab_size, _CHUNK)
        if better is not None:
            return _named(better)
    return "make the tokens again with the tokenizer of this model"


def _named(dtype: str) -> str:
    return f"read as {dtype} its first tokens are inside the vocabulary: --data-dtype {dtype}, if they were written so"


def check_text_vocabulary(name: str, vocab_size: int) -> None:
    """Raise `DiagnosticError` RT090 where a vocabulary has too few tokens for one token a byte."""
    if vocab_size < TEXT_VOCABULARY:
        fail(
            "RT090",
            f"'{name}' is text, read as one token a byte: that takes a vocabulary of {TEXT_VOCABULARY} tokens or more, "
            f"and the model has {vocab_size}",
            help="use a model with a larger vocabulary, or a file of token numbers (*.bin)",
        )


def _open_text(path: str, vocab_size: int) -> TokenStream:
    """Open a text file, one token a byte, after checking that all of it is UTF-8."""
    check_text_vocabulary(path, vocab_size)
    tokens = text_bytes(path)
    refuse_containers(path, tokens[:_HEAD].tobytes())
    refuse_json(tokens)
    decoder = codecs.getincrementaldecoder("utf-8")()
    end = 0
    try:
        for start, chunk in chunks_of(tokens):
            end = start + len(chunk)
            decoder.decode(chunk.tobytes(), final=end == len(tokens))
    except UnicodeDecodeError as error:
        # The decoder keeps the bytes of an unfinished character: its error counts from the first of them.
        _not_utf8(path, tokens, end - len(error.object) + error.start)
    return TokenStream(path, tokens, digest_of(tokens), documents=Documents(bounds_of([len(tokens)])))


def _not_utf8(path: str, tokens: FileTokens, position: int) -> NoReturn:
    """Refuse, with RT090, a text for its byte at `position`; the column counts bytes."""
    line, line_start = 1, 0
    for start, chunk in chunks_of(tokens.part(0, position)):
        feeds = np.flatnonzero(chunk == _LINE_FEED)
        line += len(feeds)
        line_start = start + int(feeds[-1]) + 1 if len(feeds) else line_start
    fail(
        "RT090",
        f"the training text is not UTF-8: byte {int(tokens[position : position + 1][0]):#04x} at position "
        f"{tokens.start + position}",
        Location(path, line, position - line_start + 1),
        notes=[Note("a file is read as text unless its name ends in .bin")],
        help="save the text as UTF-8; if it holds token numbers, let its name end in .bin",
    )


@frozen(eq=False)
class _Pass:
    """Stream as one pass over the data reads it."""

    tokens: Tokens
    documents: Documents | None


def _in_order(tokens: Tokens, documents: Documents, order: Positions) -> _Pass:
    """Return the stream with its documents in another order; tokens are read from their old places when used."""
    firsts = documents.bounds[:-1][order]

    def read(number: int, low: int, high: int) -> NDArray[Any]:
        first = int(firsts[number])
        return tokens[first + low : first + high]

    return _Pass(pieced(np.diff(documents.bounds)[order], read, tokens.dtype), documents.in_order(order))


def _check_starts_known(stream: TokenStream) -> None:
    """Refuse, with RT090, data with unknown document starts for a program that keeps attention inside documents."""
    if stream.documents is not None:
        return
    fail(
        "RT090",
        f"the program keeps attention inside documents (attention_mask = \"document\"), and '{stream.name}' "
        "does not say where they start",
        help="say which token ends a document, --eos 2; give documents as JSONL, one a line; or plan with "
        'attention_mask = "causal"',
    )


def _check_documents(stream: TokenStream) -> None:
    """Refuse, with RT090, to shuffle documents whose ends are unknown, or a single one."""
    help_text = (
        "give documents as JSONL, one a line, or as several text files; or take --order shuffled, which "
        "shuffles sequences"
    )
    if stream.documents is None:
        fail("RT090", f"'{stream.name}' does not say where its documents end: they cannot be shuffled", help=help_text)
    if len(stream.documents) < 2:
        fail("RT090", f"'{stream.name}' is one document: there is no other order of documents", help=help_text)


def without_labels(stream: TokenStream, seq_len: int) -> tuple[str, str]:
    """Return why tokens of a stream are no labels in the loss, and what mends that."""
    read = stream.reading
    if read.get("pack") == "whole" and read["left_out"]:
        why = f"sequences of {number_of(seq_len, 'token')} end before an answer begins"
        return why, "take longer sequences (seq_len in a plan, --seq-len of 'ratrainc finetune')"
    if read.get("pack") == "whole" and not read.keys() & {"train_on", "completion_key"}:
        return "a label is a token behind another one of its document, and all documents are single tokens", (
            "use longer documents"
        )
    return "all belong to prompts", "leave out documents with very long prompts"


def fail_without_labels(step: int, stream: TokenStream, plan: Plan, first_step: int) -> NoReturn:
    """Raise `DiagnosticError` RT090 for a step without any label in the loss."""
    before = step - first_step
    why, ways_out = without_labels(stream, plan.seq_len)
    ways_out = f"use a larger global batch, or {ways_out}"
    if before:
        ways_out += f"; the {number_of(before, 'step')} before it can be run: --steps {before}"
    fail(
        "RT090",
        f"step {step} has no label in the loss among its {number_of(plan.tokens_per_step, 'token')}: {why}",
        help=ways_out,
    )


@define(eq=False)
class Batches:
    """Assignment of a stream's sequences to steps.

    The stream is cut into n sequences of S = `plan.seq_len` tokens. Labels are the tokens one later, so n = (tokens -
    1) div S; the remaining tokens are not used. Each step takes G = `plan.global_batch` sequences. A pass visits them
    in the stream's order (`sequential`) or in a new random order (`shuffled`); or it puts the documents into a new
    random order and then cuts (`documents`). All methods are pure functions of their arguments and thread-safe. Raises
    RT090 where the stream is too short for one sequence, has no documents to shuffle, or has unknown document starts
    although attention must stay inside documents.
    """

    stream: TokenStream
    plan: Plan
    order: Order
    seed: int
    sequences: int = field(init=False)
    """n, the sequences of one pass over the data."""
    _permutations: dict[int, Positions] = field(init=False, factory=dict, repr=False)
    _passes: dict[int, _Pass] = field(init=False, factory=dict, repr=False)
    _lock: Lock = field(init=False, factory=Lock, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.order == "documents":
            _check_documents(self.stream)
        if self.plan.keeps_documents_apart:
            _check_starts_known(self.stream)
        self.sequences = (len(self.stream.tokens) - 1) // self.plan.seq_len
        if self.sequences < 1:
            fail(
                "RT090",
                f"'{self.stream.name}' has {number_of(len(self.stream.tokens), 'token')}: one "
                f"sequence and its labels take "
                f"{self.plan.seq_len + 1}",
                help="use more data, or a smaller seq_len",
            )

    def sequence_of(self, step: int, index: int) -> int:
        """Return the sequence that is number `index` (below G) of the global batch of `step` (from 0).

        It is a number in the stream as the pass reads it: with order `documents`, in the stream with its documents
        reordered.
        """
        position = step * self.plan.global_batch + index
        epoch, place = divmod(position, self.sequences)
        return int(self._permutation(epoch, self.sequences)[place]) if self.order == "shuffled" else place

    def counted(self, step: int) -> int:
        """Return the number of labels of a step's global batch that are in the loss."""
        if self.stream.counts_all:
            return self.plan.tokens_per_step
        numbers = range(self.plan.global_batch)
        total = 0
        # A step may end one pass and begin the next, whose documents lie elsewhere.
        for epoch in sorted({self._epoch_of(step, index) for index in numbers}):
            taken = [self.sequence_of(step, index) for index in numbers if self._epoch_of(step, index) == epoch]
            # + 1: the labels of a sequence are its tokens, one later.
            first = np.array(taken, np.int64) * self.plan.seq_len + 1
            documents = self._pass(epoch).documents
            assert documents is not None
            total += int(documents.counted(first, first + self.plan.seq_len).sum())
        return total

    def check_labels(self, start: int, stop: int) -> None:
        """Raise `DiagnosticError` RT090 if one of the steps [start, stop) has no label in the loss."""
        size, most = self.plan.global_batch, max(1, _CHUNK // self.plan.global_batch)
        if self.stream.counts_all or (self.order != "documents" and self._has_labels_in_any_order()):
            return
        for low in range(start, stop, most):
            positions = np.arange(low * size, min(low + most, stop) * size)
            epochs, counts = positions // self.sequences, np.empty(len(positions), np.int64)
            for epoch in np.unique(epochs).tolist():
                mine = epochs == epoch
                counts[mine] = self._labels(epoch)[positions[mine] - epoch * self.sequences]
            without = np.flatnonzero(counts.reshape(-1, size).sum(axis=1) == 0)
            if without.size:
                fail_without_labels(low + int(without[0]), self.stream, self.plan, start)

    def _labels(self, epoch: int) -> Positions:
        """Return the number of labels in the loss for each sequence of a pass, in the order of the pass."""
        documents = self._pass(epoch).documents
        assert documents is not None  # else all labels count
        first = np.arange(self.sequences) * self.plan.seq_len + 1
        found = documents.counted(first, first + self.plan.seq_len)
        return found[self._permutation(epoch, self.sequences)] if self.order == "shuffled" else found

    def _has_labels_in_any_order(self) -> bool:
        """Return True if every step surely has a label, whatever the order of sequences.

        A step of at most n sequences reaches into two passes at most. Both together have 2 * `without` sequences
        without a label; a step that takes more sequences than these has at least one label.
        """
        without = int(np.count_nonzero(self._labels(0) == 0))
        return 2 * without < self.plan.global_batch <= self.sequences

    def fill(self, step: int, replica: int, piece: Piece, part: Part, out: NDArray[np.int32]) -> None:
        """Write a micro-batch of one replica, or a slice of it, into `out` [b * S]: tokens, labels or document starts.

        Number i of the global batch belongs to replica i div (M * b), micro-batch (i mod M * b) div b. Of a slice, S is
        its length. Each run of `cp` replicas shares sequences: such a context rank has its runs of S alone. Labels
        outside the loss become `IGNORED_LABEL`. Document starts are positions within the sequence; a document that
        continues from the sequence before starts at 0.
        """
        replica, rank = divmod(replica, self.plan.cp)
        plan = slice_plan(self.plan, None if isinstance(piece, int) else piece.number)
        micro_batch = piece if isinstance(piece, int) else piece.micro_batch
        size, length = plan.micro_batch_size, run_length(plan)
        first = (replica * self.plan.micro_batches + micro_batch) * size
        runs = (positions_of(plan, run_of(plan, rank, number)).start for number in range(plan.context_runs))
        for number, (position, row) in enumerate(product(runs, range(size))):
            sequence = out[number * length : (number + 1) * length]
            self._fill_run(step, first + row, position, part, sequence)

    def _fill_run(self, step: int, number: int, position: int, part: Part, out: NDArray[np.int32]) -> None:
        """Write tokens of one sequence from a position on, or their labels or document starts."""
        shift = position + (1 if part is Part.LABELS else 0)  # labels are the same tokens, one later
        start = self.sequence_of(step, number) * self.plan.seq_len + shift
        held = self._pass(self._epoch_of(step, number))
        if part is Part.DOCUMENTS:
            assert held.documents is not None
            starts = held.documents.starts(start, start + len(out)) - (start - shift)
            np.maximum(starts, 0, out=out, casting="same_kind")
            return
        out[:] = held.tokens[start : start + len(out)]
        if part is Part.LABELS and held.documents is not None and held.documents.answers is not None:
            out[~held.documents.is_counted(start, start + len(out))] = IGNORED_LABEL

    def _epoch_of(self, step: int, index: int) -> int:
        """Return the pass over the data that number `index` of a step's global batch is in."""
        return (step * self.plan.global_batch + index) // self.sequences

    def _pass(self, epoch: int) -> _Pass:
        """Return the stream as one pass reads it: unchanged, or with its documents in that pass's order."""
        stream = self.stream
        if self.order != "documents":
            return _Pass(stream.tokens, stream.documents)
        assert stream.documents is not None
        order = self._permutation(epoch, len(stream.documents))
        with self._lock:
            if epoch not in self._passes:
                # A step at the end of a pass reaches into the next: keep both.
                near = {known: kept for known, kept in self._passes.items() if abs(known - epoch) == 1}
                self._passes = {**near, epoch: _in_order(stream.tokens, stream.documents, order)}
            return self._passes[epoch]

    def _permutation(self, epoch: int, count: int) -> Positions:
        """Return the order of `count` sequences or documents in one pass: a function of count, seed and epoch only.

        It is the argsort of raw generator output: numpy guarantees the output of its bit generators across versions,
        but not that of `permutation`. A step at the end of an epoch reaches into the next, so two are kept.
        """
        with self._lock:
            if epoch not in self._permutations:
                bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(_ORDER_KEY, epoch)))
                order = np.argsort(bits.random_raw(count), kind="stable")
                near = {known: kept for known, kept in self._permutations.items() if abs(known - epoch) == 1}
                self._permutations = {**near, epoch: order}
            return self._permutations[epoch]
