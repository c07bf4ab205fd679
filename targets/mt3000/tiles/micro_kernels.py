"""Micro-kernels a tile schedule may run, with the memories their buffers must be in.

Signatures: written buffers, then read ones, as `name:memories`, with `=` where the whole tile is made anew, `~` where
its contents are changed, `*` where there may be any number, `?` where there may be none. Memories: `a` AM, `s` SM.
Arguments have the same names in `ratrain.targets.mt3000.kernels.tiled_compute`; scores are [keys, queries] or [queries,
keys].
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import frozen

from ratrain.targets.mt3000.tiles.tile_schedule import Compute, OnChipMemory

_MEMORIES = {"a": OnChipMemory.AM, "s": OnChipMemory.SM}
_TEXT = re.compile(r"(\w+):([as]+)([=~]?)([*?]?)")


@frozen
class TileArgument:
    """Buffer that a micro-kernel takes."""

    name: str
    memories: tuple[OnChipMemory, ...]
    mode: str
    """`=` made anew, `~` changed, empty: read"""
    repeats: bool
    optional: bool


@frozen
class MicroKernel:
    """Buffers of a micro-kernel: those written, then those read."""

    writes: tuple[TileArgument, ...]
    reads: tuple[TileArgument, ...]

    def arguments(self, writes: int, reads: int) -> tuple[TileArgument, ...] | None:
        """Return the argument that each of `writes` and `reads` buffers is, or None where it takes another number."""
        read = list(self.reads)
        if read and read[-1].optional and reads < len(read):
            read.pop()
        elif read and read[-1].repeats:
            read = read[:-1] + [read[-1]] * max(0, reads - len(read) + 1)
        return (*self.writes, *read) if (writes, reads) == (len(self.writes), len(read)) else None


def _kernel(text: str) -> MicroKernel:
    arguments = [
        TileArgument(name, tuple(_MEMORIES[letter] for letter in memories), mode, mark == "*", mark == "?")
        for name, memories, mode, mark in _TEXT.findall(text)
    ]
    return MicroKernel(tuple(a for a in arguments if a.mode), tuple(a for a in arguments if not a.mode))


MICRO_KERNELS: dict[str, MicroKernel] = {
    "zero": _kernel("out:a="),
    "product": _kernel("out:a= scalars:s vectors:a"),
    "add_product": _kernel("out:a~ scalars:s vectors:a"),
    "add_run": _kernel("out:a~ scalars:s vectors:a"),
    "transpose": _kernel("out:a= source:a"),
    "round_sum": _kernel("out:a= total:a added:a*"),
    "start_softmax": _kernel("total:a= peak:a= out:a="),
    "softmax": _kernel("total:a~ peak:a~ out:a~ weight:a= score:a documents:a?"),
    "log_sum_exp": _kernel("lse:a= total:a peak:a"),
    "divide_turned": _kernel("result:a= out:a total:a"),
    "row_product": _kernel("delta:a= left:a right:a"),
    "score_gradient": _kernel("weight:a= dscore:a= score:a dweight:a lse:as delta:as documents:as?"),
    "scale_turned": _kernel("result:a= out:a"),
    "round_turned": _kernel("result:a= out:a"),
}
"""Micro-kernels by name."""

ADD_RUN = "add_run"
"""Micro-kernel that sums its products in float16, as one run, and adds the run to float32 sums."""
PRODUCTS = ("product", "add_product", ADD_RUN)
"""Micro-kernels that multiply scalars by vectors; all but `add_run` sum in float32 or float64."""


def arguments_of(compute: Compute) -> Iterator[tuple[TileArgument, str]]:
    """Pair the arguments of a micro-kernel with the names of its buffers, written first; their numbers must fit."""
    arguments = MICRO_KERNELS[compute.kernel].arguments(len(compute.writes), len(compute.reads))
    assert arguments is not None
    return zip(arguments, (*compute.writes, *compute.reads), strict=True)
