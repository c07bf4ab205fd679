"""Compare with every peer that benchmarks/ has, and print one table: goal, peer, theirs, ours, ratio, met or not.

    python benchmarks/peers.py                           all of them
    python benchmarks/peers.py --only xdsl pytorch       some of them
    python benchmarks/peers.py --vtrain FOLDER           vTrain's whole tables too, as vtrain.py takes them
    python benchmarks/peers.py --quick                   small and once: for a test, not for figures to quote

A ratio says how many times as good ours is: ours / theirs where more is better, theirs / ours where less is. A goal is
the smallest ratio that meets it, so one rule serves all rows:

    step, float32: PyTorch 4.84 s, ours 4.06 s    1.19x, goal 1.05x: met
    mean error:    vTrain 8.37 %, ours 10.18 %    0.82x, goal 1.00x: not met

Each comparison is one process or several, one after the other, each with a time limit and a log in `--logs`. Ctrl-C
ends the running one and prints the table so far (exit status 130). A peer that is not installed is a row that says how
to install it. Exit status 1 where an installed peer cannot be run, or a comparison ends otherwise than with its
figures; with `--strict` also where a goal is not met, which is not the default: speed depends on the machine and on
what else it does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import asdict, frozen

sys.path.insert(0, str(Path(__file__).parent))
from processes import ROOT, end_group, environment, interrupt_on_sigterm
from stopwatch import machine

from ratrain.ratrainc.console.extras import is_installed

BENCHMARKS = ROOT / "benchmarks"
VTRAIN_TABLE = BENCHMARKS / "published" / "vtrain-step-times.csv"
WHOLE_TABLE = "calibration_single_node.csv"
"""File that vtrain.py requires in its folder."""
VOCABULARIES = (4096, 32000)
THREADS = (1, 2)
MET, NOT_MET = "met", "not met"
INTERRUPTED = 130
"""Exit status of a command that SIGINT ended: 128 + 2, as shells have it."""


@frozen
class Goal:
    """Smallest ratio that meets the goal, and where it is set."""

    ratio: float
    source: str


NO_WORSE = "assumed: no page sets a goal, so no worse than the peer"
GOALS = {
    "parse": Goal(1.0, NO_WORSE),
    "print": Goal(1.0, NO_WORSE),
    "verify: structure": Goal(1.0, NO_WORSE),
    "forms placed": Goal(1.0, "benchmarks/README.md, Allocation: all forms fit"),
    "float32": Goal(1.05, "the project's goal for PyTorch float32 at both vocabularies"),
    "bf16": Goal(1.0, "the project's goal for PyTorch bfloat16 at both vocabularies"),
    "step-time error": Goal(1.0, NO_WORSE),
}

VTRAIN_ERRORS = {"one node": 0.0837, "many nodes": 0.1473}
"""Mean absolute error of vTrain's own predictions over all its rows, one node and many.

Source: ee.kaist.ac.kr/en/research-achieve, "EE Professor Minsoo Rhu's research team develops a simulation framework
called vTrain".
"""


@frozen
class Unit:
    """Unit of two figures, their format, and which is better."""

    name: str
    form: str
    more_is_better: bool

    def text(self, value: float) -> str:
        """Return a figure with its unit."""
        return f"{value:{self.form}} {self.name}"


RATE = Unit("ops/s", ",.0f", more_is_better=True)
FORMS = Unit("forms", ".0f", more_is_better=True)
CPU_SECONDS = Unit("CPU s", ".3f", more_is_better=False)
WALL_SECONDS = Unit("s", ".3f", more_is_better=False)
ERROR = Unit("", ".2%", more_is_better=False)


@frozen
class Figure:
    """Two figures of one comparison: the peer's and ours."""

    name: str
    peer: str
    goal: Goal
    theirs: float
    ours: float
    unit: Unit

    @property
    def ratio(self) -> float:
        """Number of times that ours is as good as theirs."""
        if self.unit.more_is_better:
            return self.ours / self.theirs
        return self.theirs / self.ours if self.ours else math.inf


