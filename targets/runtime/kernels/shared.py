"""Parts that all kernel sets have in common: rotary tables, index ranges, checks, scratch plans by kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.model.rotary import rope_frequencies
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.program.kernels import IGNORED_LABEL, KERNELS, OTHER_RANKS
from ratrain.targets.runtime.arena.kernel_memory import HOST, Memory
from ratrain.targets.runtime.arena.scratch import Plan, plan_bytes
from ratrain.targets.runtime.kernels.host_scalars import HostScalars
from ratrain.targets.runtime.kernels.team import Team

if TYPE_CHECKING:
    from ratrain.targets.program.kernel import Kernel
    from ratrain.targets.program.per_kernel import PerKernel
    from ratrain.targets.runtime.arena.scalars import Place, Scalars
    from ratrain.targets.runtime.kernels.interface import F32, I32, I64

NORM_EPS = 1e-12
"""Least norm that a row is divided by: the default of `torch.nn.functional.normalize`, which Baichuan 2's head uses."""
LARGEST_INVERSE = np.float32(1) / np.float32(NORM_EPS)
"""Factor of a row shorter than `NORM_EPS`: a constant, so it has no gradient."""

_KEY_BLOCK = 4096


def rope_table(seq_len: int, width: int, theta: float, scaling: str = "") -> tuple[F32, F32]:
    """Return cosines and sines, each [seq_len, width / 2], multiplied by YaRN's factor if scaled so.

    Frequencies and angles are rounded to float32 as in Hugging Face.
    """
    frequency, growth = rope_frequencies(theta, width, scaling)
    angle = (np.arange(seq_len, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return (np.cos(angle) * growth).astype(np.float32), (np.sin(angle) * growth).astype(np.float32)


def put_columns(src: NDArray[Any], dst: NDArray[Any], groups: int, *, inverse: bool) -> None:
    """Copy runs of columns below one another, or side by side again: the kernel `group_columns`."""
    wide, tall = (dst, src) if inverse else (src, dst)
    of_wide = wide.reshape(len(wide), groups, -1).transpose(1, 0, 2)
    of_tall = tall.reshape(groups, len(wide), -1)
    np.copyto(*((of_wide, of_tall) if inverse else (of_tall, of_wide)))


def decay_segments(length: int, decay: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Cover [0, length) in ascending order by (start, stop, decayed); `decay` are the ranges with weight decay.

    Raises ValueError for a range outside.
    """
    done = 0
    for start, stop in sorted(decay):
        if not 0 <= start <= stop <= length:
            raise ValueError(f"decay range [{start}, {stop}) is outside a shard of {length} elements")
        if start > done:
            yield done, start, False
        if stop > max(start, done):
            yield max(start, done), stop, True
        done = max(done, stop)
    if done < length:
        yield done, length, False


def check_indices(indices: I32, rows: int) -> None:
    """Raise IndexError unless all `indices` are rows of a table of `rows` rows."""
    low, high = int(indices.min(initial=0)), int(indices.max(initial=0))
    if low < 0 or high >= rows:
        raise IndexError(f"token {low if low < 0 else high} is outside a table of {rows} rows")


def check_tokens(tokens: I32, rows: int) -> None:
    """Raise IndexError unless all `tokens` are rows of a table of `rows` rows, or `OTHER_RANKS`."""
    if np.any(tokens == IGNORED_LABEL):
        raise IndexError(f"token {IGNORED_LABEL} is outside a table of {rows} rows")
    check_labels(tokens, rows)


def number_within(tokens: I32, words: range) -> None:
    """Replace tokens or labels by row numbers of a table that has `words`, in place; others become `OTHER_RANKS`.

    `IGNORED_LABEL` stays.
    """
    held = (tokens >= words.start) & (tokens < words.stop)
    tokens[:] = np.where(held, tokens - words.start, np.where(tokens == IGNORED_LABEL, IGNORED_LABEL, OTHER_RANKS))


def held_keys(keys: I64, padding_token: int | None = None) -> list[I64]:
    """Select the keys (token << 32 | row, ascending) of tokens that the table holds, the padding token left out.

    Returns one or two runs; tokens of other tensor-parallel ranks are negative and stand first.
    """
    held = keys[np.searchsorted(keys, 0) :]
    if padding_token is None:
        return [held]
    start, stop = np.searchsorted(held, [padding_token << 32, (padding_token + 1) << 32])
    return [held[:start], held[stop:]]


def check_labels(labels: I32, rows: int) -> None:
    """Raise IndexError unless all `labels` are rows of a table of `rows` rows, `IGNORED_LABEL` or `OTHER_RANKS`."""
    if int(labels.min(initial=0)) < OTHER_RANKS:
        raise IndexError(f"token {int(labels.min())} is outside a table of {rows} rows")
    check_indices(np.maximum(labels, 0), rows)


def check_starts(documents: I32 | None, length: int, first: int = 0) -> None:
    """Raise IndexError unless each row's document starts within its sequence, at the row's position or before.

    `documents[t]` is the position at which the document of row t starts. Row t has position first + t % length.
    """
    if documents is None:
        return
    for sequence in documents.reshape(-1, length):
        for start in range(0, length, _KEY_BLOCK):
            part = sequence[start : start + _KEY_BLOCK]
            behind = np.arange(first + start, first + start + len(part), dtype=np.int32) - part
            if int(part.min()) < 0 or int(behind.min()) < 0:
                raise IndexError("a document starts behind one of its rows, or before its sequence")


def document_positions(documents: I32, length: int, first: int, out: I64) -> None:
    """Set out = the position of each row within its document; raises IndexError as `check_starts` does."""
    check_starts(documents, length, first)
    np.negative(documents, out=out)
    for sequence in out.reshape(-1, length):
        for start in range(0, length, _KEY_BLOCK):
            part = sequence[start : start + _KEY_BLOCK]
            part += np.arange(first + start, first + start + len(part))


def token_keys(tokens: I32 | I64, keys: I64) -> None:
    """Set keys = the values token << 32 | t, ascending: equal tokens together, each with its rows in order.

    All keys are distinct, so the result does not depend on the sorting algorithm.
    """
    np.left_shift(tokens, 32, out=keys, dtype=np.int64)
    for start in range(0, len(keys), _KEY_BLOCK):
        part = keys[start : start + _KEY_BLOCK]
        part += np.arange(start, start + len(part))
    keys.sort()


def check_experts(chosen: I32, experts: int) -> None:
    """Raise IndexError unless all `chosen` are numbers of experts."""
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    if low < 0 or high >= experts:
        raise IndexError(f"expert {low if low < 0 else high} is outside {experts} experts")


def group_by_expert(chosen: I32, order: I32, bounds: I32) -> None:
    """Set `order` and `bounds` as the kernel `group_rows` does, by a stable sort.

    Numbers t * k + j go by expert, then ascending. Raises IndexError for a number outside.
    """
    experts = len(bounds) - 1
    check_experts(chosen, experts)
    flat = chosen.reshape(-1)
    order[:] = np.argsort(flat, kind="stable")
    bounds[0] = 0
    np.cumsum(np.bincount(flat, minlength=experts), out=bounds[1:])


def rows_of_experts(bounds: I32) -> Iterator[slice]:
    """Yield the rows of each expert."""
    return (slice(start, end) for start, end in pairwise(bounds.tolist()))


def counted_rows(rows: int, bounds: I32 | None) -> tuple[int, int]:
    """Return the first row within the bounds of experts, and how many there are; without bounds those of all rows."""
    return (0, rows) if bounds is None else (int(bounds[0]), int(bounds[-1] - bounds[0]))


def expert_runs(bounds: I32, block: int) -> Iterator[tuple[int, slice]]:
    """Yield (expert, rows) in ascending order, each of at most `block` rows of one expert."""
    for expert, rows in enumerate(rows_of_experts(bounds)):
        for first in range(rows.start, rows.stop, block):
            yield expert, slice(first, min(first + block, rows.stop))


def set_problems(kernels: type[KernelSetBase], declared: Iterable[Kernel]) -> list[str]:
    """Return a line for each declared kernel that a set lacks or has with other parameters."""
    problems = []
    for kernel in declared:
        method = getattr(kernels, kernel.name, None)
        if method is None:
            problems.append(f"the kernel set '{kernels.name}' has no '{kernel.name}'")
            continue
        problem = kernel.signature_problem([*signature(method).parameters.values()][1:])
        if problem is not None:
            problems.append(f"the kernel set '{kernels.name}': {problem}")
    return problems


class KernelSetBase:
    """Base of kernel sets: a team of threads, cached rotary tables, the scratch of each kernel.

    A subclass sets `plans` and defines the kernels. It raises TypeError when its class is created if it lacks a
    declared kernel, or has one with other parameters.
    """

    name: ClassVar[str]
    threaded: ClassVar[bool] = False
    """True if several threads share the work of a kernel."""
    on_devices: ClassVar[bool] = False
    """True if a set is made for a PyTorch device, given by name, and works on its tensors."""
    sums_halves: ClassVar[bool] = False
    """True if its `gemm` can sum in float16 (`half_run`)."""
    scalar_bytes: ClassVar[int] = 0
    """Bytes of scratch that `scalars` take, in addition to the kernels'."""
    plans: ClassVar[PerKernel[Callable[..., Plan]]]
    """Function from a kernel's arguments to its scratch plan, for each kernel with scratch.

    Arguments not needed go to `**_`. They include `plan_options`; most sets have `threads`, the number of threads that
    share each call.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        problems = set_problems(cls, KERNELS.values())
        if problems:
            raise TypeError("; ".join(problems))

    def __init__(self, threads: int = 1) -> None:
        self.team = Team(threads)
        self.memory: Memory = HOST
        self._rope: dict[tuple[int, float, str], tuple[Any, Any]] = {}

    @property
    def constant_bytes(self) -> int:
        """Bytes of the rotary tables that are kept."""
        return sum(cos.nbytes + sin.nbytes for cos, sin in self._rope.values())

    def compiles_for(self, kernels: Collection[str]) -> bool:  # noqa: ARG002
        """Tell whether running these kernels compiles loops that are not kept on disk: never, without loops."""
        return False

    def combined_loss_bytes(self, rows: int) -> int:  # noqa: ARG002
        """Return 0: `HostScalars` take no scratch."""
        return 0

    def scalars(self, blocks: Mapping[Place, Sequence[str]]) -> Scalars:
        """Make `HostScalars`, which are the same for all blocks."""
        del blocks
        return HostScalars(self)  # type: ignore[arg-type]

    def prepare_rope(self, seq_len: int, width: int, theta: float, scaling: str = "") -> None:
        """Build the table of `rope` for these values; `width` is the number of rotated elements of a head."""
        self._rope_rows(slice(0, seq_len), width, theta, scaling)

    def _rope_rows(self, positions: slice, width: int, theta: float, scaling: str) -> tuple[Any, Any]:
        """Return cosines and sines of some positions, from the longest table asked for so far."""
        key = (width, float(theta), scaling)
        table = self._rope.get(key)
        if table is None or len(table[0]) < positions.stop:
            # two threads may both build it: whichever is kept, its rows are the same
            table = self._rope[key] = self.build_rope_table(positions.stop, *key)
        cos, sin = table
        return cos[positions], sin[positions]

    def build_rope_table(self, seq_len: int, width: int, theta: float, scaling: str) -> tuple[Any, Any]:
        """Build a `rope_table` in the form that the kernels of this set take."""
        return rope_table(seq_len, width, theta, scaling)

    def plan_options(self) -> dict[str, Any]:
        """Return the arguments of plans that are not arguments of kernels."""
        return {"threads": self.team.threads}

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Return the bytes of scratch that a kernel takes; see `KernelSet.scratch_bytes`.

        Raises `DiagnosticError` RT093 for products that are to be summed in float16 by a set that cannot do it.
        """
        if kernel not in KERNELS:
            raise ValueError(f"there is no kernel {kernel!r}")
        if arguments.get("half_run") is not None and not self.sums_halves:
            text = f"the kernel set '{self.name}' sums products in f32, but this program's plan says to sum runs in f16"
            way_out = 'run it with --kernels fast or reference, or compile a plan with accumulate = "f32"'
            fail("RT093", text, help=way_out)
        plan = self.plans.get(kernel)
        return plan_bytes(plan(**arguments, **self.plan_options())) if plan else 0
