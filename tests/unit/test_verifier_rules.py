"""Every rule of the verifier: a sound text, edited so that it breaks that rule and no other, gets that rule's code.

Edits are what a person would do to a `.rtir` file: change a word, move a line, delete one, write one twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import attrs
import pytest
from attrs import frozen

from passes.manager import PassManager
from ratrain_ir.diagnostics import CODES, Diagnostic, Diagnostics
from ratrain_ir.frontend.lowering import lower
from ratrain_ir.frontend.model_config import ModelConfig
from ratrain_ir.frontend.plan import Optimizer, Plan
from ratrain_ir.parser import parse_module
from ratrain_ir.printer import print_module
from ratrain_ir.testing.fake_target import FakeTarget
from ratrain_ir.verifier import verify

MODEL = ModelConfig("toy", "llama", 64, 8, 2, 2, 1, 4, 8, 1e-5)
TIED = attrs.evolve(MODEL, tied_embeddings=True)
DEEP = attrs.evolve(MODEL, layers=3)
PLAN = Plan(2, 2, (1,), 1, 2, 4)
EACH = attrs.evolve(PLAN, zero=2, reduce="each-micro-batch")
THREE = attrs.evolve(PLAN, pp=3, cuts=(1, 2))
WHOLE = attrs.evolve(PLAN, zero=0)
CLIPPED = attrs.evolve(PLAN, optimizer=Optimizer(clip="global"))

Edit = Callable[[list[str]], list[str]]


@cache
def sound(base: str) -> str:
    """Return the text of a sound module."""
    model, plan, pipeline = {
        "dataflow": (MODEL, PLAN, ""),
        "each": (MODEL, EACH, ""),
        "whole": (MODEL, WHOLE, ""),
        "tied": (TIED, PLAN, ""),
        "clipped": (MODEL, CLIPPED, ""),
        "placed": (MODEL, PLAN, "place-1f1b"),
        "three": (DEEP, THREE, "place-1f1b"),
        "released": (MODEL, PLAN, "insert-release"),
        "allocated": (MODEL, PLAN, "allocate-ddr"),
    }[base]
    return print_module(PassManager(FakeTarget()).run(lower(model, plan), pipeline))


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


RULES = [
    Broken(
        "RT020",
        "an input that is never loaded",
        "dataflow",
        (drop("%tokens.m0 = load_input"),),
        "%x.attention.0.m0 = forward embed m0",
        "%tokens.m0 is used before it is defined",
        underlined="%tokens.m0",
    ),
    Broken(
        "RT020",
        "an op above the one it needs",
        "dataflow",
        (move("%x.attention.1.m0, %s.mlp.0.m0.* = forward", after="send activation m0"),),
        "send activation m0",
        "%x.attention.1.m0 is used before it is defined",
        underlined="%x.attention.1.m0",
    ),
    Broken(
        "RT021",
        "a release above the last use",
        "released",
        (move("release (%gs.embed)", after="%gs.embed, %flag.embed = reduce_scatter"),),
        "%p.embed, %m1.embed, %m2.embed, %t.embed += update",
        "%gs.embed is used after its release",
        underlined="%gs.embed",
        note="released here",
    ),
    Broken(
        "RT022",
        "an input loaded twice",
        "dataflow",
        (repeat("%tokens.m0 = load_input"),),
        "%tokens.m0 = load_input",
        "%tokens.m0 is defined again while it is live",
        nth=1,
        underlined="%tokens.m0",
        note="defined here",
    ),
    Broken(
        "RT022",
        "a view gathered before the old one is released",
        "released",
        (drop("release (%w.embed)"),),
        "%w.embed = all_gather embed",
        "%w.embed is defined again while it is live",
        underlined="%w.embed",
    ),
    Broken(
        "RT023",
        "a release that is missing",
        "released",
        (drop("release (%gs.embed)"),),
        "%gs.embed, %flag.embed = reduce_scatter",
        "%gs.embed is never released",
        underlined="%gs.embed",
    ),
    Broken(
        "RT024",
        "a view that is not gathered for the next step",
        "dataflow",
        (drop("%w.embed = all_gather"),),
        "view %w.embed",
        "the step must leave the view of embed next step in it, but leaves the view of embed this step",
        underlined="%w.embed",
    ),
    Broken(
        "RT024",
        "a view that is released and not gathered again",
        "released",
        (drop("%w.embed = all_gather"),),
        "release (%w.embed)",
        "%w.embed is carried into the next step, but released and not defined again",
        underlined="%w.embed",
    ),
    Broken(
        "RT024",
        "a carried tensor nobody uses",
        "dataflow",
        (insert("scalar %spare : f32[1] carried", after="scalar %scale", stage=1),),
        "scalar %spare",
        "nothing uses what it carries",
        underlined="%spare",
    ),
    Broken(
        "RT025",
        "operands in the wrong order",
        "dataflow",
        (change("%x.attention.0.m0 = forward", "(%tokens.m0, %w.embed)", "(%w.embed, %tokens.m0)"),),
        "%x.attention.0.m0 = forward",
        "reads tokens (input, i32[4]) here, but got view %w.embed",
        underlined="%w.embed",
    ),
    Broken(
        "RT025",
        "an operand too few",
        "dataflow",
        (change("%x.attention.0.m0 = forward", "(%tokens.m0, %w.embed)", "(%tokens.m0)"),),
        "%x.attention.0.m0 = forward",
        "reads w (view, f16[512]) here, but nothing is there",
    ),
    Broken(
        "RT025",
        "an operand too many",
        "dataflow",
        (change("send activation m0", "(%x.attention.1.m0)", "(%x.attention.1.m0, %scale)"),),
        "send activation m0",
        "has no use for scalar %scale",
        underlined="%scale",
    ),
    Broken(
        "RT025",
        "a wrong shape",
        "dataflow",
        (change("input %tokens.m0", "i32[4]", "i32[5]"),),
        "%tokens.m0 = load_input",
        "%tokens.m0 is i32[5], but data of 'load_input tokens m0' is i32[4]",
        underlined="%tokens.m0",
    ),
    Broken(
        "RT025",
        "a wrong state kind",
        "dataflow",
        (change("grad_shard %gs.embed", "grad_shard", "grad"),),
        "%gs.embed, %flag.embed = reduce_scatter",
        "writes gs.embed (grad_shard, f16[256]) here, but got grad %gs.embed",
        underlined="%gs.embed",
    ),
    Broken(
        "RT025",
        "something else than workspace as scratch",
        "allocated",
        (change("%x.attention.0.m0 = forward", "using %ws.forward-embed-1024", "using %overflow"),),
        "%x.attention.0.m0 = forward",
        "%overflow is scalar, but 'using' takes workspace",
        underlined="%overflow",
    ),
    Broken(
        "RT026",
        "a release where no order is claimed",
        "dataflow",
        (insert("release (%overflow)", after="%scale += scale_update", stage=0),),
        "release (%overflow)",
        "a release is not allowed at level dataflow",
    ),
    Broken(
        "RT026",
        "workspace where no order is claimed",
        "dataflow",
        (
            insert("workspace %ws : u8[64]", after="scalar %scale", stage=0),
            change("send activation m0", "(%x.attention.1.m0)", "(%x.attention.1.m0) using %ws"),
        ),
        "send activation m0",
        "workspace is not allowed at level dataflow",
    ),
    Broken(
        "RT026",
        "a sum over both ends of a model that ties nothing",
        "dataflow",
        (insert("%gs.embed, %flag.embed += all_reduce embed ends", after="%gs.embed, %flag.embed = reduce"),),
        "%gs.embed, %flag.embed += all_reduce embed ends",
        "'all_reduce ends' has no meaning for this model",
    ),
    Broken(
        "RT026",
        "overflow flags that only the replicas of a stage see",
        "dataflow",
        (change("%overflow = all_reduce_scalar", "flags all", "flags replicas", stage=0),),
        "%overflow = all_reduce_scalar",
        "leaves members out: the group of flags is 'all'",
        stage=0,
    ),
    Broken(
        "RT027",
        "a block of another stage",
        "dataflow",
        (change("%x.attention.1.m0, %s.mlp.0.m0.* = forward", "forward mlp.0", "forward mlp.1"),),
        "%x.attention.1.m0, %s.mlp.0.m0.* = forward mlp.1",
        "mlp.1 is not a block of stage @0, which holds embed to mlp.0",
    ),
    Broken(
        "RT027",
        "a block that no layer has",
        "dataflow",
        (change("%x.attention.1.m0, %s.mlp.0.m0.* = forward", "forward mlp.0", "forward mlp.999999999"),),
        "%x.attention.1.m0, %s.mlp.0.m0.* = forward",
        "mlp.999999999 is not a block of stage @0",
    ),
    Broken(
        "RT027",
        "a block twice in one bucket",
        "dataflow",
        (
            change("%gs.embed, %flag.embed = reduce_scatter", "reduce_scatter embed", "reduce_scatter embed+embed"),
            change("%gs.embed, %flag.embed = reduce_scatter", "(%g.embed)", "(%g.embed, %g.embed)"),
        ),
        "%gs.embed, %flag.embed = reduce_scatter",
        "names a block twice",
    ),
    Broken(
        "RT027",
        "a micro-batch that the plan does not have",
        "dataflow",
        (change("send activation m1", "m1 @1", "m2 @1"),),
        "send activation m2",
        "m2 does not exist: the plan has micro-batches m0 to m1",
    ),
    Broken(
        "RT027",
        "an activation that goes to nobody",
        "dataflow",
        (change("send activation m1", "@1", "@0"),),
        "send activation m1",
        "'send activation' names @0: expected @1",
    ),
    Broken(
        "RT027",
        "an activation that leaves the last stage",
        "dataflow",
        (change("send gradient m0", "send gradient m0 @0", "send activation m0 @2"),),
        "send activation m0 @2",
        "names @2: stage @1 has no neighbour there",
    ),
    Broken(
        "RT027",
        "labels on the first stage",
        "dataflow",
        (change("%tokens.m0 = load_input", "load_input tokens", "load_input labels"),),
        "%tokens.m0 = load_input labels",
        "stage @0 has no use for labels",
    ),
    Broken(
        "RT028",
        "a second release",
        "released",
        (repeat("release (%gs.embed)"),),
        "release (%gs.embed)",
        "%gs.embed is released but not live",
        nth=1,
        underlined="%gs.embed",
        note="already released here",
    ),
    Broken(
        "RT028",
        "a release of what never lived",
        "released",
        (
            insert("scalar %spare : f32[1]", after="scalar %scale", stage=0),
            change("release (%gs.embed)", "(%gs.embed)", "(%gs.embed, %spare)"),
        ),
        "release (%gs.embed, %spare)",
        "%spare is released but not live",
        underlined="%spare",
    ),
    Broken(
        "RT030",
        "a loss nobody reports",
        "dataflow",
        (drop("all_reduce_scalar loss"),),
        "stage @1",
        "stage @1 never does 'all_reduce_scalar loss'",
    ),
    Broken(
        "RT030",
        "a loss reported twice",
        "dataflow",
        (repeat("all_reduce_scalar loss"),),
        "all_reduce_scalar loss",
        "'all_reduce_scalar loss replicas' happens twice",
        nth=1,
        note="first done here",
    ),
    Broken(
        "RT030",
        "a micro-batch taken for another",
        "dataflow",
        (change("%g.embed += backward embed m1", "%tokens.m1", "%tokens.m0"),),
        "%g.embed += backward embed m1",
        "needs tokens m1 in %tokens.m0, which holds tokens m0",
        underlined="%tokens.m0",
    ),
    Broken(
        "RT030",
        "a gradient taken for another",
        "dataflow",
        (change("%dx.attention.0.m1 = %g.attention.0", "%dx.mlp.0.m1", "%dx.mlp.0.m0"),),
        "%dx.attention.0.m1 = %g.attention.0",
        "needs the gradient at the input of mlp.0 m1 in %dx.mlp.0.m0",
        underlined="%dx.mlp.0.m0",
    ),
    Broken(
        "RT030",
        "a loss that does not ascend",
        "dataflow",
        (
            move("%s.head.m0.lse, %loss = forward head m0", after="%s.head.m1.lse = %loss += forward head m1"),
            change("%s.head.m0.lse, %loss = forward", "%s.head.m0.lse, %loss = ", "%s.head.m0.lse = %loss += "),
            change("%s.head.m1.lse = %loss += forward", "%s.head.m1.lse = %loss += ", "%s.head.m1.lse, %loss = "),
        ),
        "%s.head.m1.lse, %loss = forward head m1",
        "the first contribution to the loss must be m0",
        underlined="%loss",
    ),
    Broken(
        "RT031",
        "a block that is never updated",
        "whole",
        (drop("%w.embed = %p.embed, %m1.embed, %m2.embed, %t.embed += update"),),
        "stage @0",
        "stage @0 never does 'update embed'",
    ),
    Broken(
        "RT031",
        "a gradient reduced before it is whole",
        "dataflow",
        (move("%gs.embed, %flag.embed = reduce_scatter", after="%g.embed = backward embed m0"),),
        "%gs.embed, %flag.embed = reduce_scatter",
        "needs the gradient of embed m0 m1 in %g.embed, which holds the gradient of embed m0",
        underlined="%g.embed",
    ),
    Broken(
        "RT031",
        "an update before the reduction of the last micro-batch",
        "each",
        (move("%p.embed, %m1.embed, %m2.embed, %t.embed += update", after="%gs.embed, %flag.embed = reduce_scatter"),),
        "%p.embed, %m1.embed, %m2.embed, %t.embed += update",
        "needs the reduced gradient of embed m0 m1 in %gs.embed, which holds the reduced gradient of embed m0",
        underlined="%gs.embed",
    ),
    Broken(
        "RT031",
        "a gather of what is not updated yet",
        "dataflow",
        (move("%w.embed = all_gather", after="%gs.embed, %flag.embed = reduce_scatter"),),
        "%w.embed = all_gather",
        "needs the master weights of embed next step in %p.embed",
        underlined="%p.embed",
    ),
    Broken(
        "RT031",
        "an overflow flag that is left out",
        "dataflow",
        (change("%overflow = all_reduce_scalar", ", %flag.mlp.0)", ")", stage=0),),
        "%overflow = all_reduce_scalar",
        "the overflow flag of mlp.0, of all micro-batches, is left out",
        stage=0,
    ),
    Broken(
        "RT031",
        "an overflow flag without the last micro-batch",
        "each",
        (
            move("%overflow = all_reduce_scalar", after="%gs.embed, %flag.embed = reduce_scatter embed m0", stage=0),
            move("%scale += scale_update", after="%overflow = all_reduce_scalar", stage=0),
            move("%scale += scale_update", after="%p.mlp.0, %m1.mlp.0", stage=0),
        ),
        "%overflow = all_reduce_scalar",
        "the overflow flag of embed, of all micro-batches, is left out",
        stage=0,
    ),
    Broken(
        "RT031",
        "a scale that changes before the last update",
        "dataflow",
        (
            move("%overflow = all_reduce_scalar", after="%gs.embed, %flag.embed = reduce", stage=0),
            move("%scale += scale_update", after="%overflow = all_reduce_scalar", stage=0),
        ),
        "%p.embed, %m1.embed, %m2.embed, %t.embed += update",
        "needs the loss scale of this step in %scale, which holds the loss scale of next step",
        underlined="%scale",
    ),
    Broken(
        "RT032",
        "saved tensors of another micro-batch",
        "dataflow",
        (change("%dx.mlp.0.m1 = %g.mlp.0", "%s.mlp.0.m1.*", "%s.mlp.0.m0.*"),),
        "%dx.mlp.0.m1 = %g.mlp.0",
        "needs saved mlp.0 m1 xn in %s.mlp.0.m0.xn, which holds saved mlp.0 m0 xn",
    ),
    Broken(
        "RT032",
        "a recovery of what is kept",
        "dataflow",
        (
            insert("saved %r.m0.rstd : f32[4]", after="scalar %scale", stage=0),
            insert("%r.m0.rstd = recompute mlp.0 m0 (%x.mlp.0.m0, %w.mlp.0)", after="send activation m0"),
        ),
        "%r.m0.rstd = recompute",
        "happens twice",
        note="first done here",
    ),
    Broken(
        "RT040",
        "a message nobody sends",
        "dataflow",
        (drop("send activation m1"),),
        "%x.attention.1.m1 = recv activation m1",
        "the activation from @0 to @1 of m1 is never sent",
    ),
    Broken(
        "RT040",
        "a message sent twice",
        "dataflow",
        (repeat("send activation m1"),),
        "send activation m1",
        "'send activation m1 @1' happens twice",
        nth=1,
    ),
    Broken(
        "RT040",
        "a message received twice",
        "dataflow",
        (
            insert("boundary %spare : f16[4, 8]", after="scalar %scale", stage=1),
            insert("%spare = recv activation m1 @0", after="%x.attention.1.m1 = recv"),
        ),
        "%spare = recv",
        "'recv activation m1 @0' happens twice",
    ),
    Broken(
        "RT040",
        "a message with another content",
        "dataflow",
        (
            move("send activation m0", after="send activation m1"),
            change("send activation m0", "%x.attention.1.m0", "%x.attention.1.m1"),
        ),
        "send activation m0",
        "needs the input of attention.1 m0 in %x.attention.1.m1",
        underlined="%x.attention.1.m1",
    ),
    Broken(
        "RT041",
        "messages sent in another order than received",
        "dataflow",
        (move("send activation m0", after="send activation m1"),),
        "%x.attention.1.m0 = recv activation m0",
        "crossed messages, activation from @0 to @1: @1 receives m0 where @0 sends m1",
        note="@0 sends here",
    ),
    Broken(
        "RT042",
        "a gradient awaited before what it comes from",
        "three",
        (move("%dx.attention.2.m0 = recv gradient m0 @2", after="scalar %overflow", stage=1),),
        "send activation m0 @2",
        "the program hangs with buffered sends: each of these 13 ops waits for the next",
        note="stage @1 'recv gradient m0 @2' (recv engine)",
    ),
    Broken(
        "RT043",
        "collectives in another order",
        "clipped",
        (move("%overflow = all_reduce_scalar", after="all_reduce_scalar loss", stage=1),),
        "%overflow = all_reduce_scalar",
        "is collective 0 of its group on @1, @0 has another",
        stage=1,
        note="@0 has this one there",
    ),
    Broken(
        "RT044",
        "all forwards first",
        "dataflow",
        (change("module @toy", "dataflow", "placed"),),
        "%x.mlp.1.m1, %s.attention.1.m1.* = forward attention.1 m1",
        "2 micro-batches in flight (m0, m1), but 1F1B allows 1 on stage @1",
    ),
    Broken(
        "RT050",
        "a moment on top of another",
        "allocated",
        (change("moment %m1.embed", "0x400", "0x800"),),
        "moment %m2.embed",
        "share the bytes 0x800 to 0xc00",
        underlined="%m2.embed",
        note="the other is 'moment %m1.embed",
    ),
    Broken(
        "RT050",
        "a view that reaches into its neighbour",
        "allocated",
        (change("master %p.embed", "at 0x0", "at 0x40"),),
        "moment %m1.embed",
        "%m1.embed and %p.embed are both live at",
        underlined="%m1.embed",
    ),
    Broken(
        "RT051",
        "an offset that is missing",
        "allocated",
        (change("master %p.embed", " at 0x0", ""),),
        "master %p.embed",
        "%p.embed has no offset",
        underlined="%p.embed",
    ),
    Broken(
        "RT051",
        "an offset that is not aligned",
        "allocated",
        (change("scalar %t.embed", "at 0xc00", "at 0xc08"),),
        "scalar %t.embed",
        "the offset 0xc08 of %t.embed is not a multiple of 64",
        underlined="%t.embed",
    ),
    Broken(
        "RT051",
        "an offset before there are any",
        "placed",
        (change("master %p.embed", "carried", "carried at 0x0"),),
        "master %p.embed",
        "%p.embed has an offset, but the module is at level placed",
        underlined="%p.embed",
    ),
    Broken(
        "RT052",
        "a capacity below the arena",
        "allocated",
        (change("target {", "capacity = 1099511627776", "capacity = 8192"),),
        "stage @0",
        "more than the capacity",
    ),
]


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


BASES = ("dataflow", "each", "whole", "tied", "placed", "three", "released", "allocated")


@pytest.mark.parametrize("base", BASES)
def test_what_is_not_edited_is_sound(base):
    assert problems(sound(base)) == []


def test_every_code_of_the_verifier_is_tested():
    of_the_verifier = {code for code in CODES if "RT020" <= code <= "RT052"}
    assert {rule.code for rule in RULES} == of_the_verifier


def test_everything_wrong_in_one_layer_is_reported_at_once():
    lines = sound("released").splitlines()
    for edit in (
        drop("%tokens.m0 = load_input"),
        drop("release (%gs.embed)"),
        repeat("release (%overflow)", stage=1),
        change("send activation m1", "@1", "@0"),
    ):
        lines = edit(lines)
    # names that do not exist make liveness noise: with them gone, liveness problems of all stages are shown together
    assert [item.code for item in problems("\n".join(lines))] == ["RT027"]
    lines = change("send activation m1", "@0", "@1")(lines)
    assert sorted(item.code for item in problems("\n".join(lines))) == ["RT020", "RT023", "RT028"]


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
