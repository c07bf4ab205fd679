"""Exit codes of the command line, and how a failed command says why."""

from __future__ import annotations

import io
import os
from errno import EDQUOT, EFBIG, EIO, ENOSPC

import click

_FULL = (ENOSPC, EDQUOT, EIO, EFBIG)
EXIT_DIAGNOSED, EXIT_USAGE, EXIT_INTERNAL, EXIT_INTERRUPTED = 1, 2, 70, 130
EXIT_SAVED, EXIT_TERMINATED, EXIT_HUNG_UP = 75, 143, 129
"""Exit codes after SIGTERM or SIGHUP with the state saved (`EX_TEMPFAIL` of sysexits.h: try again later), then after
SIGTERM and after SIGHUP without it.
"""


def show_failure(error: BaseException, *, as_json: bool) -> int:
    """Print on stderr why a command failed, with `as_json` as one object on stdout too; return the exit code."""
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, ToldError
    from ratrain.ratrainc.console.terminal import echo, leave_lost_readers

    if isinstance(error, click.ClickException):
        if as_json:
            _print_usage_error(error)
        shown = io.StringIO()
        error.show(shown)
        echo(shown.getvalue(), err=True, nl=False)
        return EXIT_USAGE
    if isinstance(error, DiagnosticError):
        from ratrain.ratrainc.console.console import show_diagnostics, show_notes

        if isinstance(error, ToldError) and not as_json:
            show_notes(error.notes)
        else:
            show_diagnostics(error.diagnostics, as_json=as_json)
        return EXIT_DIAGNOSED
    if isinstance(error, KeyboardInterrupt | click.Abort):
        said = str(error.__cause__ or error)  # click raises an Abort from a KeyboardInterrupt
        echo(said or "interrupted: no file is left half-written", err=True)
        return EXIT_INTERRUPTED
    if isinstance(error, OSError) and error.errno in _FULL:
        echo(f"error: the output cannot be written: {error.strerror}", err=True)
        leave_lost_readers()
        return EXIT_DIAGNOSED
    if isinstance(error, MemoryError):
        echo("error: this machine does not have the memory for that", err=True)
        return EXIT_DIAGNOSED
    if os.environ.get("RATRAIN_TRACEBACK"):
        raise error
    text = (
        f"internal error: {type(error).__name__}: {error}\nThis is a fault of ratrainc; RATRAIN_TRACEBACK=1 "
        "shows where."
    )
    echo(text, err=True)
    return EXIT_INTERNAL


def _print_usage_error(error: click.ClickException) -> None:
    """Print a usage error as a diagnostic in JSON; it has no code of its own, as nothing was read yet."""
    from ratrain.ratrain_ir.support.diagnostics import Diagnostic
    from ratrain.ratrainc.console.console import print_json

    context = error.ctx if isinstance(error, click.UsageError) else None
    way_out = f"'{context.command_path} --help' lists what it accepts" if context is not None else None
    print_json({"diagnostics": [Diagnostic("usage", error.format_message(), help=way_out).to_json()]})
