"""Two readers of one language: what the quick one reads, the grammar reads equal, and it reads nothing the grammar refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark.exceptions import UnexpectedInput

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.module import SourceText
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, pipelines
from ratrain.ratrain_ir.text.parser import grammar_module, quick_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.text.quick_syntax import UnusualTextError, quick_records
from ratrain.ratrain_ir.text.syntax import parse_records

if TYPE_CHECKING:
    import random

    from ratrain.ratrain_ir.module import Module

PASSES = (("recompute", {"policy": ("full", "attention")}), ("insert-release", {}), ("allocate-ddr", {}))
FRAGMENTS = (
    *'%@.,:=+()[]{}*/"-_ \t\r\n0x1aé\x0b\u00a0',
    *("//", ".*", " // of no consequence", " carried", " at 0x40", " using %w.head", " : f16[1]", "%", " = ", " += ", "using", "at"),
    *("stage @0 {", "  }\n", "}", "\n\n", "release", "pipeline", "forward", "m1", "head", "attention.0", "٣"),
    *OP_CLASSES,
    *(kind.value for kind in StateKind),
)  # fmt: skip


def source_of(text: str) -> SourceText:
    return SourceText("<text>", tuple(text.split("\n")))


def lines_of(module: Module) -> list[object]:
    """Line numbers, which `first_difference` leaves out."""
    found: list[object] = []
    for stage in module.stages:
        found += [stage.line, [t.line for t in stage.tensors.values()], [op.line for op in stage.ops]]
    return found


def outcome(read, source):
    """The module, or the diagnostics it is refused with."""
    try:
        return read(source), None
    except DiagnosticError as error:
        return None, [item.render() for item in error.diagnostics]


def both_agree(text: str) -> bool:
    """Compare the readers; whether the quick one took the text. `parse_module` asks the grammar about what it did not."""
    source = source_of(text)
    quick = quick_module(source)
    module, problems = outcome(grammar_module, source)
    if quick is not None:
        assert module is not None, problems
        assert first_difference(quick, module) is None
        assert lines_of(quick) == lines_of(module)
        assert quick.source == module.source
    return quick is not None


@settings(max_examples=20)
@given(cases(), pipelines(PASSES))
def test_both_read_what_is_printed(case, pipeline):
    text = print_module(PassManager(FakeTarget()).run(case.module(), pipeline))
    assert both_agree(text)


@settings(max_examples=25)
@given(cases(max_layers=2, max_stages=2, max_micro_batches=2), st.data())
def test_layout_that_does_not_matter(case, data):
    """Empty lines, comments, indentation and Windows line ends are no reason to be slow."""
    ends = st.sampled_from(("", "", "", "  ", "\r", " // of: no (consequence) }", "\n", "\n// 1\n\n", "\t\r"))
    starts = st.sampled_from(("", "", "   ", "\t"))
    lines = [data.draw(starts) + line + data.draw(ends) for line in print_module(case.module()).splitlines()]
    assert both_agree("\n".join(lines))


@st.composite
def spoilt_texts(draw: st.DrawFn) -> str:
    """A small module's text after a few edits: characters, words and lines put in, taken out, exchanged."""
    case = draw(cases(max_layers=1, max_stages=2, max_micro_batches=2))
    module = case.module()
    if draw(st.booleans()):
        PassManager(FakeTarget()).run(module, "recompute,allocate-ddr")
    text = print_module(module)
    for _ in range(draw(st.integers(1, 3))):
        text = spoil(text, draw(st.sampled_from(EDITS)), draw(st.randoms(use_true_random=False)))
    return text


EDITS = ("insert", "delete", "replace", "swap words", "swap lines", "drop line", "double line", "join lines", "split")


def spoil(text: str, edit: str, choose: random.Random) -> str:
    at = choose.randrange(len(text))
    stop = min(len(text), at + choose.choice((1, 1, 2, 8)))
    if edit == "insert":
        return text[:at] + choose.choice(FRAGMENTS) + text[at:]
    if edit == "delete":
        return text[:at] + text[stop:]
    if edit == "replace":
        return text[:at] + choose.choice(FRAGMENTS) + text[stop:]
    if edit == "split":
        return text[:at] + choose.choice(("\n", "\r\n", " \n ", "//\n")) + text[at:]
    if edit == "swap words":
        words = text.split(" ")
        first, second = choose.randrange(len(words)), choose.randrange(len(words))
        words[first], words[second] = words[second], words[first]
        return " ".join(words)
    lines = text.split("\n")
    first, second = choose.randrange(len(lines)), choose.randrange(len(lines))
    if edit == "swap lines":
        lines[first], lines[second] = lines[second], lines[first]
    elif edit == "drop line":
        del lines[first]
    elif edit == "double line":
        lines.insert(second, lines[first])
    else:
        lines[first : first + 2] = [" ".join(lines[first : first + 2])]
    return "\n".join(lines)