@frozen
class Job:
    """One process of a comparison: its words, its limit in seconds, and how its JSON is read.

    `absent` says why it cannot be started here, and how it can be; that is no failure.
    """

    name: str
    words: Sequence[str]
    limit: float
    read: Callable[[Mapping[str, Any]], list[Figure]]
    absent: str = ""


@frozen
class Comparison:
    """A peer: the package that has to be installed for it (none for published figures), and what is run."""

    peer: str
    package: str
    extra: str
    jobs: Callable[[Options], list[Job]]

    @property
    def absent(self) -> str:
        """Words that say how to install the peer; empty if it is installed, or its figures are published."""
        is_here = not self.package or is_installed(self.package)
        return "" if is_here else f"not installed: pip install -e '.[{self.extra}]'"


@frozen
class Options:
    """Options of the command that change what is run."""

    quick: bool = False
    vtrain: Path | None = None


@frozen
class Row:
    """One line of the table: a figure of a process, or why there is none."""

    job: str
    peer: str
    figure: Figure | None
    outcome: str
    failed: bool = False

    @classmethod
    def of(cls, job: str, figure: Figure) -> Row:
        """Judge a figure."""
        return cls(job, figure.peer, figure, MET if figure.ratio >= figure.goal.ratio else NOT_MET)

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        figure = self.figure
        if figure is None:
            return [self.job, self.peer, "", "", "", self.outcome]
        theirs, ours = (figure.unit.text(value).strip() for value in (figure.theirs, figure.ours))
        goal = f"{figure.name}: {figure.goal.ratio:.2f}x"
        return [goal, figure.peer, theirs, ours, f"{figure.ratio:.2f}x", self.outcome]

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        given = None if self.figure is None else {**asdict(self.figure), "ratio": self.figure.ratio}
        return {"job": self.job, "peer": self.peer, "figure": given, "outcome": self.outcome, "failed": self.failed}


class JobError(Exception):
    """A process of a comparison that did not end with its figures."""


def version(package: str) -> str:
    """Return the version of a distribution; "?" if it carries none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def _python(script: str, *words: object) -> list[str]:
    return [sys.executable, str(BENCHMARKS / script), *map(str, words), "--json"]


def xdsl_jobs(options: Options) -> list[Job]:
    """Read, print and verify schedules. Parse and print are held against xDSL's fastest form, unregistered ops; the
    verifier against defined ops, since that of unregistered ones checks attached operands alone.
    """
    words = ("--ops", 1000, "--xdsl-ops", 1000, "--repeat", 1) if options.quick else ()

    def read(given: Mapping[str, Any]) -> list[Figure]:
        figures = []
        for name, form in (("parse", "unregistered"), ("print", "unregistered"), ("verify: structure", "defined")):
            theirs, ours = given["others"][f"xDSL, {form}"][name], given["ours"][name]
            figures.append(Figure(name, f"xDSL {version('xdsl')}, {form}", GOALS[name], theirs, ours, RATE))
        return figures

    return [Job("xdsl", _python("language.py", *words), 900, read)]


def minimalloc_jobs(options: Options) -> list[Job]:
    """Place MiniMalloc's published problems, each in four forms; each form has a placement within its capacity."""

    def read(given: Mapping[str, Any]) -> list[Figure]:
        theirs, ours = len(given["forms"]), given["placed"]
        # commit of tests/data/minimalloc/README.md
        peer = "MiniMalloc 9f5cf81, published problems"
        return [Figure("forms placed", peer, GOALS["forms placed"], theirs, ours, FORMS)]

    return [Job("minimalloc", _python("minimalloc.py", *(("C",) if options.quick else ())), 900, read)]


