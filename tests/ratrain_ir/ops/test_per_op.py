"""What layers add to ops: a kind of op that a table forgets is named, and never falls into a default."""

from __future__ import annotations

from importlib import import_module
from typing import final

import pytest
from attrs import define

from ratrain.ratrain_ir.ops.base import Engine, Op
from ratrain.ratrain_ir.ops.collectives import COLLECTIVE_OPS
from ratrain.ratrain_ir.ops.compute import Forward, Release
from ratrain.ratrain_ir.ops.kinds import LONE_OPS, OP_CLASSES
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import TABLES, PerOp

OWNERS = {
    "meaning in the symbolic run": "ratrain.ratrain_ir.verifier.dataflow",
    "payload": "ratrain.targets.machine.timing",
    "work on the machine": "ratrain.targets.machine.timing",
    "algorithm": "ratrain.targets.machine.timing",
    "cause of waiting": "ratrain.targets.simulator.bubbles",
    "unit of a given time": "ratrain.targets.simulator.given_times",
    "execution by one rank alone": "ratrain.targets.runtime.engine.engine",
    "execution in one process": "ratrain.targets.runtime.engine.local",
    "part in evaluation": "ratrain.targets.runtime.engine.evaluation",
    "execution by ranks": "ratrain.targets.runtime.ranks.engine",
    "phases of collectives": "ratrain.targets.runtime.ranks.collectives",
    "phases of exchanges of tensor-parallel ranks": "ratrain.targets.runtime.ranks.tensor_collectives",
    "category of a trace": "ratrain.ratrainc.report.trace",
}
"""What each layer knows of an op, and where."""


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Compress(Op):
    """An op that no layer has heard of."""

    keyword = "compress"
    default_engine = Engine.COMPUTE


def tables() -> dict[str, PerOp[object]]:
    for module in OWNERS.values():
        import_module(module)
    return {table.what: table for table in TABLES}


def test_a_new_op_is_missed_by_name_in_every_layer() -> None:
    found = tables()
    assert found.keys() == OWNERS.keys()
    for what in OWNERS:
        assert found[what].missing([*OP_CLASSES.values(), Compress]) == [f"'compress' has no {what}"]


def test_what_a_rank_does_by_itself_is_said_of_each_op() -> None:
    """No kind of op is taken for one that needs no partner because nobody thought of it."""
    assert len({*LONE_OPS, *MESSAGE_OPS, *COLLECTIVE_OPS, Release}) == len(OP_CLASSES)
    assert len((*LONE_OPS, *MESSAGE_OPS, *COLLECTIVE_OPS, Release)) == len(OP_CLASSES)


def test_each_kind_says_its_operands_and_messages_their_direction() -> None:
    assert [kind for kind in OP_CLASSES.values() if (kind.direction is None) is (kind in MESSAGE_OPS)] == []
    assert [kind for kind in OP_CLASSES.values() if kind.candidates is Op.candidates] == [Release]


def test_a_table_that_forgets_an_op_cannot_be_made() -> None:
    known = {kind: 1 for kind in OP_CLASSES.values() if kind not in (Forward, Release)}
    before = len(TABLES)
    with pytest.raises(TypeError, match="'forward' has no colour; 'release' has no colour"):
        PerOp("colour", known)
    with pytest.raises(TypeError, match="'forward' has no colour"):
        PerOp("colour", known, never=(Release,))
    with pytest.raises(TypeError, match="'send' has colour, and never occurs there"):
        PerOp("colour", {**known, Forward: 1}, never=(Release, OP_CLASSES["send"]))
    assert len(TABLES) == before


def test_entries_are_found_by_keyword_and_by_class() -> None:
    entries = {kind: kind.keyword.upper() for kind in OP_CLASSES.values()}
    table = PerOp("name in capitals", entries)
    TABLES.remove(table)
    assert table["forward"] == table.by_kind[Forward] == "FORWARD"
    assert set(table) == OP_CLASSES.keys()
    assert len(table) == len(OP_CLASSES)