@settings(max_examples=50)
@given(spoilt_texts())
def test_spoilt_texts(text):
    both_agree(text)


NAMES = ("%a", "%a.b", "%a.*", "%a-1", "%1", "%a..b", "%a.", "%é", "a", "%")
WORDS = ("view", "forward", "using", "at", "carried", "stage", "module", "m0", "@1", "@", "a+b", "1", "1.5", "é", "")
BLANKS = st.sampled_from((" ", " ", " ", " ", " ", "", "  ", "\t"))


@st.composite
def statements(draw: st.DrawFn) -> str:
    """A line that is nearly a declaration or an op: parts left out, odd names, odd blanks."""

    def part(*texts: str) -> str:
        return draw(BLANKS) + draw(st.sampled_from((*texts, *texts, "")))

    def tensors() -> str:
        return draw(st.sampled_from((", ", ", ", ",", " "))).join(draw(st.lists(st.sampled_from(NAMES), max_size=2)))

    word = st.sampled_from(WORDS)
    rest = part("// (%a) }", "/", "}", "\r", "%a")
    if draw(st.booleans()):
        type_ = part("f16[1]", "f16[]", "x1[ ,2]", "f[1]")
        offset = part("at 0x1F", "at 0x", "at 16", "at")
        return f"{draw(word)} {draw(st.sampled_from(NAMES))}{part(':')}{type_}{part('carried')}{offset}{rest}"
    writes, updates = (tensors() + part(sign) + " " if draw(st.booleans()) else "" for sign in ("=", "+="))
    reads = part("(") + tensors() + ")" if draw(st.booleans()) else ""
    scratch = part("using") + " " + tensors() if draw(st.booleans()) else ""
    return f"{writes}{updates}{' '.join(draw(st.lists(word, min_size=1, max_size=3)))}{reads}{scratch}{rest}"


def text_around(line: str) -> str:
    return f"rtir 2\nmodule @m level placed {{\n  stage @0 {{\n    {line}\n  }}\n}}\n"


@settings(max_examples=200)
@given(statements())
def test_the_records_of_a_line_are_equal(line):
    """Whether or not they mean anything. What only the grammar reads, or refuses, is no concern of the quick reader."""
    text = text_around(line)
    try:
        quick = quick_records(text.split("\n"))
        quick = attrs.evolve(quick, stages=list(quick.stages))
    except (UnusualTextError, UnexpectedInput):
        return
    assert quick == parse_records(text)


@pytest.mark.parametrize(
    "line",
    [
        *("view %w.head : f16[64, 2] carried at 0x40", "view %w : f16[1]", "stage %w : f16[1]  // comment"),
        *("release", "release // (%a)", "release (%a.b, %c.*)", "%a, %b.* = recompute head m0 (%a) using %ws"),
        *(
            "%a = %b += backward head m0 (%c)",
            "%a += scale_update",
            "forward @1 a+b using-not",
            "using m1",
            "",
            "// %a",
        ),
    ],
)
def test_usual_statements_are_read_quickly(line):
    text = text_around(line)
    quick = list(quick_records(text.split("\n")).stages)
    assert quick == list(parse_records(text).stages)


@pytest.mark.parametrize("line", ["view  %a : f16[1]", "view %a: f16[1]", "release(%a)", "release (%a,%b)", "%a= recv"])
def test_unusual_layout_is_left_to_the_grammar(line):
    text = text_around(line)
    with pytest.raises(UnusualTextError):
        list(quick_records(text.split("\n")).stages)
    assert len(next(iter(parse_records(text).stages)).statements) == 1


@pytest.mark.parametrize(
    "first", ["view %a : f16[1]", "view %a : f16[1] at 0x40", "view %a : f16[1]  // set at 0x40", "view %a : f16[1] \t"]
)
@pytest.mark.parametrize(
    "second",
    [
        *("view %b.c-1 : f16[1]", "view %b.* : f16[1] at 0x1F", "view %b : f16[1] at 0x1g", "view %b : f16[1] at  0x1"),
        *("view %b : f16[1]  // set at 0x80", "view %b : f16[1]  // set", "view %b : f16[1] at 0x1 // c", "view %1 : f16[1]"),
        *("view %b : f16[1] carried", "  view %b : f16[1]\t", "view %b %c : f16[1]", "view % : f16[1]", "view %é : f16[1] at 0x1"),
        *("view %b : f16[1] at ", "view %b : f16[1] : f16[1]", "view %a..b : f16[1]", "%a : f16[1]", "view a : f16[1]"),
    ],
)  # fmt: skip
def test_a_declaration_like_one_before_is_read_as_the_grammar_reads_it(first, second):
    text = text_around(f"{first}\n    {second}\n    {second}")
    try:
        quick = list(quick_records(text.split("\n")).stages)
    except UnusualTextError:
        return
    assert quick == list(parse_records(text).stages)
