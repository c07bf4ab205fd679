"""What a pass changed, and nothing else, for people to read: the difference of a module before and after, op by op.

level: dataflow -> placed
stage @0
  + saved %a : f16[4, 8]                a declaration that is new; `-` one that is gone, `~` one that has changed
    forward mlp.0 m1                    what stands before or after a change, by its short name
  - send activation m1 @1               an op that no longer stands here
    ...                                 what did not change
  + %a = recompute mlp.0 m0 (%b, %w)    an op that is new, in full; by its short name, one that stood elsewhere
  ~ backward mlp.0 m0: reads -%a +%b    an op that stayed, with the operands that left and came
"""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.text.printer import declaration_text, names_text, op_text, saved_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.text.printer import Groups


def header_changes(before: Module, after: Module) -> Iterator[str]:
    """The fields of the header that differ; not the pipeline, which every pass makes longer by itself.

    A header leaves some fields out that have their default: these are "default".
    """
    old, new = _header(before), _header(after)
    for name in new | old:
        if old.get(name, "default") != new.get(name, "default"):
            yield f"{name}: {old.get(name, 'default')} -> {new.get(name, 'default')}"


def stage_changes(before: Stage, after: Stage) -> list[str]:
    """The lines of a stage's difference, its name first; none where there is none."""
    changes = [*_declaration_lines(before, after), *_op_lines(before, after)]
    return [f"stage @{after.index}", *(f"  {line}" for line in changes)] if changes else []


def _header(module: Module) -> dict[str, object]:
    target = module.target and f"{module.target.name}, {module.target.capacity_bytes} bytes"
    return {
        "level": module.level.value,
        **{f"model.{key}": value for key, value in module.model.to_fields().items()},
        **{f"plan.{key}": value for key, value in module.plan.to_fields().items()},
        "target": target,
    }


def _declaration_lines(before: Stage, after: Stage) -> Iterator[str]:
    for name, tensor in before.tensors.items():
        if name not in after.tensors:
            yield f"- {declaration_text(tensor)}"
    for name, tensor in after.tensors.items():
        text = declaration_text(tensor)
        old = declaration_text(before.tensors[name]) if name in before.tensors else None
        if text != old:
            yield f"+ {text}" if old is None else f"~ {old} -> {text}"


def _op_lines(before: Stage, after: Stage) -> Iterator[str]:
    old, new = named_ops(before), named_ops(after)
    groups = saved_groups(before), saved_groups(after)
    waiting: list[str] = []
    """unchanged ops since the last change"""
    changed = False
    for mark, name in _edits(list(old), list(new)):
        operands = _changed_operands(old[name], new[name], *groups) if mark != "-" and name in old else ""
        if mark == " " and not operands:
            waiting.append(f"  {name}")
            continue
        yield from _near(waiting, after_a_change=changed, before_a_change=True)
        waiting, changed = [], True
        if mark == " ":
            yield f"~ {name}: {operands}"
        elif mark == "+" and name in old:
            yield f"+ {name}{operands and f': {operands}'}"
        else:
            yield f"+ {op_text(new[name], groups[1])}" if mark == "+" else f"- {name}"
    if changed:
        yield from _near(waiting, after_a_change=True, before_a_change=False)


def _edits(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """The names of both lists in one, each with what it is there: kept (a space), `-` or `+`."""
    for tag, start, end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from ((" ", name) for name in old[start:end])
        else:
            yield from (("-", name) for name in old[start:end])
            yield from (("+", name) for name in new[new_start:new_end])


def _near(unchanged: list[str], *, after_a_change: bool, before_a_change: bool) -> list[str]:
    """Of a run of unchanged ops, those next to a change."""
    first = unchanged[:1] if after_a_change else []
    rest = unchanged[len(first) :]
    last = rest[-1:] if before_a_change else []
    return [*first, *(["  ..."] if len(rest) > len(last) else []), *last]


def named_ops(stage: Stage) -> dict[str, Op]:
    """Ops by what they do, releases by what they end; a repeated one gets a number."""
    found: dict[str, Op] = {}
    seen: Counter[str] = Counter()
    groups = saved_groups(stage)
    for op in stage.ops:
        name = op_text(op, groups) if type(op) is Release else repr(op)
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = op
    return found


def _changed_operands(before: Op, after: Op, old_groups: Groups, new_groups: Groups) -> str:
    """The operands that left and came, like `reads -%a +%b, using +%ws`."""
    lists = [
        ("writes", before.writes, after.writes),
        ("updates", before.updates, after.updates),
        ("reads", before.reads, after.reads),
        ("using", before.scratch, after.scratch),
    ]
    changes = []
    for word, old, new in lists:
        had, has = {t.name for t in old}, {t.name for t in new}
        gone = names_text(tuple(t for t in old if t.name not in has), old_groups)
        come = names_text(tuple(t for t in new if t.name not in had), new_groups)
        if gone or come:
            marked = [f"-{name}" for name in gone.split(", ") if gone]
            marked += [f"+{name}" for name in come.split(", ") if come]
            changes.append(f"{word} {' '.join(marked)}")
        elif [t.name for t in old] != [t.name for t in new]:
            changes.append(f"{word} in another order: {names_text(new, new_groups)}")
    return ", ".join(changes)
