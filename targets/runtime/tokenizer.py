"""Text to tokens with a Hugging Face `tokenizer.json`, through the `tokenizers` package (extra `tokenizer`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain_ir.diagnostics import fail
from ratrain_ir.files import read_text
from targets.runtime.data import TokenStream, checked_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE = 1 << 20  # bytes of text that are tokenised on their own
_TOGETHER = 16  # pieces: the package spreads them over its threads
_LINE_FEED = 0x0A
_CONTINUES = 0b1000_0000  # the upper two bits of a byte inside a UTF-8 character


def tokenized(text: TokenStream, tokenizer_file: str, *, vocab_size: int) -> TokenStream:
    """The tokens of a text, given as a stream of its UTF-8 bytes; no special tokens are added.

    The text is taken in pieces of about a MiB that end with a line: only a token that would span such an end can differ from
    those of the whole text. Raises RT002 (cannot be read) and RT090: the package is not installed, the file is no
    tokenizer, its tokens are outside the vocabulary.
    """
    tokenizer = _load(tokenizer_file)
    found: list[NDArray[np.uint32]] = []
    pieces = iter(_pieces(np.asarray(text.tokens, np.uint8)))
    while batch := list(islice(pieces, _TOGETHER)):
        encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
        found += [np.array(encoding.ids, np.uint32) for encoding in encodings]
    tokens = np.concatenate(found)
    return checked_stream(f"{text.name} by {tokenizer_file}", tokens, vocab_size)


def _load(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail(
            "RT090",
            f"'{path}' needs the package tokenizers, which is not installed",
            help="pip install 'ratrain[tokenizer]', or give token numbers (*.bin)",
        )
    content = read_text(path, "tokenizer")
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # noqa: BLE001 - the package raises no class of its own
        fail("RT090", f"'{path}' is no tokenizer.json that the package tokenizers reads: {error}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pieces(text: NDArray[np.uint8]) -> Iterator[str]:
    """The text in pieces: up to the last line end within reach, else up to a whole character."""
    start = 0
    while start < len(text):
        stop = min(start + _PIECE, len(text))
        if stop < len(text):
            feeds = np.flatnonzero(text[start:stop] == _LINE_FEED)
            stop = start + int(feeds[-1]) + 1 if len(feeds) else stop
            while text[stop] & 0b1100_0000 == _CONTINUES:
                stop -= 1
        yield text[start:stop].tobytes().decode()
        start = stop
