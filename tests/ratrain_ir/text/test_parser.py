"""Reading `.rtir`: every error of a file at its place, in users' words, and never anything but a diagnostic."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text import parser, quick_syntax
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from tests.end_to_end.toys import TOY as MODEL

PLAN = Plan(2, 2, (1,), 1, 2, 4)


@cache
def sound(pipeline: str = "") -> str:
    return print_module(PassManager(FakeTarget()).run(lower(MODEL, PLAN), pipeline))


def problems(text: str) -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        parse_module(text, file="x.rtir")
    return caught.value.diagnostics


def edited(old: str, new: str, *, pipeline: str = "") -> str:
    text = sound(pipeline)
    assert text.count(old) == 1, f"'{old}' stands {text.count(old)} times"
    return text.replace(old, new)


def only(text: str) -> Diagnostic:
    (item,) = problems(text)
    return item


def place(item: Diagnostic) -> tuple[int, str]:
    """Return the line of a diagnostic and the text its carets underline."""
    assert item.location is not None
    assert item.source is not None
    start = item.location.column - 1
    return item.location.line, item.source[start : start + item.location.length]


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


# -- syntax --------------------------------------------------------------------------------------------------------------

SEND = "send activation m0 @1 (%x.attention.1.m0)"


@pytest.mark.parametrize(
    ("old", "new", "underlined", "message", "hint"),
    [
        (
            SEND,
            "send activation m0 @1 (%x.attention.1.m0",
            "",
            "unexpected the end of the line, expected",
            "not closed",
        ),
        (SEND, "send activation m0 @1 %x.attention.1.m0)", "%x.attention.1.m0", "unexpected '%x.attention.1.m0'", None),
        (SEND, "send activation m0 @1 (%x.attention.1.m0 %w)", "%w", "unexpected '%w', expected ')' or ','", "','"),
        (SEND, f"%a = %b = {SEND}", "=", "unexpected '=', expected '+='", None),
        (SEND, f"= {SEND}", "=", "unexpected '='", None),
        (SEND, f"{SEND} using", "", "unexpected the end of the line, expected a tensor", None),
        (SEND, SEND.replace("%", "$"), "$", "unexpected '$'", None),
        (
            "scalar %loss : f64[1]",
            "scalar %loss",
            "",
            "unexpected the end of the line, expected ':'",
            "type is missing",
        ),
        ("scalar %loss : f64[1]", "scalar %loss : f64", "f64", "unexpected 'f64', expected a type like", None),
        ("scalar %loss : f64[1]", "scalar %loss : f64[1] 0x40", "0x40", "unexpected '0x40'", "'at 0x...'"),
        ("scalar %loss : f64[1]", "scalar %loss : f64[1] at 64", "64", "expected an offset like 0x1000", "'at 0x...'"),
        ("rtir 2", "rtir one", "one", "unexpected 'one', expected a number", None),
        ("level dataflow {", "level dataflow", "", "unexpected the end of the line, expected '{'", None),
        ("model { name", "model name", "name", "unexpected 'name', expected '{'", None),
        ("pp = 2,", "pp 2,", "2", "unexpected '2', expected '='", None),
        ("pp = 2,", "pp = 2", "dp", "unexpected 'dp', expected ',' or '}'", None),
        ("cuts = [1]", "cuts = [1", "", "", None),
    ],
)
def test_a_syntax_error_says_what_stands_there_and_what_is_expected(old, new, underlined, message, hint):
    text = edited(old, new)
    item = problems(text)[0]
    assert item.code == "RT001"
    assert message in item.message
    line, shown = place(item)
    assert line == line_of(text, new)
    assert shown == underlined or not underlined
    if hint is not None:
        assert item.help is not None
        assert hint in item.help


def test_a_stage_that_is_not_closed_is_said():
    text = edited("  }\n  stage @1 {", "  stage @1 {")
    item = problems(text)[0]
    assert (item.code, item.help) == ("RT001", "the stage above is not closed: write '}' before the next stage")
    assert place(item)[0] == line_of(text, "stage @1 {")


def test_the_caret_stands_under_the_mistake():
    item = problems(edited(SEND, "send activation m0 @1 (%x.attention.1.m0 %w)"))[0]
    _, source, carets, *_ = item.render().splitlines()
    assert source.strip() == "send activation m0 @1 (%x.attention.1.m0 %w)"
    assert source[carets.index("^") : len(carets)] == "%w"
    assert carets.strip() == "^~"


def test_several_syntax_errors_are_all_reported():
    text = edited(SEND, "send activation m0 @1 (%x.attention.1.m0")
    text = text.replace("scalar %loss : f64[1]", "scalar %loss f64[1]")
    text = text.replace("recv gradient m1 @1", "recv gradient m1 @1 ,")
    found = problems(text)
    assert [item.code for item in found] == ["RT001"] * 3
    expected = [line_of(text, words) for words in ("send activation m0 @1", "recv gradient m1 @1 ,", "%loss f64[1]")]
    assert [place(item)[0] for item in found] == expected


def test_no_more_than_twenty_syntax_errors_are_reported():
    lines = ["    (" if line.startswith("    ") else line for line in sound().splitlines()]
    found = problems("\n".join(lines))
    assert len(found) == 20
    assert [note.message for each in found for note in each.notes] == [
        "the search for errors ends here: more may follow"
    ]


@given(st.data())
def test_a_text_that_is_cut_short_has_one_error_at_its_end(data: st.DataObject) -> None:
    """Wherever it is cut: no line that is whole is called wrong."""
    text = sound()
    first = text.index("{") + 1
    cut = text[: data.draw(st.integers(first, text.rindex("}") - 1))]
    item = only(cut)
    assert "the text ends early" in item.message
    assert item.location is not None
    assert item.location.line == len(cut.rstrip().splitlines())
    assert str(cut.count("{") - cut.count("}")) in item.message


@given(st.data())
def test_errors_of_syntax_ascend(data: st.DataObject) -> None:
    lines = sound().splitlines()
    for number in data.draw(st.sets(st.integers(8, len(lines) - 1), min_size=1, max_size=4)):
        lines[number] = data.draw(st.sampled_from(["", "}", "release (", "stage @7 {", "? ?"]))
    try:
        parse_module("\n".join(lines), file="x.rtir")
    except DiagnosticError as error:
        found = [item for item in error.diagnostics if item.code == "RT001"]
        places = [item.location.line for item in found if item.location is not None]
        assert places == sorted(places)


@pytest.mark.parametrize(
    "text", ["", "\n", "   ", "// nothing", "rtir", "rtir 2", "rtir 1\n", "rtir 1\nmodule @m level"]
)
def test_a_file_that_ends_too_early(text):
    item = problems(text)[-1]
    assert item.code == "RT001"
    assert "the end of the" in item.message
    item.render()


@pytest.mark.parametrize("cut", [1 / 7, 1 / 3, 1 / 2, 0.9, 0.999])
def test_a_file_cut_off_anywhere_is_refused(cut):
    text = sound("allocate-ddr")
    item = problems(text[: int(len(text) * cut)])[-1]
    assert item.location is not None
    assert item.code in {"RT001", "RT004"}


# -- names, versions and values ------------------------------------------------------------------------------------------


def test_a_tensor_that_is_not_declared_is_named_with_the_nearest():
    item = only(edited(SEND, SEND.replace("attention", "atention")))
    assert (item.code, item.message) == ("RT004", "%x.atention.1.m0 is not declared in stage @0")
    assert item.help == "did you mean %x.attention.1.m0?"
    assert place(item)[1] == "%x.atention.1.m0"


def test_a_name_is_not_found_inside_a_longer_one():
    text = edited(SEND, "send activation m0 @1 (%w.embedding, %w.embed.x, %w.embe)")
    assert [place(item)[1] for item in problems(text)] == ["%w.embedding", "%w.embed.x", "%w.embe"]


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "help_text", "underlined"),
    [
        (SEND, SEND.replace("send", "sent"), "RT004", "'sent' is not an op", "did you mean 'send'?", "sent"),
        ("scalar %loss", "scaler %loss", "RT004", "'scaler' is not a state kind", "did you mean 'scalar'?", "scaler"),
        ("level dataflow", "level data", "RT004", "'data' is not a level", None, "data"),
        ("  model {", "  modle {", "RT004", "'modle' is not a section", None, "modle"),
        ("layers = 2", "layer = 2", "RT062", '"layer" is not a known field', "did you mean 'layers'?", None),
        ("pp = 2", "pp = 200", "RT064", "200", None, None),
        ("pp = 2", "pp = true", "RT064", "true", None, None),
        ("lr = 0.0003", "lr = 1e999", "RT064", "'lr' is inf", None, None),
        ("lr = 0.0003", "lr = [[[[1]]]]", "RT064", "'lr' is", None, None),
        ("cuts = [1]", 'cuts = "auto"', "RT064", "'cuts' is \"auto\"", None, None),
        ("seed = 0", f"seed = {'9' * 5000}", "RT064", "'seed' is", None, None),
        ("seed = 0", "seed = 0, seed = 1", "RT006", "'seed' is given twice in 'plan'", None, "seed"),
        ("f64[1]", "f63[1]", "RT005", "'f63[1]' is not a type; element types are f16", None, "f63[1]"),
        ("f64[1]", "f64[]", "RT005", "the shape of 'f64[]' must be positive numbers", None, "f64[]"),
        ("f64[1]", "f64[0]", "RT005", "must be positive numbers", None, "f64[0]"),
        ("f64[1]", "f64[1,,1]", "RT005", "must be positive numbers", None, "f64[1,,1]"),
        ("f64[1]", "f64[1 1]", "RT005", "must be positive numbers", None, "f64[1 1]"),
        ("f64[1]", f"f64[{'9' * 5000}]", "RT005", "must be positive numbers", None, None),
        ("f64[1]", f"f64[{', '.join(['999999999999999999'] * 400)}]", "RT005", "no machine holds that", None, None),
        ("%loss : f64[1]", "%loss.* : f64[1]", "RT005", "'.*' names several tensors", None, "%loss.*"),
        ("%loss : f64[1]", f"%loss : f64[1] at 0x{'f' * 4000}", "RT051", "is beyond any arena", None, None),
        (SEND, SEND.replace("m0 @1", "m @1"), "RT005", "micro-batch of 'send': expected a micro-batch", None, "send"),
        (SEND, SEND.replace("m0 @1", "m9999999999 @1"), "RT005", "expected a micro-batch like 'm0'", None, "send"),
        (SEND, SEND.replace("@1", ""), "RT005", "'send' needs a peer", None, "send"),
        (SEND, SEND.replace("@1", "@1 @1"), "RT005", "'send' does not take '@1'", None, "send"),
        (
            SEND,
            SEND.replace("activation m0", "weights m0"),
            "RT005",
            "expected one of activation, gradient",
            None,
            "send",
        ),
        ("update embed", "update embed none", "RT005", "'update' does not take 'none'", None, "update"),
        ("update embed", "update embed send", "RT005", "'update' does not take 'send'", None, "update"),
        ("forward embed m0", "forward embed.0 m0", "RT005", "expected a block", None, "forward"),
        ("forward mlp.1 m0", "forward mlp.01 m0", "RT005", "expected a block", None, "forward"),
        ("  stage @1 {", "  stage @2 {", "RT005", "expected stage @1 here, got @2", None, "@2"),
        ("  stage @1 {", "  stage @one {", "RT005", "expected stage @1 here, got @one", None, "@one"),
    ],
)
def test_a_wrong_word_or_value(old, new, code, message, help_text, underlined):
    text = edited(old, new)
    item = next(item for item in problems(text) if item.code == code)
    assert message in item.message
    assert item.help == help_text or help_text is None
    line, shown = place(item)
    assert underlined in {None, shown}
    if "\n" not in new and code not in {"RT062", "RT064"}:
        assert line == line_of(text, new)


def test_an_update_on_the_host_is_an_update():
    module = parse_module(edited("update embed", "update embed host"))
    check(module)
    assert "update embed host" in print_module(module)


def test_a_tensor_declared_twice_names_both_places():
    text = edited("    scalar %loss : f64[1]\n", "    scalar %loss : f64[1]\n    scalar %loss : f32[1]\n")
    item = only(text)
    assert item.code == "RT006"
    line = line_of(text, "scalar %loss : f32[1]")
    assert place(item) == (line, "%loss")
    assert [note.location.line for note in item.notes] == [line - 1]


def test_errors_of_the_whole_file_come_together():
    text = edited(SEND, SEND.replace("send", "sent")).replace("scalar %loss : f64[1]", "scaler %loss : f63[1]")
    text = text.replace("%labels.m1 = load_input labels m1", "%labls.m1 = load_input label m1")
    found = problems(text)
    assert [item.location.line for item in found] == sorted(item.location.line for item in found) or len(found) > 4
    messages = " | ".join(item.message for item in found)
    for words in (
        "'sent' is not an op",
        "'scaler' is not a state kind",
        "expected one of tokens, labels",
        "%loss is not",
    ):
        assert words in messages


@pytest.mark.parametrize("version", ["0", "3", "01", "9" * 6000, "-1"])
def test_another_version_is_refused_by_name(version):
    item = only(edited("rtir 2", f"rtir {version}"))
    assert item.code == "RT003"
    assert "this compiler reads versions 1 and 2" in item.message


def test_sections_that_are_missing_or_doubled():
    text = sound()
    for section in ("model", "plan"):
        without = "\n".join(line for line in text.splitlines() if not line.startswith(f"  {section} "))
        item = problems(without)[0]
        assert (item.code, item.message) == ("RT001", f"the module has no '{section} {{ ... }}'")
        line = next(line for line in text.splitlines() if line.startswith(f"  {section} "))
        doubled = problems(text.replace(line, f"{line}\n{line}"))[0]
        assert (doubled.code, doubled.message) == ("RT006", f"'{section}' is given twice")


def test_a_plan_with_another_number_of_stages():
    text = sound()
    item = only(text[: text.index("  stage @1")] + "}\n")
    assert (item.code, item.message) == ("RT005", "the plan has 2 stages, the module 1")


@pytest.mark.parametrize(
    "target", ['name = "x"', "name = 1, capacity = 2", 'name = "x", capacity = 0', "capacity = 1.5"]
)
def test_a_target_that_is_none(target):
    item = only(edited("  stage @0 {", f"  target {{ {target} }}\n  stage @0 {{"))
    assert item.code == "RT005"
    assert "a target is" in item.message


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "x.rtir"
    with pytest.raises(DiagnosticError, match="RT002"):
        api.load_schedule(str(path))
    path.write_bytes(b"rtir 2\nmodule \xff")
    with pytest.raises(DiagnosticError, match=r"x.rtir:2:8: error\[RT002\]"):
        api.load_schedule(str(path))
    path.write_text(sound(), encoding="utf-8")
    assert print_module(api.load_schedule(str(path))) == sound()


# -- anything at all -----------------------------------------------------------------------------------------------------


def must_be_read_or_refused(text: str) -> None:
    """Parsing and verifying give a sound module or diagnostics that can be shown; nothing else."""
    try:
        check(parse_module(text, file="x.rtir"))
    except DiagnosticError as error:
        assert error.diagnostics  # noqa: PT017 - a sound text need not raise
        for item in error.diagnostics:
            item.render()
            item.to_json()


@settings(max_examples=50)
@given(st.binary(max_size=200))
@example(b"\x00" * 50)
@example("\ufeffrtir 2".encode())
def test_noise_is_refused(data):
    must_be_read_or_refused(data.decode("latin-1"))
    must_be_read_or_refused(f"rtir 2\nmodule @m level placed {{\n{data.decode('latin-1')}\n}}")


WORDS = (
    "%w.embed",
    "%s.mlp.0.m0.*",
    "@9",
    "m7",
    "0x40",
    "at",
    "carried",
    "=",
    "+=",
    "(",
    ")",
    ",",
    "{",
    "}",
    "using",
    "//",
)
WORDS += (
    "release",
    "forward",
    "embed",
    "mlp.0",
    "stage",
    "-1",
    "999999999999999999999",
    "1e5",
    '"',
    "none",
    "\x00",
    "é",
)
WORDS += ("f16[8]", "all", "ends", "host", "m0", "activation", "gradient", "all_reduce", "recv", "level", "dataflow")


@st.composite
def mutations(draw) -> str:
    """A sound text with lines dropped, doubled, swapped, and words put in the place of others."""
    lines = sound(draw(st.sampled_from(("", "place-1f1b", "insert-release", "allocate-ddr")))).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("drop", "double", "swap", "word", "word", "word", "cut")))
        if kind == "drop":
            lines[at] = ""
        elif kind == "double":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif kind == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif words := lines[at].split():
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(WORDS))
            lines[at] = " ".join(words)
    return "\n".join(lines)


@settings(max_examples=50)
@given(mutations())
def test_a_spoilt_text_is_read_or_refused(text):
    must_be_read_or_refused(text)


def test_deep_nesting_is_refused():
    must_be_read_or_refused(edited("lr = 0.0003", f"lr = {'[' * 5000}1{']' * 5000}"))
    must_be_read_or_refused(edited("lr = 0.0003", f"lr = {'[' * 5000}"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[" * 3_000_000, "1:1"),
        ("rtir 2\nmodule @m level placed {\n  plan { a = " + "[" * 100_000 + "\n", "3:14"),
        ("rtir 2\nmodule @m level placed {\n  plan { a = [" + "1, " * 1_000_000 + "1] }\n}\n", "3:1"),
        ("rtir 2\nmodule @m level placed {\n" + "  plan { a = 1 }\n" * 1_000_000 + "}\n", None),
        ("\n" * 3_000_000, None),
    ],
    ids=["brackets", "nested", "long list", "many sections", "empty lines"],
)
def test_what_no_schedule_has_is_refused_at_once(text: str, place: str | None) -> None:
    """The grammar would take from half a minute to an hour over them: its own reader must not be called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "parse_records", None)
        patch.setattr(quick_syntax, "parse_records", None)
        (found,) = problems(text)
    assert found.code == "RT001"
    assert found.location is not None
    if place is not None:
        assert str(found.location).endswith(f":{place}")


