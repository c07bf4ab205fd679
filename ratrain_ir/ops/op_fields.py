"""The fields of ops: how each is written as text and read from it, and what the seconds of an op depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

from attrs import field

from ratrain.ratrain_ir.model.blocks import Block, parse_block

TIME = "time"
"""Metadata of a field of an op or a tensor: what of it the seconds of an op depend on, as the name of one attribute of its value, or
`NOTHING`. A field that does not say counts with all it holds."""

NOTHING = ""
UNTIMED = {TIME: NOTHING}
"""Metadata of a field that no seconds depend on."""


class FieldError(ValueError):
    """A field's text is not what its codec reads; the message says what was expected."""


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
    """A reader of one of some members, by its value; it raises `FieldError` for other words."""
    table = {str(member.value): member for member in members}

    def read(text: str) -> E:
        if text not in table:
            raise FieldError(f"expected one of {', '.join(table)}, got '{text}'")
        return table[text]

    return read


def block_field() -> Any:
    """One block; of it, its kind counts for the time."""
    return field(metadata={"read": _read_block, "write": str, TIME: "kind"})


def blocks_field(*, optional: bool = False) -> Any:
    """What is moved or combined of the blocks, and so the time that takes, is said by the operands."""
    codec = {
        "read": _read_blocks,
        "write": lambda blocks: "+".join(map(str, blocks)),
        "optional": optional,
        TIME: NOTHING,
    }
    return field(metadata=codec, default=()) if optional else field(metadata=codec)


def micro_batch_field(*, optional: bool = False) -> Any:
    """Which micro-batch."""
    codec = {"read": _read_number("m", "a micro-batch"), "write": "m{}".format, "optional": optional, TIME: NOTHING}
    return field(metadata=codec, default=None) if optional else field(metadata=codec)


def slice_field() -> Any:
    """Where micro-batches are cut along the sequence: which of their slices."""
    codec = {"read": _read_number("s", "a slice"), "write": "s{}".format, "optional": True}
    return field(metadata=codec, default=None)


def chunk_field() -> Any:
    """Where stages hold several chunks: the one whose input a message carries, or the gradient of whose input."""
    codec = {"read": _read_number("c", "a chunk"), "write": "c{}".format, "optional": True}
    return field(metadata=codec, default=None)


def peer_field() -> Any:
    """The other stage of a message, or of bytes that one lends."""
    return field(metadata={"read": _read_number("@", "a stage"), "write": "@{}".format})


def enum_field(kind: type[Enum], default: Enum | None = None, among: tuple[Enum, ...] = ()) -> Any:
    """One of the members of an enumeration, or of those named; it may be left out where it has a default."""
    codec = {"read": read_enum(among or kind), "write": lambda member: member.value, "optional": default is not None}
    return field(metadata=codec) if default is None else field(metadata=codec, default=default)


def _read_blocking(text: str) -> bool:
    if text != "blocking":
        raise FieldError(f"expected 'blocking', got '{text}'")
    return True


def blocking_field() -> Any:
    """Whether compute waits: no computation runs while the collective does. It takes as long on its own."""
    codec = {"read": _read_blocking, "write": lambda _: "blocking", "optional": True, TIME: NOTHING}
    return field(metadata=codec, default=False)
