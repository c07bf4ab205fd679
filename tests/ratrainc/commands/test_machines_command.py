"""`ratrainc machines`, and what commands say of machines whose files say little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine, machine_names

GIVEN = ["--model", str(example_path("tiny.json")), "--plan", str(example_path("tiny.toml"))]
OWN = 'base = "cpu"\nname = "own"\nddr_bandwidth = "30 GB/s"\nlaunch = { value = "9 us", certainty = "measured", source = "here" }\n'
NOTE = "the machine 'own' says no certainty of these, which count as assumed: ddr_bandwidth\n"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(words)) == 0
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_machines_are_listed_with_what_is_assumed_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = printed(capsys, "machines")
    found = json.loads(printed(capsys, "machines", "--json")[0])["machines"]
    assert [each["name"] for each in found] == machine_names()
    for each in found:
        machine = load_machine(each["name"])
        assert (each["ddr_capacity"], each["fp16_peak"]) == (machine["ddr_capacity"], machine["fp16_peak"])
        assert each["assumed"] == [key for key, c in machine.constants.items() if c.certainty == "assumed"]
        row = next(line for line in text.splitlines() if f" {each['name']} " in line)
        assert f" {len(machine.constants)} " in row
        assert f" {len(each['assumed'])} " in row
    assert "450 GB/s in a node of 8, 50 GB/s in a system" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a100-node", "3 of 4 published steps on such machines are within {:.0f} % of simulated times"),
        ("h200", "no published step on a machine like h200 was held against simulated times"),
        ("mt3000", None),
    ],
)
def test_answers_say_how_far_off_published_steps_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str | None
) -> None:
    error, program = load_machine(name).step_error, str(tmp_path / "a.rtx")
    printed(capsys, "compile", *GIVEN, "--machine", name, "-o", program)
    planned = ("plan", *GIVEN[:2], "--clusters", "2", "--global-batch", "4", "--seq-len", "64", "--quick")
    compared = ("compare", *GIVEN, "--strategies", "baseline-1f1b,ratrain")
    for words in (("simulate", program), (*planned, "--machine", name), (*compared, "--machine", name)):
        text = " ".join(printed(capsys, *words)[0].split())
        if said is None:
            assert "published" not in text
        else:
            assert said.format(100 * (error or 0)) in text
        assert json.loads(printed(capsys, *words, "--json")[0])["step_error"] == error


@pytest.mark.parametrize("name", ["mt3000", "h100-node"])
def test_a_machine_is_shown_figure_by_figure(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, _ = printed(capsys, "machines", name)
    found = json.loads(printed(capsys, "machines", name, "--json")[0])
    machine = load_machine(name)
    assert {c["name"]: c["value"] for c in found["constants"]} == {k: c.value for k, c in machine.constants.items()}
    for key, constant in machine.constants.items():
        row = next(line for line in text.splitlines() if line.split()[:1] == [key])
        assert constant.certainty in row
        assert row.endswith(constant.source)
    assert "*" not in text.splitlines()[1]


def test_what_a_file_leaves_open_is_marked_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whoever is given the file; what is compiled for it carries the figures as assumed, and no more is said."""
    (tmp_path / "own.toml").write_text(OWN)
    own, program = str(tmp_path / "own.toml"), str(tmp_path / "a.rtx")
    text, _ = printed(capsys, "machines", own)
    marked = [line.split()[0] for line in text.splitlines() if "assumed*" in line]
    assert marked == ["ddr_bandwidth"]
    assert json.loads(printed(capsys, "machines", own, "--json")[0])["without_certainty"] == marked
    assert printed(capsys, "compile", *GIVEN, "--machine", own, "-o", program)[1].endswith(NOTE)
    out, err = printed(capsys, "simulate", program, "--json")
    assert (json.loads(out)["machine"], err) == ("own", "")
    assert printed(capsys, "simulate", program, "--machine", own, "--json") == (out, NOTE)
    _, err = printed(capsys, "simulate", program, "--machine", "h100-node", "--json")
    assert err == f"the machine is 'h100-node', of --machine; {program} was compiled for 'own'\n"
    page = str(tmp_path / "a.html")
    printed(capsys, "report", program, "-o", page)
    assert "<td>assumed</td><td>not said</td>" in Path(page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message", "help_text"),
    [
        ("link=400Gb/s", "'400Gb/s' counts bits, not bytes/s", "that is 50 GB/s"),
        ("ddr=5us", "'5us' is in s, not in bytes", "80 GB or 80 GiB"),
        ("latency=5GB", "'5GB' is in bytes, not in s", "25 us"),
        ("gemm=80%", "gemm_efficiency is a number (fraction of fp16_peak), got '80%'", ""),
        ("ddr=0GB", "ddr_capacity (bytes) is a number above 0, got '0GB'", ""),
        ("ddr=16", "'16' has no unit", "write 16 GB or 16 GiB; or 16 B, if that is meant"),
        ("ddr=16G", "'G' is no unit of bytes", "write 16 GB or 16 GiB"),
        ("link=7.4", "'7.4' has no unit", "write 7.4 GB/s"),
        ("link=7g", "'g' is no unit of bytes/s", "write 7 GB/s or 7 GiB/s"),
        ("latency=5", "'5' has no unit", "write 5 us"),
    ],
)
def test_a_what_if_reads_quantities_as_a_machine_file_does(
    capsys: pytest.CaptureFixture[str], change: str, message: str, help_text: str
) -> None:
    size = ["--clusters", "2", "--global-batch", "4", "--seq-len", "16", "--quick"]
    assert main(["plan", "--model", GIVEN[1], *size, "--what-if", change]) == 1
    shown = capsys.readouterr().err
    assert "error[RT065]" in shown
    assert message in shown
    assert help_text in shown
