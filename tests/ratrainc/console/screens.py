"""A terminal of memory: what somebody sees who runs a command, after all that was drawn and taken away."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratrain.ratrainc.console import console

if TYPE_CHECKING:
    import pytest

_PART = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A stream that says it is a terminal; `lines` is what its screen shows, of lines as long as they are."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        rows: list[str] = [""]
        row = column = 0
        for number, letter, control, text in _PART.findall(self.getvalue()):
            count = int(number) if number.isdigit() else 1
            if letter == "A":
                row = max(0, row - count)
            elif letter == "K":
                rows[row] = "" if number == "2" else rows[row][:column]
            elif control == "\r":
                column = 0
            elif control == "\n":  # as a terminal's line discipline has it: to the start of the next line
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif text:
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                column += len(text)
        return [line.rstrip() for line in rows]


@contextmanager
def terminal(patch: pytest.MonkeyPatch, columns: int = 80) -> Iterator[Terminal]:
    """Stdout and stderr are one terminal."""
    screen = Terminal()
    patch.setenv("COLUMNS", str(columns))
    patch.setenv("TERM", "xterm")
    with patch.context() as streams:
        streams.setattr(sys, "stdout", screen)
        streams.setattr(sys, "stderr", screen)
        for cached in (console.errors, console.output):
            cached.cache_clear()
        try:
            yield screen
        finally:
            for cached in (console.errors, console.output):
                cached.cache_clear()
