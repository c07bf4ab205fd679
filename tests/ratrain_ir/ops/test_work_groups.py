"""In which work ops stand: whatever works on a micro-batch serves a pass of it, unless it only moves bytes between memories."""

from __future__ import annotations

from inspect import getattr_static

import pytest
from attrs import fields

from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.ops.base import Op, Phase, WorkGroup
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS

PLACED_LATER = (Store, *OFFLOAD_OPS)
"""Ops that passes put beside work that is in its order already."""


@pytest.mark.parametrize("kind", OP_CLASSES.values(), ids=OP_CLASSES)
def test_what_works_on_a_micro_batch_says_which_pass_it_serves(kind: type[Op]) -> None:
    says = getattr_static(kind, "work_group") is not getattr_static(Op, "work_group")
    serves = says or kind.default_work_group is not WorkGroup.STEP_END
    of_a_micro_batch = any(attribute.name == "micro_batch" for attribute in fields(kind))
    assert serves == (of_a_micro_batch and kind not in PLACED_LATER)


def test_a_fetch_serves_the_pass_that_it_names() -> None:
    groups = {None: WorkGroup.STEP_END, Phase.FORWARD: WorkGroup.FORWARD, Phase.BACKWARD: WorkGroup.BACKWARD}
    for phase, group in groups.items():
        assert Fetch(block=block("mlp", 0), micro_batch=0, phase=phase).work_group is group