def pytorch_jobs(options: Options) -> list[Job]:
    """Train a step beside PyTorch; its faster step counts, eager or by torch.compile. One thread is timed by CPU time,
    which other work on the machine changes least.
    """
    size = ("--repeat", 1, "--layers", 1, "--seq-len", 64) if options.quick else ("--repeat", 9)
    beside = {"float32": "RATrain f16", "bf16": "torch kernels"}
    peers = {"float32": ("float32", "float32 compiled"), "bf16": ("bfloat16", "bfloat16 compiled")}
    only = (*beside.values(), *(name for names in peers.values() for name in names))

    def read(given: Mapping[str, Any]) -> list[Figure]:
        figures = []
        for step in given["steps"]:
            seconds, threads = step["seconds"], step["threads"]
            for dtype, ours in beside.items():
                fastest = min(peers[dtype], key=seconds.__getitem__)
                way = "compiled" if fastest.endswith(" compiled") else "eager"
                name = f"step, {dtype}, vocabulary {step['vocab']:,}, {threads} thread{'s' * (threads > 1)}"
                peer = f"PyTorch {version('torch')}, {way}"
                unit = CPU_SECONDS if threads == 1 else WALL_SECONDS
                figures.append(Figure(name, peer, GOALS[dtype], seconds[fastest], seconds[ours], unit))
        return figures

    jobs = []
    for threads in THREADS:
        for vocab in VOCABULARIES:
            words = ("--vocab", vocab, "--threads", threads, "--clock", "cpu" if threads == 1 else "wall")
            command = _python("training_step.py", *words, *size, "--no-profile", "--only", *only)
            jobs.append(Job(f"pytorch-{vocab}-{threads}", command, 1800, read))
    return jobs


def vtrain_jobs(options: Options) -> list[Job]:
    """Predict vTrain's measured iterations: the rows of published/ with the machine as it stands, and its whole tables
    with constants fitted to every other row. Errors are means over held-out rows, theirs over all their rows.
    """

    def figure(rows: str, group: str, ours: float) -> Figure:
        goal = GOALS["step-time error"]
        return Figure(f"step-time error, {rows}, {group}", "vTrain, published", goal, VTRAIN_ERRORS[group], ours, ERROR)

    def read_published(given: Mapping[str, Any]) -> list[Figure]:
        held_out = [row for row in given["rows"] if row["split"] == "held-out"]
        groups = {group: [abs(row["error"]) for row in held_out if row["group"] == group] for group in VTRAIN_ERRORS}
        return [figure(f"{len(errors)} rows", group, fmean(errors)) for group, errors in groups.items()]

    def read_whole(given: Mapping[str, Any]) -> list[Figure]:
        means = {group: found["held_out"] for group, found in given.items()}
        return [figure(f"{held['rows']} rows, fitted", group, held["mean"]) for group, held in means.items()]

    validate = [sys.executable, "-m", "ratrain", "validate", str(VTRAIN_TABLE), "--json"]
    absent = "" if options.vtrain else "not here: --vtrain FOLDER, as benchmarks/vtrain.py takes it"
    if options.vtrain and not is_installed("scipy"):  # what vtrain.py fits with
        absent = "not installed: pip install -e '.[calibrate]'"
    return [
        Job("vtrain", validate, 900, read_published),
        Job("vtrain-whole", _python("vtrain.py", options.vtrain or "FOLDER"), 900, read_whole, absent),
    ]


COMPARISONS = {
    "xdsl": Comparison("xDSL", "xdsl", "benchmark", xdsl_jobs),
    "minimalloc": Comparison("MiniMalloc", "", "", minimalloc_jobs),
    "pytorch": Comparison("PyTorch", "torch", "parity", pytorch_jobs),
    "vtrain": Comparison("vTrain", "", "", vtrain_jobs),
}


