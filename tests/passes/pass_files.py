"""File tests of passes: what one pass makes of one small schedule, on one page.

    // RUN: recompute{policy=mlp}
    // The mlp's saved tensors are dropped after forward; its backward reads them after a recovery of their own.
    // PLAN: pp = 2, micro_batches = 2
    // BEFORE: place-1f1b
    // EXPECT:
    stage @0
      ~ forward mlp.0 m0: writes -%s.mlp.0.m0.*
        ...

The first line names the pass with its options, the comment says what is shown. The input is a toy, lowered and taken
through the passes of BEFORE. What a case is about stands in MODEL (`layers = 2`; else one layer a stage), PLAN (else
one stage, one replica, one micro-batch) and TARGET (fields of `FakeTarget`, and bytes of other memories: `host = 4096`), as TOML pairs. Then
`MOVE: @0 update embed BEFORE update head`, any number of times, changes a stage's order by hand. Each `TABLE: 0F0,0B0` is
a row of the schedule table that passes find as `table.csv`. Where all that does not lead to the schedule a case needs, a
whole module's text follows `// INPUT:` instead. The rest, after `// EXPECT:`, is what came of it: the diagnostics of a
refusal, or the parts that SHOW names:

    diff        (the default) what the pass changed and nothing else (`tests/passes/differences.py`)
    header      of that the header alone: level, plan, target
    order       a row of actions a stage, as PyTorch's schedule tables name them
    ops         all ops, by their short names
    arena       bytes of the arena, and live bytes
    addresses   the same, and what has which bytes when
    statistics  what the pass reports
    @1          of all but the header and the statistics, this stage alone
"""

from __future__ import annotations

import re
import tomllib
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.passes.manager import PassManager, PassRun
from ratrain.passes.registry import PASSES
from ratrain.ratrain_ir.analysis.actions import actions_of_module
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.plan_text import plan_from_fields
from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.config.types import STORES, aligned
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import names_text, saved_groups
from ratrain.ratrain_ir.verifier import verify
from tests.end_to_end.toys import TOY
from tests.passes.differences import header_changes, named_ops, stage_changes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor

INPUT, EXPECT = "// INPUT:", "// EXPECT:"
PARTS = ("diff", "header", "order", "ops", "arena", "addresses", "statistics")
_DIRECTIVE = re.compile(r"// ([A-Z]+): *(.*)")
_DIRECTIVES = ("RUN", "MODEL", "PLAN", "TARGET", "BEFORE", "MOVE", "TABLE", "SHOW")
_REPEATED = ("MOVE", "TABLE")
_WALL_SECONDS = re.compile(r", [0-9]+\.[0-9]{3} s$")
"""At the end of a statistic: what the pass took, another time in each run."""
_MOVE = re.compile(r"@([0-9]+) (.+) BEFORE (.+)")


class BadFileError(Exception):
    """A file that is no test of a pass, and why."""


@frozen
class PassFile:
    """A file as it was read."""

    run: str
    shown: str
    """the comment lines that say what the case shows"""
    head: str
    """everything above what is expected"""
    expected: str
    before: str = ""
    model: dict[str, Any] = field(factory=dict)
    plan: dict[str, Any] = field(factory=dict)
    target: dict[str, Any] = field(factory=dict)
    moves: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    """rows of `table.csv`"""
    parts: tuple[str, ...] = ("diff",)
    stages: tuple[int, ...] = ()
    """those shown; empty: all"""
    input_text: str | None = None
    input_line: int = 0
    """lines above the input's first, so that its diagnostics name lines of the file"""


