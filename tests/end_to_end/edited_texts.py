"""Sound texts and edits that break one rule of the verifier each.

Edits are what a person would do to a `.rtir` file: change a word, move a line, delete one, write one twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import attrs
from attrs import frozen

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Diagnostics
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import verify
from tests.end_to_end.toys import TOY as MODEL

TIED = attrs.evolve(MODEL, tied_embeddings=True)
NORMED = in_family(MODEL, "gemma2", attention_scale=0.5, embedding_scale=8**0.5)
"""Norms of what blocks add."""
PARALLEL = in_family(MODEL, "gpt_neox", kv_heads=2)
"""Attention and MLP side by side."""
OVER_HEADS = attrs.evolve(MODEL, family="olmo2", norm_placement="post", qk_norm="whole")
"""Queries and keys normed over all heads of a token."""
DEEP = attrs.evolve(MODEL, layers=3)
PLAN = Plan(2, 2, (1,), 1, 2, 4)
EACH = attrs.evolve(PLAN, zero=2, reduce="each-micro-batch")
THREE = attrs.evolve(PLAN, pp=3, cuts=(1, 2))
ONE = attrs.evolve(PLAN, pp=1, cuts=())
GATHERED = attrs.evolve(PLAN, zero=3)
WHOLE = attrs.evolve(PLAN, zero=0)
PACKED = attrs.evolve(PLAN, attention_mask="document")
PEERS = attrs.evolve(PLAN, tp=2)
FROZEN = attrs.evolve(PLAN, training=Training(freeze="*.mlp.*"))
CLIPPED = attrs.evolve(PLAN, optimizer=Optimizer(clip="global"))

Edit = Callable[[list[str]], list[str]]


@cache
def sound(base: str) -> str:
    """Return the text of a sound module."""
    model, plan, pipeline = {
        "dataflow": (MODEL, PLAN, ""),
        "each": (MODEL, EACH, ""),
        "one": (MODEL, ONE, ""),
        "gathered": (MODEL, GATHERED, ""),
        "whole": (MODEL, WHOLE, ""),
        "packed": (MODEL, PACKED, ""),
        "tied": (TIED, PLAN, ""),
        "peers": (MODEL, PEERS, ""),
        "normed": (NORMED, PEERS, ""),
        "parallel": (PARALLEL, PEERS, ""),
        "over-heads": (OVER_HEADS, PEERS, ""),
        "clipped": (MODEL, CLIPPED, ""),
        "layers": (MODEL, PEERS, "place-1f1b,recompute{policy=full checkpoint=layer}"),
        "placed": (MODEL, PLAN, "place-1f1b"),
        "three": (DEEP, THREE, "place-1f1b"),
        "released": (MODEL, PLAN, "insert-release"),
        "sized": (MODEL, PLAN, "legalise"),
        "allocated": (MODEL, PLAN, "allocate-ddr"),
        "stored": (MODEL, PLAN, "place-1f1b,recompute{policy=none store=host}"),
        "fetched": (MODEL, FROZEN, "place-1f1b,offload-state{what=views}"),
    }[base]
    stores = ((Home.HOST, 1 << 40),) if base in ("stored", "fetched") else ()
    return print_module(PassManager(FakeTarget(stores=stores)).run(lower(model, plan), pipeline))


def problems(text: str) -> list[Diagnostic]:
    found = Diagnostics()
    verify(parse_module(text, file="edited.rtir"), found)
    return found.errors


def stage_of(lines: list[str]) -> list[int]:
    """Return the stage that each line belongs to; -1 above the first."""
    stage, found = -1, []
    for line in lines:
        stage += line.startswith("  stage ")
        found.append(stage)
    return found


def find(lines: list[str], start: str, stage: int | None = None) -> int:
    """Return the index of the one line that starts so (after its indentation), in a stage if given."""
    stages = stage_of(lines)
    hits = [i for i, line in enumerate(lines) if line.strip().startswith(start) and stage in (None, stages[i])]
    assert len(hits) == 1, f"{len(hits)} lines start with '{start}'"
    return hits[0]


def change(start: str, old: str, new: str, *, stage: int | None = None) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        at = find(lines, start, stage)
        assert lines[at].count(old) == 1, lines[at]
        return [*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]

    return edit


def drop(start: str, *, stage: int | None = None) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        at = find(lines, start, stage)
        return lines[:at] + lines[at + 1 :]

    return edit


def insert(text: str, *, after: str, stage: int | None = None) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        at = find(lines, after, stage) + 1
        return [*lines[:at], f"    {text}", *lines[at:]]

    return edit


def move(start: str, *, after: str, stage: int | None = None) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        line = lines[find(lines, start, stage)].strip()
        return insert(line, after=after, stage=stage)(drop(start, stage=stage)(lines))

    return edit


def repeat(start: str, *, after: str | None = None, stage: int | None = None) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        line = lines[find(lines, start, stage)].strip()
        return insert(line, after=after or start, stage=stage)(lines)

    return edit


@frozen
class Broken:
    """A sound text, edits, and what the verifier must say: code, the line it points at, and words of the message.

    `at` is the start of that line; `nth` says which of the lines that start so; `underlined` is the text at the caret.
    """

    code: str
    what: str
    base: str
    edits: tuple[Edit, ...]
    at: str
    phrase: str
    stage: int | None = None
    nth: int = 0
    underlined: str | None = None
    note: str | None = None
