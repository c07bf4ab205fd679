"""Ops as instructions, and back: the fields that a program stores of an op, and the schedule that a program executes.

An emitter stores ops. A verifier lifts a program to a module again and judges it by the rules of schedules, so that no
rule is written twice:

    compute: forward m0 (waits: recv 1) | backward m0 ...        stage @1
    recv:    recv m0                                      ->       recv m0, forward m0, backward m0, ...

The streams of each stage are merged into one list in which each op stands after all it waits for. An instruction
becomes an op only if storing that op gives the very same instruction: nothing of a program escapes the rules. The cost
is linear in instructions and operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.passes.memory.insert_release import insert_releases
from ratrain.ratrain_ir.model.blocks import Block, named_block
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import ENGINES, Engine, Group, Op, Part, Payload, Phase, Quantity
from ratrain.ratrain_ir.ops.collectives import (
    is_blocking,
)
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.ops.kinds import FIELDS, OP_CLASSES
from ratrain.ratrain_ir.ops.signatures import Binding, bind
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.targets.program.instruction import HEAD_GROUP, Access, Instruction, Operand

if TYPE_CHECKING:
    from enum import Enum

    from ratrain.ratrain_ir.support.diagnostics import Diagnostics
    from ratrain.targets.program.program import Program, ProgramStage


@frozen
class StoredFields:
    """Fields of an op as an instruction holds them."""

    micro_batch: int | None
    peer: int | None
    variant: str
    group: str
    blocks: tuple[str, ...]
    blocking: bool
    chunk: int | None
    slice: int | None


def stored_fields(op: Op) -> StoredFields:
    """Return the fields of an op as an instruction holds them."""
    block = getattr(op, "block", None)
    return StoredFields(
        getattr(op, "micro_batch", None),
        getattr(op, "peer", None),
        ".".join(_variant_word(word) for name in _VARIANTS[type(op)] if (word := getattr(op, name)) is not None),
        group_name(op),
        tuple(map(str, getattr(op, "blocks", ()) if block is None else (block,))),
        is_blocking(op),
        getattr(op, "chunk", None),
        getattr(op, "slice", None),
    )


def _variant_word(value: Enum | int) -> str:
    """Return the word of a field in a variant: a number is that of a group of heads."""
    return HEAD_GROUP.format(value) if isinstance(value, int) else str(value.value)


_IN_VARIANT = ("part", "payload", "quantity", "phase", "head_group")
_VARIANTS = {
    kind: [name for name in _IN_VARIANT if any(name == attribute.name for attribute in attributes)]
    for kind, attributes in FIELDS.items()
}
"""Fields that an instruction's variant holds, joined by dots, by kind of op; the last may be missing."""


def stored_operands(op: Op, binding: Binding, index: Mapping[Tensor, int]) -> tuple[Operand, ...]:
    """Return the operands of an op as an instruction holds them: in the order of its signature, then its workspace."""
    accesses = dict.fromkeys(op.reads, Access.READ)
    accesses |= dict.fromkeys(op.writes, Access.WRITE) | dict.fromkeys(op.updates, Access.UPDATE)
    operands = [Operand(role, index[tensor], accesses[tensor]) for role, tensor in binding.tensors.items()]
    operands += [Operand("workspace", index[tensor], Access.SCRATCH) for tensor in op.scratch]
    return tuple(operands)


def group_name(op: Op) -> str:
    """Return the group of a collective by name; empty for any other op."""
    return "" if op.members is None else op.members.value


def _only_block(instruction: Instruction) -> Block:
    if len(instruction.blocks) != 1:
        raise ValueError(f"it must name one block, not {len(instruction.blocks)}")
    return named_block(instruction.blocks[0])


def _word(instruction: Instruction, name: str) -> str:
    """Return a field's word in the variant of an instruction; empty where it is missing."""
    words = dict(zip(_VARIANTS[OP_CLASSES[instruction.keyword]], instruction.variant.split("."), strict=False))
    return words.get(name, "")


def _phase(instruction: Instruction) -> Phase | None:
    """Return the pass that a gather within the step serves; None if the instruction names none."""
    word = _word(instruction, "phase")
    return Phase(word) if word else None


def _group(instruction: Instruction) -> Group:
    """Return the group that an op's text names: a gather of views, or of parts of them, says so by its operands."""
    group = Group(instruction.group)
    return Group.SHARDS if group in (Group.VIEWS, Group.PARTS) else group


_FIELD_READERS: dict[str, Callable[[Instruction, Engine], Any]] = {
    "block": lambda instruction, _engine: _only_block(instruction),
    "blocks": lambda instruction, _engine: tuple(map(named_block, instruction.blocks)),
    "micro_batch": lambda instruction, _engine: instruction.micro_batch,
    "slice": lambda instruction, _engine: instruction.slice,
    "chunk": lambda instruction, _engine: instruction.chunk,
    "peer": lambda instruction, _engine: instruction.peer,
    "payload": lambda instruction, _engine: Payload(_word(instruction, "payload")),
    "part": lambda instruction, _engine: Part(_word(instruction, "part")),
    "phase": lambda instruction, _engine: _phase(instruction),
    "head_group": lambda instruction, _engine: instruction.head_group,
    "quantity": lambda instruction, _engine: Quantity(_word(instruction, "quantity")),
    "group": lambda instruction, _engine: _group(instruction),
    "blocking": lambda instruction, _engine: instruction.blocking,
    "placement": lambda _instruction, engine: engine,
}