def run_job(job: Job, logs: Path) -> list[Figure]:
    """Run a process to its end and return its figures; NAME.json and NAME.log in `logs` keep what it printed.

    Raises `JobError` if it takes longer than its limit, ends with another status than 0, or hands back no figures. An
    interrupt ends it, with all that it started.
    """
    output, log = logs / f"{job.name}.json", logs / f"{job.name}.log"
    with output.open("wb") as to_output, log.open("wb") as to_log:
        process = subprocess.Popen(
            job.words, env=environment(), stdin=subprocess.DEVNULL, stdout=to_output, stderr=to_log, process_group=0
        )
        try:
            status = process.wait(job.limit)
        except subprocess.TimeoutExpired:
            raise JobError(f"it took longer than its {job.limit:g} s; see {log}") from None
        finally:
            end_group(process)
    if status:
        last = log.read_text("utf-8", "replace").strip().splitlines() or ["nothing was printed"]
        raise JobError(f"it ended with {status}: {last[-1].strip()}; see {log}")
    try:
        figures = job.read(json.loads(output.read_text("utf-8")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # no JSON, of another form, no number
        raise JobError(f"it handed back no figures ({type(error).__name__}: {error}); see {output}") from error
    for figure in figures:
        if not (_is_number(figure.theirs) and _is_number(figure.ours) and figure.theirs > 0):
            raise JobError(f"{figure.name}: {figure.theirs!r} and {figure.ours!r} are no figures; see {output}")
    if not figures:
        raise JobError(f"it handed back no figures; see {output}")
    return figures


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def rows_of(name: str, options: Options, logs: Path) -> Iterator[Row]:
    """Yield the rows of one comparison as its processes end."""
    comparison = COMPARISONS[name]
    if comparison.absent:
        yield Row(name, comparison.peer, None, comparison.absent)
        return
    for job in comparison.jobs(options):
        if job.absent:
            yield Row(job.name, comparison.peer, None, job.absent)
            continue
        print(f"{job.name}, at most {job.limit:g} s", file=sys.stderr, flush=True)
        try:
            for figure in run_job(job, logs):
                yield Row.of(job.name, figure)
        except JobError as error:
            yield Row(job.name, comparison.peer, None, f"failed: {error}", failed=True)


def head(begin: Sequence[float], end: Sequence[float], *, quick: bool) -> dict[str, str]:
    """Name the machine, its load and the versions."""
    packages = ("ratrain", "numpy", "numba", *(each.package for each in COMPARISONS.values() if each.package))
    versions = ", ".join(f"{name} {version(name)}" for name in packages if is_installed(name))
    loads = (" ".join(f"{load:.2f}" for load in loads) for loads in (begin, end))
    given = {"machine": machine(), "load (1, 5, 15 minutes)": "{} at the beginning, {} at the end".format(*loads)}
    given["versions"] = f"Python {platform.python_version()}, {versions}"
    return {**given, "quick": "small and once: no figures to quote"} if quick else given


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [["goal", "peer", "theirs", "ours", "ratio", "met"], *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([text[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *text[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparisons and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), metavar="PEER")
    parser.add_argument("--quick", action="store_true", help="small and once, for a test")
    parser.add_argument("--strict", action="store_true", help="exit status 1 also where a goal is not met")
    parser.add_argument("--vtrain", type=Path, metavar="FOLDER", help="vTrain's tables, as vtrain.py takes them")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build" / "peers", metavar="DIR", help="default: build/peers"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")
    chosen = parser.parse_args(arguments)
    if chosen.vtrain and not (chosen.vtrain / WHOLE_TABLE).is_file():
        parser.error(
            f"--vtrain {chosen.vtrain}: it has no {WHOLE_TABLE}; name the folder that benchmarks/vtrain.py takes"
        )
    try:
        chosen.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs {chosen.logs}: {error.strerror}; name a folder that can be made")
    options, begin = Options(chosen.quick, chosen.vtrain), os.getloadavg()
    rows: list[Row] = []
    interrupted = False
    try:
        for name in chosen.only:
            for row in rows_of(name, options, chosen.logs):
                rows.append(row)
                print(f"  {' | '.join(filter(None, row.cells()))}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    found = head(begin, os.getloadavg(), quick=chosen.quick)
    if chosen.json:
        print(json.dumps({"head": found, "interrupted": interrupted, "rows": [row.to_json() for row in rows]}))
    else:
        print("\n".join(f"{key}: {value}" for key, value in found.items()))
        print(f"\n{table(rows)}")
        if interrupted:
            print("interrupted: the table has what had ended")
    if interrupted:
        return INTERRUPTED
    return int(any(row.failed or (chosen.strict and row.outcome == NOT_MET) for row in rows))


if __name__ == "__main__":
    interrupt_on_sigterm()
    sys.exit(main())
