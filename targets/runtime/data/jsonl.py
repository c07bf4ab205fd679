"""Documents from JSONL: one JSON object a line, with a text field, or with a prompt and a completion field.

A file that is one JSON array of such objects is read as if each stood on a line of its own:

    [{"text": "one"},                  as            {"text": "one"}
     {"text": "two"}]                                {"text": "two"}

All lines are parsed once, to check them and to measure their documents. If a token is a byte, no text is kept: a line
is parsed again when a sequence reads from it, so that memory holds only the places of documents (32 bytes each).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import Location, fail
from ratrain.ratrain_ir.support.files import MARK
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.data.data import TokenStream, check_text_vocabulary, checked_stream, chunks_of, digest_of
from ratrain.targets.runtime.data.documents import Documents, bounds_of, end_tokens, pieced
from ratrain.targets.runtime.data.token_file import FileTokens, text_bytes

if TYPE_CHECKING:
    from ratrain.targets.runtime.data.tokenizer import Encoder

_LINE_FEED = b"\n"
TOGETHER = 1 << 22
"""Characters tokenised in one call, unless one document is larger: the package spreads a call over its threads."""
_MOST_NAMED = 8


@frozen
class Fields:
    """Fields of a line whose texts, one after the other, make its document."""

    names: tuple[str, ...]
    """one, or a prompt's and its completion's"""

    @property
    def is_pair(self) -> bool:
        """True if there is a prompt, which does not count in the loss."""
        return len(self.names) > 1


@frozen
class Line:
    """Bytes [start, stop) of a file: a line, possibly blank, or an element of an array."""

    number: int
    """line that it begins on, from 1"""
    start: int
    stop: int
    content: bytes
    column: int = 1
    """column that it begins at"""


def open_jsonl(
    path: str, fields: Fields, *, vocab_size: int, eos: int | None = None, encoder: Encoder | None = None
) -> TokenStream:
    """Open the documents of a JSONL file in its order, each followed by the token `eos` if given.

    Without an encoder a token is a byte. Lines without text are skipped. Raises `DiagnosticError` RT002 (cannot be
    read) and RT090, with the line: no JSON, no object, a field that is missing or no text, not UTF-8; no document at
    all; tokens outside the vocabulary.
    """
    if encoder is None:
        check_text_vocabulary(path, vocab_size)
    file = text_bytes(path)
    stream = (
        _of_bytes(path, file, fields, eos)
        if encoder is None
        else _encoded(path, file, fields, eos, encoder, vocab_size)
    )
    if not len(stream.tokens):
        fail(
            "RT090", f"'{path}' has no document: all its lines are empty", help="name a file with a JSON object a line"
        )
    return stream


def _of_bytes(path: str, file: FileTokens, fields: Fields, eos: int | None) -> TokenStream:
    """Measure the documents in bytes; their text is read later, line by line."""
    starts, stops, lengths, prompts = (array("q") for _ in range(4))
    end = end_tokens(eos, np.uint8)
    for line, texts in _documents(path, file, fields):
        sizes = [len(text.encode()) for text in texts]
        # A line without text is no document, although an end token could follow it.
        if not sum(sizes):
            continue
        starts.append(line.start)
        stops.append(line.stop)
        lengths.append(sum(sizes) + len(end))
        prompts.append(sum(sizes[:-1]))
    lines = _Lines(file, np.array(starts, np.int64), np.array(stops, np.int64), fields, end)
    tokens = pieced(np.array(lengths, np.int64), lines.read, end.dtype)
    documents = _found(tokens.bounds, np.array(prompts, np.int64), fields)
    return TokenStream(path, tokens, digest_of(tokens, documents), documents=documents)


def _encoded(
    path: str, file: FileTokens, fields: Fields, eos: int | None, encoder: Encoder, vocab_size: int
) -> TokenStream:
    """Tokenise all documents into memory."""
    end = end_tokens(eos, np.uint32)
    lengths, prompts = array("q"), array("q")
    encoded: list[NDArray[np.uint32]] = []
    for batch in _batches(path, file, fields):
        parts = iter(encoder(path, [text for texts in batch for text in texts]))
        pieces: list[NDArray[np.uint32]] = []
        for texts in batch:
            own = [next(parts) for _ in texts]
            if not sum(map(len, own)):
                continue
            pieces += [*own, end]
            lengths.append(sum(map(len, own)) + len(end))
            prompts.append(sum(map(len, own[:-1])))
        encoded.append(np.concatenate([end[:0], *pieces]))
    tokens = np.concatenate([end[:0], *encoded])
    documents = _found(bounds_of(np.array(lengths, np.int64)), np.array(prompts, np.int64), fields)
    stream = checked_stream(f"{path} by {encoder.tokenizer.path}", tokens, vocab_size, encoder.token)
    return encoder.named(stream, path, documents, digest_of(tokens, documents))


def _found(bounds: NDArray[np.int64], prompts: NDArray[np.int64], fields: Fields) -> Documents:
    return Documents.ending_in_answers(bounds, bounds[:-1] + prompts) if fields.is_pair else Documents(bounds)


@define(eq=False)
class _Lines:
    """Lines of a file that have documents, which are parsed again when they are read."""

    file: FileTokens
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    fields: Fields
    end: NDArray[Any]
    last: tuple[int, NDArray[Any]] | None = None
    """number and tokens of the document read last: sequences of a long one often follow each other"""

    def read(self, number: int, low: int, high: int) -> NDArray[Any]:
        """Return tokens [low, high) of a document."""
        # One attribute, read once and replaced as a whole: threads may read at the same time without a lock.
        last = self.last
        if last is None or last[0] != number:
            content = self.file[int(self.starts[number]) : int(self.stops[number])].tobytes()
            held = json.loads(content.decode())
            text = "".join(held[name] for name in self.fields.names).encode()
            last = self.last = number, np.concatenate([np.frombuffer(text, np.uint8), self.end]).astype(self.end.dtype)
        return last[1][low:high]


def _batches(path: str, file: FileTokens, fields: Fields) -> Iterator[list[tuple[str, ...]]]:
    """Yield the texts of documents, grouped for one call of the tokenizer."""
    batch: list[tuple[str, ...]] = []
    size = 0
    for _, texts in _documents(path, file, fields):
        batch.append(texts)
        size += sum(map(len, texts))
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(path: str, file: FileTokens, fields: Fields) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """Yield each line that is not blank, with the texts of its fields."""
    for line in lines_of(path, file):
        if line.content.strip():
            yield line, _texts(path, line, fields)


def lines_of(path: str, file: FileTokens) -> Iterator[Line]:
    """Yield all lines of a file, or the elements of the array that it is. Raises RT090 for a broken array."""
    begins_with = next((head for _, chunk in chunks_of(file) if (head := chunk.tobytes().lstrip()[:1])), b"")
    return _elements_of(path, file) if begins_with == b"[" else _lines_of(file)


_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)
"""Parts of JSON that tell where an element ends; brackets within strings do not."""


def _elements_of(path: str, file: FileTokens) -> Iterator[Line]:
    """Yield the elements of an array; the file is held in memory meanwhile."""
    content = file[: len(file)].tobytes()
    depth, number, before, start, row = 0, 1, 0, 0, 0
    line = Line(1, 0, 0, b"")
    for found in _STRING_OR_BRACKET.finditer(content):
        mark = found.group()
        if mark in b"[{":
            depth += 1
            start = found.end() if depth == 1 else start
        elif depth == 1 and mark in b",]":
            held = content[start : found.start()].strip()
            first = content.find(held, start) if held else found.start()
            row = max(row, content.rfind(_LINE_FEED, before, first) + 1)
            number, before = number + content.count(_LINE_FEED, before, first), first
            is_first = not line.stop
            line = Line(number, first, first + len(held), held, first - row + 1)
            if not held and not (is_first and mark == b"]"):
                refuse_line(path, line, "has an array without an element at this place", way_out=_ARRAY)
            yield line
            start = found.end()
        depth -= mark in b"]}"
        if not depth:
            break
    if depth or content[start:].strip():
        what = "begin an element of an array that does not end" if depth else "have more behind their array"
        number += content.count(_LINE_FEED, before, start)
        fail("RT090", f"the training data {what}", Location(path, number, 1), help=_ARRAY)


_ARRAY = "a file that begins with a bracket is one array of objects; else it has an object on every line"


def _lines_of(file: FileTokens) -> Iterator[Line]:
    """Yield all lines of a file; a line that crosses chunks is joined from its parts."""
    number, start = 1, 0
    begun: list[bytes] = []
    for offset, chunk in chunks_of(file):
        data, place = chunk.tobytes(), 0
        while (feed := data.find(_LINE_FEED, place)) >= 0:
            stop = offset + feed
            yield Line(number, start, stop, b"".join([*begun, data[place:feed]]))
            begun, place, start, number = [], feed + 1, stop + 1, number + 1
        begun.append(data[place:])
    yield Line(number, start, len(file), b"".join(begun))


def object_in(path: str, line: Line) -> dict[str, Any]:
    """Return the JSON object of a line. Raises RT090 with the line."""
    if line.content.startswith(MARK):
        way_out = "delete it: such a mark stands only at a file's start, and 'cat' of several files leaves it within"
        refuse_line(path, line, "begins with a byte order mark", way_out=way_out)
    try:
        held = json.loads(line.content.decode())
    except UnicodeDecodeError as error:
        refuse_line(path, line, "is not UTF-8", error.start)
    except json.JSONDecodeError as error:
        below = error.lineno - 1
        at = Line(line.number + below, line.start, line.stop, line.content, 1 if below else line.column)
        refuse_line(path, at, f"is no JSON: {error.msg}", error.colno - 1)
    except (ValueError, RecursionError) as error:
        refuse_line(path, line, f"is no JSON that can be read: {error}")
    if not isinstance(held, dict):
        refuse_line(path, line, "is no JSON object")
    return held


def _texts(path: str, line: Line, fields: Fields) -> tuple[str, ...]:
    """Return the texts in the fields of a line. Raises RT090 with the line."""
    held = object_in(path, line)
    texts = []
    for name in fields.names:
        messages = name if name in held else next((key for key, value in held.items() if are_messages(value)), name)
        if are_messages(held.get(messages)):
            what = f"has a list of messages in its field {shown(messages)}, and is read as one text"
            refuse_line(path, line, what, way_out=_CHATS)
        if name not in held:
            known = ", ".join(shown(key) for key in list(held)[:_MOST_NAMED]) or "none"
            way_out = _way_out(fields)
            if not fields.is_pair and held.keys() >= {"prompt", "completion"}:
                way_out = (
                    "'ratrainc run --train-on completion' trains on prompts and completions; so does 'ratrainc "
                    "finetune' if the first line has them"
                )
            refuse_line(path, line, f"has no field {shown(name)}; it has {known}", way_out=way_out)
        if not isinstance(held[name], str):
            refuse_line(
                path, line, f"has no text in its field {shown(name)}: {shown(held[name])}", way_out=_way_out(fields)
            )
        try:
            held[name].encode()
        except UnicodeEncodeError:
            refuse_line(path, line, f"has half of a surrogate pair in its field {shown(name)}, which is no text")
        texts.append(held[name])
    return tuple(texts)


def are_messages(value: object) -> bool:
    """Tell whether a value is a chat as other programs write it: a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


_CHATS = (
    "'ratrainc run --train-on answers' reads chats, by the template of the tokenizer, with answers alone in the loss; "
    "so does 'ratrainc finetune' if the first line is one, and no field of texts is named"
)


def _way_out(fields: Fields) -> str:
    keys = (
        "--prompt-key and --completion-key name the fields"
        if fields.is_pair
        else "--text-key names the field of the text, --prompt-key and --completion-key those of a pair"
    )
    return f"{keys}; every line needs them" if fields.is_pair else f"{keys}; every line needs it"


def refuse_line(path: str, line: Line, what: str, behind: int = 0, way_out: str | None = None) -> NoReturn:
    """Raise RT090 for a line of training data, `behind` columns after its begin."""
    usual = "a JSONL file has a JSON object on every line; lines may be empty"
    fail(
        "RT090",
        f"line {line.number} of the training data {what}",
        Location(path, line.number, line.column + behind),
        help=way_out or usual,
    )
