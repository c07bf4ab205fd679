"""Text to tokens with a Hugging Face `tokenizer.json`, through the `tokenizers` package (extra `tokenizer`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.files import is_there, read_text
from ratrain.targets.runtime.companions import TOKENIZER_FILE
from ratrain.targets.runtime.data import TokenStream, checked_stream
from ratrain.targets.runtime.weights import model_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.data import Tokens

_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")

_PIECE = 1 << 20  # bytes of text that are tokenised on their own
_TOGETHER = 16  # pieces: the package spreads them over its threads
_LINE_FEED = 0x0A
_CONTINUES = 0b1000_0000  # the upper two bits of a byte inside a UTF-8 character


@frozen
class TokenizerChoice:
    """A tokenizer.json, the name that a run calls it by, and where it was found, where nobody named it."""

    path: str
    name: str
    found: str = ""


def tokenizer_beside(weights: str) -> str | None:
    """The tokenizer.json of the model that weights are of; None where there is none.

    Raises RT002 where that cannot be told, and RT090 where the directory has a tokenizer that is not read here: to go on with bytes
    would train on other tokens.
    """
    directory = model_directory(weights)
    if directory is None:
        return None
    folder = Path(directory)
    if is_there(folder / TOKENIZER_FILE):
        return str(folder / TOKENIZER_FILE)
    other = next((name for name in _OTHER_FORMATS if is_there(folder / name)), None)
    if other is not None:
        fail(
            "RT090",
            f"'{directory}' has a tokenizer in a format that is not read here ({other}), and no {TOKENIZER_FILE}",
            help=f"convert it ('transformers' saves a {TOKENIZER_FILE}) and name it with --tokenizer, give token numbers "
            "(*.bin), or say --tokenizer bytes for one token a byte",
        )
    return None


def tokenized(text: TokenStream, tokenizer: TokenizerChoice, *, vocab_size: int) -> TokenStream:
    """The tokens of a text, given as a stream of its UTF-8 bytes; no special tokens are added.

    The text is taken in pieces of about a MiB that end with a line: only a token that would span such an end can differ from
    those of the whole text. Raises RT002 (cannot be read) and RT090: the package is not installed, the file is no
    tokenizer, its tokens are outside the vocabulary.
    """
    loaded = _load(tokenizer.path)
    encoded: list[NDArray[np.uint32]] = []
    pieces = iter(_pieces(text.tokens))
    while batch := list(islice(pieces, _TOGETHER)):
        try:
            encodings = loaded.encode_batch(batch, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the package raises no class of its own
            fail("RT090", f"the tokenizer '{tokenizer.name}' cannot take '{text.name}': {error}")
        encoded += [np.array(encoding.ids, np.uint32) for encoding in encodings]
    tokens = np.concatenate(encoded)
    token = f"one of the tokenizer '{tokenizer.name}'"
    stream = checked_stream(f"{text.name} by {tokenizer.path}", tokens, vocab_size, token)
    return evolve(stream, name=text.name, tokenizer=tokenizer.name, found=tokenizer.found)


def _load(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail(
            "RT090",
            f"'{path}' needs the package tokenizers, which is not installed",
            help="pip install 'ratrain[tokenizer]', give token numbers (*.bin), or say --tokenizer bytes for one token a byte",
        )
    content = read_text(path, "tokenizer")
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # noqa: BLE001 - the package raises no class of its own
        fail("RT090", f"'{path}' is no tokenizer.json that the package tokenizers reads: {error}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pieces(text: Tokens) -> Iterator[str]:
    """The text in pieces: up to the last line end within reach, else up to a whole character."""
    start = 0
    while start < len(text):
        piece = text[start : start + _PIECE + 1]  # with the byte behind it, which says whether a character goes on
        stop = min(_PIECE, len(piece))
        if stop < len(piece):
            feeds = np.flatnonzero(piece[:stop] == _LINE_FEED)
            stop = int(feeds[-1]) + 1 if len(feeds) else stop
            while piece[stop] & 0b1100_0000 == _CONTINUES:
                stop -= 1
        yield piece[:stop].tobytes().decode()
        start += stop
