"""The logs to watch, and the loop that writes their page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity, fail
from ratrain.ratrain_ir.support.files import check_writable, is_directory, is_regular, opened_regular, path_errors
from ratrain.ratrainc.console.console import show_diagnostic, status
from ratrain.ratrainc.console.failures import EXIT_INTERRUPTED
from ratrain.ratrainc.watch.reading import GrowingLog, NoLogError
from ratrain.ratrainc.watch.watch_page import MARK, write_watch_page

_HEAD_BYTES = 1 << 12
_MOST_NAMED = 4


def logs_of(runs: Sequence[str]) -> list[GrowingLog]:
    """Return the named logs and those in named folders (*.jsonl), each once, already read.

    Other files of a folder are left out, and named in a warning. Raises `DiagnosticError` RT002 if a log cannot be
    read, a file that is named is none, or a folder has none.
    """
    logs: dict[str, GrowingLog] = {}
    for run in runs:
        for log in _in_folder(run) if is_directory(run) else [_read(run)]:
            logs.setdefault(log.path, log)
    return list(logs.values())


def _read(path: str) -> GrowingLog:
    log = GrowingLog(path)
    log.read()
    return log


def _in_folder(folder: str) -> list[GrowingLog]:
    logs, others = list[GrowingLog](), list[str]()
    for path in _lines_in(folder):
        try:
            logs.append(_read(path))
        except NoLogError:
            others.append(path)
    if not logs:
        fail(
            "RT002",
            f"no file in the folder '{folder}' is the log of a run: {_named(others)}",
            help="'ratrainc run ... --log losses.jsonl' writes one: name that file",
        )
    if others:
        text = f"left out, as no logs of runs: {_named(others)}"
        show_diagnostic(Diagnostic("RT002", text, severity=Severity.WARNING))
    return logs


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return ", ".join(f"'{path}'" for path in paths[:_MOST_NAMED]) + more


def _lines_in(folder: str) -> list[str]:
    with path_errors(f"cannot read the folder '{folder}'"):
        found = sorted(str(path) for path in Path(folder).glob("*.jsonl"))
    if not found:
        fail(
            "RT002",
            f"the folder '{folder}' has no log (.jsonl); a checkpoint holds none",
            help="'ratrainc run ... --log losses.jsonl' writes one: name that file",
        )
    return found


def page_path(log: str) -> str:
    """Return the path of a log's page if none is named: the log's, ending in .html.

    Raises `DiagnosticError` RT002 if another file is there, or the page cannot be written.
    """
    path = str(Path(log).with_suffix(".html"))
    if is_regular(path):
        with path_errors(f"cannot read '{path}'"), opened_regular(path) as stream:
            is_ours = f'content="{MARK}"'.encode() in stream.read(_HEAD_BYTES)
        if not is_ours:
            fail("RT002", f"'{path}' is there, and no page of 'ratrainc watch'", help="name the page with -o")
    check_writable(path)
    return path


def watch(logs: Sequence[GrowingLog], path: str, every: float | None) -> tuple[int, int]:
    """Write the page, and again every `every` seconds while runs write to the logs; return its bytes and the exit code.

    Without `every` it is written once. Ctrl-C ends it with 130, after a last page that does not reload itself.
    """
    try:
        with status(f"watching {logs[0].path}") as tell:
            while True:
                # before reading: lines that a run writes after this look are then read in the next turn
                growing = any(log.is_growing for log in logs)
                for log in logs:
                    log.read()
                if every is None or not growing:
                    return write_watch_page(path, logs, reload_seconds=None), 0
                write_watch_page(path, logs, reload_seconds=every)
                tell(f"watching: {path} is of {_progress(logs)}; Ctrl-C ends it")
                time.sleep(every)
    except KeyboardInterrupt:
        return write_watch_page(path, logs, reload_seconds=None), EXIT_INTERRUPTED


def _progress(logs: Sequence[GrowingLog]) -> str:
    last = logs[0]
    return f"step {last.steps[-1]}, loss {last.columns['loss'][-1]:.4f}" if last.steps else "no step yet"
