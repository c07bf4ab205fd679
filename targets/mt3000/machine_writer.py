"""Machine files as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain_ir.files import write_lines
from targets.mt3000.link_groups import GROUP_UNITS
from targets.mt3000.machine import parse_machine

if TYPE_CHECKING:
    from targets.mt3000.machine import Constant, Machine


def machine_lines(machine: Machine) -> Iterator[str]:
    """The lines of a machine's file; `parse_machine` reads them back as an equal machine."""
    yield f"name = {_quoted(machine.name)}"
    yield f"update_engine = {_quoted(machine.update_engine.value)}"
    yield f"cost = {_quoted(machine.cost)}"
    for name, constant in machine.constants.items():
        if "." not in name:
            yield from _constant_lines(name, constant)
    for group in machine.group_names:
        yield ""
        yield "[[link_group]]"
        yield f"name = {_quoted(group)}"
        for key in GROUP_UNITS:
            if f"{group}.{key}" in machine.constants:
                yield from _constant_lines(f"link_group.{key}", machine.constants[f"{group}.{key}"])
    for op in machine.table.ops:
        yield ""
        yield "[[op]]"
        yield f"key = {_quoted(op.key)}"
        yield f"size = {op.size!r}"
        yield f"seconds = {op.seconds!r}"


def _constant_lines(table: str, constant: Constant) -> Iterator[str]:
    yield ""
    yield f"[{table}]"
    yield f"value = {constant.value!r}"
    yield f"unit = {_quoted(constant.unit)}"
    yield f"certainty = {_quoted(constant.certainty)}"
    yield f"source = {_quoted(constant.source)}"


def write_machine(machine: Machine, path: str) -> None:
    """Write a machine's file, atomically.

    Raises `DiagnosticError` RT065 where its constants contradict each other, RT002 where the file cannot be written.
    """
    lines = list(machine_lines(machine))
    parse_machine("\n".join(lines), file=path)
    write_lines(path, lines)


def _quoted(text: str) -> str:
    """A TOML basic string: as JSON writes it, but that TOML wants DEL escaped too; what is not Unicode becomes '?'."""
    sound = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(sound, ensure_ascii=False).replace("\x7f", "\\u007f")
