"""A head whose backward follows at once makes its logits once: to the same bits, and only where nobody could tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.program.instruction import CountWait
from ratrain.targets.runtime.engine import engine as engines
from ratrain.targets.runtime.engine.one_pass_head import head_pairs
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from tests.end_to_end.tiny_runs import MODEL, instructions, losses, make_program, same_bits, train

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

SHAPING: dict[str, dict[str, Any]] = {
    "plain": {"normalise": False},
    "normalised": {"normalise": True},
    "capped": {"normalise": False, "scale_of_logits": 0.5, "softcap": 3.0},
}
_NAMES = [
    pytest.param("fast", np.float32),
    pytest.param("fast", np.float16),
    pytest.param("torch", ml_dtypes.bfloat16, marks=pytest.mark.parity),
]


@pytest.mark.parametrize("options", SHAPING)
@pytest.mark.parametrize(("name", "dtype"), _NAMES)
@pytest.mark.parametrize(("rows", "chunk", "threads", "adds"), [(37, 16, 2, True), (37, 64, 1, False), (8, 3, 1, True)])
def test_one_pass_gives_the_bits_of_two(
    name: str, dtype: Any, options: str, rows: int, chunk: int, threads: int, adds: bool
) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    kernels: Any = kernel_set(name, threads)
    shaping, random, hidden, words = SHAPING[options], np.random.default_rng(3), 24, 330
    xn, table = (random.normal(size=(count, hidden)).astype(dtype) for count in (rows, words))
    labels = random.integers(0, words, rows).astype(np.int32)
    labels[::5] = -1
    found = []
    for one_pass in (False, True):
        held = {
            "lse": np.full(rows, np.nan, np.float32),
            "loss": np.full(1, 2.5),
            "dxn": np.full_like(xn, np.nan),
            "dtable": np.ones_like(table),
        }
        given = {"xn": xn, "table": table, "labels": labels, "lse": held["lse"], **shaping}
        given["logits"] = np.full((chunk, words), np.nan, np.float32)
        backward: dict[str, Any] = {
            **given,
            "scale": np.array([2.0, 0.0], np.float32),
            "dxn": held["dxn"],
            "dtable": held["dtable"],
            "denominator": 30.0,
            "accumulate": adds,
        }
        forward: dict[str, Any] = {**given, "loss": held["loss"], "accumulate": adds}
        scratch = Scratch(kernels.scratch_bytes("head_backward", **backward))
        if one_pass:
            assert kernels.makes_head_in_one_pass(xn, table, given["logits"], **shaping)
            kernels.head_in_one_pass(**backward, loss=held["loss"], adds_loss=adds, scratch=scratch)
        else:
            kernels.head_forward(**forward, scratch=Scratch(kernels.scratch_bytes("head_forward", **forward)))
            kernels.head_backward(**backward, scratch=scratch)
        found.append(held)
    two, one = found
    assert np.isfinite(one["loss"]).all()
    for key, expected in two.items():
        assert one[key].tobytes() == expected.tobytes(), key


def train_in_two_passes(program: Program, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(engines, "head_pairs", lambda _: ())
        return train(program, 3, **settings)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"pp": 1, "dp": 1, "micro_batches": 1},
        {"zero": 3, "reduce": "each-micro-batch"},
        {"model": evolve(MODEL, tied_embeddings=True), "pp": 3},
        {"name": "zb-h1"},
    ],
    ids=["1f1b", "alone", "zero-3", "tied", "zb-h1"],
)
@pytest.mark.parametrize("settings", [{}, {"threads": 2}, {"interleave_seed": 1}], ids=["local", "threads", "shuffled"])
@pytest.mark.sampled(5)
def test_a_training_keeps_its_bits(keys: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program(**keys)
    assert head_pairs(program.stages[-1])
    two, one = train_in_two_passes(program, monkeypatch, **settings), train(program, 3, poison=True, **settings)
    assert losses(one) == losses(two)
    same_bits(one, two)


def test_each_micro_batch_of_1f1b_goes_in_one_pass_and_none_of_gpipe() -> None:
    assert [len(head_pairs(stage)) for stage in make_program().stages] == [0, 3]
    assert [len(head_pairs(stage)) for stage in make_program(name="gpipe").stages] == [0, 0]


def test_tensor_ranks_that_combine_their_sums_between_are_left_alone() -> None:
    assert not any(map(head_pairs, make_program(tp=2, dp=1).stages))


def test_a_loss_that_is_read_before_the_backward_is_made_by_the_forward() -> None:
    program = make_program(pp=1, dp=1, micro_batches=1)
    (stage,) = program.stages
    assert head_pairs(stage)
    ((forward, _),) = head_pairs(stage)
    at = stage.streams[Engine.COMPUTE].index(forward)
    (reader,) = (found for *_, found in instructions(program, "all_reduce_scalar") if found.variant == "loss")
    stage.streams[Engine.COLLECTIVE].remove(reader)
    stage.streams[Engine.COLLECTIVE].insert(0, reader)
    reader.waits = (CountWait(Engine.COMPUTE, at + 1, previous_step=False),)
    assert not head_pairs(stage)
