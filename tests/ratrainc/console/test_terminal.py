"""Nothing that a file holds, or is called, steers a terminal: it is shown by its numbers, wherever it is shown."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from rich.panel import Panel

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Location, printable
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import console
from ratrain.ratrainc.console.terminal import echo_document
from tests.ratrainc.commands.test_paths import CONFIG, PLAN

POISON = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\r\u202e\u2066\u200f\u2028\x85"
SHOWN = r"\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\x0d\u202e\u2066\u200f\u2028\x85"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_what_steers_is_shown_and_the_rest_stays() -> None:
    assert printable(POISON) == SHOWN
    assert printable("a\tb\nc é 漢 ▁▂ \u200d") == "a\tb\nc é 漢 ▁▂ \u200d"
    assert not STEERING.search(printable("".join(map(chr, range(0x3000))) + "\ud800\udfff"))


def test_the_caret_stays_under_its_place() -> None:
    source = "a\x1b[1m = 5\x9b"
    shown = Diagnostic("RT001", "x", Location("f", 1, 8, 2), source=source).render().splitlines()
    assert shown[1] == r"  a\x1b[1m = 5\x9b"
    assert shown[2] == "  " + " " * len(r"a\x1b[1m = "[:-1]) + "^" + "~"


def calls(path: Path) -> list[str]:
    """What a module calls, by name."""
    tree = ast.parse(path.read_text("utf-8"))
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_one_place_writes() -> None:
    """All else goes through it. Signal handlers write constants, by `os.write`."""
    folder = Path(__file__).resolve().parents[3]
    writers = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write", "Console", "rich.print"}
    found = {
        path.relative_to(folder).as_posix(): sorted(writers & set(calls(path)))
        for part in ("src", "ratrainc", "ratrain_ir", "passes", "targets")
        for path in (folder / part).rglob("*.py")
        if writers & set(calls(path))
    }
    assert found == {
        "ratrainc/console/terminal.py": ["click.echo", "sys.stdout.write"],
    }


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose names, and what can be named in them, hold what steers."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / f"{POISON}.json").write_text(json.dumps(CONFIG))
    (folder / f"{POISON}.toml").write_text(PLAN)
    (folder / "plan.toml").write_text(PLAN)
    (folder / "machine.toml").write_text(f'base = "mt3000"\nname = {json.dumps("m" + POISON.replace(chr(127), ""))}\n')
    words = ["compile", "--model", f"{folder}/{POISON}.json", "--plan", f"{folder}/plan.toml"]
    assert main([*words, "-o", f"{folder}/a.rtx"]) == 0
    shutil.copy(folder / "a.rtx", folder / f"{POISON}.rtx")
    (folder / "text.txt").write_text("some text to train on\n" * 40)
    (folder / "bad.csv").write_text(f"0F0,{POISON.replace(chr(13), '')}\n", newline="")
    (folder / "problem.csv").write_text(f"id,lower,upper,size\na{POISON.strip()},2,x,8\n", newline="")
    (folder / "bad.rtir").write_text(f'rtir 2\nmodule @m level placed {{\n  model {{ name = "{POISON}" }} {POISON}\n')
    (folder / "bad.json").write_text(json.dumps(CONFIG | {f"{POISON}": 1, "hidden_act": POISON}))
    (folder / "bad.toml").write_text(PLAN + f'["{POISON}"]\nx = 1\n')
    (folder / "profile.json").write_text(json.dumps({"otherData": {"format": POISON}}))
    (folder / "rows.csv").write_text(f"model,plan,step_seconds\n{POISON},plan.toml,1\n", newline="")
    return folder


COMMANDS = [
    ("compile", "--model", f"{POISON}.json", "--plan", f"{POISON}.toml"),
    ("compile", "--model", f"{POISON}.json", "--plan", "plan.toml", "--json", "-o", f"{POISON}2.rtir"),
    ("compile", "--model", "bad.json", "--plan", "plan.toml"),
    ("compile", "--model", f"{POISON}.json", "--plan", "bad.toml"),
    ("compile", "--model", f"{POISON}.json", "--plan", "plan.toml", "--machine", "machine.toml"),
    ("compile", "--model", POISON, "--plan", "plan.toml"),
    ("compile", "--model", f"{POISON}.json", "--plan", "plan.toml", "--strategy", POISON),
    ("compile", "--model", f"{POISON}.json", "--plan", "plan.toml", "--passes", POISON),
    ("model", f"{POISON}.json"),
    ("verify", f"{POISON}.rtx"),
    ("verify", f"{POISON}.rtx", "--json"),
    ("verify", "bad.rtir"),
    ("verify", "bad.rtir", "--json"),
    ("verify", f"missing {POISON}"),
    ("lint", "bad.csv"),
    ("alloc", "problem.csv", "--capacity", "1KiB"),
    ("alloc", "problem.csv", "--capacity", POISON),
    ("disasm", f"{POISON}.rtx"),
    ("disasm", f"{POISON}.rtx", "--engine", POISON),
    ("disasm", f"{POISON}.rtx", "--routines"),
    ("simulate", f"{POISON}.rtx"),
    ("simulate", f"{POISON}.rtx", "--machine", "machine.toml"),
    ("explain", f"{POISON}.rtx", "--seconds", "0"),
    ("compare", "--model", f"{POISON}.json", "--plan", f"{POISON}.toml", "--strategies", "ratrain"),
    ("calibrate", "--profile", "profile.json"),
    ("calibrate", "--rows", "rows.csv", "--fit", "launch"),
    ("run", f"{POISON}.rtx", "--data", "text.txt", "--steps", "1", "--kernels", "reference", "--threads", "1"),
    ("run", f"{POISON}.rtx", "--data", f"{POISON}.toml", "--steps", "1", "--kernels", "reference", "--log", "."),
    ("opt", "bad.rtir", "--passes", POISON),
    ("postmortem", POISON),
    ("doctor", f"{POISON}.rtx"),
    (POISON,),
    ("verify", f"--{POISON}"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words).replace(POISON, "POISON"))
def test_what_commands_write_steers_nothing(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(poisoned)
    assert main(list(words)) in (0, 1, 2)
    found = capsys.readouterr()
    assert found.out or found.err
    for text in (found.out, found.err):
        assert not STEERING.search(text), STEERING.search(text)
    if "--json" in words:
        json.loads(found.out)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_document_is_printable_on_a_terminal_and_itself_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    """What `opt` and `export` print is read again by other commands."""
    written = stream()
    monkeypatch.setattr("sys.stdout", written)
    echo_document(f"a {POISON}\tb\n")
    assert written.getvalue() == f"a {SHOWN if stream is Terminal else POISON}\tb\n"


OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What rich itself writes to a terminal: colours, and moving the cursor."""
MARKUP = "[red]x[/red] [/nothing] :smile:"


