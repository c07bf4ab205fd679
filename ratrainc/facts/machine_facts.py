"""Facts about this machine that matter to a run, for `ratrainc doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.process_pool import usable_cores
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.console.extras import is_installed
from ratrain.targets.runtime.arena.processor import bf16_instructions, cpu_flags

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

_PINS = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "BLIS_ARCH_TYPE",
    "BLIS_NUM_THREADS",
    "NPY_DISABLE_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DISABLE_JIT",
)
"""Variables that decide which BLAS kernels multiply, on how many threads, or how the kernels here are compiled."""
_CORE_TYPES = frozenset({"OPENBLAS_CORETYPE", "MKL_CBWR", "BLIS_ARCH_TYPE"})


@frozen
class MachineFact:
    """One fact, with a remark; `stops_a_run` if a run would fail for it."""

    found: str
    remark: str = ""
    stops_a_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fact as plain data."""
        return asdict(self)


def machine_facts() -> dict[str, MachineFact]:
    """Collect the facts: Python, BLAS, threads, bf16, the kernels' cache, MPI, torch.distributed, memory."""
    return {
        "python": MachineFact(f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        "blas": _blas(),
        "threads": _threads(),
        "matrix products": _matrix_products(),
        "bf16": bf16_fact(cpu_flags()),
        "kernels": kernels_fact(cpu_flags()),
        "kernel cache": _kernel_cache(),
        "mpi": _mpi(),
        "torch.distributed": _torch(),
        "free memory": MachineFact(size_text(free_memory())),
    }


def program_fact(program: Program) -> MachineFact:
    """Tell whether all ranks of a program, run in one process, fit the free memory; if not, how many do."""
    from ratrain.targets.runtime.engine.certificate import scratch_bytes
    from ratrain.targets.runtime.kernels import kernel_set

    scratch = scratch_bytes(program, kernel_set("fast"))
    arenas = program.arena_bytes_of_all_ranks
    largest = max(stage.arena_bytes for stage in program.stages)
    free = free_memory()
    words = (
        f"{number_of(program.plan.clusters, 'rank')} in one process: arenas {size_text(arenas)}, "
        f"kernel scratch {size_text(scratch)}"
    )
    if arenas + scratch <= free:
        return MachineFact(words, f"largest rank: {size_text(largest)}")
    fitting = free // (largest + scratch)
    remark = f"more than is free; the largest rank needs {size_text(largest)}: {fitting} of its size fit here"
    return MachineFact(words, remark, stops_a_run=True)


def free_memory() -> int:
    """Return the bytes that a new process can take: the system's free ones, within its control group's limit."""
    limits = [_available()]
    for limit, used in _GROUP_FILES:
        try:
            limits.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no control groups of this kind, or no limit ("max")
            continue
    return max(0, min(limits))


def memory_limit() -> int:
    """Return the bytes that all processes can take together: the memory, within the control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in _GROUP_FILES:
        with suppress(OSError, ValueError):  # no control groups of this kind, or no limit ("max")
            limits.append(int(limit.read_text()))
    return min(limits)


_GROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Files with the limit and the usage of a control group, of version 2 and version 1."""


def _available() -> int:
    """Return the available bytes: on Linux including caches that can be reclaimed, elsewhere the free pages."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _blas() -> MachineFact:
    import numpy as np

    from ratrain.targets.runtime.checkpoint.manifest import blas_facts

    facts = blas_facts()
    words = f"{facts['blas']}, core type {facts['blas_core_type']}, numpy {np.__version__}"
    pinned = [f"{name}={os.environ[name]}" for name in _PINS if name in os.environ]
    if _CORE_TYPES & os.environ.keys():
        remark = f"the environment pins the core type ({', '.join(pinned)}): repeatable, maybe not the fastest"
    elif pinned:
        remark = f"the environment sets {', '.join(pinned)}; the core type is this processor's own"
    else:
        remark = "the environment pins nothing: bits may differ on another processor"
    return MachineFact(words, remark)


def _threads() -> MachineFact:
    from threadpoolctl import threadpool_info

    pools = ", ".join(f"{pool['internal_api']} {pool['num_threads']}" for pool in threadpool_info())
    usable = f"{len(usable_cores())} of {os.cpu_count()} processors usable"
    return MachineFact(f"{usable}; pools: {pools or 'none'}", "a run sets BLAS to one thread")


def _matrix_products() -> MachineFact:
    from threadpoolctl import threadpool_limits

    from ratrain.targets.runtime.training.utilisation import measured_peak_flops

    with threadpool_limits(limits=1):
        peak = measured_peak_flops()
    return MachineFact(
        f"{peak / 1e9:.0f} GFLOP/s in f32 on one core", "measured now; what utilisation is counted against"
    )


def bf16_fact(flags: Collection[str]) -> MachineFact:
    """Tell whether a processor with these flags multiplies bf16, and what bf16 saves if it does not."""
    native = bf16_instructions(flags)
    found = f"this processor multiplies it ({', '.join(native)})" if native else "this processor does not multiply it"
    by_pytorch = "'run --kernels torch' uses that" + (
        "" if is_installed("torch") else " (pip install 'ratrain[torch]')"
    )
    used = f"{by_pytorch}; the other kernels" if native else "the kernels here"
    return MachineFact(
        found,
        f"{used} multiply in f32, where bf16 saves memory, not time: activations, views and gradients take half "
        "of what they take in f32 "
        f"({_parameter_bytes(Dtype.BF16)} bytes a parameter, not {_parameter_bytes(Dtype.F32)}, where nothing "
        "is sharded), as much as in f16, which needs a loss scale",
    )


def kernels_fact(flags: Collection[str]) -> MachineFact:
    """Tell which kernel sets work here, and which one `run --kernels auto` takes on a processor with these flags."""
    from ratrain.ratrainc.choices.kernel_choice import host_choice
    from ratrain.targets.runtime.kernels import KERNEL_SETS

    extras = {"torch": "torch", "torch-device": "torch", "torch-triton": "triton"}
    missing = {name: extra for name, extra in extras.items() if not is_installed(extra)}
    found = [name for name in KERNEL_SETS.names() if name not in missing]
    found += [f"{name} with 'ratrain[{extra}]'" for name, extra in missing.items()]
    choice = host_choice(Dtype.BF16, flags, has_torch="torch" not in missing)
    of_bf16 = "the faster of fast and torch" if choice is None else f"{choice.name} ({choice.reason})"
    return MachineFact(", ".join(found), f"here 'run --kernels auto' takes fast for f16 and f32, for bf16 {of_bf16}")


def _parameter_bytes(dtype: Dtype) -> int:
    """Return bytes per parameter: view and gradient in `dtype`, master weight and two moments in f32."""
    return 2 * dtype.itemsize + 3 * Dtype.F32.itemsize


def _kernel_cache() -> MachineFact:
    """Check the folder in which numba keeps compiled kernels, by writing to it."""
    import numba

    version = f"numba {numba.__version__}"
    from ratrain.ratrain_ir.support.loops import WAY_OUT
    from ratrain.targets.runtime.kernels.fast import fast_rows

    compiled = [value.stats for value in vars(fast_rows).values() if hasattr(value, "stats")]
    folder = next((stats.cache_path for stats in compiled if stats.cache_path is not None), None)
    if not compiled:
        return MachineFact(
            f"{version} compiles nothing", "kernels run as plain Python, very slowly: unset NUMBA_DISABLE_JIT"
        )
    if folder is None:
        return MachineFact(f"{version}, no place to keep kernels", f"they are compiled in every process; {WAY_OUT}")
    try:  # a file, as a disk can be full where numba has found a folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"x")
    except OSError as error:
        return MachineFact(f"{version}, '{folder}': {error.strerror}", f"kernels cannot be kept there; {WAY_OUT}")
    return MachineFact(f"{version}, '{folder}' is writable")


_OPTIONAL = "not needed by the local engine, which runs all ranks in one process"


def _mpi() -> MachineFact:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    launcher = shutil.which("mpirun", path=places) or shutil.which("mpiexec", path=places)
    launched = f"launcher {launcher}" if launcher else "no launcher (mpirun, mpiexec) next to Python or on the path"
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # only to ask for the library's version
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "mpi4py"
        found = "mpi4py is not installed" if is_missing else str(error)
        return MachineFact(f"{found}; {launched}", f"{_OPTIONAL}; pip install 'ratrain[mpi]'")
    library = " ".join(MPI.Get_library_version().strip("\0\n ").splitlines()[0].split())
    return MachineFact(f"mpi4py {mpi4py.__version__}, {library}; {launched}", _OPTIONAL)


def _torch() -> MachineFact:
    from ratrain.ratrainc.console.extras import is_installed

    if not is_installed("torch"):
        return MachineFact("PyTorch is not installed", f"{_OPTIONAL}; pip install 'ratrain[torch]'")
    from ratrain.targets.pytorch.availability import distributed_words

    return MachineFact(distributed_words(), f"{_OPTIONAL}; --engine torch uses gloo, and NCCL between GPUs")
