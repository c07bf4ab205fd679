"""Files that were proved sound are not proved again while not a byte of them, nor the machine, has changed; unsound ones never pass."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support import proof_cache
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.compiling import proving, soundness
from ratrain.targets.verifier import program_verifier
from tests.end_to_end.tiny_runs import MODEL, make_plan, swap_neighbours

PASSES = "place-1f1b,bucket-grad-sync,insert-prefetch,allocate-ddr"

ROOMS = {"check": soundness, "check_program": program_verifier}
"""Where proofs are taken from."""


class _Proofs:
    """What is proved, by the real proof."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("check", "check_program"):
            monkeypatch.setattr(ROOMS[name], name, self._counting(name))

    def _counting(self, name: str):
        real = getattr(ROOMS[name], name)

        def counted(*given, **options):
            self.made.append(name)
            return real(*given, **options)

        return counted

    def of(self, work) -> list[str]:
        self.made = []
        work()
        return self.made


@pytest.fixture
def proofs(monkeypatch, tmp_path) -> _Proofs:
    monkeypatch.setenv(proof_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(proof_cache, "installation", lambda: "this one")
    return _Proofs(monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("proved")
    module = api.compile(MODEL, make_plan(MODEL), passes=PASSES)
    api.save(module, str(folder / "tiny.rtir"))
    api.save(module, str(folder / "tiny.rtx"))
    return folder


def test_a_program_is_proved_once_for_all_commands(proofs, files, capsys):
    path = str(files / "tiny.rtx")
    assert proofs.of(lambda: main(["simulate", path])) == ["check_program"]
    assert proofs.of(lambda: main(["simulate", path])) == []
    assert proofs.of(lambda: main(["explain", path, "--time"])) == []
    assert proofs.of(lambda: main(["report", path, "-o", str(files / "tiny.html")])) == []
    assert proofs.of(lambda: main(["run", path, "--steps", "1", "--kernels", "reference"])) == []


@pytest.mark.parametrize(("name", "proof"), [("tiny.rtx", "check_program"), ("tiny.rtir", "check")])
def test_verify_always_proves_and_leaves_an_entry(proofs, files, name, proof, capsys):
    path = str(files / name)
    for _ in range(2):
        assert proofs.of(lambda: main(["verify", path])) == [proof]
    assert proof not in proofs.of(lambda: main(["simulate", path]))


def test_what_a_schedule_gives_is_proved_each_time(proofs, files, capsys):
    path = str(files / "tiny.rtir")
    assert proofs.of(lambda: main(["simulate", path])) == ["check", "check_program"]
    assert proofs.of(lambda: main(["simulate", path])) == ["check_program"]


def test_a_large_schedule_is_proved_without_its_ops(proofs, files, monkeypatch, capsys):
    """Check that it leaves the same entry as any other proof; if something is wrong, the rules on ops say what."""
    monkeypatch.setattr(proving, "ALLOWANCE", Allowance(0))
    path = str(files / "tiny.rtir")
    assert proofs.of(lambda: main(["verify", path])) == []
    large = capsys.readouterr().out
    assert "check" not in proofs.of(lambda: main(["simulate", path]))
    monkeypatch.setattr(proving, "ALLOWANCE", Allowance(1 << 30))
    capsys.readouterr()
    assert proofs.of(lambda: main(["verify", path])) == ["check"]
    assert capsys.readouterr().out == large
    wrong = files / "wrong.rtir"
    wrong.write_text(re.sub(r"    release .*\n", "", Path(path).read_text(), count=1))
    refused = []
    for allowed in (0, 1 << 30):
        monkeypatch.setattr(proving, "ALLOWANCE", Allowance(allowed))
        assert proofs.of(lambda: main(["verify", str(wrong)])) == ["check"]
        refused.append(capsys.readouterr())
    assert refused[0] == refused[1]
    assert "RT023" in refused[0].err


def test_a_schedule_is_proved_for_each_machine(proofs, files, capsys):
    path = str(files / "tiny.rtir")
    assert proofs.of(lambda: main(["simulate", path]))[0] == "check"
    assert proofs.of(lambda: main(["simulate", path, "--machine", "h100-node"]))[0] == "check"
    assert proofs.of(lambda: main(["simulate", path, "--machine", "h100-node"])) == ["check_program"]


def test_a_comment_more_is_another_schedule(proofs, files, tmp_path, capsys):
    text = (files / "tiny.rtir").read_text()
    copy = tmp_path / "copy.rtir"
    copy.write_text(text)
    assert "check" in proofs.of(lambda: main(["simulate", str(copy)]))
    assert "check" not in proofs.of(lambda: main(["simulate", str(copy)]))
    copy.write_text(text + "// more\n")
    assert "check" in proofs.of(lambda: main(["simulate", str(copy)]))


def test_every_changed_byte_of_a_program_is_proved_anew(proofs, files, monkeypatch):
    """With a digest that is right again; most of what such bytes say is refused while it is read."""
    data = (files / "tiny.rtx").read_bytes()
    api.verify(str(files / "tiny.rtx"))
    proved = []
    monkeypatch.setattr(program_verifier, "check_program", proved.append)
    changed, read = files / "changed.rtx", 0
    for place in range(20, len(data) - 32, (len(data) - 52) // 60):
        body = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 : -32]
        changed.write_bytes(body + hashlib.sha256(body).digest())
        try:
            proving.sound_program(str(changed))
        except DiagnosticError:
            continue
        read += 1
    assert len(proved) == read > 5
    proving.sound_program(str(files / "tiny.rtx"))
    assert len(proved) == read


def test_an_unsound_program_is_never_let_through(proofs, files):
    program = api.load(str(files / "tiny.rtx"))
    swap_neighbours(program.stages[0].streams[Engine.COMPUTE], 1)
    path = str(files / "unsound.rtx")
    api.save(program, path)
    for _ in range(2):
        proofs.made = []
        with pytest.raises(DiagnosticError):
            api.simulate(path)
        assert proofs.made == ["check_program"]
