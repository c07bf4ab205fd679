"""`ratrainc doctor`."""

from __future__ import annotations

from typing import Any

import click

from ratrainc.commands.options import json_option

_EPILOG = """\b
Examples:
  ratrainc doctor
  ratrainc doctor tiny.rtx        also: does this program fit this machine's memory?
"""


@click.command(epilog=_EPILOG)
@click.argument("file", required=False, metavar="[FILE.rtx]")
@json_option
def command(file: str | None, as_json: bool) -> int:
    """Say what this machine offers a run: BLAS and its core type, threads, the kernels' cache, MPI, free memory.

    Exit code 1 when something would stop a run.
    """
    from ratrainc.console import print_json, say

    facts = _facts(file)
    problems = [name for name, fact in facts.items() if fact["stops_a_run"]]
    if as_json:
        print_json({"facts": facts, "problems": problems})
    else:
        for name, fact in facts.items():
            mark = "!!" if fact["stops_a_run"] else "ok"
            say(f"{mark}  {name}: {fact['found']}" + (f"\n      {fact['remark']}" if fact["remark"] else ""))
    return 1 if problems else 0


def _fact(found: str, remark: str = "", *, stops_a_run: bool = False) -> dict[str, Any]:
    return {"found": found, "remark": remark, "stops_a_run": stops_a_run}


def _facts(file: str | None) -> dict[str, dict[str, Any]]:
    import platform

    facts = {
        "python": _fact(platform.python_version()),
        "blas": _blas(),
        "threads": _threads(),
        "kernel cache": _kernel_cache(),
        "mpi": _mpi(),
        "free memory": _fact(_size(_free_memory())),
    }
    if file is not None:
        facts["program"] = _program(file)
    return facts


def _blas() -> dict[str, Any]:
    import os

    import numpy as np

    from targets.runtime.training import blas_facts

    np.ones((2, 2)) @ np.ones((2, 2))  # BLAS is loaded on first use
    facts = blas_facts()
    pinned = os.environ.get("OPENBLAS_CORETYPE")
    remark = f"OPENBLAS_CORETYPE={pinned} pins the core type: repeatable, maybe not the fastest" if pinned else ""
    return _fact(f"{facts['blas']}, core type {facts['blas_core_type']}, numpy {np.__version__}", remark)


def _threads() -> dict[str, Any]:
    import os

    from threadpoolctl import threadpool_info

    pools = ", ".join(f"{pool['internal_api']} {pool['num_threads']}" for pool in threadpool_info())
    return _fact(f"{os.cpu_count()} processors; pools: {pools or 'none'}", "a run sets BLAS to one thread")


def _kernel_cache() -> dict[str, Any]:
    import os
    from pathlib import Path

    import numba

    from targets.runtime import kernels

    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(kernels.__file__).parent)
    writable = os.access(folder, os.W_OK)
    remark = (
        "" if writable else "kernels are compiled anew in every process; set NUMBA_CACHE_DIR to a writable directory"
    )
    return _fact(f"numba {numba.__version__}, {'writable' if writable else 'not writable'}", remark)


def _mpi() -> dict[str, Any]:
    import shutil
    from importlib.util import find_spec

    found = find_spec("mpi4py") is not None
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    words = f"mpi4py {'found' if found else 'not installed'}, launcher {'found' if launcher else 'not found'}"
    return _fact(words, "not needed: the local engine runs all ranks in one process")


def _free_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _program(file: str) -> dict[str, Any]:
    from ratrainc import api

    program = api.load(file)
    needed = program.arena_bytes_of_all_ranks
    fits = needed <= _free_memory()
    words = f"{program.plan.clusters} ranks in one process need arenas of {_size(needed)}"
    return _fact(words, "" if fits else "more than is free: run it on more machines", stops_a_run=not fits)


def _size(count: int) -> str:
    from ratrainc.console import size_text

    return size_text(count)