@pytest.mark.parametrize(
    ("text", "code"),
    [('pipeline "a\x1b[2J"', "RT005"), ('pipeline "a"\n  pipeline "b"', "RT006")],
)
def test_a_pipeline_is_said_once_and_can_be_shown(text: str, code: str) -> None:
    source = sound("place-1f1b").replace('pipeline "place-1f1b"', text)
    with pytest.raises(DiagnosticError) as caught:
        parse_module(source, file="p.rtir")
    (problem,) = caught.value.diagnostics
    assert problem.code == code
    assert problem.location is not None


@pytest.mark.parametrize("mark", ["}", "="])
@pytest.mark.sampled(2)
def test_any_mark_at_any_word_of_an_op_is_an_error_at_its_place(mark: str) -> None:
    """Also where the grammar's library has no example that goes on alike."""
    lines = sound("place-1f1b").splitlines()
    number = next(i for i, line in enumerate(lines) if "+= backward head" in line)
    words = lines[number].split(" ")
    for at, word in enumerate(words):
        for spoilt in (f"{word[:3]}{mark}{word[3:]}", f"{mark}{word}", f"{word}{mark}"):
            text = "\n".join([*lines[:number], " ".join([*words[:at], spoilt, *words[at + 1 :]]), *lines[number + 1 :]])
            with pytest.raises(DiagnosticError) as caught:
                parse_module(text, file="s.rtir")
            assert all(problem.location is not None for problem in caught.value.diagnostics)
