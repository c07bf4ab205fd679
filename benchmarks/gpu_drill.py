"""Run the parts of gpu_drill.sh: each a process with a time limit, a block of lines and a JSON; a table at the end.

    python benchmarks/gpu_drill.py [--device cuda|cpu] [--only PART ...]

Run it by gpu_drill.sh, which finds an interpreter for it. `OUT` names the folder of results (default: drill),
`DRILL_SECONDS` the time of all parts together. This process imports the standard library alone until a part begins, so
that it can say what else is missing. What the parts do stands in drill_parts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from processes import ROOT, end_group, environment, interrupt_on_sigterm

SECONDS = {"cuda": 560.0, "cpu": 1800.0}
"""The limit of all parts together; a rehearsal takes less than three minutes, where others leave it two cores."""
CPU = "cpu"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EXTRAS = ("calibrate", "testing")
UNUSED = ("hjson", "tree-sitter", "tree-sitter-bash", "PyYAML")
"""Requirements that only readers of other tools' settings have."""


SHARES = {
    "machine": 0.04,
    "correctness": 0.18,
    "graph": 0.14,
    "ranks": 0.05,
    "bytes": 0.11,
    "ballast": 0.06,
    "tiles": 0.07,
    "calibrate": 0.14,
    "speed": 0.27,
    "experts": 0.15,
    "finetune": 0.3,
}
"""By part, in their order: the share that it may take of the time that is left."""


def do_part(name: str, device: str, out: Path, limit: float, sets: Sequence[str], words: Sequence[str]) -> int:
    """Do a part in this process, and leave its JSON."""
    from drill_parts import PARTS, Drill, SkipError, one_line

    drill = Drill(device, out, limit, sets, words)
    status, why = PASSED, ""
    start = time.monotonic()
    try:
        PARTS[name](drill)
    except SkipError as skip:
        status, why = SKIPPED, str(skip)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the part has failed, whatever it was
        traceback.print_exc()
        drill.wrong.append(one_line(error))
    if drill.wrong:
        more = f" (and {len(drill.wrong) - 1} more)" if len(drill.wrong) > 1 else ""
        status, why = FAILED, drill.wrong[0] + more
    seconds = round(time.monotonic() - start, 2)
    _leave(drill.out, name, {"status": status, "why": why, "seconds": seconds, "wrong": drill.wrong, **drill.figures})
    return int(status == FAILED)


def _leave(out: Path, name: str, result: dict[str, Any]) -> None:
    (out / f"{name}.json").write_text(json.dumps({"part": name, **result}, indent=1, default=str) + "\n", "utf-8")


def run_part(
    name: str, device: str, compared: Sequence[str], out: Path, limit: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Do a part in a process of its own, which ends at its limit with all that it started; return what it left."""
    place = out / f"{name}.json"
    place.unlink(missing_ok=True)
    words = [sys.executable, __file__, "--device", device, "--part", name, "--limit", str(limit), *compared]
    variables = environment(ROOT / "benchmarks", OUT=str(out), PYTHONUNBUFFERED="1")
    start = time.monotonic()
    process = subprocess.Popen(
        words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    assert process.stdout is not None
    last = [""]

    def pass_on() -> None:
        for line in process.stdout or ():
            tell(line.rstrip("\n"))
            last[0] = line.strip() or last[0]

    reader = Thread(target=pass_on, daemon=True)
    reader.start()
    why = ""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        why = f"it took longer than its {limit:.3g} s"
    finally:  # by its end, by the limit or by a signal to this process
        end_group(process)
    reader.join(5)
    seconds = round(time.monotonic() - start, 2)
    if place.exists() and not why:
        found: dict[str, Any] = json.loads(place.read_text("utf-8"))
    else:
        why = why or f"it ended with {process.returncode}: {last[0]}"
        found = {"part": name, "status": FAILED, "why": why}
    _leave(out, name, {**found, "seconds": seconds, "limit": limit, "device": device})
    return {**found, "seconds": seconds}


def missing() -> list[str]:
    """Return the requirements of the project that this interpreter lacks, or has in a version that does not do."""
    import tomllib

    from drill_parts import version_of

    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        Requirement = None  # type: ignore[assignment,misc] # noqa: N806 - then versions are not compared
    said = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    more = [each for extra in EXTRAS for each in said["optional-dependencies"][extra]]
    found = []
    for text in [*said["dependencies"], *more, "pytest>=8.3"]:
        name = re.split(r"[^A-Za-z0-9_.-]", text)[0]
        version = version_of(name)
        is_other = version and Requirement and not Requirement(text).specifier.contains(version, prereleases=True)
        if name not in UNUSED and (version is None or is_other):
            found.append(text)
    return found


def no_device(device: str) -> str:
    """Return why nothing can be run on a device; empty if it can."""
    text = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True).returncode
    if code == 3 and device != CPU:
        return "PyTorch sees no GPU here; rehearse with --device cpu"
    return (
        ""
        if code in (0, 3)
        else "PyTorch cannot be imported here: name an interpreter that has it, PYTHON=/path/to/python3"
    )


def drill_all(device: str, only: Sequence[str], compared: Sequence[str], out: Path) -> int:
    """Do the parts one after the other, and print the table; `compared` are options of this command for each."""
    out.mkdir(parents=True, exist_ok=True)
    total = float(os.environ.get("DRILL_SECONDS") or SECONDS[device])
    end = time.monotonic() + total
    results: dict[str, dict[str, Any]] = {}
    with (out / "drill.log").open("a", encoding="utf-8") as log:

        def tell(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        tell(f"drill on '{device}', {total:g} s in all, results in {out}")
        for number, name in enumerate(only):  # what a part leaves of its time is that of those after it
            shares = sum(SHARES[later] for later in only[number:])
            limit = max(1.0, end - time.monotonic()) * SHARES[name] / shares
            tell(f"\n== {name} (at most {limit:.3g} s) ==")
            results[name] = run_part(name, device, compared, out, limit, tell)
        tell("\n| part | result | seconds | why |\n|---|---|---|---|")
        for name, found in results.items():
            tell(f"| {name} | {found['status']} | {found['seconds']:.0f} | {found['why']} |")
        bad = [name for name, found in results.items() if found["status"] == FAILED]
        tell(f"failed: {', '.join(bad)}" if bad else "no part failed")
    return int(bool(bad))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do a part, or all; return 1 if one failed, 2 if none can be done."""
    parser = argparse.ArgumentParser(description="What this project claims of GPUs, in ten minutes on one.")
    parser.add_argument("--device", default="cuda", choices=SECONDS, help="cuda, or cpu for a rehearsal")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), metavar="PART")
    parser.add_argument("--sets", nargs="*", default=[], metavar="SET", help="kernel sets to compare: torch-triton")
    parser.add_argument(
        "--kernels", nargs="*", default=[], metavar="WORD", help="compare kernels with it in their names"
    )
    parser.add_argument("--missing", action="store_true", help="print what has to be installed, and end")
    parser.add_argument("--part", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT") or ROOT / "drill").absolute()
    if chosen.missing:
        print("\n".join(missing()))
        return 0
    if chosen.part:
        return do_part(chosen.part, chosen.device, out, chosen.limit, chosen.sets, chosen.kernels)
    if reason := no_device(chosen.device):
        print(reason, file=sys.stderr)
        return 2
    interrupt_on_sigterm()
    compared = ["--sets", *chosen.sets, "--kernels", *chosen.kernels]
    return drill_all(chosen.device, chosen.only, compared, out)


if __name__ == "__main__":
    sys.exit(main())
