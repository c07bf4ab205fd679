"""Field declarations of ops: how a field is written as text and read, and how much of it affects an op's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

from attrs import field

from ratrain.ratrain_ir.model.blocks import Block, parse_block

TIME = "time"
"""Metadata key of a field of an op or a tensor: the part of its value that the seconds of an op depend on.

The part is the name of one attribute of the value, or `NOTHING`. A field without this key counts with its whole value.
"""

NOTHING = ""
UNTIMED = {TIME: NOTHING}
"""Metadata of a field that no op's seconds depend on."""


class FieldError(ValueError):
    """Error of a field's text that its codec cannot read; the message says what was expected."""


def _read_block(text: str) -> Block:
    block = parse_block(text)
    if block is None:
        raise FieldError(f"expected a block (embed, attention.N, mlp.N or head), got '{text}'")
    return block


def _read_blocks(text: str) -> tuple[Block, ...]:
    return tuple(_read_block(part) for part in text.split("+"))


def _read_number(sigil: str, what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text[len(sigil) :]
        if not text.startswith(sigil) or not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
            raise FieldError(f"expected {what} like '{sigil}0', got '{text}'")
        return int(digits)

    return read


E = TypeVar("E", bound=Enum)


def read_enum(members: Iterable[E]) -> Callable[[str], E]:
    """Return a reader that maps a word to the member with this value; it raises `FieldError` for other words."""
    table = {str(member.value): member for member in members}

    def read(text: str) -> E:
        if text not in table:
            raise FieldError(f"expected one of {', '.join(table)}, got '{text}'")
        return table[text]

    return read


def block_field() -> Any:
    """Declare a field for one block. An op's time depends on the block's kind only."""
    return field(metadata={"read": _read_block, "write": str, TIME: "kind"})


def blocks_field(*, optional: bool = False) -> Any:
    """Declare a field for several blocks, joined by `+`. Time does not depend on it: the operands carry the sizes."""
    codec = {
        "read": _read_blocks,
        "write": lambda blocks: "+".join(map(str, blocks)),
        "optional": optional,
        TIME: NOTHING,
    }
    return field(metadata=codec, default=()) if optional else field(metadata=codec)


def micro_batch_field(*, optional: bool = False) -> Any:
    """Declare a field for a micro-batch (`m0`); None if it is optional and left out."""
    codec = {"read": _read_number("m", "a micro-batch"), "write": "m{}".format, "optional": optional, TIME: NOTHING}
    return field(metadata=codec, default=None) if optional else field(metadata=codec)


def slice_field() -> Any:
    """Declare a field for the slice of a micro-batch (`s0`); None where micro-batches are not cut into slices."""
    codec = {"read": _read_number("s", "a slice"), "write": "s{}".format, "optional": True}
    return field(metadata=codec, default=None)


def head_group_field() -> Any:
    """Declare a field for a group of key heads (`g0`); None where context ranks do not gather group by group."""
    codec = {"read": _read_number("g", "a group of heads"), "write": "g{}".format, "optional": True}
    return field(metadata=codec, default=None)


def chunk_field() -> Any:
    """Declare a field for the chunk of a message (`c0`); None where each stage holds one chunk.

    The message carries the input of this chunk, or the gradient of that input.
    """
    codec = {"read": _read_number("c", "a chunk"), "write": "c{}".format, "optional": True}
    return field(metadata=codec, default=None)


def peer_field() -> Any:
    """Declare a field for the other stage of a message (`@0`)."""
    return field(metadata={"read": _read_number("@", "a stage"), "write": "@{}".format})


def enum_field(kind: type[Enum], default: Enum | None = None, among: tuple[Enum, ...] = ()) -> Any:
    """Declare a field for a member of an enumeration (or one `among` some); it may be left out if it has a default."""
    codec = {"read": read_enum(among or kind), "write": lambda member: member.value, "optional": default is not None}
    return field(metadata=codec) if default is None else field(metadata=codec, default=default)


def _read_blocking(text: str) -> bool:
    if text != "blocking":
        raise FieldError(f"expected 'blocking', got '{text}'")
    return True


def blocking_field() -> Any:
    """Declare a field for whether compute waits for a collective (the word `blocking`).

    The time of the collective itself does not depend on it.
    """
    codec = {"read": _read_blocking, "write": lambda _: "blocking", "optional": True, TIME: NOTHING}
    return field(metadata=codec, default=False)
