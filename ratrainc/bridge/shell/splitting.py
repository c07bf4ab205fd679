"""Splitting of expanded words into fields, at characters of IFS, and the most that a word may hold."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, evolve

from ratrain.ratrainc.bridge.shell.shell_text import Text, TextRun, Unknown, nothing_known

MOST = 1 << 16
"""Most characters or words of one word: far above any command, and soon reached by a text that doubles in a loop."""


@define
class WordPart:
    """A part of a word before it is split; `ends` ends the word after this part, quoted or not."""

    text: Text
    quoted: bool
    ends: bool = False


def split(parts: list[WordPart], spaces: str) -> list[Text]:
    """Split the parts of a word into fields, at the characters of IFS (`spaces`).

    Only parts that are not quoted are split. An unknown part stays in its word.
    """
    found: list[Text] = []
    pieces: list[TextRun] = []
    begun = False

    def end() -> None:
        nonlocal begun
        if begun:
            found.append(Text(tuple(pieces), quoted_empty=not pieces))
            pieces.clear()
        begun = False

    for part in parts:
        if part.quoted:
            pieces += part.text.pieces
            begun = True
        else:
            for piece in part.text.pieces:
                if piece.unknown is not None:
                    pieces.append(piece)
                    begun = True
                    continue
                for is_word, start, stop in _runs(piece.text, spaces):
                    if is_word:
                        pieces.append(piece.part(start, stop))
                        begun = True
                    else:
                        end()
        if part.ends:
            end()
    end()
    # A word that is one unknown expansion without quotes may be several words: `bare` tells so.
    if len(found) == 1 and len(parts) == 1 and not parts[0].quoted and found[0].sole is not None:
        found[0] = evolve(found[0], bare=True)
    if len(found) > MOST:
        found = [_too_long(found[0])]
    return [bounded(each) for each in found]


def _runs(text: str, spaces: str) -> Iterator[tuple[bool, int, int]]:
    """Yield the runs of a text: True if the characters are a word's, the start, and the exclusive end."""
    start = 0
    for at in range(1, len(text) + 1):
        # A run ends where characters change between spaces and others.
        if at == len(text) or (text[at] in spaces) != (text[start] in spaces):
            yield text[start] not in spaces, start, at
            start = at


def bounded(text: Text) -> Text:
    """Return a text, or one of which nothing is known in place of one longer than any command."""
    # A limit on pieces too: a text of many short pieces is slow to expand again and again.
    if len(text.pieces) <= MOST >> 6 and sum(len(piece.text) for piece in text.pieces) <= MOST:
        return text
    return _too_long(text)


def _too_long(text: Text) -> Text:
    return nothing_known("...", Unknown("", "it is longer than any command", text.place()))
