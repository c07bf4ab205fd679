"""The files `tests/passes/<pass>/<case>.rtir`: each comes out as it says, all show every pass, a bad one fails by name.

`pytest --update-golden tests/passes/test_pass_files.py` rewrites what the files expect.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from ratrain.passes.memory.insert_release import InsertReleasePass
from ratrain.passes.pass_base import option_text
from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.registry import PASSES, pass_class
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from tests.passes.pass_files import BadFileError, PassFile, read_pass_file, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.passes.pass_base import Pass
    from tests.conftest import Golden

FOLDER = Path(__file__).parent
OWN_PASSES = [name for name, place in PASSES.places().items() if place.startswith("ratrain.")]
"""Not those of other distributions that happen to be installed."""
FEWEST = 5
"""Files that each pass has at least."""


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.rtir"))


def check(path: Path, golden: Golden) -> None:
    """Fail, by the file's name, unless it is a test of its folder's pass that comes out as the file says."""
    name = f"{path.parent.name}/{path.name}"
    try:
        case = read_pass_file(path.read_bytes().decode(), path.parent.name)
        text = case.head + result_of(case, name)
    except BadFileError as error:
        pytest.fail(f"{name}: {error}", pytrace=False)
    attrs.evolve(golden, folder=path.parent.parent)(name, text)


@pytest.mark.parametrize("path", files(FOLDER), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_pass_makes_what_the_file_expects(path: Path, golden: Golden) -> None:
    check(path, golden)


# -- all files together ------------------------------------------------------------------------------------------------


def shortcomings(folder: Path) -> Iterator[str]:
    """What the files of a folder lack: passes and options that are not shown, cases that show nothing of their own."""
    cases: dict[str, dict[str, PassFile]] = defaultdict(dict)
    for path in files(folder):
        if path.parent.name in OWN_PASSES:
            cases[path.parent.name][path.name] = read_pass_file(path.read_text(), path.parent.name)
        else:
            yield f"'{path.parent.name}' is not a pass"
    for name in OWN_PASSES:
        found = cases[name]
        if len(found) < FEWEST:
            yield f"{name} has {len(found)} files of {FEWEST}"
        by_result: dict[str, str] = {}
        for file, case in found.items():
            if case.expected in by_result:
                yield f"{name}: {file} comes out like {by_result[case.expected]}"
            by_result[case.expected] = file
        yield from (f"{name}: no file shows {option}" for option in options_not_shown(name, found.values()))


def options_not_shown(name: str, cases) -> Iterator[str]:
    """The choices of a pass that no case takes, and the options with a unit that none gives."""
    runs = [run for case in cases if (run := parsed(case.run)) is not None]
    for option in attrs.fields(pass_class(name)):
        taken = {option_text(value) if isinstance(value := getattr(run, option.name), bool) else value for run in runs}
        written = option.name.replace("_", "-")
        words = (*option.metadata.get("choices", ()), *option.metadata.get("words", ()))
        yield from (f"{written}={word}" for word in words if word not in taken)
        if "unit" in option.metadata and not any(value != option.default and value not in words for value in taken):
            yield written


def parsed(run: str) -> Pass | None:
    """The pass of a RUN line; None where the case shows that it cannot be read."""
    try:
        (item,) = parse_pipeline(run)
    except DiagnosticError:
        return None
    return item


def test_the_files_show_every_pass_and_option_and_each_something_of_its_own():
    assert list(shortcomings(FOLDER)) == []


def test_what_is_not_shown_is_named(tmp_path):
    write(tmp_path, "recompute", "one", "// RUN: recompute\n// x\n// EXPECT:\nsame\n")
    write(tmp_path, "recompute", "two", "// RUN: recompute{policy=mlp budget=1}\n// x\n// EXPECT:\nsame\n")
    write(tmp_path, "recompte", "three", "// RUN: recompte\n// x\n// EXPECT:\n")
    found = list(shortcomings(tmp_path))
    assert "'recompte' is not a pass" in found
    assert "recompute has 2 files of 5" in found
    assert "recompute: two.rtir comes out like one.rtir" in found
    assert "legalise has 0 files of 5" in found
    assert "place-zb-h1: no file shows delay" in found
    assert "bucket-grad-sync: no file shows bytes=auto" in found
    assert [line.split("shows ")[1] for line in found if line.startswith("recompute: no file")] == [
        "policy=none",
        "policy=attention",
        "policy=ops",
        "policy=norms",
        "policy=auto",
        "placement=forward-side",
        "store=host",
        "store=file",
        "store=peer",
        "gathered=again",
        "checkpoint=layer",
        "repeat=all",
        "every",
    ]


# -- the runner --------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, case: str, text: str) -> Path:
    path = folder / name / f"{case}.rtir"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def failure(path: Path, golden: Golden) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        check(path, golden)
    return str(caught.value)


SOUND = """\
// RUN: place-gpipe
// The module is a placed one afterwards.
// SHOW: header
// EXPECT:
level: dataflow -> placed
plan.schedule: None -> gpipe
"""


@pytest.fixture
def compare(golden):
    """As without --update-golden, whether or not this run has it."""
    return attrs.evolve(golden, update=False)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"// RUN: place-gpipe\n": ""}, "the first line is not '// RUN: ' with a pass"),
        ({"// RUN: place-gpipe": "// RUN:"}, "the first line is not '// RUN: ' with a pass"),
        ({"// EXPECT:\n": ""}, "there is no line '// EXPECT:'"),
        ({"place-gpipe": "place-gpip"}, "RUN names 'place-gpip', the folder is that of 'place-gpipe'"),
        ({"place-gpipe": "lifetime"}, "RUN names 'lifetime', the folder is that of 'place-gpipe'"),
        ({"place-gpipe": "place-gpipe,lifetime"}, "RUN ran place-gpipe,lifetime: what is not the pass itself"),
        ({"// The module is a placed one afterwards.\n": ""}, "no comment says what the case shows"),
        ({"// The module": "The module"}, "'The module is a placed one afterwards.' is neither a directive"),
        ({"SHOW: header": "SHOW: heading"}, "SHOW has no part 'heading'; there are diff, header,"),
        ({"SHOW: header": "SHOWN: header"}, "there is no directive SHOWN; there are RUN, MODEL,"),
        ({"SHOW: header": "SHOW: header\n// SHOW: ops"}, "SHOW is given twice"),
        ({"SHOW: header": "PLAN: pp = "}, "PLAN is not a list of TOML pairs"),
        ({"SHOW: header": "PLAN: zero = 7"}, "the input cannot be made:\nerror[RT064]"),
        ({"SHOW: header": "BEFORE: place-gpip"}, "the input cannot be made:\npipeline:1:1: error[RT004]"),
        ({"SHOW: header": "TARGET: speed = 2"}, "TARGET: "),
        ({"SHOW: header": "TARGET: update_engine = 'gpu'"}, "TARGET: "),
        ({"SHOW: header": "MOVE: @0 update embed"}, "MOVE is not '@STAGE OP BEFORE OP'"),
        ({"SHOW: header": "MOVE: @1 update embed BEFORE update head"}, "MOVE: there is no stage @1"),
        ({"SHOW: header": "MOVE: @0 update m0 BEFORE update head"}, "MOVE: stage @0 has no op 'update m0'"),
        ({"SHOW: header": "MOVE: @0 update embed BEFORE forward embed m0"}, "the input is unsound:\n"),
        ({"SHOW: header": "PLAN: pp = 1\n// INPUT:"}, "the model and the plan of an INPUT stand in its text"),
        ({"SHOW: header": "INPUT:\nrtir 9"}, "the input cannot be made:\nplace-gpipe/case.rtir:4:"),
    ],
)
@pytest.mark.parametrize("update", [False, True])
def test_a_bad_file_fails_by_name_and_is_not_rewritten(edits, message, update, tmp_path, golden):
    text = SOUND
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    path = write(tmp_path, "place-gpipe", "case", text)
    assert failure(path, attrs.evolve(golden, update=update)).startswith(f"place-gpipe/case.rtir: {message}")
    assert path.read_text() == text


def test_a_folder_that_is_no_pass_fails(tmp_path, compare):
    path = write(tmp_path, "gpipe", "case", SOUND.replace("place-gpipe", "gpipe"))
    assert failure(path, compare).startswith("gpipe/case.rtir: the folder is that of no pass")


def test_a_file_that_says_what_comes_out_passes(tmp_path, compare):
    check(write(tmp_path, "place-gpipe", "case", SOUND), compare)


def test_another_result_is_shown_as_a_difference(tmp_path, compare):
    path = write(tmp_path, "place-gpipe", "case", SOUND.replace("-> placed", "-> allocated"))
    text = failure(path, compare)
    assert text.startswith("place-gpipe/case.rtir differs from its golden file:\n")
    assert "-level: dataflow -> allocated\n+level: dataflow -> placed\n" in text
    assert "--update-golden" in text


def test_only_what_is_expected_is_rewritten(tmp_path, golden):
    path = write(tmp_path, "place-gpipe", "case", SOUND.replace("level: dataflow -> placed\n", ""))
    check(path, attrs.evolve(golden, update=True))
    assert path.read_text() == SOUND


@pytest.mark.parametrize("update", [False, True])
def test_a_pass_that_leaves_an_unsound_module_fails_whatever_is_expected(update, tmp_path, golden, monkeypatch):
    monkeypatch.setattr(InsertReleasePass, "run", lambda _self, module, _context: module.stages[0].ops.pop())
    path = write(
        tmp_path, "insert-release", "case", "// RUN: insert-release\n// x\n// BEFORE: place-1f1b\n// EXPECT:\n"
    )
    text = failure(path, attrs.evolve(golden, update=update))
    assert text.startswith("insert-release/case.rtir: the schedule after the pass is unsound:\n")


def test_a_pass_that_is_missing_is_not_run_unsaid(tmp_path, compare):
    path = write(tmp_path, "recompute", "case", "// RUN: recompute\n// x\n// EXPECT:\n")
    assert "RUN ran place-1f1b,recompute: what is not the pass itself belongs in BEFORE" in failure(path, compare)
