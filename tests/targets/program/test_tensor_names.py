"""Names of tensors, asked of all characters at once, against the names that the grammar of schedules has."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.program.tensor_names import are_names, longest

NAME = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*")
"""As `TENSOR` of grammar/rtir.lark."""


@given(st.text("aZ_09-.\n", max_size=12) | st.text("a_0.-\n é²\u0660@[`{~\x7f", max_size=6))
def test_lines_are_names_as_the_grammar_has_them(lines: str) -> None:
    each = lines.split("\n")
    assert are_names(lines) == all(NAME.fullmatch(line) for line in each)
    assert longest(lines) == max(map(len, each))


@pytest.mark.parametrize("code", range(128))
def test_every_character_is_as_the_grammar_has_it(code: int) -> None:
    for lines in (chr(code), f"a{chr(code)}", f"a.{chr(code)}", f"a.b\n{chr(code)}"):
        assert are_names(lines) == all(NAME.fullmatch(line) for line in lines.split("\n")), repr(lines)
