"""Training in bf16: near f32, the same bits however it is scheduled and run, and in a type of its own throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import save_file

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.targets.runtime.arena.dtypes import BFLOAT16, NUMPY_DTYPES
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, same_bits, start, train
from tests.end_to_end.toys import GPT2

STEPS = 20
NEAR_F32 = 2e-3
"""Of the loss in each of 20 steps: half of what one rounding to bf16 changes at most. 3.2e-4 was seen."""
TIED = evolve(MODEL, tied_embeddings=True)
NEAR_REFERENCE = 5e-4
"""The same of two kernel sets; 8.7e-5 was seen."""


def test_every_element_type_has_a_numpy_dtype_of_its_size() -> None:
    assert NUMPY_DTYPES.keys() == set(Dtype)
    assert {dtype: numpy.itemsize for dtype, numpy in NUMPY_DTYPES.items()} == {
        dtype: dtype.itemsize for dtype in Dtype
    }
    assert len(set(NUMPY_DTYPES.values())) == len(Dtype)


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        pytest.param(MODEL, "reference", id="llama-reference"),
        pytest.param(GPT2, "fast", id="gpt2-fast"),
        pytest.param(TIED, "fast", id="tied-fast"),
        pytest.param(MODEL, "fast", id="llama-fast", marks=pytest.mark.full),
        pytest.param(GPT2, "reference", id="gpt2-reference", marks=pytest.mark.full),
        pytest.param(TIED, "reference", id="tied-reference", marks=pytest.mark.full),
    ],
)
@pytest.mark.sampled(3)
def test_bf16_trains_near_f32(model: Any, kernels: str) -> None:
    bf16, f32 = (
        losses(train(make_program(model, view_dtype=dtype), STEPS, kernels=kernels)) for dtype in ("bf16", "f32")
    )
    assert bf16 != f32
    assert f32[-1] < f32[0] - 0.3, "the model does not learn: equal losses would say little"
    np.testing.assert_allclose(bf16, f32, rtol=NEAR_F32)


def test_fast_kernels_train_near_the_reference() -> None:
    """Sums in another order, now and then rounded to the other neighbour."""
    fast, reference = (
        losses(train(make_program(view_dtype="bf16"), STEPS, kernels=kernels)) for kernels in ("fast", "reference")
    )
    np.testing.assert_allclose(fast, reference, rtol=NEAR_REFERENCE)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Any) -> None:
    program = make_program(view_dtype="bf16", zero=2, reduce="each-micro-batch")
    whole = train(program, 6, save=str(tmp_path / "whole"))
    train(program, 3, save=str(tmp_path / "half"))
    rest = train(program, 3, resume=str(tmp_path / "half"))
    assert losses(rest) == losses(whole)[3:]
    same_bits(rest, whole)


def test_weights_of_a_bf16_file_are_the_views_bit_for_bit(tmp_path: Any) -> None:
    path = tmp_path / "weights.safetensors"
    source = random_weights(MODEL, 1)
    held = {name: source(name).astype(BFLOAT16) for name in named_parameters(MODEL)}
    save_file(held, path)
    engine = start(make_program(view_dtype="bf16", pp=1, dp=1), 1, init=str(path)).engine
    ((rank,),) = engine.ranks
    for block in block_chain(MODEL):
        view = rank.carried("w", str(block))
        for parameter in parameters(MODEL, block):
            values = view[parameter.offset : parameter.offset + parameter.elements]
            assert values.tobytes() == held[parameter.name].tobytes(), parameter.name


def test_any_order_and_poison_change_no_bit() -> None:
    program = make_program(view_dtype="bf16", zero=3)
    plain = train(program, 3)
    mixed = train(program, 3, interleave_seed=4, poison=True, threads=2)
    assert losses(mixed) == losses(plain)
    same_bits(mixed, plain)


def test_views_gradients_and_activations_are_bf16() -> None:
    engine = start(make_program(view_dtype="bf16"), 1).engine
    kinds = {"view", "grad", "grad_shard", "activation", "boundary", "checkpoint"}
    for rank in (rank for ranks in engine.ranks for rank in ranks):
        held = list(zip(rank.stage.tensors, rank.views, strict=True))
        assert {str(view.dtype) for tensor, view in held if tensor.kind.value in kinds} == {"bfloat16"}
        assert {str(view.dtype) for tensor, view in held if tensor.kind.value in ("master", "moment")} == {"float32"}
