"""Snapshots that PyTorch's memory viewer opens: its own loader reads them, and no two live tensors share a byte."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main

GIB = 1 << 30
PLAN = "[parallel]\npp = 2\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 4\nseq_len = 32\n"


def read(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        data: dict[str, Any] = pickle.load(stream)
        return data


def most_live(trace: list[dict[str, Any]]) -> int:
    """Replay a trace: no allocation overlaps a live one, every free is of one; return the most live bytes."""
    live: dict[int, int] = {}
    most = 0
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    for entry in trace:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
            near = sorted(live.items())
            assert all(one + size <= other for (one, size), (other, _) in pairwise(near))
            most = max(most, sum(live.values()))
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    return most


def check(data: dict[str, Any]) -> None:
    """Compare the allocations that are live at a trace's end with its segment's blocks."""
    for number, trace in enumerate(data["device_traces"]):
        most_live(trace)
        live: dict[int, int] = {}
        for entry in trace:
            if entry["action"] == "alloc":
                live[entry["addr"]] = entry["size"]
            elif entry["action"] == "free_completed":
                del live[entry["addr"]]
        (segment,) = (each for each in data["segments"] if each["device"] == number)
        blocks = [each for each in segment["blocks"] if each["state"] == "active_allocated"]
        assert {each["address"]: each["size"] for each in blocks} == live
        assert sum(each["size"] for each in segment["blocks"]) == segment["total_size"]


def opened_by_pytorch(data: dict[str, Any]) -> None:
    """PyTorch's own loader, where PyTorch is installed."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viewer.segsum(data)
    assert "entries" in viewer.trace(data)
    assert "MemoryViz" in viewer.trace_plot(data)
    assert viewer.segments(data, format_flamegraph=lambda lines: lines)


def test_a_framework_s_step(tmp_path: Path) -> None:
    out = tmp_path / "step.pickle"
    assert main(["fit", "--model", "llama-3-8b", "--devices", "8", "--snapshot", str(out)]) == 0
    data = read(out)
    check(data)
    found = api.fit(model="llama-3-8b", devices=8)
    assert most_live(data["device_traces"][0]) == found.fullest.peak_bytes
    opened_by_pytorch(data)


def test_every_moment_has_its_bytes(tmp_path: Path) -> None:
    """The trace passes through each moment of the answer, in their order."""
    found = api.fit(model="llama-2-7b", devices=4, micro_batch_size=2)
    found.write_snapshot(str(tmp_path / "step.pickle"))
    (trace,) = read(tmp_path / "step.pickle")["device_traces"]
    sums, now = [], 0
    for entry in trace:
        now += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        sums.append(now)
    at = 0
    for moment in found.fullest.moments:
        assert moment.bytes in sums[at:], moment.name
        at += sums[at:].index(moment.bytes)


def test_a_program_s_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text(PLAN)
    assert main(["compile", "--model", "tinyllama-1.1b", "--plan", "p.toml", "-o", "x.rtx", "--capacity", "64GiB"]) == 0
    assert main(["report", "x.rtx", "-o", "x.pickle"]) == 0
    data = read(Path("x.pickle"))
    check(data)
    program = api.load("x.rtx")
    for stage, trace in zip(program.stages, data["device_traces"], strict=True):
        assert most_live(trace) <= stage.arena_bytes
        names = {entry["frames"][0]["filename"] for entry in trace}
        assert any(name.startswith("%x.") for name in names)
    opened_by_pytorch(data)


FIT = ["fit", "--model", "llama-3-8b", "--devices", "8", "--snapshot"]


@pytest.mark.parametrize("name", ["step.pickle", "step.pkl"])
def test_a_file_of_others_is_not_replaced(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / name
    for content in (pickle.dumps({"segments": [], "device_traces": []}), pickle.dumps([1]), b"my notes"):
        out.write_bytes(content)
        assert main([*FIT, str(out)]) == 1
        told = capsys.readouterr().err
        assert "is no memory snapshot of ratrain" in told
        assert "name another file" in told
        with pytest.raises(DiagnosticError, match="is not replaced"):
            api.fit(model="llama-2-7b", devices=4).write_snapshot(str(out))
        assert out.read_bytes() == content


def test_a_snapshot_of_ours_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "step.pickle"
    out.touch()
    assert main([*FIT, str(out)]) == 0
    first = out.read_bytes()
    assert main([*FIT[:-3], "--devices", "4", "--snapshot", str(out)]) == 0
    assert out.read_bytes() != first
    assert read(out)["made_by"] == "ratrain"
