"""Files of token numbers in formats of other programs: a header in front of the numbers, or an index file next to them.

A file of bare numbers does not declare its layout. These do, and are read accordingly:

    llm.c, modded-nanogpt   .bin     256 int32: magic, version, token count, ... | tokens
    numpy                   .npy     magic, version, header length, {'descr', 'fortran_order', 'shape'} | tokens
    Megatron-LM             .bin     tokens; next to it .idx: MMIDIDX, version, type, sequences S, documents D |
                                     S int32 lengths | S int64 byte offsets | D int64 first sequences of documents

Files of other kinds, whose bytes would be taken for tokens, are refused by their first bytes.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_regular
from ratrain.targets.runtime.data.token_file import FileTokens, file_bytes

INDEX = ".idx"
"""Suffix of Megatron-LM's index, which stands next to a `.bin` of the same name."""


@frozen(eq=False)
class TokenLayout:
    """Layout of a file of tokens: their place and their type."""

    what: str
    """description of what declares the layout"""
    dtype: str
    start: int
    """bytes in front of the first token"""
    count: int
    bounds: NDArray[np.int64] | None = None
    """[documents + 1]: start of each document, and the end of the last; None if not declared"""

    def tokens(self, raw: FileTokens) -> FileTokens:
        """Return the tokens of the file, read when used."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        # Headers are multiples of 4 bytes, so the division is exact.
        first = self.start // dtype.itemsize
        return FileTokens(raw.file, dtype=dtype, start=first, stop=first + self.count)


def layout_of(raw: FileTokens) -> TokenLayout | None:
    """Return the layout that a file of token numbers declares; None for a file of bare numbers.

    Raises `DiagnosticError` RT090 for a file that is not whole, holds no token numbers, or has a type that tokens
    cannot have.
    """
    head = raw[:_HEAD].tobytes()
    refuse_containers(raw.file.path, head)
    layout = _of_llm_c(raw, head) or _of_numpy(raw, head) or _of_megatron(raw)
    if layout is None and _is_text(head):
        fail(
            "RT090",
            f"'{raw.file.path}' holds text, not token numbers",
            help="name it *.txt: a file is read as token numbers where its name ends in .bin",
        )
    return layout


_HEAD = 1 << 16
"""Bytes of a file's start that are looked at: more than numpy's header of an array with a single type."""

_CONTAINERS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b\x08", "is compressed by gzip", "unpack it: gunzip"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "unpack it: zstd -d"),
    (b"BZh", "is compressed by bzip2", "unpack it: bunzip2"),
    (b"\xfd7zXZ\x00", "is compressed by xz", "unpack it: unxz"),
    (b"PK\x03\x04", "is a zip archive (.zip, .npz, .pt)", "write its contents as token numbers or as text"),
    (b"PAR1", "is a Parquet table", "write its column of text as JSONL: {columns}"),
    (b"ARROW1\x00\x00", "is an Arrow table", "write its column of text as JSONL: {columns}"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file", "write the tokens in it as uint16 or uint32: numpy's tofile"),
    (b"MMIDIDX\x00\x00", "is an index of Megatron-LM, which has no tokens", "name the .bin next to it"),
    (b"TNTIDX\x00\x00", "is an index of an old Megatron-LM, which has no tokens", "name the .bin next to it"),
)
_COLUMNS = 'pandas.read_parquet(FILE)[["text"]].to_json("FILE.jsonl", orient="records", lines=True)'
_BZIP2_BLOCK = b"1AY&SY"


def refuse_containers(path: str, head: bytes) -> None:
    """Refuse, with RT090, a file whose first bytes show that it is neither text nor token numbers."""
    for magic, what, way_out in _CONTAINERS:
        if head.startswith(magic) and (magic != b"BZh" or head[4:10] == _BZIP2_BLOCK):
            fail("RT090", f"'{path}' {what}: it is not training data", help=way_out.format(columns=_COLUMNS))


_LEAST_TEXT = 32
"""Bytes from which on printable text is recognised: token numbers whose first 32 bytes are all printable have not
been seen."""
_CONTROL = bytes(each for each in range(32) if each not in b"\t\n\r\f")


def _is_text(head: bytes) -> bool:
    """Return True if bytes are UTF-8 text; the last character may be cut."""
    if len(head) < _LEAST_TEXT or any(each in head for each in _CONTROL) or b"\x7f" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start > len(head) - 4
    return True


_LLM_C_HEADER = 256
_LLM_C = {20240520: ("GPT-2", 1, "uint16"), 20240801: ("Llama 3", 7, "uint32")}
"""Owner of the tokens, format version and token type, by the first number of the header (llm.c,
dev/data/data_common.py)."""
_LLM_C_EVALUATION = 20240522
_LLM_C_VERSIONS = 1000


def _of_llm_c(raw: FileTokens, head: bytes) -> TokenLayout | None:
    """Return the layout that an llm.c header declares; None for a file without one. Raises RT090."""
    path, size = raw.file.path, 4 * _LLM_C_HEADER
    if len(head) < size:
        return None
    magic, version, count = struct.unpack_from("<3i", head)
    # Bare 16-bit numbers hardly ever begin like this: the version's upper half is a zero, next to a magic of two given
    # numbers.
    if not 0 <= version < _LLM_C_VERSIONS:
        return None
    if magic == _LLM_C_EVALUATION:
        fail(
            "RT090",
            f"'{path}' has questions and answers of an evaluation (llm.c, {magic}), not a stream of tokens",
            help="name the .bin of the training data",
        )
    if magic not in _LLM_C:
        return None
    of, known, dtype = _LLM_C[magic]
    if version != known:
        fail(
            "RT090",
            f"the header of '{path}' (llm.c, {magic}) has version {version}; {known} is read",
            help="write the tokens again, as bare uint16 or uint32 numbers",
        )
    return _whole(raw, TokenLayout(f"its header (llm.c, {of}'s tokens)", dtype, size, count))


def _of_numpy(raw: FileTokens, head: bytes) -> TokenLayout | None:
    """Return the layout that a numpy header declares; None for a file without one. Raises RT090."""
    if not head.startswith(b"\x93NUMPY"):
        return None
    path, what = raw.file.path, "its header (numpy)"
    try:
        length_bytes = 2 if head[6] == 1 else 4
        length = int.from_bytes(head[8 : 8 + length_bytes], "little")
        start = 8 + length_bytes + length
        said = ast.literal_eval(head[8 + length_bytes : start].decode("utf-8"))
        descr, shape = said["descr"], said["shape"]
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError, RecursionError, MemoryError):
        fail("RT090", f"'{path}' begins like an array of numpy, but its header cannot be read", help=_AGAIN)
    name = {"<u2": "uint16", "<u4": "uint32"}.get(descr if isinstance(descr, str) else "")
    if name is None or not isinstance(shape, tuple) or len(shape) != 1 or type(shape[0]) is not int or start % 4:
        fail(
            "RT090",
            f"'{path}' is an array of numpy of type {descr!r} and shape {shape!r}; tokens are uint16 or uint32, "
            "in one dimension",
            help='write it again: numpy.load("X.npy").ravel().astype("uint32").tofile("X.bin"), and read it '
            "with --data-dtype uint32",
        )
    return _whole(raw, TokenLayout(what, name, start, shape[0]))


_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_MEGATRON_READ = {4: "uint32", 8: "uint16"}
"""Token types by code. Megatron-LM writes uint16 or, for large vocabularies, int32; no token is negative."""


def _of_megatron(raw: FileTokens) -> TokenLayout | None:
    """Return the layout that a Megatron-LM index next to the file declares; None without one. Raises RT090."""
    index = Path(raw.file.path).with_suffix(INDEX)
    if not is_regular(index):
        return None
    path, what = raw.file.path, f"its index '{index}' (Megatron-LM)"
    data = file_bytes(str(index))
    head = data[: _MEGATRON_HEAD.size].tobytes()
    if not head.startswith(_MEGATRON) or len(head) < _MEGATRON_HEAD.size:
        fail(
            "RT090",
            f"'{index}' stands next to '{path}', but is no index of Megatron-LM that is read here",
            help="move it away if it is no index of these tokens; else write the tokens again, as bare uint16 "
            "or uint32 numbers",
        )
    _, version, code, sequences, documents = _MEGATRON_HEAD.unpack(head)
    if version != 1 or code not in _MEGATRON_READ:
        fail(
            "RT090",
            f"'{index}' has version {version} and tokens of type {_MEGATRON_TYPES.get(code, code)}; version 1 "
            "with uint16 or int32 is read",
            help="make the data again with Megatron-LM's tools/preprocess_data.py",
        )
    start, end = _MEGATRON_HEAD.size, len(data)
    if sequences * 12 + documents * 8 > end - start:
        fail("RT090", f"'{index}' is cut short: it says {sequences:,} sequences", help=_AGAIN)
    lengths = np.frombuffer(data[start : start + 4 * sequences].tobytes(), "<i4").astype(np.int64)
    # 12 bytes per sequence lie before: a length (4) and an offset (8). The offsets follow from the lengths and are
    # skipped.
    firsts = np.frombuffer(data[start + 12 * sequences :][: 8 * documents].tobytes(), "<i8")
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    is_sound = len(firsts) > 1 and firsts[0] == 0 and firsts[-1] == sequences and bool((np.diff(firsts) >= 0).all())
    if not is_sound or bool((lengths < 0).any()):
        fail("RT090", f"'{index}' does not say where documents begin and end", help=_AGAIN)
    held = np.unique(bounds[firsts])  # an empty document would be a bound twice: it is dropped
    return _whole(raw, TokenLayout(what, _MEGATRON_READ[code], 0, int(bounds[-1]), held))


_AGAIN = "copy the file again, or write it again"


def _whole(raw: FileTokens, layout: TokenLayout) -> TokenLayout:
    """Return the layout if the file has as many tokens as it declares; else raise `DiagnosticError` RT090."""
    size = np.dtype(layout.dtype).itemsize
    if layout.count < 1 or layout.start + layout.count * size != raw.file.size:
        _not_whole(raw, layout, size)
    return layout


def _not_whole(raw: FileTokens, layout: TokenLayout, size: int) -> NoReturn:
    fail(
        "RT090",
        f"{layout.what} says that '{raw.file.path}' has {layout.count:,} tokens of {layout.dtype}, "
        f"{layout.start + layout.count * size:,} "
        f"bytes, but it has {raw.file.size:,}",
        help=_AGAIN,
    )


def check_said_type(path: str, layout: TokenLayout, dtype: str | None) -> None:
    """Refuse, with RT090, a given type that contradicts the file's own."""
    if dtype is not None and dtype != layout.dtype:
        fail(
            "RT090",
            f"the type {dtype} is given for the tokens of '{path}', but {layout.what} says {layout.dtype}",
            help=f"leave --data-dtype out: what the file says is read, {layout.dtype}",
        )


