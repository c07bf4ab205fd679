"""Tests of users' texts on a page in Markdown: they are shown as written, and are no markup or HTML of it."""

from __future__ import annotations

import html
import re

from hypothesis import example, given
from hypothesis import strategies as st

from ratrain.ratrainc.console.markdown_text import escaped, prose

ODD = st.text(st.sampled_from("`<>&|*_[]\\ab \n!#") | st.characters(), max_size=40)


@given(ODD)
@example("<script>alert(1)</script>|x|*y*|_z_|[a](javascript:b)|`c`\\")
def test_an_escaped_text_reads_as_itself_and_has_no_markup(text: str) -> None:
    found = escaped(text)
    assert html.unescape(re.sub(r"\\(.)", r"\1", found)) == " ".join(html.unescape(text).split()) or "&" in text
    bare = re.sub(r"\\.|&(lt|gt|amp);", "", found)
    assert not re.search(r"[\\`*\[\]<>&|\n]", bare)
    assert "snake_case" in escaped(f"snake_case{text}")


def spans(paragraph: str) -> list[tuple[bool, str]]:
    """A paragraph in pieces, by the rule of CommonMark, letter by letter; of each, whether it is code."""
    found, text, at = [], "", 0
    while at < len(paragraph):
        if paragraph[at] == "\\":
            text, at = text + paragraph[at : at + 2], at + 2
            continue
        run = re.match("`+", paragraph[at:])
        if run is None:
            text, at = text + paragraph[at], at + 1
            continue
        ticks = run[0]
        end = re.search(f"(?<!`){ticks}(?!`)", paragraph[at + len(ticks) :])
        stop = at + len(ticks) + (end.end() if end else 0)
        if end:
            found += [(False, text), (True, paragraph[at:stop])]
            text = ""
        else:
            text += ticks
        at = stop
    return [*found, (False, text)]


@given(st.text(st.sampled_from("`<>\\a "), max_size=24))
@example("`code <b>` and <script>")
@example("``<b>` <i>")
@example("\\`<b>`")
@example("\\\\`<b>`")
def test_prose_has_no_tag_outside_of_code(paragraph: str) -> None:
    found = prose(paragraph)
    assert not any("<" in text for is_code, text in spans(found) if not is_code)
    assert found.replace("&lt;", "<") == paragraph


def test_markdown_of_prose_stays() -> None:
    text = "See [the page](a.md): `a < b`, **bold**, a > b."
    assert prose(text) == text
