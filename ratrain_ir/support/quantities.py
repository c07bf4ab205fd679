"""Parser and formatter of bytes, seconds and rates as people write them (`80 GB`, `25 us`), for files and options.

SI prefixes are powers of 1000, those with an i (KiB, MiB, GiB) powers of 1024. Arithmetic is decimal and rounds once,
so that `25 us` is exactly the float `25e-6`.
"""

from __future__ import annotations

import re
from decimal import Decimal

GIB = 1 << 30
MIB = 1 << 20
_STEPS = "KMGTP"
_PREFIXES = {"": Decimal(1), "k": Decimal(1000)} | {p: Decimal(1000) ** (i + 1) for i, p in enumerate(_STEPS)}
_BINARY = {f"{p}i": Decimal(1024) ** (i + 1) for i, p in enumerate(_STEPS)}
BYTES = {f"{prefix}B": scale for prefix, scale in (_PREFIXES | _BINARY).items()}
_FLOP = {f"{prefix}{word}": scale for prefix, scale in _PREFIXES.items() for word in ("FLOP", "flop")}
SCALES: dict[str, dict[str, Decimal]] = {
    "bytes": BYTES,
    "bytes/s": {f"{name}/s": scale for name, scale in BYTES.items()},
    "s": {"s": Decimal(1)}
    | {f"{prefix}s": scale for prefix, scale in (("m", Decimal("1e-3")), ("n", Decimal("1e-9")))}
    | {f"{micro}s": Decimal("1e-6") for micro in ("u", "\u00b5", "\u03bc")},
    "flop/s": {f"{name}/s": scale for name, scale in _FLOP.items()}
    | {f"{prefix}FLOPS": scale for prefix, scale in _PREFIXES.items()},
    "cycles/s": {f"{prefix}Hz": scale for prefix, scale in _PREFIXES.items()},
}
"""For each unit of a number: the suffixes that may follow the number, with their factors."""
EXAMPLES = {
    "bytes": "80 GB or 80 GiB",
    "bytes/s": "900 GB/s",
    "s": "25 us",
    "flop/s": "989 TFLOP/s",
    "cycles/s": "1.2 GHz",
}
COUNTS = {"": Decimal(1)} | {
    name: Decimal(1000) ** power for power, names in enumerate(("Kk", "M", "BG", "T"), 1) for name in names
}
"""Suffixes of a number of tokens (`15T`, `300B`), with their factors."""
_SHOWN = {
    "bytes": (("B", "KB", "MB", "GB", "TB", "PB"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")),
    "bytes/s": (("B/s", "KB/s", "MB/s", "GB/s", "TB/s", "PB/s"),),
    "s": (("ns", "us", "ms", "s"),),
    "flop/s": (("FLOP/s", "KFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"),),
    "cycles/s": (("Hz", "kHz", "MHz", "GHz"),),
}
"""Suffixes that each unit is shown with, ascending, for each kind of prefix."""
_QUANTITY = re.compile(r"(\d{1,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,2})?)\s*([A-Za-z\u00b5\u03bc][A-Za-z/]{0,11})?")
_WITHOUT_BYTE = re.compile(r"([KkMGTP])i?", re.IGNORECASE)
_MOST_BYTES = 10**18
"""Larger than any memory."""
_BITS = re.compile(r"([KkMGTP]i?)?(?:b|bit|bits)(/s|ps)?")


class QuantityError(ValueError):
    """Error of a text that is not a quantity of the unit asked for; `help` shows how to write one."""

    def __init__(self, message: str, help: str) -> None:  # noqa: A002 - the word users see
        super().__init__(message)
        self.help = help


def parse_quantity(text: str, unit: str) -> float:
    """Parse a text like `80 GB` as a number in `unit`, a key of `SCALES`; a number without suffix is in that unit.

    Raises `QuantityError` if it is no number, or has another unit. Bits are refused rather than converted: who writes
    `Gb` for `GB` would silently get an eighth.
    """
    return float(exact_quantity(text, unit))


def exact_quantity(text: str, unit: str) -> Decimal:
    """Parse as `parse_quantity` does, without rounding to a float."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise QuantityError(f"'{text[:60]}' is not a number with a unit", _how(unit))
    number, suffix = Decimal(match[1]), match[2]
    scale = Decimal(1) if suffix is None else SCALES[unit].get(suffix)
    if scale is not None:
        return number * scale
    bits = _BITS.fullmatch(suffix)
    if bits is not None and unit in ("bytes", "bytes/s"):
        nbytes = number * (_PREFIXES | _BINARY)[bits[1] or ""] / 8
        shown = quantity_text(float(nbytes), "bytes/s" if bits[2] else "bytes")
        raise QuantityError(f"'{text}' counts bits, not {unit}", _help_of_bits(shown, unit, is_rate=bool(bits[2])))
    other = next((known for known, names in SCALES.items() if suffix in names), None)
    if other is None:
        raise QuantityError(f"'{suffix}' is no unit of {unit}", _help_of_suffix(match[1], suffix, unit))
    sibling = {"bytes/s": f"{suffix}/s", "bytes": suffix.removesuffix("/s")}.get(unit)
    raise QuantityError(
        f"'{text}' is in {other}, not in {unit}",
        f"write {match[1]} {sibling}" if sibling in SCALES[unit] else _how(unit),
    )


def _help_of_suffix(number: str, suffix: str, unit: str) -> str:
    """Return help for a suffix that is misspelt in case, or lacks its last letters."""
    meant = next((name for name in SCALES[unit] if name.lower() == suffix.lower()), None)
    if meant is not None:
        return f"write {number} {meant}"
    prefix, rate = suffix.removesuffix("/s"), "/s" if unit == "bytes/s" else ""
    if unit not in ("bytes", "bytes/s") or _WITHOUT_BYTE.fullmatch(prefix) is None:
        return _how(unit)
    letter = prefix[0].upper()
    named = (f"{letter}iB{rate}",) if len(prefix) > 1 else (f"{letter}B{rate}", f"{letter}iB{rate}")
    return f"write {' or '.join(f'{number} {name}' for name in named)}"


def with_unit(text: str, unit: str) -> str:
    """Return the text of a quantity unchanged if it has a unit.

    Raises `QuantityError` for a number alone, with the ways to write it.
    """
    if _QUANTITY.fullmatch(text.strip()) is None or not text.strip()[-1].isdigit():
        return text  # `exact_quantity` says what else is wrong
    examples = EXAMPLES[unit].split(" or ")
    spelt = [f"{text.strip()} {example.partition(' ')[2]}" for example in examples]
    bare = next(name for name, scale in SCALES[unit].items() if scale == 1)
    raise QuantityError(
        f"'{text}' has no unit", f"write {' or '.join(spelt)}; or {text.strip()} {bare}, if that is meant"
    )


def whole_bytes(text: str) -> int:
    """Parse a whole number of bytes from a text like `20GiB`, `1.5 GB` or `1000`.

    A part of a byte is dropped where a unit is larger than a byte: `23.6GiB`, as devices report their memory, are
    25,340,307,046.4 bytes. Raises `QuantityError` for part of a byte otherwise, for less than a byte, or for more than
    any memory has.
    """
    size = exact_quantity(text, "bytes")
    match = _QUANTITY.fullmatch(text.strip())
    counts_bytes = match is not None and match[2] in (None, "B")
    if size > _MOST_BYTES or (size != int(size) and (counts_bytes or size < 1)):
        why = "more bytes than any memory has" if size > _MOST_BYTES else "no whole number of bytes"
        raise QuantityError(f"'{text}' is {why}", _how("bytes"))
    return int(size)


def parse_count(text: str) -> float:
    """Parse a number of tokens like `1e12`, `300B` or `15T`. Raises `QuantityError` if it is none."""
    match = _QUANTITY.fullmatch(text.strip().replace("_", ""))
    suffix = match[2] or "" if match else ""
    if match is None or suffix not in COUNTS:
        meant = suffix.upper() if match and suffix.upper() in COUNTS else None
        how = f"write {match[1]}{meant}" if match and meant else "write for example 1e12 or 1T, 300e9 or 300B"
        raise QuantityError(f"'{text[:60]}' is not a number of tokens", how)
    return float(Decimal(match[1]) * COUNTS[suffix])


def _help_of_bits(shown: str, unit: str, *, is_rate: bool) -> str:
    return f"eight bits are a byte: that is {shown}" if is_rate == (unit == "bytes/s") else _how(unit)


def _how(unit: str) -> str:
    return f"write for example {EXAMPLES[unit]}"


def number_of(count: float, noun: str, form: str = "") -> str:
    """Format a count with its noun, in the plural unless it is 1: "1 stage", "2 stages"; `form` is as of `format`."""
    if count == 1:
        return f"{count:{form}} {noun}"
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:{form}} {f'{noun[:-1]}ies' if noun.endswith('y') else noun + ending}"


def size_text(count: int, beside: int = 0) -> str:
    """Format bytes in GiB if large, else in MiB; in the unit of the larger one where they stand beside others.

    Below 0.01 MiB they are bytes: two digits after the point would say that there are none.
    """
    if count < MIB // 100:
        return number_of(count, "byte")
    return f"{count / GIB:.2f} GiB" if max(count, beside) >= GIB // 4 else f"{count / MIB:.2f} MiB"


def mib_text(count: int) -> str:
    """Write bytes in MiB, whatever their number, so that they compare with one another."""
    return f"{count / MIB:.2f} MiB"


def quantity_text(value: float, unit: str) -> str:
    """Format a number as the shortest text that `parse_quantity` reads back exactly.

    A decimal prefix is preferred where a binary one gives no shorter text.
    """
    exact = Decimal(repr(float(value)))
    texts = [f"{_plain(exact / SCALES[unit][name])} {name}" for name in _largest(exact, unit)]
    return min(texts, key=len)


def _largest(number: Decimal, unit: str) -> list[str]:
    """Return, for each kind of prefix, the largest suffix with which the number is at least 1."""
    scales = SCALES[unit]
    return [next((name for name in reversed(names) if number >= scales[name]), names[0]) for names in _SHOWN[unit]]


def _plain(number: Decimal) -> str:
    short = number.normalize()
    return f"{short:f}" if -9 <= short.adjusted() <= 20 else f"{short:e}"
