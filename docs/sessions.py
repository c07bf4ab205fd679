"""Pages that are sessions: every `console` block is run, in its order, in one new folder, and shows what came out.

A page is its own source: running it keeps the words and the commands and writes the outputs anew. Figures that a clock gives differ
from run to run; where nothing else differs, what the page had stays.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import ratrain
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import heartbeat

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"[|<>&;$*]")
_CLOCKED = ("run", "quickstart", "launch", "alloc", "plan", "generate")
"""Commands whose output has figures of a clock, or of this processor's arithmetic."""
COLUMNS = "80"
"""As wide as the terminal that pages are made for."""


def run_page(text: str) -> str:
    """The page with the outputs of its commands as they are now.

    Raises ValueError where a command ends with another exit code than 0, or 1 for an input that is shown to be at fault.
    """
    with _new_folder():
        return _BLOCK.sub(lambda block: f"```console\n{_run_block(block[1])}```", text)


def commands_of(text: str) -> list[str]:
    """The commands of a page's sessions."""
    return [line[2:] for block in _BLOCK.findall(text) for line in block.split("\n") if line.startswith("$ ")]


def _run_block(block: str) -> str:
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    shown = []
    for command, before in zip(parts[::2], parts[1::2], strict=True):
        now = _output(command)
        shown.append(f"$ {command}\n{before if _is_same(command, before, now) else now}")
    return "".join(shown)


def _is_same(command: str, before: str, now: str) -> bool:
    """Whether two outputs differ in figures of a clock alone."""
    words = command.split()
    clocked = words[0] == "ratrainc" and words[1] in _CLOCKED
    return before == now or (clocked and _without_figures(before) == _without_figures(now))


def _without_figures(text: str) -> str:
    """An output without numbers, pictures made of them, and the breaks of lines that depend on their lengths."""
    one_line = " ".join(text.split())
    as_ever = re.sub(
        r" ETA \S+|, compiling loops [\d.]+ MiB|; both include the one-time compilation of \d+ loops?", "", one_line
    )  # said where there is one
    return re.sub(r"[\d.,:+-]+( [MG]iB)?|[▁▂▃▄▅▆▇█]+", "#", as_ever)


def _output(command: str) -> str:
    """What a command prints; of ratrainc in this process, of all else by the shell."""
    if command.startswith("ratrainc ") and not _SHELL.search(command):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(shlex.split(command)[1:])
        text = out.getvalue()
    else:
        words = f'ratrainc() {{ {shlex.quote(sys.executable)} -m ratrain "$@"; }}; {command}'
        done = subprocess.run(  # noqa: S603 - a command of our own page
            ["bash", "-c", words],  # noqa: S607
            env=os.environ | {"PYTHONPATH": str(Path(ratrain.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
        )
        code, text = done.returncode, done.stdout
    if code not in (0, 1):
        raise ValueError(f"'{command}' ended with {code}: {text}")
    return text


@contextlib.contextmanager
def _new_folder() -> Iterator[None]:
    """A new current folder, and a terminal of `COLUMNS`, where nothing is said of how long work goes on."""
    before, columns, every = Path.cwd(), os.environ.get("COLUMNS"), heartbeat.EVERY_SECONDS
    heartbeat.EVERY_SECONDS = threading.TIMEOUT_MAX
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["COLUMNS"] = COLUMNS
        try:
            yield
        finally:
            os.chdir(before)
            heartbeat.EVERY_SECONDS = every
            if columns is None:
                del os.environ["COLUMNS"]
            else:
                os.environ["COLUMNS"] = columns
