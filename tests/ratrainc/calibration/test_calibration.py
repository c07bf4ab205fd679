"""Machine files fitted to measured step times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.calibration import fitting
from ratrain.ratrainc.calibration.calibration_report import calibrate_rows
from ratrain.ratrainc.calibration.fitting import fitted, fitted_rates, with_values
from ratrain.ratrainc.calibration.from_profile import machine_from_profiles
from ratrain.ratrainc.calibration.measured_rows import compiled, read_rows
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import extras
from ratrain.ratrainc.validation.validation_rows import read_validation_table
from ratrain.targets.machine.machine import Machine, load_machine, parse_machine
from ratrain.targets.machine.writer import machine_lines, write_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.validation.errors import Seconds

EXAMPLES = Path(__file__).parents[3] / "examples"
COUNTS = (1, 2, 4, 8, 16)


def table(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def row(micro_batches: int, value: float, split: str = "") -> str:
    return f"{EXAMPLES / 'tiny.json'},{EXAMPLES / 'tiny.toml'},{micro_batches},{value!r},{split}"


@pytest.mark.full
def test_fit_finds_constants_that_made_the_rows(tmp_path: Path) -> None:
    start = load_machine("mt3000")
    truth = with_values(start, ["launch", "ddr_bandwidth"], [55e-6, 21e9], "made for a test")
    lines = ["model,plan,micro_batches,step_seconds,split"]
    for count in COUNTS:
        plan = (EXAMPLES / "tiny.toml").read_text().replace("micro_batches = 4", f"micro_batches = {count}")
        (tmp_path / "plan.toml").write_text(plan)
        program = api.emit(
            api.compile(str(EXAMPLES / "tiny.json"), str(tmp_path / "plan.toml"), machine=truth), machine=truth
        )
        lines.append(row(count, api.simulate(program, machine=truth).step_seconds))
    found = calibrate_rows(table(tmp_path / "rows.csv", lines), start, ["launch", "ddr_bandwidth"], every=4)
    assert found.machine["launch"] == pytest.approx(55e-6, rel=1e-3)
    assert found.machine["ddr_bandwidth"] == pytest.approx(21e9, rel=1e-3)
    assert found.is_held_out == [False, False, False, True, False]
    assert dict(found.errors)["held out"].largest < 1e-3
    assert found.machine.constants["launch"].certainty == "fitted"
    assert "4 measured steps" in found.machine.constants["launch"].source
    assert found.machine.constants["link_latency"] == start.constants["link_latency"]


def test_rows_run_as_their_strategy_has_them(tmp_path: Path) -> None:
    """With its ZeRO level and its chunks; a row that says another level is refused at its place."""
    rows = table(tmp_path / "rows.csv", ["model,plan,micro_batches,step_seconds,split", row(2, 0.1)])
    machine = load_machine("mt3000")
    for name, level, chunks in (("ratrain", 1, 1), ("zero3", 3, 1), ("interleaved", 1, 2)):
        (program,) = compiled(read_rows(rows, machine, strategy(name)).rows, machine)
        assert (program.plan.zero, program.plan.chunks) == (level, chunks)
    said = table(tmp_path / "said.csv", ["model,plan,zero,step_seconds,split", row(2, 0.1)])
    assert read_rows(said, machine, strategy("ratrain")).rows[0].task.plan.zero == 2
    with pytest.raises(DiagnosticError, match="the strategy 'zero3' is ZeRO 3, the row is ZeRO 2") as refused:
        read_rows(said, machine, strategy("zero3"))
    assert refused.value.diagnostics[0].code == "RT064"
    assert refused.value.diagnostics[0].location.line == 2


MIXED = [
    "# Steps of a foreign machine.",
    "id,class,split,model,machine,capacity,strategy,plan,tp,pp,cuts,mapping,attention,micro_batches,step_seconds,peak_bytes,needs",
    f"one,step-time,fit,{EXAMPLES / 'tiny.json'},a100-node,,,{EXAMPLES / 'tiny.toml'},2,,,,,,0.02,,",
    f"two,step-time,held-out,{EXAMPLES / 'tiny.json'},a100-node,8GB,full-save,{EXAMPLES / 'tiny.toml'},2,2,auto,node 2x2,scores-kept,8,0.05,,",
    f"peak,memory,fit,{EXAMPLES / 'tiny.json'},a100-node,,,{EXAMPLES / 'tiny.toml'},,,,,,,,1GB,",
    f"three,step-time,held-out,{EXAMPLES / 'tiny.json'},a100-node,,,{EXAMPLES / 'tiny.toml'},,,,,,,0.05,,skew",
]
"""A table of everything that a table can say."""


def test_both_commands_read_a_table_as_the_same_steps(tmp_path: Path) -> None:
    """With any key of a plan, machine, bytes and strategy by row; a fit leaves out what has no time."""
    path = table(tmp_path / "rows.csv", MIXED)
    validated = {row.id: row for row in read_validation_table(path).rows}
    to_fit = read_rows(path)
    assert [each.label for each in to_fit.rows] == ["one", "two"]
    assert to_fit.left_out == 2
    assert to_fit.machine.name == "a100-node"
    for each in to_fit.rows:
        assert each.task == validated[each.label].task
        assert each.split == validated[each.label].split
    two = to_fit.rows[1].task.plan
    assert (two.tp, two.pp, two.attention, two.micro_batches) == (2, 2, "scores-kept", 8)
    assert [each.capacity for each in to_fit.rows] == [None, 8_000_000_000]


def test_the_error_of_rows_that_a_table_holds_out_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "rows.csv", MIXED)
    assert main(["calibrate", "--rows", path, "--fit", "dispatch", "--hold-out", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"] == "a100-node"
    assert [(each["label"], each["held_out"]) for each in data["rows"]] == [("one", False), ("two", True)]
    assert data["errors"]["held_out"]["rows"] == 1
    assert data["left_out"] == 2
    assert main(["calibrate", "--rows", path, "--fit", "dispatch"]) == 0
    assert "left out: 2 rows without a time" in capsys.readouterr().out


def test_rows_of_several_machines_are_not_fitted_as_one(tmp_path: Path) -> None:
    lines = ["model,plan,machine,step_seconds"]
    lines += [f"{EXAMPLES / 'tiny.json'},{EXAMPLES / 'tiny.toml'},{name},1" for name in ("a100-node", "h100-node")]
    path = table(tmp_path / "rows.csv", lines)
    with pytest.raises(DiagnosticError, match="several machines") as raised:
        read_rows(path)
    assert raised.value.diagnostics[0].code == "RT064"
    assert read_rows(path, load_machine("h100-node")).machine.name == "h100-node"


@given(st.floats(0.05, 0.9), st.floats(1e9, 1e12))
def test_fit_of_a_known_formula(efficiency: float, bandwidth: float) -> None:
    flops, nbytes = np.array([1e12, 3e12, 1e12, 2e11]), np.array([1e10, 1e10, 9e10, 9e10])
    start = load_machine("mt3000")

    def predict(machine: Machine) -> np.ndarray:
        return flops / (8.1e12 * machine["gemm_efficiency"]) + nbytes / machine["ddr_bandwidth"]

    names = ["gemm_efficiency", "ddr_bandwidth"]
    truth = with_values(start, names, [efficiency, bandwidth], "made for a test")
    found = fitted(start, names, predict, predict(truth), source="test")
    assert predict(found) == pytest.approx(predict(truth), rel=1e-4)


def test_efficiency_stays_a_fraction() -> None:
    start = load_machine("mt3000")

    def predict(machine: Machine) -> np.ndarray:
        return np.array([1 / machine["gemm_efficiency"]])

    found = fitted(start, ["gemm_efficiency"], predict, np.array([0.5]), source="test")
    assert found["gemm_efficiency"] == pytest.approx(1.0)
    assert found["gemm_efficiency"] <= 1.0


@given(st.text(min_size=1), st.floats(1e-12, 1e20))
def test_written_machines_read_back_equal(source: str, value: float) -> None:
    machine = with_values(load_machine("mt3000"), ["launch"], [value], source)
    assert parse_machine("\n".join(machine_lines(machine)), file="m.toml") == machine


@pytest.mark.parametrize(
    ("lines", "code", "place", "words"),
    [
        ([], "RT002", 1, "empty"),
        (["model,plan,steps", "tiny,p,1"], "RT004", 1, "no column 'steps'"),
        (["model,plan", "tiny,p"], "RT005", 2, "says step_seconds or tokens_per_second"),
        (["plan,step_seconds", "p,1"], "RT002", 1, "no column 'model'"),
        (
            ["model,class,peak_bytes,pp,dp,micro_batch_size,micro_batches,seq_len", "gpt2,memory,1GB,1,1,1,1,64"],
            "RT002",
            1,
            "no row of the table has a time",
        ),
        (["model,plan,plan,step_seconds", "a,b,b,1"], "RT006", 1, "given twice"),
        (["model,plan,micro_batches,step_seconds,split"], "RT002", 1, "no rows"),
        (["model,plan,micro_batches,step_seconds,split", row(4, 1.0), "a,b"], "RT002", 3, "expected 5 fields"),
        (["model,plan,micro_batches,step_seconds,split", row(4, -1.0)], "RT005", 2, "positive number"),
        (["model,plan,micro_batches,step_seconds,split", row(4, float("nan"))], "RT005", 2, "positive number"),
        (["model,plan,micro_batches,step_seconds,split", row(4, 1.0, "both")], "RT005", 2, "fit or held-out"),
        (["model,plan,step_seconds", '"a,b,1'], "RT002", 2, "not CSV"),
    ],
)
def test_bad_rows_are_diagnosed(tmp_path: Path, lines: list[str], code: str, place: int, words: str) -> None:
    path = table(tmp_path / "rows.csv", lines) if lines else str(tmp_path / "rows.csv")
    Path(path).touch()
    with pytest.raises(DiagnosticError) as raised:
        calibrate_rows(path, load_machine("mt3000"), ["launch"], every=0)
    found = raised.value.diagnostics[0]
    assert found.code == code
    assert found.location is not None
    assert found.location.line == place
    assert words in found.message


@pytest.mark.parametrize(
    ("field", "value", "underlined"),
    [
        ("model", "nomodel", "nomodel"),
        ("model", "none.json", "none.json"),
        ("plan", "nosuch.toml", "nosuch.toml"),
        ("step_seconds", "soon", "soon"),
        ("micro_batches", "few", "few"),
        ("micro_batches", "0", "0"),
        ("dp", "3000000", "3000000"),
    ],
)
def test_every_bad_value_has_its_place(tmp_path: Path, field: str, value: str, underlined: str) -> None:
    cells = {"model": str(EXAMPLES / "tiny.json"), "plan": str(EXAMPLES / "tiny.toml")}
    cells |= {"dp": "2", "micro_batches": "4", "step_seconds": "1.5", field: value}
    path = table(tmp_path / "rows.csv", [",".join(cells), ",".join(cells.values())])
    with pytest.raises(DiagnosticError) as raised:
        calibrate_rows(path, load_machine("mt3000"), ["launch"], every=0)
    found = raised.value.diagnostics[0]
    assert found.location is not None
    assert (found.location.file, found.location.line) == (path, 2)
    assert found.source is not None
    start = found.location.column - 1
    assert found.source[start : start + found.location.length] == underlined


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["lunch"], "not a constant"),
        (["ddr_capacity"], "counts something"),
        (["link_bandwidth", "launch"], "cannot be fitted to 1 rows"),
    ],
)
def test_bad_names_are_diagnosed(tmp_path: Path, names: list[str], words: str) -> None:
    path = table(tmp_path / "rows.csv", ["model,plan,micro_batches,step_seconds,split", row(4, 1.0)])
    with pytest.raises(DiagnosticError, match=words):
        calibrate_rows(path, load_machine("mt3000"), names, every=0)


def test_a_constant_without_influence_is_diagnosed() -> None:
    with pytest.raises(DiagnosticError, match="changes the time of no row"):
        fitted(load_machine("mt3000"), ["launch"], lambda _: np.array([1.0]), np.array([2.0]), source="test")


def test_a_rate_without_influence_keeps_its_value_and_says_so() -> None:
    """Nobody named it: on a small program products may be bound by memory alone."""
    start = load_machine("mt3000")

    def predict(machine: Machine) -> Seconds:
        return np.array([2.0, 3.0]) * machine["launch"]

    measured = np.array([2e-5, 3e-5])
    found = fitted_rates(start, ["gemm_efficiency", "launch"], predict, measured, source="test", unseen="not seen")
    assert found["launch"] == pytest.approx(1e-5)
    assert found.constants["launch"].certainty == "fitted"
    kept = found.constants["gemm_efficiency"]
    assert (kept.value, kept.certainty, kept.source) == (
        start["gemm_efficiency"],
        start.constants["gemm_efficiency"].certainty,
        "not seen",
    )


def test_a_machine_without_a_time_is_diagnosed() -> None:
    with pytest.raises(DiagnosticError, match="nothing to start from"):
        fitted(load_machine("mt3000"), ["launch"], lambda _: np.array([0.0]), np.array([2.0]), source="test")


def test_what_rows_leave_open_stays_near_its_start() -> None:
    """Memory takes next to none of the time, and the rows would have it take none at all."""
    start = load_machine("mt3000")
    flops, nbytes = np.array([1e12, 3e12, 2e11]), np.array([1e4, 1e4, 1e4])

    def predict(machine: Machine) -> np.ndarray:
        return flops / (8.1e12 * machine["gemm_efficiency"]) + nbytes / machine["ddr_bandwidth"]

    found = fitted(start, ["gemm_efficiency", "ddr_bandwidth"], predict, flops / (8.1e12 * 0.3), source="test")
    assert found["gemm_efficiency"] == pytest.approx(0.3, rel=1e-4)
    assert found["ddr_bandwidth"] == pytest.approx(start["ddr_bandwidth"], rel=0.1)


def test_no_constant_runs_away() -> None:
    start = load_machine("mt3000")
    found = fitted(
        start, ["ddr_bandwidth"], lambda m: np.array([1.0 + 1e10 / m["ddr_bandwidth"]]), np.array([0.1]), source="test"
    )
    assert start["ddr_bandwidth"] < found["ddr_bandwidth"] <= 1.001e4 * start["ddr_bandwidth"]


@pytest.mark.parametrize("words", [("--rows", "rows.csv", "--fit", "launch"), ("--profile", "p.json")])
def test_without_scipy_a_fit_is_refused_before_the_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(words[1]).write_text("neither a table nor a profile")
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    assert main(["calibrate", *words, "-o", "m.toml"]) == 1
    shown = capsys.readouterr().err
    assert "error[RT002]: fitting constants needs scipy, which is not installed" in shown
    assert "pip install 'ratrain[calibrate]'" in shown
    assert not Path("m.toml").exists()


def test_command_writes_a_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "rows.csv", ["model,plan,micro_batches,step_seconds,split", row(4, 0.02), row(8, 0.03)])
    out = tmp_path / "mine.toml"
    assert main(["calibrate", "--rows", path, "--fit", "launch", "--hold-out", "2", "-o", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["errors"]["fitted"]["rows"] == printed["errors"]["held_out"]["rows"] == 1
    assert load_machine(str(out))["launch"] == pytest.approx(printed["constants"]["launch"]["fitted"])


def test_contradicting_machine_is_not_written(tmp_path: Path) -> None:
    machine = with_values(load_machine("mt3000"), ["launch"], [float("inf")], "made for a test")
    with pytest.raises(DiagnosticError):
        write_machine(machine, str(tmp_path / "m.toml"))
    assert not (tmp_path / "m.toml").exists()


VALUES: tuple[Any, ...] = (None, "", "x", -1, 0, 1e300, 10**30, math.nan, [], {}, [1], {"a": 1})
GONE = object()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A profile with each distinct op once."""
    folder = tmp_path_factory.mktemp("profile")
    model, plan = str(EXAMPLES / "tiny.json"), str(EXAMPLES / "tiny.toml")
    assert main(["compile", "--model", model, "--plan", plan, "-o", str(folder / "a.rtx")]) == 0
    words = ["run", str(folder / "a.rtx"), "--steps", "1", "--threads", "1", "--profile", str(folder / "p.json")]
    assert main(words) == 0
    data: dict[str, Any] = json.loads((folder / "p.json").read_text())
    ops = {
        (event["args"]["op"], event["args"]["routine"]): event for event in data["traceEvents"] if event["ph"] == "X"
    }
    return data | {"traceEvents": list(ops.values())}


