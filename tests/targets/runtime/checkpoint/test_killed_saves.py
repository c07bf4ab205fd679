"""A process killed at any moment of a save leaves a whole checkpoint, and the next save leaves nothing else.

One process per case forks a child for every call into the operating system that a save makes, kills it there with SIGKILL, and looks
at what is left. It prints what it found wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

COMMON = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from attrs import evolve
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.checkpoint import checkpoint_places
from ratrain.targets.runtime.checkpoint.checkpoint import clear_leftovers, hold_checkpoint_place, save_checkpoint
from ratrain.targets.runtime.checkpoint.checkpoint_series import load_latest
from ratrain.targets.runtime.engine.processes import Processes
from tests.targets.runtime.checkpoint.training_states import LLAMA, RUN, make_state

folder, exchanging, old = Path(sys.argv[2]), sys.argv[3] == "exchange", sys.argv[4] == "old"
place = folder / "ck"
before, after = evolve(make_state(LLAMA), step=41), evolve(make_state(LLAMA, 1), step=42)
os.fsync = os.fstat  # a killed process loses nothing that it has written: only a machine does
if not exchanging:
    checkpoint_places._renameat2 = lambda: None


def found(directory):
    try:
        return load_latest(str(directory), LLAMA, Processes()).state.step
    except DiagnosticError:
        return None


def wrong(when):
    "What is wrong after a kill, and after the save that follows."
    there, under_name = found(place), place.exists()
    if there not in ((41, 42) if old else (42, None)):
        yield f"{when}: --resume finds {there}"
    if exchanging and old and not under_name:
        yield f"{when}: nothing stands under the name"
    with hold_checkpoint_place(str(place)) as lock:
        left = [path for path in folder.iterdir() if path.name.startswith("ck.")]
        said = clear_leftovers(str(place), lock)
    if len(said) != len(left):
        yield f"{when}: {left} are left, and {said} is said"
    if found(place) != there:
        yield f"{when}: clearing has lost {there}"
    save_checkpoint(str(place), LLAMA, before, RUN)
    if found(place) != 41 or [path.name for path in folder.iterdir()] != ["ck"]:
        yield f"{when}: after the next save there is {list(folder.iterdir())}"
"""

EVERY_CALL = """
KINDS = ("posix", "fcntl", "_io")
HARMLESS = ("fspath", "fsencode", "fsdecode", "lstat")
WRITES = 24  # of so many writes to a file one is tried


def kill_at(number):
    "Kill this process before its n-th call into the operating system, or after an exchange."
    count = writes = 0

    def watch(frame, event, argument):
        nonlocal count, writes
        name = getattr(argument, "__module__", None) or type(getattr(argument, "__self__", None)).__module__
        is_call = event == "c_call" and name in KINDS and argument.__name__ not in HARMLESS
        if is_call and argument.__name__ == "write":
            writes += 1
            is_call = writes % WRITES == 1
        is_exchange = event == "return" and frame.f_code.co_name in ("exchange", "_say_who")
        if is_call or is_exchange:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


number, problems = 0, []
while True:
    number += 1
    if old:
        save_checkpoint(str(place), LLAMA, before, RUN)
    elif place.exists():
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    child = os.fork()
    if child == 0:
        kill_at(number)
        save_checkpoint(str(place), LLAMA, after, RUN)
        sys.setprofile(None)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    problems += wrong(f"killed at call {number}")
    if status == 0:
        break
print(number)
print("\\n".join(problems))
"""

ANY_MOMENT = """
choice, problems, kills = random.Random(7), [], 0
started = time.monotonic()
save_checkpoint(str(place), LLAMA, after, RUN)
longest = 2 * (time.monotonic() - started)
while kills < 200:
    save_checkpoint(str(place), LLAMA, before, RUN)
    child = os.fork()
    if child == 0:
        while True:
            save_checkpoint(str(place), LLAMA, after, RUN)
    time.sleep(choice.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    kills += 1
    problems += wrong(f"kill {kills}")
print(kills)
print("\\n".join(problems))
"""


def problems_of(script: str, *words: str | Path) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", COMMON + script, ROOT, *words], capture_output=True, text=True, timeout=170, check=False
    )
    assert result.returncode == 0, result.stderr
    count, _, problems = result.stdout.partition("\n")
    return int(count), problems.strip()


@pytest.mark.parametrize(("how", "what"), [("exchange", "old"), ("renames", "old"), ("exchange", "new")])
@pytest.mark.sampled(3)
def test_a_save_killed_at_any_call_leaves_a_whole_checkpoint(how: str, what: str, tmp_path: Path) -> None:
    calls, problems = problems_of(EVERY_CALL, tmp_path, how, what)
    assert not problems
    assert calls > 30  # it was killed at all of them


@pytest.mark.full
@pytest.mark.parametrize("how", ["exchange", "renames"])
def test_two_hundred_kills_at_random_moments(how: str, tmp_path: Path) -> None:
    kills, problems = problems_of(ANY_MOMENT, tmp_path, how, "old")
    assert not problems
    assert kills == 200
