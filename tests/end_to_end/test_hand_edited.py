"""Schedules edited by hand: a legal swap trains the same bits, an illegal one is refused with the rule it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.cli import main
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL as TOY
from tests.end_to_end.tiny_runs import losses, make_plan, same_bits, state, train

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

STEPS = 3
ALLOCATION = "insert-release,legalise,allocate-ddr"
ORDER = "place-1f1b,insert-prefetch,recompute{policy=full},bucket-grad-sync"


@pytest.fixture(scope="module")
def allocated() -> str:
    """A schedule as `compile` writes it."""
    return print_module(api.compile(TOY, make_plan(), passes=f"{ORDER},{ALLOCATION}"))


@pytest.fixture(scope="module")
def placed() -> str:
    """A schedule in order, before anything has an address."""
    return print_module(api.compile(TOY, make_plan(), passes=ORDER))


@pytest.fixture(scope="module")
def untouched(allocated: str) -> TrainingRun:
    """What the schedule trains as it was."""
    return train(program_of(allocated), STEPS)


def program_of(text: str) -> Program:
    """The program of an edited schedule: verified, allocated where it is not, written, read back and verified."""
    module = parse_module(text, file="edited.rtir")
    api.check(module)
    program = parse_program(program_bytes(api.emit(module)), "edited.rtx")
    check_program(program)
    return program


def line_of(lines: list[str], *parts: str, stage: int = 0) -> int:
    """The one line of a stage that has all the parts."""
    starts = [i for i, line in enumerate(lines) if line.startswith("  stage @")] + [len(lines)]
    found = [i for i in range(starts[stage], starts[stage + 1]) if all(part in lines[i] for part in parts)]
    assert len(found) == 1, f"{parts}: {[lines[i] for i in found]}"
    return found[0]


def moved(text: str, *parts: str, before: tuple[str, ...], stage: int = 0) -> str:
    """The text with one line moved to stand right before another."""
    lines = text.splitlines(keepends=True)
    line = lines.pop(line_of(lines, *parts, stage=stage))
    lines.insert(line_of(lines, *before, stage=stage), line)
    edited = "".join(lines)
    assert edited != text
    assert sorted(edited.splitlines()) == sorted(text.splitlines())
    return edited


def swapped(text: str, one: tuple[str, ...], other: tuple[str, ...], stage: int = 0) -> str:
    """The text with two neighbouring lines swapped."""
    lines = text.splitlines(keepends=True)
    first, second = line_of(lines, *one, stage=stage), line_of(lines, *other, stage=stage)
    assert abs(first - second) == 1, f"lines {first} and {second} are no neighbours"
    lines[first], lines[second] = lines[second], lines[first]
    return "".join(lines)


def same_training(text: str, untouched: TrainingRun) -> None:
    """Fail unless an edited schedule gives the same losses and the same state, ordered and interleaved."""
    program = program_of(text)
    for seed in (None, 4):
        run = train(program, STEPS, interleave_seed=seed)
        assert losses(run) == losses(untouched)
        mine, theirs = state(run), state(untouched)
        assert all(array.tobytes() == theirs[name].tobytes() for name, array in mine.items())


Edit = Callable[[str], str]

LEGAL_ALLOCATED: dict[str, Edit] = {
    "a reduction after an independent send": lambda text: moved(
        text, "send gradient m2", before=("reduce_scatter",), stage=1
    ),
    "the loss before a send": lambda text: moved(text, "all_reduce_scalar loss", before=("send gradient m2",), stage=1),
    "a gather after the next update": lambda text: moved(text, "all_gather embed", before=("update mlp.0",)),
    "a release later": lambda text: moved(text, "release (%gs.embed,", before=("scale_update",)),
}


@pytest.mark.parametrize("name", LEGAL_ALLOCATED)
@pytest.mark.sampled(2)
def test_a_legal_move_in_an_allocated_schedule_trains_the_same(
    name: str, allocated: str, untouched: TrainingRun
) -> None:
    same_training(LEGAL_ALLOCATED[name](allocated), untouched)


LEGAL_PLACED: dict[str, Edit] = {
    "nothing": lambda text: text,
    "two loads": lambda text: swapped(
        moved(text, "load_input tokens m1", before=("forward embed m0",)), ("tokens m0",), ("tokens m1",)
    ),
    "recovery before the gradient arrives": lambda text: swapped(
        moved(text, "recompute attention.0 m0", before=("send activation m1",)),
        ("recompute attention.0 m0",),
        ("recv gradient m0",),
    ),
    "updates in another order": lambda text: moved(text, "update mlp.0", before=("update embed",)),
    "a gather later": lambda text: moved(text, "all_gather embed", before=("scale_update",)),
    "a forward before a receive": lambda text: moved(text, "recv gradient m1", before=("forward embed m2",)),
    "flags after updates": lambda text: moved(text, "all_reduce_scalar flags", before=("all_gather embed",)),
}


@pytest.mark.parametrize("name", LEGAL_PLACED)
@pytest.mark.sampled(2)
def test_a_legal_move_before_allocation_trains_the_same(name: str, placed: str, untouched: TrainingRun) -> None:
    same_training(LEGAL_PLACED[name](placed), untouched)


ILLEGAL_PLACED: dict[str, tuple[Edit, str]] = {
    "a block before the one it needs": (
        lambda text: swapped(text, ("forward attention.0 m0",), ("forward mlp.0 m0",)),
        "RT020",
    ),
    "messages crossed": (
        lambda text: moved(text, "send activation m0", before=("recompute attention.0 m0",)),
        "RT041",
    ),
    "a gather before its update": (
        lambda text: (
            swapped(text, ("all_gather embed",), ("= update embed",))
            if "= update embed" in text
            else moved(text, "all_gather embed", before=("update embed",))
        ),
        "RT031",
    ),
    "an update after the loss scale has changed": (
        lambda text: moved(
            moved(text, "update mlp.0", before=("scale_update",)), "scale_update", before=("update mlp.0",)
        ),
        "RT031",
    ),
    "an update before its reduction": (lambda text: moved(text, "update embed", before=("reduce_scatter",)), "RT020"),
    "a third micro-batch in flight": (
        lambda text: moved(
            moved(text, "load_input tokens m2", before=("load_input tokens m1",)),
            "forward embed m2",
            before=("recv gradient m0",),
        ),
        "RT044",
    ),
    "a weight used after it was gathered anew": (
        lambda text: moved(text, "recompute attention.0 m2", before=("update mlp.0",)),
        "RT020",
    ),
    "a reduction that misses a contribution": (
        lambda text: moved(text, "reduce_scatter", before=("backward embed m2",)),
        "RT031",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL_PLACED)
def test_an_illegal_move_is_refused_with_its_rule(name: str, placed: str) -> None:
    edit, code = ILLEGAL_PLACED[name]
    with pytest.raises(DiagnosticError) as raised:
        program_of(edit(placed))
    codes = [item.code for item in raised.value.diagnostics]
    assert code in codes, codes
    first = raised.value.diagnostics[0]
    assert first.location is not None
    assert first.location.file == "edited.rtir"


def address(text: str, tensor: str) -> str:
    """The offset of a tensor as it stands in the text."""
    line = text.splitlines()[line_of(text.splitlines(), f"%{tensor} :")]
    return line.rpartition(" ")[2]


ILLEGAL_ALLOCATED: dict[str, tuple[Edit, str]] = {
    "bytes that are still in use": (
        lambda text: moved(text, "load_input tokens m2", before=("forward embed m0",)),
        "RT050",
    ),
    "a use after its release": (
        lambda text: moved(text, "send activation m0", before=("load_input tokens m1",)),
        "RT021",
    ),
    "an address of something else": (
        lambda text: text.replace(address(text, "m1.embed"), address(text, "p.embed"), 1),
        "RT050",
    ),
    "an address between two lines of a cache": (
        lambda text: text.replace(f"{address(text, 'p.mlp.0')}\n", f"{int(address(text, 'p.mlp.0'), 16) + 4:#x}\n", 1),
        "RT051",
    ),
    "an address beyond the capacity": (
        lambda text: text.replace(f"{address(text, 'p.mlp.0')}\n", f"{20 << 30:#x}\n", 1),
        "RT052",
    ),
    "a workspace taken away": (
        lambda text: text.replace(" using %ws.mlp.backward\n", "\n"),
        "RT025",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL_ALLOCATED)
def test_an_illegal_edit_of_an_allocated_schedule_is_refused(name: str, allocated: str) -> None:
    edit, code = ILLEGAL_ALLOCATED[name]
    edited = edit(allocated)
    assert edited != allocated
    with pytest.raises(DiagnosticError) as raised:
        program_of(edited)
    codes = [item.code for item in raised.value.diagnostics]
    assert code in codes, codes


def test_names_are_free(allocated: str, untouched: TrainingRun) -> None:
    """A tensor is what ops do with it, not what it is called."""
    edited = allocated
    for old, new in (("p", "weights"), ("m1", "mean"), ("t", "count"), ("w", "copy")):
        edited = edited.replace(f"%{old}.", f"%{new}.")
    edited = edited.replace("%scale", "%factor")
    assert "%p." not in edited
    run = train(program_of(edited), STEPS)
    assert losses(run) == losses(untouched)
    mine, theirs = state(run), state(untouched)
    assert [array.tobytes() for array in mine.values()] == [array.tobytes() for array in theirs.values()]


def test_a_checkpoint_outlives_an_edit(placed: str, allocated: str, tmp_path: Path) -> None:
    """Saved under one order, gone on under another: bit for bit the run that never stopped."""
    place = str(tmp_path / "checkpoint")
    whole = train(program_of(allocated), 4)
    train(program_of(allocated), 2, save=place)
    edited = program_of(LEGAL_PLACED["recovery before the gradient arrives"](placed))
    rest = train(edited, 2, resume=place)
    assert losses(rest) == losses(whole)[2:]
    same_bits(rest, whole)


def test_an_edited_file_goes_through_the_command_line(
    allocated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    legal, illegal = tmp_path / "legal.rtir", tmp_path / "illegal.rtir"
    legal.write_text(LEGAL_ALLOCATED["the loss before a send"](allocated), "utf-8")
    illegal.write_text(ILLEGAL_ALLOCATED["bytes that are still in use"][0](allocated), "utf-8")
    program = tmp_path / "x.rtx"
    assert main(["verify", str(legal)]) == 0
    assert main(["compile", str(legal), "-o", str(program)]) == 0
    assert main(["verify", str(program)]) == 0
    program.unlink()
    capsys.readouterr()
    assert main(["verify", str(illegal)]) == 1
    assert main(["compile", str(illegal), "-o", str(program)]) == 1
    assert not program.exists()
    errors = capsys.readouterr().err
    assert f"{illegal}:" in errors
    assert "error[RT050]" in errors


FREE = 1 << 30
"""An address far above the arena of the toy, and within the capacity."""


def without(text: str, start: str, stage: int | None = None) -> str:
    """The text without the lines that start so (after their indentation), of one stage if given."""
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith("  stage @")] + [len(lines)]
    inside = range(len(lines)) if stage is None else range(starts[stage], starts[stage + 1])
    kept = [line for i, line in enumerate(lines) if i not in inside or not line.lstrip().startswith(start)]
    assert len(kept) < len(lines)
    return "".join(kept)


def two_lives(text: str) -> str:
    """One tensor for the labels of two micro-batches, one after the other, in bytes that nothing else uses."""
    text = re.sub(r"(input %labels\.m0 .*) at \w+", rf"\1 at {FREE:#x}", without(text, "input %labels.m1", stage=1))
    return re.sub(r"%labels\.m1\b", "%labels.m0", text)


def unsized(text: str) -> str:
    """The text before a target has sized anything, with the releases it has."""
    return re.sub(r" using %\S+| at 0x\w+", "", without(text, "target").replace("level allocated", "level placed"))


SUSPICIOUS: dict[str, tuple[Edit, bool]] = {
    "nothing": (lambda text: text, True),
    "an op without its workspace": (lambda text: text.replace(" using %ws.mlp.backward\n", "\n"), False),
    "a workspace too small by a byte": (
        lambda text: re.sub(r"(%ws\.mlp\.backward : u8)\[(\d+)", lambda m: f"{m[1]}[{int(m[2]) - 1}", text),
        False,
    ),
    "a workspace that is larger than it must be": (
        lambda text: re.sub(
            r"(%ws\.mlp\.backward : u8)\[(\d+)\] at \w+", lambda m: f"{m[1]}[{int(m[2]) + 1}] at {FREE:#x}", text
        ),
        True,
    ),
    "another machine of equal needs": (
        lambda text: re.sub(r'"mt3000", (capacity = \d+), digest = "\w+"', r'"mt3000-1.2ghz", \1', text),
        True,
    ),
    "another machine with the digest of the first": (lambda text: text.replace('"mt3000"', '"mt3000-1.2ghz"'), False),
    "a machine nobody knows": (lambda text: text.replace('"mt3000"', '"elsewhere"'), False),
    "no target": (lambda text: without(text, "target"), False),
    "a petabyte that no target allows": (
        lambda text: without(text, "target").replace(f"{address(text, 'p.mlp.0')}\n", f"{1 << 49:#x}\n", 1),
        False,
    ),
    "two lives of one tensor": (two_lives, True),
    "two lives of one tensor, no addresses": (lambda text: unsized(two_lives(text)), True),
    "a target that has sized nothing": (
        lambda text: re.sub(r" using %\S+| at 0x\w+", "", text.replace("level allocated", "level placed")),
        False,
    ),
    "no addresses": (unsized, True),
    "no addresses, and no releases in one stage": (lambda text: without(unsized(text), "release", stage=1), False),
    "no addresses and no releases": (lambda text: without(unsized(text), "release"), True),
    "no addresses, and a tensor with the name of a workspace to come": (
        lambda text: without(unsized(text), "workspace").replace("%x.mlp.0.m0", "%ws.mlp.backward"),
        True,
    ),
    "no addresses, and a tensor that nothing touches": (
        lambda text: unsized(text).replace("    scalar %scale", "    saved %idle : u8[40000000000]\n    scalar %scale"),
        True,
    ),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
@pytest.mark.sampled(3)
def test_what_verify_accepts_is_compiled_verified_and_trained(
    name: str, allocated: str, untouched: TrainingRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, sound = SUSPICIOUS[name]
    edited = edit(allocated)
    assert (edited == allocated) is (name == "nothing")
    schedule, program = tmp_path / "x.rtir", tmp_path / "x.rtx"
    schedule.write_text(edited, "utf-8")
    assert main(["verify", str(schedule)]) == (0 if sound else 1), capsys.readouterr().err
    assert main(["compile", str(schedule), "-o", str(program)]) == (0 if sound else 1), capsys.readouterr().err
    assert program.exists() is sound
    if sound:
        assert main(["verify", str(program)]) == 0, capsys.readouterr().err
        same_training(edited, untouched)