def test_tables_progress_and_panels_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are taken as they are: no markup, no control characters, in columns as wide as what is shown."""
    written = io.StringIO()
    terminal = console.PlainConsole(file=written, force_terminal=True, width=200)
    monkeypatch.setattr(console, "output", lambda: terminal)
    monkeypatch.setattr(console, "errors", lambda: terminal)
    text, shown = (f"{half} {MARKUP}".replace("\x07", "").replace("\r", "") for half in (POISON, SHOWN))
    shown = shown.replace(r"\x07", "").replace(r"\x0d", "")  # rich drops these two itself
    console.say(text)
    console.table(text, (text, "b"), [[text, text], ["a", "b"]])
    with console.status(text):
        pass
    with console.progress(3, text) as (bar, task):
        bar.update(task, advance=1, status=text)
        bar.refresh()
    with Live(Panel(text), console=terminal):
        pass
    found = written.getvalue()
    assert found.count(shown) >= 8
    assert not STEERING.search(OWN.sub("", found))
    rows = [OWN.sub("", line) for line in found.splitlines() if "┃" in line or "│" in line or "┏" in line]
    assert len({len(row) for row in rows if len(row) < 200}) == 1


class ShortWrites(io.RawIOBase):
    """A file that takes a few bytes of each write, as one on a nearly full disk does."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data[: min(100, len(data))])
        self.data += taken
        return len(taken)


def test_nothing_is_lost_where_a_write_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONUNBUFFERED, where stdout has no buffer that would go on."""
    shown = []
    for _ in range(2):
        raw = ShortWrites()
        unbuffered = io.TextIOWrapper(raw, "utf-8", write_through=True)  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdout", unbuffered)
        monkeypatch.setattr(sys, "__stdout__", unbuffered)
        assert main(["schedule", "--kind", "gpipe", "--stages", "4", "--micro-batches", "200"]) == 0
        sys.stdout.flush()
        shown.append(bytes(raw.data).decode())
    assert shown[0] == shown[1]
    assert len(shown[0].splitlines()) == 4
    assert shown[0].splitlines()[3].endswith("3B199")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (10_000, "10000 bytes"), (10_486, "0.01 MiB"), (3 << 20, "3.00 MiB")],
)
def test_no_bytes_are_shown_as_none(count: int, text: str) -> None:
    assert console.size_text(count) == text