def places_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in JSON data."""
    if path:
        yield path
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from places_in(data[key], (*path, key))


def with_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of JSON data with something else in one place."""
    copy = data.copy()
    if len(path) > 1:
        copy[path[0]] = with_value(data[path[0]], path[1:], value)
    elif value is GONE:
        del copy[path[0]]
    else:
        copy[path[0]] = value
    return copy


@pytest.mark.full
def test_malformed_profiles_end_in_a_diagnostic_or_a_machine(
    profile: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else, or nothing, in every kind of place of a profile: its machine can be written and read, or it is refused."""
    monkeypatch.setattr(fitting, "_MOST_STEPS", 1)  # the fit is the same for all that get as far
    path = tmp_path / "p.json"
    kinds: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for place in places_in(profile):
        kinds.setdefault(tuple(key if isinstance(key, str) else "*" for key in place), place)
    refused = made = 0
    for number, place in enumerate(kinds.values()):
        for value in {GONE: 0, **dict.fromkeys(range(number % 3, len(VALUES), 3))}:
            path.write_text(json.dumps(with_value(profile, place, value if value is GONE else VALUES[value])))
            try:
                found = machine_from_profiles([str(path)], "mine", 1e11)
            except DiagnosticError as error:
                assert {"RT002", "RT005"} >= {diagnostic.code for diagnostic in error.diagnostics}  # noqa: PT017
                refused += 1
            else:
                write_machine(found.machine, str(tmp_path / "m.toml"))
                load_machine(str(tmp_path / "m.toml"))
                made += 1
    assert refused > 200
    assert made > 20
