"""Printer of a `Module` as canonical `.rtir` text.

`parse_module(print_module(m))` equals `m`, and prints as the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.plan import KEYS
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Op, field_texts
from ratrain.ratrain_ir.process_pool import each_stage
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import checked, write_lines
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.text.parser import FORMAT_VERSION, Groups, parse_module, tensors_by_prefix

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, TargetInfo
    from ratrain.ratrain_ir.ops.tensor import Tensor


def print_module(module: Module) -> str:
    """Return the canonical text of a module."""
    return "\n".join(module_texts(module)) + "\n"


def write_module(module: Module, path: str) -> None:
    """Write a schedule, atomically.

    The head, which holds all free text, is read back first. Reading back the stages would take a tenth of the time of a
    compilation; tests do that. Raises `DiagnosticError` RT002 if the file cannot be written, or is too large to be
    read, and RT011 if the head is not read back as it was.
    """
    checked(
        print_module(evolve(module, stages=[Stage(stage.index) for stage in module.stages])), "schedule", _read_back
    )
    write_lines(path, module_texts(module), "schedule")


def _read_back(text: str) -> None:
    """Raise `DiagnosticError` (RT001, or the parser's) unless a text that is parsed and printed stays the same."""
    again = print_module(parse_module(text, file="X.rtir"))
    for line, found in zip_longest(text.split("\n"), again.split("\n"), fillvalue=""):
        if line != found:
            fail("RT001", f"a line is read back as '{shown(found)}'", source=line)


def module_texts(module: Module) -> Iterator[str]:
    """Yield the canonical text in parts of one or more lines, without final newlines: header lines, then stages."""
    yield f"rtir {FORMAT_VERSION}"
    yield f"module @{module.name} level {module.level.value} {{"
    yield _header("model", module.model.to_fields())
    yield _header("plan", KEYS.with_words(module.plan.to_fields()))
    if module.target is not None:
        yield from _target_lines(module.target)
    if module.pipeline:
        yield f'  pipeline "{module.pipeline}"'
    yield from each_stage(lambda stage: "\n".join(stage_lines(stage)), module.stages)
    yield "}"


def _target_lines(target: TargetInfo) -> Iterator[str]:
    digest = {"digest": target.digest} if target.digest else {}
    stores = {home.value: nbytes for home, nbytes in target.stores}
    yield _header("target", {"name": target.name, "capacity": target.capacity_bytes, **stores, **digest})
    if target.machine:
        yield "  machine {"
        yield from (f"    | {line}" if line else "    |" for line in target.machine.split("\n"))
        yield "  }"


def stage_lines(stage: Stage) -> Iterator[str]:
    """Yield the lines of one stage: declarations, an empty line, ops."""
    yield f"  stage @{stage.index} {{"
    for tensor in stage.tensors.values():
        yield f"    {declaration_text(tensor)}"
    if stage.ops:
        yield ""
    groups = saved_groups(stage)
    for op in stage.ops:
        yield f"    {op_text(op, groups)}"
    yield "  }"


def declaration_text(tensor: Tensor) -> str:
    """Format a declaration."""
    carried = " carried" if tensor.carried else ""
    home = "" if tensor.home is Home.DDR else f" in {tensor.home.value}"
    offset = "" if tensor.offset is None else f" at {tensor.offset:#x}"
    return f"{_KINDS[tensor.kind]} %{tensor.name} : {tensor.type}{carried}{home}{offset}"


_KINDS = {kind: kind.value for kind in StateKind}


def op_text(op: Op, groups: Groups | None = None) -> str:
    """Format an op. `groups` (of `saved_groups`) allow it to write `%prefix.*`."""
    parts = []
    groups = groups or {}
    if op.writes:
        parts += [names_text(op.writes, groups), "="]
    if op.updates:
        parts += [names_text(op.updates, groups), "+="]
    parts.append(op.keyword)
    parts += field_texts(op)
    if op.reads:
        parts.append(f"({names_text(op.reads, groups)})")
    if op.scratch:
        parts += ["using", names_text(op.scratch, groups)]
    return " ".join(parts)


def names_text(tensors: tuple[Tensor, ...], groups: Groups) -> str:
    """Format names separated by commas; a run of tensors that is a whole group is written `%prefix.*`."""
    if len(tensors) == 1:
        return f"%{tensors[0].name}"
    names = []
    index = 0
    while index < len(tensors):
        tensor = tensors[index]
        if tensor.kind is StateKind.SAVED:
            prefix = tensor.name.rpartition(".")[0]
            group = groups.get(prefix, ())
            if len(group) > 1 and tensors[index : index + len(group)] == group:
                names.append(f"%{prefix}.*")
                index += len(group)
                continue
        names.append(f"%{tensor.name}")
        index += 1
    return ", ".join(names)


def saved_groups(stage: Stage) -> Groups:
    """Return the tensors with a common prefix, by prefix, where all of them are saved tensors."""
    groups = tensors_by_prefix(stage)
    return {prefix: ts for prefix, ts in groups.items() if all(t.kind is StateKind.SAVED for t in ts)}


def _header(name: str, values: Mapping[str, Any]) -> str:
    return f"  {name} {{ " + ", ".join(f"{key} = {_value(value)}" for key, value in values.items()) + " }"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
