"""Block-quantised elements in numba loops, with the bits of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.config.quantised import BLOCK_ELEMENTS, LARGEST_CODE, LEAST_SCALE, block_count
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.fast import fast_flat
from ratrain.targets.runtime.kernels.fast.fast_numba import bits as bits_of
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, flat, load, maximum, narrow, round_even
from ratrain.targets.runtime.kernels.reference.reference_quantised import packed_parts

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import U8, Array
    from ratrain.targets.runtime.kernels.team import Team

_CHUNK = 16 * BLOCK_ELEMENTS
"""Elements that are summed while they stay in the first-level cache."""

_LEAST_SCALE = np.float32(LEAST_SCALE)
_ZERO, _INFINITY, _NAN = np.float32(0), np.float32(np.inf), np.float32(np.nan)


@exact()
def _largest(a: Any) -> Any:
    """Return the largest magnitude; NaN if any element is not finite."""
    largest = _ZERO
    for i in range(a.size):
        # `maximum` passes a NaN on; an infinity becomes NaN at the end, so one test finds both
        largest = maximum(largest, abs(load(a[i])))
    return _NAN if largest == _INFINITY else largest


@exact()
def _scales(a: Any, scales: Any, most: Any) -> None:
    """Set the scale of each block; `most` is the largest code."""
    for block in range(scales.size):
        start = block * BLOCK_ELEMENTS
        scale = _largest(a[start : min(start + BLOCK_ELEMENTS, a.size)]) / most
        scales[block] = _ZERO if scale < _LEAST_SCALE else scale


@exact()
def _codes(a: Any, scales: Any, codes: Any) -> None:
    """Set the code of each element as a signed byte; 0 in blocks with scale 0 or NaN."""
    for block in range(scales.size):
        start = block * BLOCK_ELEMENTS
        stop = min(start + BLOCK_ELEMENTS, a.size)
        part, out, scale = a[start:stop], codes[start:stop], scales[block]
        if scale > _ZERO:
            for i in range(part.size):
                # a division, as in the reference: a product with 1 / scale would round differently
                out[i] = np.int8(round_even(load(part[i]) / scale))
        else:
            for i in range(part.size):
                out[i] = np.int8(0)


@exact()
def _pack_pairs(codes: Any, stored: Any) -> None:
    """Pack two 4-bit codes into each byte."""
    for i in range(codes.size // 2):
        stored[i] = np.uint8(codes[2 * i] + 8) | (np.uint8(codes[2 * i + 1] + 8) << 4)
    if codes.size % 2:
        stored[codes.size // 2] = np.uint8(codes[codes.size - 1] + 8) | np.uint8(8 << 4)


@exact()
def _unpack_pairs(stored: Any, codes: Any) -> None:
    """Unpack two 4-bit codes from each byte."""
    for i in range(codes.size // 2):
        codes[2 * i] = np.int8(stored[i] & 15) - np.int8(8)
        codes[2 * i + 1] = np.int8(stored[i] >> 4) - np.int8(8)
    if codes.size % 2:
        codes[codes.size - 1] = np.int8(stored[codes.size // 2] & 15) - np.int8(8)


@exact()
def _add_values(acc: Any, codes: Any, scales: Any) -> None:
    """Add the values of codes to acc."""
    for block in range(scales.size):
        start = block * BLOCK_ELEMENTS
        stop = min(start + BLOCK_ELEMENTS, acc.size)
        part, out, scale = codes[start:stop], acc[start:stop], scales[block]
        for i in range(part.size):
            out[i] += np.float32(part[i]) * scale


@exact()
def _store_values(codes: Any, scales: Any, out: Any) -> None:
    """Set out = the values of codes."""
    for block in range(scales.size):
        start = block * BLOCK_ELEMENTS
        stop = min(start + BLOCK_ELEMENTS, out.size)
        part, stored, scale = codes[start:stop], out[start:stop], scales[block]
        for i in range(part.size):
            stored[i] = narrow(np.float32(part[i]) * scale, out.dtype)


def _codes_plan(count: int, threads: int, bits: int) -> Plan:
    """Plan a chunk of codes for each thread; nothing for 8 bits, whose packed codes are signed bytes already."""
    return [] if bits == 8 else [Buffer((threads, min(count, _CHUNK)), np.int8)]


def quantise_plan(a: Array, *, bits: int, threads: int, **_: object) -> Plan:
    """Plan codes before two of them are packed into a byte."""
    return _codes_plan(a.size, threads, bits)


def dequantise_plan(out: Array, *, bits: int, threads: int, **_: object) -> Plan:
    """Plan codes after two of them are unpacked from a byte."""
    return _codes_plan(out.size, threads, bits)


def mean_of_quantised_plan(out: Array, *, bits: int, threads: int, **_: object) -> Plan:
    """Plan sums, and the codes of `dequantise`."""
    return [Buffer((threads, min(out.size, _CHUNK))), *_codes_plan(out.size, threads, bits)]


class FastQuantised:
    """The kernels of `Fast` on packed elements. Threads take chunks of whole blocks."""

    team: Team

    def quantise(self, a, packed, *, scratch, bits):
        spare = scratch.take_all(quantise_plan(a, bits=bits, threads=self.team.threads))
        values = flat(a)
        scales, stored = packed_parts(packed, a.size)
        stored[a.size * bits // 8 :] = 0
        most = np.float32(LARGEST_CODE[bits])

        def part(numbered: tuple[int, slice]) -> None:
            for at, blocks in _chunks(numbered[1], a.size):
                _scales(values[at], scales[blocks], most)
                if bits == 8:
                    _codes(values[at], scales[blocks], stored.view(np.int8)[at])
                else:
                    codes = spare[0][numbered[0], : at.stop - at.start]
                    _codes(values[at], scales[blocks], codes)
                    _pack_pairs(codes, stored[at.start // 2 :])

        self.team.run(part, self._shares(a.size))

    def dequantise(self, packed, out, *, scratch, bits):
        spare = scratch.take_all(dequantise_plan(out, bits=bits, threads=self.team.threads))
        values = bits_of(out).reshape(-1)
        scales, stored = packed_parts(packed, out.size)

        def part(numbered: tuple[int, slice]) -> None:
            for at, blocks in _chunks(numbered[1], out.size):
                codes = _unpacked(stored, at, bits, spare, numbered[0])
                _store_values(codes, scales[blocks], values[at])

        self.team.run(part, self._shares(out.size))

    def mean_of_quantised(self, parts, out, *, scratch, accumulate, divisor, bits):
        sums, *spare = scratch.take_all(mean_of_quantised_plan(out, bits=bits, threads=self.team.threads))
        values = flat(out)
        packed = [packed_parts(part, out.size) for part in parts]

        def part(numbered: tuple[int, slice]) -> bool:
            finite = True
            for at, blocks in _chunks(numbered[1], out.size):
                acc = sums[numbered[0], : at.stop - at.start]
                acc.fill(0)
                for scales, stored in packed:
                    _add_values(acc, _unpacked(stored, at, bits, spare, numbered[0]), scales[blocks])
                fast_flat.store_scaled(acc, values[at], np.float32(1 / divisor), accumulate)
                finite &= fast_flat.all_finite(values[at])
            return finite

        return all(self.team.run(part, self._shares(out.size)))

    def _shares(self, elements: int) -> list[tuple[int, slice]]:
        """Return the chunks of each thread, numbered by thread."""
        return list(enumerate(self.team.ranges(-(-elements // _CHUNK), least=4)))


def _chunks(mine: slice, elements: int) -> list[tuple[slice, slice]]:
    """Return, for each chunk whose number is in `mine`, its elements and its blocks.

    `elements` is the length of the whole array, where the last chunk is cut off.
    """
    found = []
    for chunk in range(mine.start, mine.stop):
        at = slice(chunk * _CHUNK, min((chunk + 1) * _CHUNK, elements))
        found.append((at, slice(at.start // BLOCK_ELEMENTS, block_count(at.stop))))
    return found


def _unpacked(stored: U8, at: slice, bits: int, spare: list[Any], thread: int) -> Any:
    """Return the codes of some elements as signed bytes."""
    if bits == 8:
        return stored.view(np.int8)[at]
    codes = spare[0][thread, : at.stop - at.start]
    _unpack_pairs(stored[at.start // 2 :], codes)
    return codes