def read_pass_file(text: str, pass_name: str) -> PassFile:
    """The case of a file's text in the folder of a pass.

    Raises `BadFileError`.
    """
    if PASSES.place(pass_name) is None:
        raise BadFileError("the folder is that of no pass")
    head, mark, expected = text.partition(f"{EXPECT}\n")
    if not mark:
        raise BadFileError(f"there is no line '{EXPECT}'")
    heading, has_input, input_text = head.partition(f"{INPUT}\n")
    lines = heading.splitlines()
    if not lines or not lines[0].startswith("// RUN: "):
        raise BadFileError("the first line is not '// RUN: ' with a pass")
    values: dict[str, str] = {}
    comments: list[str] = []
    repeated: dict[str, list[str]] = {name: [] for name in _REPEATED}
    for line in lines:
        match = _DIRECTIVE.fullmatch(line)
        if match is None:
            if not line.startswith("// "):
                raise BadFileError(f"'{line}' is neither a directive nor a comment")
            comments.append(line.removeprefix("// "))
        elif match[1] not in _DIRECTIVES:
            raise BadFileError(f"there is no directive {match[1]}; there are {', '.join(_DIRECTIVES)}")
        elif match[1] in _REPEATED:
            repeated[match[1]].append(match[2])
        elif match[1] in values:
            raise BadFileError(f"{match[1]} is given twice")
        else:
            values[match[1]] = match[2]
    if not comments:
        raise BadFileError("no comment says what the case shows")
    named = re.match(r"[a-z0-9-]*", values["RUN"])
    if named is None or named[0] != pass_name:
        raise BadFileError(f"RUN names '{values['RUN']}', the folder is that of '{pass_name}'")
    if has_input and ("MODEL" in values or "PLAN" in values):
        raise BadFileError("the model and the plan of an INPUT stand in its text, not in MODEL and PLAN")
    parts, stages = _shown_parts(values.get("SHOW", "diff"))
    return PassFile(
        run=values["RUN"],
        shown=" ".join(comments),
        head=head + mark,
        expected=expected,
        before=values.get("BEFORE", ""),
        model=_pairs("MODEL", values),
        plan=_pairs("PLAN", values),
        target=_pairs("TARGET", values),
        moves=tuple(repeated["MOVE"]),
        table=tuple(repeated["TABLE"]),
        parts=parts,
        stages=stages,
        input_text=input_text if has_input else None,
        input_line=len(lines) + 1,
    )


def result_of(case: PassFile, file: str) -> str:
    """What the pass made of the case, as the file is to hold it.

    Raises `BadFileError` where the input cannot be made, another pass than the folder's ran too, or the module is
    unsound afterwards.
    """
    if not case.table:
        return _result_here(case, file)
    with TemporaryDirectory() as folder, chdir(folder):
        Path("table.csv").write_text("".join(f"{row}\n" for row in case.table))
        return _result_here(case, file)


def _result_here(case: PassFile, file: str) -> str:
    try:
        target = _target(case)
        module = PassManager(target, verify_each=True).run(_input(case, file), case.before)
        for move in case.moves:
            _move(module, move)
        _check_sound(module, target, "the input")
    except DiagnosticError as error:
        raise BadFileError(f"the input cannot be made:\n{error}") from None
    before = copy_module(module)
    manager = PassManager(target)
    try:
        manager.run(module, case.run)
    except DiagnosticError as error:
        return f"{error}\n"
    if len(manager.runs) != 1:
        ran = ",".join(run.text for run in manager.runs)
        raise BadFileError(f"RUN ran {ran}: what is not the pass itself belongs in BEFORE")
    _check_sound(module, target, "the schedule after the pass")
    return "".join(f"{line}\n" for line in _result_lines(case, before, module, manager.runs[0]))


