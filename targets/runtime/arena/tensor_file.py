"""Safetensors files: tensors by name in one file, read through a memory map and written piece by piece.

    | header length | header: JSON name -> dtype, shape, byte range | bytes of all tensors |
      8 bytes, LE     written here: padded to a multiple of 8         no gap, no overlap

Format: https://github.com/huggingface/safetensors#format. The library of that name is not used because it gives numpy
no bf16 and writes only tensors that are in memory as a whole.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NoReturn, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import help_for, opened_regular
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES

Float32 = NDArray[np.float32]

PIECE_ELEMENTS = 1 << 20
"""Elements that are drawn, read or rounded at a time when a tensor is moved: 4 MiB of f32. Temporaries then stay
below 16 MiB in addition to the tensor's own bytes."""

FLOAT_TYPES = ("F32", "F16", "BF16")
"""Dtypes whose values can be read, in the format's spelling."""

_MAX_HEADER = 100_000_000  # bytes: the limit of the format's own library
_ALIGNMENT = 8  # bytes: where the tensors start in a file that is written here
_LENGTH_BYTES = 8
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class Writer(Protocol):
    """Sink for a file's bytes: a binary file, or a wrapper of one."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of `data`."""


def cut(start: int, stop: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into ascending ranges of at most `most` elements (default `PIECE_ELEMENTS`).

    Raises ValueError for `most` = 0.
    """
    most = PIECE_ELEMENTS if most is None else most
    for low in range(start, stop, most):
        yield low, min(low + most, stop)


@frozen(eq=False)
class MappedFile:
    """Bytes of a file as a memory map, read from disk when they are accessed."""

    pages: mmap.mmap
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, descriptor: int) -> MappedFile:
        """Map all of an open file, which must not be empty. Raises OSError."""
        pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        return cls(pages, np.frombuffer(pages, np.uint8))

    def let_go(self, start: int, stop: int) -> None:
        """Drop the pages of bytes [start, stop) from this process's memory; a later access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            # madvise wants a page boundary. Dropping neighbouring bytes of the first page is harmless: the map is
            # read-only, and they are read again.
            start -= start % mmap.PAGESIZE
            self.pages.madvise(mmap.MADV_DONTNEED, start, stop - start)


@frozen(eq=False)
class StoredTensor:
    """Tensor in a mapped file."""

    dtype: str
    """in the format's spelling"""
    shape: tuple[int, ...]
    file: MappedFile
    start: int
    stop: int
    """byte range [start, stop) in the file"""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def values(self, start: int, stop: int) -> Float32:
        """Copy elements [start, stop) of the flat tensor to f32, exactly; the dtype must be one of `FLOAT_TYPES`."""
        size = _ITEM_BYTES[self.dtype]
        low, high = self.start + start * size, self.start + stop * size
        data = self.file.data[low:high]
        values: Float32
        if self.dtype == "BF16":
            # bf16 is the upper half of an f32.
            values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            with np.errstate(all="ignore"):  # widening a signalling NaN
                values = data.view("<f4" if self.dtype == "F32" else "<f2").astype(np.float32)
        # The copy is made: without this, reading a large file would make all of it resident.
        if low < high:
            self.file.let_go(low, high)
        return values

    def pieces(self, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of the flat tensor as f32, at most `PIECE_ELEMENTS` at a time."""
        for low, high in cut(start, stop):
            yield self.values(low, high)


def joined(pieces: Iterable[Float32], elements: int) -> Float32:
    """Join consecutive pieces into one array of `elements` elements."""
    whole = np.empty(elements, np.float32)
    at = 0
    for piece in pieces:
        whole[at : at + piece.size] = piece
        at += piece.size
    assert at == elements, f"{at} of {elements} elements came"
    return whole


def open_tensors(path: str, code: str) -> dict[str, StoredTensor]:
    """Map a file and return its tensors by name, after checking the whole header against the format.

    Raises RT002 (cannot be read) and `code` (not a safetensors file, cut short, or contradicting itself).
    """
    try:
        with opened_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            # The length is untrusted: bound it before reading, so that a damaged file cannot ask for gigabytes.
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER, size - _LENGTH_BYTES):
                _not_tensors(path, code, start, size)
            header = stream.read(length)
            file = MappedFile.of(stream.fileno())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail("RT002", f"cannot read '{path}': {reason}", help=help_for(error))
    entries = _parse_header(path, code, header)
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    before = _LENGTH_BYTES + length
    for name, entry in entries.items():
        dtype, shape, begin, end = _parse_entry(path, code, name, entry)
        ranges.append((begin, end, name))
        tensors[name] = StoredTensor(dtype, shape, file, before + begin, before + end)
    _check_ranges(path, code, sorted(ranges), len(file.data) - before)
    return tensors


def metadata_of(path: str) -> dict[str, object]:
    """Return the `__metadata__` entry of a file; empty where it has none, cannot be read or is no such file."""
    with suppress(OSError, ValueError, RecursionError), opened_regular(path) as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        header = json.loads(stream.read(min(length, _MAX_HEADER)))
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        return metadata if isinstance(metadata, dict) else {}
    return {}


def write_tensors(
    stream: Writer,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[Iterable[NDArray[Any]]],
    metadata: Mapping[str, str],
    dtype: Dtype = Dtype.F32,
) -> None:
    """Write tensors of these names and shapes, in this order, rounded to `dtype` (f32 or bf16).

    Each tensor comes as consecutive pieces of any shape, so none has to be in memory as a whole.
    """
    # The header needs only shapes: it is complete before the first tensor is asked for.
    stored, word = NUMPY_DTYPES[dtype].newbyteorder("<"), dtype.value.upper()
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, shape in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(text)
    for (name, shape), pieces in zip(shapes.items(), tensors, strict=True):
        written = 0
        for piece in pieces:
            written += piece.size
            stream.write(np.ascontiguousarray(piece, dtype=stored).reshape(-1).view(np.uint8).data)
        assert written == prod(shape), f"{name} was announced as {shape}, and has {written} elements"


def _not_tensors(path: str, code: str, start: bytes, size: int) -> NoReturn:
    """Refuse a file that does not begin like this format, with a hint drawn from its first bytes."""
    help_text = None
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        help_text = "it looks like a PyTorch pickle, which can run code when it is read: convert it to safetensors"
    elif start.startswith(b"version ") or size < _LENGTH_BYTES:
        help_text = "the download may be incomplete (a Git LFS pointer, or cut short): fetch the file again"
    fail(code, f"'{path}' is not a safetensors file, or is cut short in its header ({size} bytes)", help=help_text)


def _damaged(path: str, code: str, what: str, *, help: str | None = None) -> NoReturn:  # noqa: A002
    fail(code, f"'{path}' is not a sound safetensors file: {what}", help=help)


def _parse_header(path: str, code: str, header: bytes) -> dict[str, object]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(items)
        if len(fields) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            _damaged(path, code, f"its header names {shown(twice)} twice")
        return fields

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        _damaged(path, code, "its header is no JSON")
    if not isinstance(entries, dict):
        _damaged(path, code, "its header is no JSON object")
    entries.pop("__metadata__", None)
    return entries


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _parse_entry(path: str, code: str, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, and byte range [begin, end) of a tensor, which its shape must fill."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _damaged(path, code, f"the entry of {shown(name)} is not made of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    sound = (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and all(_is_count(value) for value in (*shape, *offsets))
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    )
    if not sound:
        _damaged(path, code, f"the entry of {shown(name)} has a value that cannot be")
    begin, end = offsets
    # Types that are unknown here are listed but not measured: they matter only if somebody reads their values.
    taken = prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if dtype in _ITEM_BYTES and taken != end - begin:
        _damaged(path, code, f"{shown(name)} has {end - begin} bytes, not the {shown(taken)} of {dtype} {shown(shape)}")
    return dtype, tuple(shape), begin, end


def _check_ranges(path: str, code: str, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Check that ascending byte ranges cover `size` bytes without gap or overlap."""
    at = 0
    for begin, end, name in ranges:
        if begin != at:
            _damaged(path, code, f"the bytes of {shown(name)} start at {begin}, not at {at} where others end")
        at = end
    if at != size:
        _damaged(
            path,
            code,
            f"its header describes {at} bytes of tensors, but {size} follow it",
            help="it may have been cut short: fetch or write the file again" if at > size else None,
        )
