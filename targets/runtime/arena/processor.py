"""Instruction sets of the processor that runs this."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Linux's names of instruction sets that multiply bf16: two of x86, and Arm's."""


def cpu_flags(facts: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of the first processor, as Linux names them; empty where it does not say."""
    try:
        lines = facts.read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return frozenset()
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def bf16_instructions(flags: Collection[str]) -> tuple[str, ...]:
    """Return the flags among `flags` that stand for bf16 multiplication."""
    return tuple(flag for flag in _BF16_FLAGS if flag in flags)


@cache
def multiplies_bf16() -> bool:
    """Return True if this processor multiplies bf16; False where the system does not say."""
    return bool(bf16_instructions(cpu_flags()))
