"""What the processor that runs this can do."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""What Linux calls instructions that multiply bf16: two sets of x86, and Arm's."""


def cpu_flags(facts: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of the first processor, as Linux names them; none where it does not say."""
    try:
        lines = facts.read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return frozenset()
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def bf16_instructions(flags: Collection[str]) -> tuple[str, ...]:
    """Which of these flags are of instructions that multiply bf16."""
    return tuple(flag for flag in _BF16_FLAGS if flag in flags)


@cache
def multiplies_bf16() -> bool:
    """Whether this processor does; False where nobody says."""
    return bool(bf16_instructions(cpu_flags()))
