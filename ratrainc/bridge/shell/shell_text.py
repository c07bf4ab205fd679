"""Text of a script: every character has a place in a file, and unknown parts name the variable that decides them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import field, frozen

from ratrain.ratrain_ir.support.text import Place


@frozen
class Script:
    """A text that is read as a script: a file, or a string that the shell is given to run."""

    text: str
    place: Callable[[int, int], Place]
    """from the start and exclusive end index of a part to its place in a file"""
    folder: str | None = None
    """where the file lies; None of what is no file"""
    path: str = ""


@frozen
class Unknown:
    """A part of a text that the script does not say."""

    name: str
    """the variable that `--set` gives a value, or empty if none does"""
    why: str
    """in words, after "because" """
    place: Place = field(eq=False)
    unset: bool = False
    """a variable that is never assigned: it expands to nothing if the environment does not have it"""

    def help(self) -> str | None:
        """Return the way out, where a variable is one."""
        return f"give its value: --set {self.name}=VALUE" if self.name else None


@frozen
class TextRun:
    """A run of characters with one origin."""

    text: str
    place: Callable[[int, int], Place] = field(eq=False)
    start: int = field(eq=False)
    end: int = field(eq=False)
    exact: bool = field(default=True, eq=False)
    """its characters stand one for one in its origin"""
    unknown: Unknown | None = None

    def part(self, start: int, end: int) -> TextRun:
        """Return the characters from an index to an exclusive end index."""
        if self.unknown is not None or not self.exact:
            return TextRun(self.text[start:end], self.place, self.start, self.end, exact=False, unknown=self.unknown)
        return TextRun(self.text[start:end], self.place, self.start + start, self.start + end)

    def where(self) -> Place:
        """Return the place of this piece in its file."""
        return self.place(self.start, self.end)


@frozen
class Text:
    """A text in pieces. Two are equal where they read the same, wherever they come from."""

    pieces: tuple[TextRun, ...] = field(default=(), eq=False)
    key: tuple[object, ...] = field(init=False, repr=False)
    quoted_empty: bool = field(default=False, eq=False)
    bare: bool = field(default=False, eq=False)
    """it stood in a command as one unquoted expansion of something unknown: it may be no word, or several"""

    def __attrs_post_init__(self) -> None:
        key: list[object] = []
        for piece in self.pieces:
            item: object = piece.unknown if piece.unknown is not None else piece.text
            if isinstance(item, str) and key and isinstance(key[-1], str):
                key[-1] = key[-1] + item
            elif item != "":
                key.append(item)
        object.__setattr__(self, "key", tuple(key))

    @property
    def plain(self) -> str | None:
        """The characters, or None if some are unknown."""
        return None if any(piece.unknown for piece in self.pieces) else self.shown

    @property
    def shown(self) -> str:
        """The characters, and of unknown parts what the script has in their place."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def unknown(self) -> Unknown | None:
        """The first part that is unknown."""
        return next((piece.unknown for piece in self.pieces if piece.unknown is not None), None)

    @property
    def sole(self) -> Unknown | None:
        """The unknown that is all of the text."""
        return self.key[0] if len(self.key) == 1 and isinstance(self.key[0], Unknown) else None

    def place(self) -> Place:
        """Return the place of its first character."""
        return self.pieces[0].where() if self.pieces else Place()

    def part(self, start: int, end: int) -> Text:
        """Return the characters of `shown` from an index to an exclusive end index."""
        pieces, at = [], 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(end - at, len(piece.text))
            if low < high:
                pieces.append(piece.part(low, high))
            at += len(piece.text)
        return Text(tuple(pieces))

    def replaced(self, known: dict[Unknown, Text]) -> Text:
        """Return the text with parts that have become known."""
        if not known or not any(piece.unknown in known for piece in self.pieces):
            return self
        pieces: list[TextRun] = []
        for piece in self.pieces:
            pieces += known[piece.unknown].pieces if piece.unknown in known else (piece,)
        return Text(tuple(pieces), quoted_empty=self.quoted_empty)

    def script(self) -> Script:
        """Return the text as a script of its own; unknown parts must be gone."""

        def place(start: int, end: int) -> Place:
            found = self.part(start, max(end, start + 1)).pieces
            return (found or self.pieces)[0].where() if self.pieces else Place()

        return Script(self.shown, place)


def joined(texts: Iterable[Text], between: Text | None = None) -> Text:
    """Return one text of several."""
    pieces: list[TextRun] = []
    for number, text in enumerate(texts):
        if number and between is not None:
            pieces += between.pieces
        pieces += text.pieces
    return Text(tuple(pieces))


def literal(text: str, origin: Text | None = None) -> Text:
    """Return a text that nobody wrote as it is, at the place of another that it follows from."""
    first = origin.pieces[0] if origin is not None and origin.pieces else None
    if first is None:
        return Text((TextRun(text, _nowhere, 0, 0, exact=False),)) if text else Text()
    return Text((TextRun(text, first.place, first.start, first.end, exact=False),))


def nothing_known(shown: str, unknown: Unknown) -> Text:
    """Return a text of which nothing is known."""
    return Text((TextRun(shown, lambda _start, _end: unknown.place, 0, 0, exact=False, unknown=unknown),))


def _nowhere(_start: int, _end: int) -> Place:
    return Place()
