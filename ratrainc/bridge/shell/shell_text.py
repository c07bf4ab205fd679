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
    """maps the start and exclusive end index of a part to its place in a file"""
    folder: str | None = None
    """folder of the file; None if the text does not come from a file"""
    path: str = ""


NOT_RUN = "scripts are read, not run"


@frozen
class Unknown:
    """A part of a text that the script does not determine."""

    name: str
    """variable that decides it, for `--set`; empty if there is none"""
    why: str
    """reason, as a clause of a message"""
    place: Place = field(eq=False)
    unset: bool = False
    """true for a variable that is never assigned: it is empty unless the environment sets it"""

    def help(self) -> str | None:
        """Return advice to set the variable that decides it; None if there is no variable."""
        return f"give its value: --set {self.name}=VALUE" if self.name else None


@frozen
class TextRun:
    """A run of characters with one origin."""

    text: str
    place: Callable[[int, int], Place] = field(eq=False)
    start: int = field(eq=False)
    end: int = field(eq=False)
    exact: bool = field(default=True, eq=False)
    """true if its characters are the characters of its origin, one for one"""
    unknown: Unknown | None = None

    def part(self, start: int, end: int) -> TextRun:
        """Return the run from a start index to an exclusive end index."""
        # Here a character has no place of its own: each part has the place of the whole run.
        if self.unknown is not None or not self.exact:
            return TextRun(self.text[start:end], self.place, self.start, self.end, exact=False, unknown=self.unknown)
        return TextRun(self.text[start:end], self.place, self.start + start, self.start + end)

    def where(self) -> Place:
        """Return the place of this piece in its file."""
        return self.place(self.start, self.end)


@frozen
class Text:
    """A text in pieces. Two texts are equal if they read the same, wherever they come from."""

    pieces: tuple[TextRun, ...] = field(default=(), eq=False)
    key: tuple[object, ...] = field(init=False, repr=False)
    """characters and unknown parts in order, adjacent characters joined"""
    quoted_empty: bool = field(default=False, eq=False)
    bare: bool = field(default=False, eq=False)
    """true for a word that is one unquoted expansion of an unknown value: it may become no word, or several"""

    def __attrs_post_init__(self) -> None:
        # The boundaries of pieces do not count: known characters next to each other become one item.
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
        """The characters; for unknown parts, the script's own text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def unknown(self) -> Unknown | None:
        """The first unknown part, or None."""
        return next((piece.unknown for piece in self.pieces if piece.unknown is not None), None)

    @property
    def sole(self) -> Unknown | None:
        """The unknown part, if it is the whole text; else None."""
        return self.key[0] if len(self.key) == 1 and isinstance(self.key[0], Unknown) else None

    def place(self) -> Place:
        """Return the place of its first character."""
        return self.pieces[0].where() if self.pieces else Place()

    def part(self, start: int, end: int) -> Text:
        """Return the text between two indices into `shown`; the end is exclusive."""
        pieces, at = [], 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(end - at, len(piece.text))
            if low < high:
                pieces.append(piece.part(low, high))
            at += len(piece.text)
        return Text(tuple(pieces))

    def replaced(self, known: dict[Unknown, Text]) -> Text:
        """Return the text with values in place of the unknown parts in `known`."""
        if not known or not any(piece.unknown in known for piece in self.pieces):
            return self
        pieces: list[TextRun] = []
        for piece in self.pieces:
            pieces += known[piece.unknown].pieces if piece.unknown in known else (piece,)
        return Text(tuple(pieces), quoted_empty=self.quoted_empty)

    def script(self) -> Script:
        """Return the text as a script with the same places; it must not have unknown parts."""

        def place(start: int, end: int) -> Place:
            # An empty range has no piece: the next character gives the place, and the first one at the end of the text.
            found = self.part(start, max(end, start + 1)).pieces
            return (found or self.pieces)[0].where() if self.pieces else Place()

        return Script(self.shown, place)


def joined(texts: Iterable[Text], between: Text | None = None) -> Text:
    """Concatenate texts, with `between` between them."""
    pieces: list[TextRun] = []
    for number, text in enumerate(texts):
        if number and between is not None:
            pieces += between.pieces
        pieces += text.pieces
    return Text(tuple(pieces))


def literal(text: str, origin: Text | None = None) -> Text:
    """Make a text that no file contains in this form; its place is the place of `origin`, from which it follows."""
    first = origin.pieces[0] if origin is not None and origin.pieces else None
    if first is None:
        return Text((TextRun(text, _nowhere, 0, 0, exact=False),)) if text else Text()
    return Text((TextRun(text, first.place, first.start, first.end, exact=False),))


def nothing_known(shown: str, unknown: Unknown) -> Text:
    """Make a text that is wholly unknown and reads as `shown` in messages."""
    return Text((TextRun(shown, lambda _start, _end: unknown.place, 0, 0, exact=False, unknown=unknown),))


def _nowhere(_start: int, _end: int) -> Place:
    return Place()
