"""Reads a report page as a browser would: its elements, and the columns and lines it holds."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np

VOID = {"meta", "br", "input", "link", "img", "hr", "base", "source"}


class Page(HTMLParser):
    """A page that has been read; fails where its tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        """text by the id of the element it stands in directly"""
        self.heading = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, f"<{tag}/> is not closed by its slash in HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, name = self._open[-1]
        if tag == "h1":
            self.heading += data
        if name is not None:
            self.texts[name] = self.texts.get(name, "") + data

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["facts"])
        return found

    def lines(self, name: str) -> list[str]:
        return self._bytes(name).decode().split("\n")

    def columns(self, name: str) -> dict[str, np.ndarray]:
        (directory,) = [attrs["data-columns"] for _, attrs in self.tags if attrs.get("id") == name]
        body, place, found = self._bytes(name), 0, {}
        for entry in (directory or "").split():
            column, kind, length = entry.split(":")
            found[column] = np.frombuffer(body, f"<{kind}", int(length), place)
            assert place % found[column].itemsize == 0, "typed arrays start at multiples of their item size"
            place += found[column].nbytes
        assert place == len(body)
        return found

    def _bytes(self, name: str) -> bytes:
        return zlib.decompress(base64.b64decode(self.texts[name], validate=True))
