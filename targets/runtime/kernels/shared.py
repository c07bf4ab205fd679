"""What every kernel set has in common: tables, ranges, checks, the scratch of its kernels by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ratrain.ratrain_ir.model.rotary import rope_frequencies
from ratrain.targets.program.kernels import IGNORED_LABEL, KERNELS, OTHER_PEERS
from ratrain.targets.runtime.arena.kernel_memory import HOST, Memory
from ratrain.targets.runtime.arena.scratch import Plan, plan_bytes
from ratrain.targets.runtime.kernels.host_scalars import HostScalars
from ratrain.targets.runtime.kernels.team import Team

if TYPE_CHECKING:
    from ratrain.targets.program.kernels import Kernel
    from ratrain.targets.program.per_kernel import PerKernel
    from ratrain.targets.runtime.arena.scalars import Place, Scalars
    from ratrain.targets.runtime.kernels.interface import F32, I32, I64

NORM_EPS = 1e-12
"""Least norm a row is divided by: the default of `torch.nn.functional.normalize`, which Baichuan 2's head uses."""
LARGEST_INVERSE = np.float32(1) / np.float32(NORM_EPS)
"""What a row shorter than `NORM_EPS` is multiplied by: a constant, so without a gradient."""

_KEY_BLOCK = 4096


def rope_table(seq_len: int, width: int, theta: float, scaling: str = "") -> tuple[F32, F32]:
    """Cosines and sines [seq_len, width / 2]: frequencies and angles rounded to float32 as Hugging Face does; grown by YaRN's factor."""
    frequency, growth = rope_frequencies(theta, width, scaling)
    angle = (np.arange(seq_len, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return (np.cos(angle) * growth).astype(np.float32), (np.sin(angle) * growth).astype(np.float32)


def decay_segments(length: int, decay: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Cover [0, length) in ascending order by (start, stop, decayed)."""
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
    """Raise IndexError unless all `tokens` are rows of a table of `rows` rows, or `OTHER_PEERS`."""
    if np.any(tokens == IGNORED_LABEL):
        raise IndexError(f"token {IGNORED_LABEL} is outside a table of {rows} rows")
    check_labels(tokens, rows)


def number_within(tokens: I32, words: range) -> None:
    """Turn tokens or labels into rows of a table of those words, in place: what has no row there into `OTHER_PEERS`."""
    held = (tokens >= words.start) & (tokens < words.stop)
    tokens[:] = np.where(held, tokens - words.start, np.where(tokens == IGNORED_LABEL, IGNORED_LABEL, OTHER_PEERS))


def held_keys(keys: I64, padding_token: int | None = None) -> list[I64]:
    """Runs of ascending `keys`, token << 32 | t, of tokens that are rows of the table and not the padding token."""
    held = keys[np.searchsorted(keys, 0) :]
    if padding_token is None:
        return [held]
    start, stop = np.searchsorted(held, [padding_token << 32, (padding_token + 1) << 32])
    return [held[:start], held[stop:]]


def check_labels(labels: I32, rows: int) -> None:
    """Raise IndexError unless all `labels` are rows of a table of `rows` rows, `IGNORED_LABEL` or `OTHER_PEERS`."""
    if int(labels.min(initial=0)) < OTHER_PEERS:
        raise IndexError(f"token {int(labels.min())} is outside a table of {rows} rows")
    check_indices(np.maximum(labels, 0), rows)


def check_starts(documents: I32 | None, length: int, first: int = 0) -> None:
    """Raise IndexError unless the document of each row starts at the row's position or before it, and not before its sequence.

    Row t of `documents`, if there are any, has position first + t % length.
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
    """Set out = the position of each row in its document; raises IndexError as `check_starts` does."""
    check_starts(documents, length, first)
    np.negative(documents, out=out)
    for sequence in out.reshape(-1, length):
        for start in range(0, length, _KEY_BLOCK):
            part = sequence[start : start + _KEY_BLOCK]
            part += np.arange(first + start, first + start + len(part))


def token_keys(tokens: I32 | I64, keys: I64) -> None:
    """Set keys = the values token << 32 | t, ascending: equal tokens together, each with its rows in order.

    All are distinct, so the result does not depend on the sorting algorithm.
    """
    np.left_shift(tokens, 32, out=keys, dtype=np.int64)
    for start in range(0, len(keys), _KEY_BLOCK):
        part = keys[start : start + _KEY_BLOCK]
        part += np.arange(start, start + len(part))
    keys.sort()


def set_problems(kernels: type[KernelSetBase], declared: Iterable[Kernel]) -> list[str]:
    """A line for each declared kernel that a kernel set does not have, or has with other arguments."""
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
    """A team of threads, rotary tables, cached, and the scratch of each kernel; a subclass names its plans and has the kernels.

    A subclass that lacks a kernel, or has one with other arguments than are declared, cannot be made: TypeError.
    """

    name: ClassVar[str]
    threaded: ClassVar[bool] = False
    """Whether several threads share the work of a kernel."""
    on_devices: ClassVar[bool] = False
    """Whether it is made for a device of PyTorch, given by name, on whose tensors it works."""
    scalar_bytes: ClassVar[int] = 0
    """Of scratch, beside those of kernels: what `scalars` take."""
    plans: ClassVar[PerKernel[Callable[..., Plan]]]
    """For each kernel that takes scratch, its plan from its arguments; arguments it does not need go to `**_`.

    Among the arguments are those of `plan_options`; most sets have `threads`: how many each call is shared out to.
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
        """Bytes of the tables that are kept."""
        return sum(cos.nbytes + sin.nbytes for cos, sin in self._rope.values())

    def combined_loss_bytes(self, rows: int) -> int:  # noqa: ARG002
        """None: the host's own memory serves."""
        return 0

    def scalars(self, blocks: Mapping[Place, Sequence[str]]) -> Scalars:
        """Numbers of Python, whatever the blocks."""
        del blocks
        return HostScalars(self)  # type: ignore[arg-type]

    def prepare_rope(self, seq_len: int, width: int, theta: float, scaling: str = "") -> None:
        """Build the table of `rope` for these values; `width`: elements of a head that are rotated."""
        self._rope_rows(slice(0, seq_len), width, theta, scaling)

    def _rope_rows(self, positions: slice, width: int, theta: float, scaling: str) -> tuple[Any, Any]:
        """Cosines and sines of some positions, from the longest table there has been need for."""
        key = (width, float(theta), scaling)
        table = self._rope.get(key)
        if table is None or len(table[0]) < positions.stop:
            # two threads may both build it: whichever is kept, its rows are the same
            table = self._rope[key] = self.build_rope_table(positions.stop, *key)
        cos, sin = table
        return cos[positions], sin[positions]

    def build_rope_table(self, seq_len: int, width: int, theta: float, scaling: str) -> tuple[Any, Any]:
        """`rope_table`, as the kernels of this set take it."""
        return rope_table(seq_len, width, theta, scaling)

    def plan_options(self) -> dict[str, Any]:
        """What plans depend on beside the arguments of a call."""
        return {"threads": self.team.threads}

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Bytes of scratch that a kernel takes; see `KernelSet.scratch_bytes`."""
        if kernel not in KERNELS:
            raise ValueError(f"there is no kernel {kernel!r}")
        plan = self.plans.get(kernel)
        return plan_bytes(plan(**arguments, **self.plan_options())) if plan else 0
