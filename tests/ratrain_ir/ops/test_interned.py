"""There is one object of each block and of each type, also of those that come from another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from ratrain.ratrain_ir.config.types import Dtype, tensor_type
from ratrain.ratrain_ir.model.blocks import block, parse_block


@pytest.mark.parametrize("text", ["embed", "attention.3", "head"])
def test_a_block_is_one_object(text: str) -> None:
    one = parse_block(text)
    assert one is not None
    assert one is block(one.kind, one.layer)
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(one) is one


def test_a_block_without_a_layer_is_the_one_whose_layer_is_none() -> None:
    assert block("embed") is block("embed", None)


def test_a_type_is_one_object() -> None:
    one = tensor_type(Dtype.F16, (2, 3))
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(one) is one
    assert tensor_type(Dtype.F32, (2, 3)) is not one
