"""A schedule as an xDSL module: the same ops in the same order, with as many operands and results, and the same fields.

A stage is an op with a region. A tensor that an op writes is a result of it, with dtype and shape as its type; carried tensors
and workspace are arguments of the region. State kinds, names, `carried` and addresses have no counterpart here, so xDSL has less
to read and to print. Two forms: unregistered ops, for which xDSL does least, and ops defined with IRDL, whose operand groups and
attributes it verifies, as the verifier of schedules does with operands and fields.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING, Any

from attrs import frozen
from xdsl.context import Context
from xdsl.dialects.builtin import (
    Builtin,
    DenseArrayBase,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    TensorType,
    UnregisteredOp,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    base,
    irdl_op_definition,
    opt_prop_def,
    opt_region_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import NoTerminator

from ratrain.ratrain_ir.ops.kinds import FIELDS, OP_CLASSES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor

ELEMENTS = {"f16": f16, "f32": f32, "f64": f64, "i32": i32, "i64": i64, "u8": i8, "u32": i32}

Attributes = dict[str, Attribute]
Maker = Callable[..., Operation]


@frozen
class Form:
    """One way of having the ops in xDSL."""

    title: str
    definitions: dict[str, type[IRDLOperation]]
    """By keyword; empty: the ops are unregistered."""

    def convert(self, module: Module) -> ModuleOp:
        """The equivalent of a module."""
        types: dict[Any, Attribute] = {}
        return ModuleOp([self.stage(stage, types) for stage in module.stages])

    def stage(self, stage: Stage, types: dict[Any, Attribute]) -> Operation:
        """One stage: its ops in a region of one block."""
        for tensor in stage.tensors.values():
            element = ELEMENTS[tensor.type.dtype.value]
            types.setdefault(tensor.type, TensorType(element, tensor.type.shape))
        written = {tensor for op in stage.ops for tensor in op.writes}
        given = [t for t in stage.tensors.values() if t.carried or t not in written]
        body = Block(arg_types=[types[t.type] for t in given])
        values: dict[Tensor, SSAValue] = dict(zip(given, body.args, strict=True))
        for op in stage.ops:
            operands = [[values[t] for t in group] for group in (op.reads, op.updates, op.scratch)]
            made = self.make(op.keyword, operands, [types[t.type] for t in op.writes], _fields(op), [])
            values.update(zip(op.writes, made.results, strict=True))
            body.add_op(made)
        return self.make("stage", [[], [], []], [], {}, [Region(body)])

    def make(
        self,
        keyword: str,
        groups: list[list[SSAValue]],
        results: list[Attribute],
        fields: Attributes,
        regions: list[Region],
    ) -> Operation:
        """One op."""
        operands = [value for group in groups for value in group]
        if not self.definitions:
            cls = UnregisteredOp.with_name(f"schedule.{keyword}")
            attributes = {"op_name__": StringAttr(f"schedule.{keyword}"), **fields}
            return cls.create(operands=operands, result_types=results, attributes=attributes, regions=regions)
        sizes = DenseArrayBase.from_list(i32, [len(group) for group in groups])
        return self.definitions[keyword].create(
            operands=operands,
            result_types=results,
            properties={"operandSegmentSizes": sizes, **fields},
            regions=regions,
        )


def _fields(op: Op) -> Attributes:
    """The fields that the text has: whole numbers as integers, others as their words."""
    fields: Attributes = {}
    for attribute in FIELDS[type(op)]:
        value = getattr(op, attribute.name)
        if isinstance(value, int) and not isinstance(value, bool):
            fields[attribute.name] = IntegerAttr(value, i64)
        elif not (attribute.metadata.get("optional") and value is attribute.default):
            fields[attribute.name] = StringAttr(attribute.metadata["write"](value))
    return fields


def _definition(keyword: str, fields: tuple[Any, ...]) -> type[IRDLOperation]:
    """An op with three groups of operands, and its fields as properties."""
    members: dict[str, Any] = {
        "name": f"schedule.{keyword}",
        "irdl_options": (AttrSizedOperandSegments(as_property=True),),
        "reads": var_operand_def(base(TensorType)),
        "updates": var_operand_def(base(TensorType)),
        "scratch": var_operand_def(base(TensorType)),
        "writes": var_result_def(base(TensorType)),
        "body": opt_region_def(),
        "traits": traits_def(NoTerminator()),
    }
    for field in fields:
        members[field.name] = opt_prop_def(IntegerAttr if "int" in str(field.type).split(" ") else StringAttr)
    return irdl_op_definition(type(f"Schedule_{keyword}", (IRDLOperation,), {"__annotations__": {}, **members}))


FORMS = (
    Form("xDSL, unregistered", {}),
    Form(
        "xDSL, defined",
        {"stage": _definition("stage", ())} | {key: _definition(key, FIELDS[cls]) for key, cls in OP_CLASSES.items()},
    ),
)


def printed(module: ModuleOp) -> str:
    """The text of a module, in the generic syntax."""
    stream = StringIO()
    Printer(stream).print_op(module)
    return stream.getvalue()


def parsed(text: str, form: Form) -> ModuleOp:
    """The module of a text."""
    context = Context(allow_unregistered=not form.definitions)
    context.load_dialect(Builtin)
    for definition in form.definitions.values():
        context.load_op(definition)
    return Parser(context, text).parse_module()
