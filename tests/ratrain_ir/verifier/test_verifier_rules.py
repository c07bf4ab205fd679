"""Every rule of the verifier: a sound text, edited so that it breaks that rule and no other, gets that rule's code."""

from __future__ import annotations

import pytest

from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.support.diagnostics import CODES, Diagnostics
from ratrain.ratrain_ir.verifier import verify
from tests.end_to_end.edited_texts import MODEL, PLAN, change, drop, insert, problems, repeat, sound, stage_of
from tests.ratrain_ir.verifier.memory_rules import MEMORIES
from tests.ratrain_ir.verifier.peer_rules import PEERS
from tests.ratrain_ir.verifier.schedule_rules import SCHEDULES
from tests.ratrain_ir.verifier.structure_rules import STRUCTURE

RULES = [*STRUCTURE, *SCHEDULES, *PEERS, *MEMORIES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code} {rule.what}")
def test_a_text_that_breaks_one_rule_gets_its_code(rule):
    lines = sound(rule.base).splitlines()
    for edit in rule.edits:
        lines = edit(lines)
    found = problems("\n".join(lines))
    assert {item.code for item in found} == {rule.code}, "\n".join(item.render() for item in found)
    stages = stage_of(lines)
    places = [
        number
        for number, line in enumerate(lines, 1)
        if line.strip().startswith(rule.at) and rule.stage in (None, stages[number - 1])
    ]
    item = next((item for item in found if rule.phrase in item.message), None)
    assert item is not None, "\n".join(item.render() for item in found)
    assert item.location is not None
    assert (item.location.file, item.location.line) == ("edited.rtir", places[rule.nth]), item.render()
    start = item.location.column - 1
    shown = lines[item.location.line - 1][start : start + item.location.length]
    if rule.underlined is not None:
        assert shown == rule.underlined
    assert shown == shown.strip() != ""
    assert item.source == lines[item.location.line - 1]
    if rule.note is not None:
        assert any(rule.note in note.message for note in item.notes), item.render()
    for note in item.notes:
        assert note.location is not None, "the other half of a conflict has a place too"


def test_what_people_read_for_each_rule(golden):
    """The whole text of every diagnostic of the verifier, with its caret and notes."""
    shown = []
    for rule in RULES:
        lines = sound(rule.base).splitlines()
        for edit in rule.edits:
            lines = edit(lines)
        shown.append(f"# {rule.code} {rule.what}\n" + "\n".join(item.render() for item in problems("\n".join(lines))))
    golden("verifier-diagnostics.txt", "\n\n".join(shown) + "\n")


BASES = (
    "dataflow",
    "each",
    "one",
    "gathered",
    "whole",
    "tied",
    "peers",
    "normed",
    "parallel",
    "over-heads",
    "layers",
    "placed",
    "three",
    "released",
    "sized",
    "allocated",
    "stored",
    "fetched",
)


@pytest.mark.parametrize("base", BASES)
def test_what_is_not_edited_is_sound(base):
    assert problems(sound(base)) == []


def test_every_code_of_the_verifier_is_tested():
    of_the_verifier = {code for code in CODES if "RT020" <= code <= "RT053"}
    assert {rule.code for rule in RULES} == of_the_verifier


def test_everything_wrong_in_one_layer_is_reported_at_once():
    lines = sound("released").splitlines()
    for edit in (
        drop("%tokens.m0 = load_input"),
        drop("release (%g.embed)"),
        repeat("release (%overflow)", stage=1),
        change("send activation m1", "@1", "@0"),
    ):
        lines = edit(lines)
    # names that do not exist make liveness noise: with them gone, liveness problems of all stages are shown together
    assert [item.code for item in problems("\n".join(lines))] == ["RT027"]
    lines = change("send activation m1", "@0", "@1")(lines)
    assert sorted(item.code for item in problems("\n".join(lines))) == ["RT020", "RT023", "RT028"]


def test_advice_on_releases_makes_the_text_sound_again():
    def advised(edit, code):
        lines = edit(sound("released").splitlines())
        (item,) = problems("\n".join(lines))
        assert item.code == code
        return lines, item.help

    lines, advice = advised(drop("release (%g.embed)"), "RT023")
    assert advice == "write 'release (%g.embed)' after its last use"
    released = insert(advice.split("'")[1], after="%gs.embed, %flag.embed = reduce_scatter", stage=0)
    assert problems("\n".join(released(lines))) == []
    lines, advice = advised(repeat("release (%overflow)", stage=1), "RT028")
    assert advice == "release it once, after its last use"
    last = len(lines) - 1 - next(at for at, line in enumerate(reversed(lines)) if "release (%overflow)" in line)
    assert problems("\n".join(lines[:last] + lines[last + 1 :])) == []


def test_a_module_that_has_no_text_is_reported_by_its_own():
    """Made by passes, not read from a file: the op is printed, and its place in the stage given."""
    module = lower(MODEL, PLAN)
    module.stages[1].ops.pop(0)
    found = Diagnostics()
    verify(module, found)
    (first, *_) = found.errors
    assert first.code == "RT020"
    assert first.message == "%x.attention.1.m0 is used before it is defined (stage @1, op 1)"
    assert first.location is not None
    assert (first.location.file, first.location.line) == ("@1", 1)
    assert first.source is not None
    assert first.source[first.location.column - 1 :].startswith("%x.attention.1.m0, ")
