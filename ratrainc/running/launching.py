"""Start a run with one process a rank, and watch over it: the work of `ratrainc launch`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from shlex import quote

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.plugins import plugins
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.compiling.opening import load_schedule
from ratrain.ratrainc.running.supervisor import Supervisor, start_command
from ratrain.targets.program.rtx import read_program
from ratrain.targets.runtime.checkpoint.checkpoint_series import RUN_FOLDER, what_is_left
from ratrain.targets.runtime.watch.positions import RunFolder


def launch(file: str, ranks: int | None, words: tuple[str, ...], engine: str, mpirun: str | None) -> int:
    """Run a program with `ranks` processes, one a rank, and return the exit code of the run; None: as many as it has.

    `words` are options of `ratrainc run`. Raises `DiagnosticError` RT002 or RT093 if the processes cannot be started,
    or are not as many as the program has ranks.
    """
    if ranks is None:
        ranks = _ranks_of(file)
    launcher, variables = start_command(engine, ranks, mpirun)
    _check_ranks(file, ranks)
    save, given = _value_of("--save", words), _value_of("--run-dir", words)
    place = given or _folder_in_checkpoints(save, ranks, words)
    advice = partial(what_is_left, save) if save else None
    with nullcontext(RunFolder(place)) if place else _temporary_folder() as folder:
        run = ["run", file, *words, "--run-dir", folder.directory, "--engine", engine]
        others = [word for name in plugins() for word in ("--plugin", name)]
        run = [sys.executable, "-m", "ratrain", *others, *run]
        named = "torchrun" if engine == "torch" else None
        return Supervisor(folder, advice, named).run([*launcher, *run], variables)


def _ranks_of(file: str) -> int:
    """Return the number of ranks of the program, or of the schedule, in a file. Raises `DiagnosticError`."""
    if file.endswith(".rtir"):
        return load_schedule(file).plan.clusters
    return read_program(file).plan.clusters


def _check_ranks(file: str, ranks: int) -> None:
    """Raise RT093 if a program has another number of ranks; of a file that cannot be read the ranks say why."""
    has = ranks
    with suppress(DiagnosticError):
        has = _ranks_of(file)
    if has != ranks:
        fail(
            "RT093",
            f"'{file}' has {number_of(has, 'rank')}, and -n {ranks} would start {number_of(ranks, 'process')}",
            help=f"ratrainc launch -n {has} {quote(file)} ..., or leave out -n: it starts a process for each rank",
        )


@contextmanager
def _temporary_folder() -> Iterator[RunFolder]:
    """Make a folder for the ranks' positions; it is removed at the end unless it has a report."""
    folder = RunFolder(tempfile.mkdtemp(prefix="ratrain-"))
    try:
        yield folder
    finally:
        if not folder.report():
            shutil.rmtree(folder.path, ignore_errors=True)


def _folder_in_checkpoints(save: str | None, ranks: int, words: tuple[str, ...]) -> str | None:
    """Return the folder for positions inside a directory of checkpoints; None if the directory is not a series.

    One process without --save-every writes a single checkpoint, whose directory may hold nothing else.
    """
    is_series = ranks > 1 or _value_of("--save-every", words) is not None
    return str(Path(save) / RUN_FOLDER) if save is not None and is_series else None


def _value_of(option: str, words: tuple[str, ...]) -> str | None:
    """Return the value of an option among words of `ratrainc run`; the last one counts, None if there is none."""
    value = None
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
