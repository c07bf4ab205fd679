"""Text to tokens with a Hugging Face `tokenizer.json`, through the `tokenizers` package (extra `tokenizer`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_regular, is_there, read_text
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.data.data import TokenStream, checked_stream
from ratrain.targets.runtime.data.documents import Documents, bounds_of
from ratrain.targets.runtime.weights.companions import TOKENIZER_FILE
from ratrain.targets.runtime.weights.weights import model_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.data.data import Tokens

_SAYING_SPECIAL_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")

_PIECE = 1 << 20  # bytes of text that are tokenised on their own
_TOGETHER = 16  # pieces in one call: the package spreads them over its threads
_LINE_FEED = 0x0A
_CONTINUES = 0b1000_0000  # the upper two bits of a byte inside a UTF-8 character


@frozen
class TokenizerChoice:
    """Path of a tokenizer.json, the run's name for it, and where it was found if nobody named it."""

    path: str
    name: str
    found: str = ""


def tokenizer_of_weights(weights: str) -> str | None:
    """Return the tokenizer.json in the directory of a model's weights; None if there is none.

    Raises RT002 where that cannot be told, and RT090 where the directory has a tokenizer of another format: reading
    bytes instead would train on other tokens.
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
            help=f"convert it ('transformers' saves a {TOKENIZER_FILE}) and name it with --tokenizer, give "
            "token numbers "
            "(*.bin), or say --tokenizer bytes for one token a byte",
        )
    return None


@frozen
class Encoder:
    """Loaded tokenizer that turns texts into tokens; no special tokens are added."""

    tokenizer: TokenizerChoice
    loaded: Any

    @property
    def token(self) -> str:
        """Description of a token."""
        return f"one of the tokenizer '{self.tokenizer.name}'"

    def __call__(self, source: str, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the tokens of each text. Raises `DiagnosticError` RT090, naming `source`, if it cannot take them."""
        return [np.array(encoding.ids, np.uint32) for encoding in self._encodings(source, texts)]

    def with_starts(self, source: str, texts: list[str]) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Yield the tokens of each text, and the character that each of them begins at. Raises as `__call__`."""
        for encoding in self._encodings(source, texts):
            starts = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
            yield np.array(encoding.ids, np.uint32), np.maximum.accumulate(starts)

    def _encodings(self, source: str, texts: list[str]) -> Any:
        try:
            return self.loaded.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the package raises no class of its own
            fail("RT090", f"the tokenizer '{self.tokenizer.name}' cannot take '{source}': {error}")

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.loaded.decode(list(tokens), skip_special_tokens=False))

    def named(self, stream: TokenStream, name: str, documents: Documents | None, digest: str) -> TokenStream:
        """Return a stream of its tokens under the name of their text."""
        choice = self.tokenizer
        return evolve(stream, name=name, tokenizer=choice.name, found=choice.found, documents=documents, digest=digest)

    def end_of_document(self) -> int:
        """Return the token that ends a document: the `eos_token` in the files next to the tokenizer.

        Raises `DiagnosticError` RT002 and RT090 where no file names it.
        """
        places = [Path(self.tokenizer.path).with_name(name) for name in _SAYING_SPECIAL_TOKENS]
        said = ((place, _eos_token(str(place))) for place in places if is_regular(place))
        place, token = next((entry for entry in said if entry[1] is not None), (None, None))
        if token is None:
            fail(
                "RT090",
                f"no file next to the tokenizer '{self.tokenizer.name}' has an eos_token, which would end a document",
                help=f"{_SAYING_SPECIAL_TOKENS[0]} with an eos_token belongs next to it; or give the token's "
                "number: --eos 2",
            )
        number = self.loaded.token_to_id(token)
        if number is None:
            text = (
                f"'{place}' has {shown(token)} as eos_token, which the tokenizer '{self.tokenizer.name}' does not know"
            )
            fail("RT090", text, help="put the tokenizer's own token there, or name its number: --eos 2")
        return int(number)


def names_end(path: str) -> bool:
    """Tell whether a file beside a tokenizer.json names an `eos_token`."""
    places = [Path(path).with_name(name) for name in _SAYING_SPECIAL_TOKENS]
    return any(_eos_token(str(place)) is not None for place in places if is_regular(place))


def _eos_token(path: str) -> str | None:
    try:
        held = json.loads(read_text(path, "tokenizer"))
    except (ValueError, RecursionError):
        fail(
            "RT090",
            f"'{path}' is no JSON",
            help="put the file of the tokenizer back, or name the token's number: --eos 2",
        )
    token = held.get("eos_token") if isinstance(held, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def encoder_of(tokenizer: TokenizerChoice) -> Encoder:
    """Load the encoder of a tokenizer.json.

    Raises RT002 (cannot be read) and RT090: the package is not installed, the file is no tokenizer.
    """
    return Encoder(tokenizer, _load(tokenizer.path))


def tokenized(text: TokenStream, encoder: Encoder, *, vocab_size: int) -> TokenStream:
    """Tokenise a text, given as a stream of its UTF-8 bytes; no special tokens are added.

    It is cut into pieces of about a MiB that end with a line. Only a token that would span such a cut can differ from
    the tokens of the whole text. Raises RT090 where tokens are outside the vocabulary.
    """
    encoded: list[NDArray[np.uint32]] = []
    pieces = iter(_pieces(text.tokens))
    while batch := list(islice(pieces, _TOGETHER)):
        encoded += encoder(text.name, batch)
    tokens = np.concatenate(encoded)
    stream = checked_stream(f"{text.name} by {encoder.tokenizer.path}", tokens, vocab_size, encoder.token)
    return encoder.named(stream, text.name, Documents(bounds_of([len(tokens)])), stream.digest)


def _load(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail(
            "RT090",
            f"'{path}' needs the package tokenizers, which is not installed",
            help="pip install 'ratrain[tokenizer]', give token numbers (*.bin), or say --tokenizer bytes for "
            "one token a byte",
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
    """Yield the text in pieces: up to the last line end within reach, else up to a whole character."""
    start = 0
    while start < len(text):
        piece = text[start : start + _PIECE + 1]  # one byte more, to see whether the last character goes on
        stop = min(_PIECE, len(piece))
        if stop < len(piece):
            feeds = np.flatnonzero(piece[:stop] == _LINE_FEED)
            stop = int(feeds[-1]) + 1 if len(feeds) else stop
            while piece[stop] & 0b1100_0000 == _CONTINUES:
                stop -= 1
        yield piece[:stop].tobytes().decode()
        start += stop