def _shown_parts(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    words = text.split()
    stages = tuple(int(word[1:]) for word in words if re.fullmatch("@[0-9]+", word))
    parts = tuple(word for word in words if not re.fullmatch("@[0-9]+", word))
    for word in parts:
        if word not in PARTS:
            raise BadFileError(f"SHOW has no part '{word}'; there are {', '.join(PARTS)} and @STAGE")
    return parts or ("diff",), stages


def _pairs(directive: str, values: dict[str, str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(f"pairs = {{ {values.get(directive, '')} }}")["pairs"]
    except tomllib.TOMLDecodeError as error:
        raise BadFileError(f"{directive} is not a list of TOML pairs: {error}") from None
    return found


def _input(case: PassFile, file: str) -> Module:
    if case.input_text is not None:
        return parse_module("\n" * case.input_line + case.input_text, file=file)
    stages = case.plan.get("pp", 1)
    model = model_from_fields({**TOY.to_fields(), "layers": stages, **case.model})
    plan = {"pp": stages, "dp": 1, "micro_batch_size": 1, "micro_batches": 1, "seq_len": 4, **case.plan}
    plan.setdefault("cuts", list(balance_cuts(model, stages, plan["seq_len"], WHOLE)))
    return lower(model, plan_from_fields(plan, model=model))


def _move(module: Module, move: str) -> None:
    match = _MOVE.fullmatch(move)
    if match is None:
        raise BadFileError(f"MOVE is not '@STAGE OP BEFORE OP': '{move}'")
    if int(match[1]) >= len(module.stages):
        raise BadFileError(f"MOVE: there is no stage @{match[1]}")
    stage = module.stages[int(match[1])]
    found = named_ops(stage)
    for name in match.group(2, 3):
        if name not in found:
            raise BadFileError(f"MOVE: stage @{stage.index} has no op '{name}'")
    stage.ops.remove(found[match[2]])
    stage.ops.insert(stage.ops.index(found[match[3]]), found[match[2]])


def _target(case: PassFile) -> FakeTarget:
    values = dict(case.target)
    try:
        if "update_engine" in values:
            values["update_engine"] = Engine(values["update_engine"])
        stores = {home: values.pop(home.value) for home in STORES if home.value in values}
        return evolve(FakeTarget(), **values, stores=tuple(stores.items()))
    except (TypeError, ValueError) as error:
        raise BadFileError(f"TARGET: {error}") from None


def _check_sound(module: Module, target: FakeTarget, what: str) -> None:
    found = Diagnostics()
    verify(module, found, target)
    if found.errors:
        raise BadFileError(f"{what} is unsound:\n" + "\n".join(item.render() for item in found.errors))


def _result_lines(case: PassFile, before: Module, after: Module, run: PassRun) -> Iterator[str]:
    shown = [stage for stage in after.stages if not case.stages or stage.index in case.stages]
    for part in case.parts:
        if part == "diff":
            changes = [*header_changes(before, after)]
            for stage in shown:
                changes += stage_changes(before.stages[stage.index], stage)
            yield from changes or ["nothing changed"]
        elif part == "header":
            yield from header_changes(before, after)
        elif part == "order":
            rows = actions_of_module(after).rows
            yield from (f"stage @{stage.index}: {' '.join(map(str, rows[stage.index]))}" for stage in shown)
        elif part == "ops":
            for stage in shown:
                yield f"stage @{stage.index}"
                yield from (f"  {name}" for name in named_ops(stage))
        elif part in ("arena", "addresses"):
            for stage in shown:
                live = lifetimes(stage).peak_bytes
                yield f"stage @{stage.index}: arena of {stage.arena_bytes} bytes, {live} live at the peak"
                yield from _address_lines(stage) if part == "addresses" else ()
        else:
            yield from (f"{name}: {_WALL_SECONDS.sub('', str(value))}" for name, value in run.statistics.items())


def _address_lines(stage: Stage) -> Iterator[str]:
    """What has which bytes when: first byte, bytes, names, and each life from its first op to the one after its last.

    Neighbours in memory that live and die together share a line.
    """
    lives = lifetimes(stage).intervals
    groups = saved_groups(stage)
    throughout = [tensor for tensor in lives if lives[tensor] == ((0, len(stage.ops)),)]
    yield f"  {sum(aligned(t.type.nbytes) for t in throughout)} bytes of {len(throughout)} tensors that live throughout"
    together: list[list[Tensor]] = []
    for tensor in sorted(set(lives) - set(throughout), key=lambda t: (t.offset or 0, t.name)):
        last = together[-1][-1] if together else tensor
        if lives[last] == lives[tensor] and _end(last) == tensor.offset:
            together[-1].append(tensor)
        else:
            together.append([tensor])
    for run in together:
        spans = " ".join(f"{start}-{end}" for start, end in lives[run[0]])
        size = sum(aligned(tensor.type.nbytes) for tensor in run)
        yield f"  {run[0].offset:#06x} +{size:<5} {names_text(tuple(run), groups)}: {spans}"


def _end(tensor: Tensor) -> int:
    assert tensor.offset is not None
    return tensor.offset + aligned(tensor.type.nbytes)
