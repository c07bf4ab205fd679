"""Likeness: ops that may take different times are told apart, by all of their fields but what those say does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import pytest
from attrs import define, evolve, field, fields

from ratrain.passes.pass_base import PassContext
from ratrain.ratrain_ir.config.types import Dtype, StateKind, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.ops.base import Engine, Op, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import AllGather
from ratrain.ratrain_ir.ops.compute import Forward, Update
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.ops.likeness import likeness, timed_fields
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS, Recv, Send
from ratrain.ratrain_ir.ops.op_fields import NOTHING, TIME
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

X = Tensor("x.m0", StateKind.ACTIVATION, tensor_type(Dtype.F16, (4, 8)))


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Compress(Op):
    """An op that came later: of its fields one says that it makes no difference, the other nothing."""

    keyword = "compress"
    default_engine = Engine.COMPUTE
    ratio: int = 1
    number: int = field(default=0, metadata={TIME: NOTHING})


class CompressingTarget(FakeTarget):
    """Takes longer the more an op compresses."""

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        seconds = super().op_seconds(module, stage, op)
        return seconds * op.ratio if isinstance(op, Compress) else seconds


def test_a_field_that_says_nothing_keeps_the_seconds_of_ops_apart() -> None:
    module = lower(MODEL, make_plan(MODEL))
    stage, target = module.stages[0], CompressingTarget()
    context = PassContext(target)
    ops = [Compress(reads=(X,), ratio=ratio, number=number) for ratio in (1, 2, 3) for number in (0, 1)]
    seconds = [context.op_seconds(module, stage, op) for op in ops]
    assert seconds == [target.op_seconds(module, stage, op) for op in ops]
    assert len(set(seconds)) == len({likeness(op, 0) for op in ops}) == 3


def test_an_op_takes_its_own_time_on_each_stage_until_it_says_otherwise() -> None:
    op = Compress(reads=(X,))
    assert likeness(op, 0) != likeness(op, 1)
    found = [kind for kind in OP_CLASSES.values() if not kind.alike_on_all_stages]
    assert found == list(MESSAGE_OPS)


def test_a_field_of_tensors_that_says_nothing_keeps_them_apart() -> None:
    @define(eq=False)
    class Housed(Tensor):
        home: str = "ddr"

    read = timed_fields(Housed, "role")
    here, there = (Housed("x", StateKind.VIEW, X.type, home=home) for home in ("ddr", "host"))
    assert read(here) != read(there)
    assert read(here) == read(evolve(there, name="y", offset=64, carried=True, line=3, home="ddr"))


def forward(layer: int, m: int, *tensors: Tensor) -> Forward:
    return Forward(block=block("mlp", layer), micro_batch=m, reads=(X,), writes=tensors)


def saved(slot: str, rows: int = 4) -> Tensor:
    return Tensor(f"s.mlp.0.m0.{slot}", StateKind.SAVED, tensor_type(Dtype.F16, (rows, 8)))


UP = forward(0, 0, saved("up"))
W = Tensor("w", StateKind.VIEW, X.type)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (UP, forward(7, 3, saved("up")), True),
        (UP, evolve(UP, line=9, scratch=(X,)), True),
        (UP, evolve(UP, block=block("attention", 0)), False),
        (UP, forward(0, 0, saved("gate")), False),
        (UP, forward(0, 0, saved("up", rows=5)), False),
        (UP, forward(0, 0, saved("up"), saved("gate")), False),
        (UP, evolve(UP, writes=(), updates=UP.writes), False),
        (
            AllGather(blocks=(block("embed"),), reads=(X,), writes=(W,)),
            AllGather(blocks=(block("head"),), reads=(X,), writes=(W,)),
            True,
        ),
        (
            AllGather(blocks=(block("embed"),), phase=Phase.FORWARD),
            AllGather(blocks=(block("embed"),), phase=Phase.BACKWARD),
            False,
        ),
        (Update(block=block("embed")), Update(block=block("embed"), placement=Engine.HOST), False),
        (
            Send(payload=Payload.ACTIVATION, micro_batch=0, peer=1, reads=(X,)),
            Send(payload=Payload.ACTIVATION, micro_batch=5, peer=1, reads=(X,)),
            True,
        ),
        (
            Recv(payload=Payload.ACTIVATION, micro_batch=0, peer=1, writes=(X,)),
            Recv(payload=Payload.ACTIVATION, micro_batch=0, peer=2, writes=(X,)),
            False,
        ),
    ],
)
def test_what_makes_a_difference(one: Op, other: Op, alike: bool) -> None:
    assert (likeness(one, 0) == likeness(other, 0)) is alike


def test_what_counts_of_a_field_is_there_to_be_read() -> None:
    """Every field of every op says nothing, or names an attribute of what it holds."""
    parts = {
        (kind.keyword, each.name): each.metadata[TIME]
        for kind in OP_CLASSES.values()
        for each in fields(kind)
        if each.metadata.get(TIME)
    }
    assert parts
    assert all(name == "block" and hasattr(block("embed"), part) for (_, name), part in parts.items())