def refuse_json(text: FileTokens) -> None:
    """Refuse, with RT090, a text that looks like JSON unless it is named *.txt; brackets and names would be learned."""
    path = text.file.path
    suffix = Path(path).suffix.lower()
    head = text[:_HEAD].tobytes().decode(errors="ignore").lstrip()
    if suffix == ".txt" or not head.startswith(("{", "[")):
        return
    is_lines = isinstance(_json_at_start(head.split("\n", 1)[0]), dict)
    value = _json_at_start(head)
    is_list = bool(_LIST_OF_OBJECTS.match(head))
    if not (is_lines or is_list or isinstance(value, dict) or suffix == ".json"):
        return
    if is_lines or is_list:
        form = "has an object a line" if is_lines else "is an array of objects"
        ending = ".jsonl" if is_lines else ".json"
        way_out = f"rename it to end in {ending} if it {form}, of which --text-key names the field of the text"
    else:
        way_out = (
            'write each text as an object on a line of its own, {"text": "..."}, to a file whose name ends in .jsonl'
        )
    fail(
        "RT090",
        f"'{path}' holds JSON, which would be learned with its brackets and names",
        help=f"{way_out}; as it is, it is read where its name ends in .txt",
    )


_LIST_OF_OBJECTS = re.compile(r'\[\s*\{\s*("|\})')


def _json_at_start(text: str) -> Any:
    """Return the first JSON value of a text, or None."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