def lift(program: Program, diagnostics: Diagnostics) -> Module:
    """Return the schedule that a program executes: a `placed` module without addresses, streams merged in list order.

    The module has the releases of a module sized for a target; emission leaves releases out, since they are no work.

    Reports RT080 for every instruction that is no op (fields or operands missing, too many or of the wrong type), and
    RT042 where the engines of a stage wait for each other.
    """
    stages = [StageLift(program, index, stage, diagnostics).lift() for index, stage in enumerate(program.stages)]
    for stage in stages:
        insert_releases(stage)
    return Module(program.name, Level.PLACED, program.model, program.plan, stages, program.info, program.pipeline)


class StageLift:
    """Lifting of one stage."""

    def __init__(self, program: Program, number: int, stage: ProgramStage, diagnostics: Diagnostics) -> None:
        self.program = program
        self.number = number
        self.source = stage
        self.diagnostics = diagnostics
        self.tensors = [Tensor(t.name, t.kind, t.type, t.carried, home=t.home) for t in stage.tensors]
        self.index = {tensor: i for i, tensor in enumerate(self.tensors)}

    def lift(self) -> Stage:
        """Return the stage of the schedule; report RT080 for instructions that are no ops."""
        stage = Stage(self.number)
        for tensor in self.tensors:
            if tensor.name in stage.tensors:
                self.diagnostics.error("RT080", f"stage @{self.number} has two tensors %{tensor.name}")
            stage.tensors[tensor.name] = tensor
        for engine, position in self.list_order():
            instruction = self.source.streams[engine][position]
            try:
                stage.ops.append(self.op(instruction, engine))
            except ValueError as error:  # a SignatureError among them
                place = f"stage @{self.number}, {engine.value} engine, instruction {position + 1} '{instruction.title}'"
                self.diagnostics.error("RT080", f"{place}: {error}")
        return stage

    def list_order(self) -> list[tuple[Engine, int]]:
        """Return (engine, position) of all instructions, each after all that it waits for in its step.

        Reports RT042 where some wait for each other.
        """
        order = self.source.list_order()
        if len(order) < self.source.instructions:
            # The order stops short where engines wait for each other: each engine is stuck at its first instruction
            # that is not in it.
            done = Counter(engine for engine, _ in order)
            streams = self.source.streams
            stuck = [f"'{streams[e][done[e]].title}' ({e.value})" for e in ENGINES if done[e] < len(streams[e])]
            self.diagnostics.error("RT042", f"stage @{self.number} cannot end: {', '.join(stuck)} wait for each other")
        return order

    def op(self, instruction: Instruction, engine: Engine) -> Op:
        """Return the op that an instruction executes.

        Raises ValueError where it is none.
        """
        cls = OP_CLASSES[instruction.keyword]
        # Operands keep their order within an access, so `compare` sees any operand in the wrong place.
        groups: dict[Access, list[Tensor]] = {access: [] for access in Access}
        for _, number, access in instruction.operands:
            groups[access].append(self.tensors[number])
        fields = {a.name: _FIELD_READERS[a.name](instruction, engine) for a in FIELDS[cls]}
        for attribute in FIELDS[cls]:
            if fields[attribute.name] is None and not attribute.metadata.get("optional"):
                raise ValueError(f"it has no {attribute.name.replace('_', '-')}")
        op = cls(
            reads=tuple(groups[Access.READ]),
            writes=tuple(groups[Access.WRITE]),
            updates=tuple(groups[Access.UPDATE]),
            scratch=tuple(groups[Access.SCRATCH]),
            **fields,
        )
        self.compare(op, instruction, engine)
        return op

    def compare(self, op: Op, instruction: Instruction, engine: Engine) -> None:
        """Raise ValueError unless storing the op gives this very instruction."""
        if engine is not op.engine or engine not in _engines_of(op):
            raise ValueError(f"it belongs on the {op.default_engine.value} engine")
        # An op's class reads only the fields it has. A field that it does not have would be lost, so the op is stored
        # again and compared.
        mine = StoredFields(
            instruction.micro_batch,
            instruction.peer,
            instruction.variant,
            instruction.group,
            instruction.blocks,
            instruction.blocking,
            instruction.chunk,
            instruction.slice,
        )
        if stored_fields(op) != mine:
            raise ValueError(f"it has fields that '{op.keyword}' does not have")
        # Roles and order of operands follow from the op, so they are derived again and compared.
        binding = bind(op, self.program.model, self.program.plan)
        if stored_operands(op, binding, self.index) != instruction.operands:
            raise ValueError("its operands have other roles, or another order, than the op has")
        if binding.accumulates is not instruction.accumulates:
            raise ValueError("it must add to its result" if binding.accumulates else "it has nothing to add to")
        if len(op.scratch) > 1:
            raise ValueError("it has more than one workspace")


def _engines_of(op: Op) -> tuple[Engine, ...]:
    return (Engine.COMPUTE, Engine.HOST) if isinstance(op, Update) else (op.default_engine,)
