"""The glossary: what it names exists, and what there is of a kind it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import fields

from ratrain.passes.registry import PASSES
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import BLOCK_KINDS
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text()
ENTRIES = {
    name: " ".join(text.split())
    for item in re.split(r"\n(?=- \*\*|\n)", TEXT)
    if item.startswith("- **")
    for name, text in [re.fullmatch(r"- \*\*(.+?)\*\*(.*)", item, re.DOTALL).groups()]  # type: ignore[union-attr]
}
KINDS = {kind.value for kind in StateKind}
NAMED = (
    KINDS
    | {*OP_CLASSES, *PASSES.names(), *BLOCK_KINDS}
    | {kind.value for kind in (*Group, *Level)}
    | {field.name for field in fields(Plan)}
)
SLOTS = {"q", "rstd"}
ASKED_FOR = """
view, master, boundary, lag, GradSync, UpdateShard, PrefetchW, FSR, chunk, slice, stage, rank, replica, peer,
channel, group, micro-batch, step, carried tensor, arena, workspace, certificate, on-chip tile, bucket, shard,
home, warm-up, bubble, exposed tail, bound, closed form, lean slots, saved slot, recovery, split backward,
routine, program, level, pass, sound
"""


def words_in_code() -> set[str]:
    """The single words in backticks that can be names of ops, kinds, passes, fields: no files, commands, `m0` or `@0`."""
    found = re.findall(r"`([^`]+)`", TEXT)
    return {word for word in found if re.fullmatch(r"[a-z][a-z0-9_-]+", word) and not re.fullmatch(r"m[0-9]", word)}


def test_ops_kinds_passes_and_fields_it_names_exist() -> None:
    assert len(words_in_code() & {*OP_CLASSES}) >= 8
    assert words_in_code() <= NAMED | SLOTS, words_in_code() - NAMED - SLOTS
    assert set(SPLIT_KINDS) <= set(BLOCK_KINDS)


def test_every_state_kind_has_an_entry() -> None:
    told = {kind for text in ENTRIES.values() for kind in re.findall(r"^\(`(\w+)`\):", text)}
    assert told == KINDS


@pytest.mark.parametrize("word", [" ".join(word.split()) for word in ASKED_FOR.split(",")])
def test_words_of_the_pages_have_entries(word: str) -> None:
    assert word in ENTRIES


@pytest.mark.parametrize("word", ENTRIES)
def test_an_entry_is_short_and_leads_further(word: str) -> None:
    text = ENTRIES[word]
    assert re.search(r"\]\([\w./#-]+\)$", text.rstrip(".")), f"{word} links nowhere"
    told = re.sub(r"\[[^]]*\]\([^)]*\)", "", text)
    assert len(re.findall(r"[.;](?= |$)", told)) <= 4, f"{word} takes more than a few sentences"


def test_words_in_italics_have_entries() -> None:
    known = {f"{name}{ending}" for name in ENTRIES for ending in ("", "s", "es", "'s")}
    italics = {" ".join(word.split()) for word in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", TEXT)}
    assert italics <= known, italics - known
