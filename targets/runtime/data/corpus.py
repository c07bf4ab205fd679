"""Training data of several files: the files that paths name, and the stream of all their documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_directory
from ratrain.targets.runtime.data.data import TokenStream, chunks_of, digest_of
from ratrain.targets.runtime.data.documents import Documents, Positions, end_tokens, pieced
from ratrain.targets.runtime.data.token_layouts import INDEX

TOKENS, DOCUMENTS, TEXT = ".bin", ".jsonl", ".txt"
"""Suffixes of data in a folder: token numbers, documents line by line, a text."""

_ALSO_DOCUMENTS = (".json", ".ndjson")
"""Other suffixes of documents in files that are named themselves; in a folder they may hold anything."""
_MOST_NAMED = 4


def kind_of(file: str) -> str:
    """Return how a file is read by its name: as TOKENS, as DOCUMENTS, or, empty, as plain text."""
    suffix = Path(file).suffix.lower()
    if suffix in _ALSO_DOCUMENTS:
        return DOCUMENTS
    return suffix if suffix in (TOKENS, DOCUMENTS) else ""


def data_files(paths: Sequence[str]) -> list[str]:
    """Return the files that paths name, in their order; for a folder all files below it, sorted by name.

    Raises `DiagnosticError` RT002 and RT090: a folder without data, or with files of other kinds; a file that is named
    twice.
    """
    files = [file for path in paths for file in (_files_within(path) if is_directory(path) else [path])]
    seen: set[Hashable] = set()
    for file in files:
        identity = file_identity(file)
        if identity in seen:
            text = f"'{file}' is named twice as data"
            fail("RT090", text, help="name each file, and the folder it is in, once")
        seen.add(identity)
    return files


def file_identity(path: str) -> Hashable:
    """Return a value that is equal for paths to the same file, also through links; for no file, the path itself."""
    try:
        status = os.stat(path)  # noqa: PTH116 - as in `ratrain.ratrain_ir.support.files`
    except (OSError, ValueError):  # whoever opens it says why
        return path
    return status.st_dev, status.st_ino


def _files_within(folder: str) -> list[str]:
    found: list[Path] = []

    def unreadable(error: OSError) -> None:
        fail("RT002", f"cannot read the training data '{error.filename}': {error.strerror or error}")

    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place) / name for name in sorted(names) if not name.startswith(".")]
    present = set(found)
    found = [
        path for path in found if path.suffix != INDEX or path.with_suffix(TOKENS) not in present
    ]  # read with its tokens
    others = [str(path) for path in found if path.suffix.lower() not in (TOKENS, DOCUMENTS, TEXT)]
    known = f"{DOCUMENTS}, {TEXT} and {TOKENS}"
    if others:
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        text = f"'{folder}' has files that are no data by their names: {', '.join(others[:_MOST_NAMED])}{more}"
        fail("RT090", text, help=f"data in a folder are {known}; name the files one by one, or move the rest out of it")
    if not found:
        fail("RT090", f"'{folder}' has no data in it", help=f"data in a folder are {known}")
    return [str(path) for path in found]


def ended(text: TokenStream, eos: int) -> TokenStream:
    """Append the end token to a text that is one document."""
    end = end_tokens(eos, text.tokens.dtype.type)
    return _in_a_row(text, [text.tokens, end], Documents(np.array([0, len(text.tokens) + 1], np.int64)))


def ended_by(numbers: TokenStream, eos: int) -> TokenStream:
    """Mark documents in token numbers: each ends with token `eos`; tokens after the last one are a document too."""
    ends = [start + np.flatnonzero(chunk == eos) + 1 for start, chunk in chunks_of(numbers.tokens)]
    bounds = np.concatenate([np.zeros(1, np.int64), *ends])
    if bounds[-1] < len(numbers.tokens):
        bounds = np.append(bounds, len(numbers.tokens))
    documents = Documents(bounds)
    return evolve(numbers, documents=documents, digest=digest_of(numbers.tokens, documents))


def refuse_without_ends(name: str, streams: Sequence[TokenStream], eos: int) -> None:
    """Refuse, with RT090, token numbers of documents if none of the streams has the end token."""
    if any(len(one.documents or ()) > 1 or int(one.tokens[len(one.tokens) - 1 :][0]) == eos for one in streams):
        return
    text = f"'{name}' has no token {eos}, which shall end its documents"
    fail("RT090", text, help="name the token that stands at the end of each document, --eos 2")


def joined(name: str, streams: Sequence[TokenStream]) -> TokenStream:
    """Join streams of one kind into one; it has documents if every one of them has."""
    starts = np.cumsum([0, *(len(stream.tokens) for stream in streams)])
    known = [stream.documents for stream in streams if stream.documents is not None]
    documents = _joined(known, starts) if len(known) == len(streams) else None
    whole = _in_a_row(streams[0], [stream.tokens for stream in streams], documents)
    parts = hashlib.blake2b("\n".join(stream.digest for stream in streams).encode(), digest_size=16)
    size = len(whole.tokens) * whole.tokens.dtype.itemsize
    return evolve(whole, name=name, digest=f"{size}-{whole.tokens.dtype.name}-{parts.hexdigest()}")


def _in_a_row(first: TokenStream, parts: Sequence[Any], documents: Documents | None) -> TokenStream:
    """Return a stream like `first` with the tokens of all parts, one after the other."""
    dtype = np.result_type(*(part.dtype for part in parts))

    def read(number: int, low: int, high: int) -> NDArray[Any]:
        tokens: NDArray[Any] = parts[number][low:high]
        return tokens

    tokens = pieced([len(part) for part in parts], read, dtype)
    return evolve(first, tokens=tokens, documents=documents, digest=digest_of(tokens, documents))


def _joined(documents: Sequence[Documents], starts: Positions) -> Documents:
    pairs = list(zip(documents, starts.tolist(), strict=False))
    bounds = np.concatenate([np.zeros(1, np.int64), *(held.bounds[1:] + start for held, start in pairs)])
    if all(held.answers is None for held in documents):
        return Documents(bounds)
    return Documents(bounds, np.concatenate([_counted(held) + start for held, start in pairs]))


def _counted(documents: Documents) -> Positions:
    """Return the runs of tokens that count: of documents that count whole, themselves."""
    if documents.answers is not None:
        return documents.answers
    whole = np.stack([documents.bounds[:-1], documents.bounds[1:]], axis=1)
    return whole[whole[:, 0] < whole[:, 1]]
