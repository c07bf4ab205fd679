"""The two kernel sets on PyTorch against the reference kernels in numpy: every family, every kind of schedule, every type of storage.

What is compared is the losses of some steps, so gradients and updates with them, and in float32 the norms of the gradients.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.families import FAMILIES
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.testing.families import in_family
from tests.end_to_end.chunk_runs import plan_keys, shapes
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, losses, make_plan, make_program, train
from tests.end_to_end.toys import GEMMA3, GPT2, GRANITE, NEOX, OLMO2

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

NEAR = {"f32": 2e-6, "f16": 2e-3, "bf16": 4e-3}
"""Of the losses, relative: sums in another order, and in 16 bits roundings to the other neighbour."""
NORMS = 1e-4
"""Of the norms of gradients in float32."""
STEPS = 3
FEW = {"experts": 4, "experts_per_token": 2}

MODELS = {
    "llama": MODEL,
    "mistral": in_family(MODEL, "mistral", sliding_window=4),
    "qwen2": in_family(MODEL, "qwen2", tied_embeddings=True, rope_scaling="yarn 4 32 1 4 1.1 1"),
    "qwen3": in_family(MODEL, "qwen3"),
    "baichuan": in_family(MODEL, "baichuan", kv_heads=4, position="alibi", rope_theta=0.0, normalised_head=True),
    "gemma2": in_family(
        MODEL,
        "gemma2",
        sliding_window=4,
        layer_kinds="wfw",
        attention_scale=0.3,
        attention_softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=24**0.5,
    ),
    "gemma3_text": GEMMA3,
    "phi3": in_family(MODEL, "phi3", rotary_dim=4),
    "olmo2": OLMO2,
    "granite": GRANITE,
    "internlm2": in_family(MODEL, "internlm2", qkv_bias=True, o_bias=True),
    "smollm3": in_family(MODEL, "smollm3", layer_kinds="fnf"),
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "mixtral": in_family(MODEL, "mixtral", **FEW, sliding_window=4),
    "qwen2_moe": in_family(
        MODEL, "qwen2_moe", **FEW, qkv_bias=True, expert_size=20, shared_expert_size=28, router_normalised=False
    ),
    "qwen3_moe": in_family(MODEL, "qwen3_moe", **FEW, expert_size=20),
    "olmoe": in_family(MODEL, "olmoe", **FEW, router_normalised=False),
    "granitemoe": in_family(MODEL, "granitemoe", **FEW, attention_scale=0.3, residual_scale=0.5, logit_scale=0.5),
}
DEEP = evolve(MODEL, layers=4)
SHAPES = {
    **{
        f"{kind}-{shape.layout}": (kind, plan_keys(kind, shape))
        for chunks in (1, 2)
        for kind, shape in shapes(2, chunks, 4)
    },
    "seq1f1b": ("seq1f1b", {"schedule": "seq1f1b", "slices": (5, 5), "micro_batches": 2}),
}
STATES: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero2": {"zero": 2, "reduce": "each-micro-batch"},
    "zero3-clipped": {"zero": 3, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)},
    "documents": {"attention_mask": "document"},
    "scores": {"attention": "scores-kept"},
}
"""What a plan may say beside its schedule."""
PEERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied-clipped": (
        evolve(MODEL, tied_embeddings=True),
        {"tp": 2, "dp": 1, "zero": 0, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)},
    ),
    "copied-heads": (MODEL, {"tp": 4, "pp": 1, "dp": 1, "zero": 0, "sequence_sharding": False}),
    "each-micro-batch": (MODEL, {"tp": 2, "pp": 1, "zero": 2, "reduce": "each-micro-batch"}),
    "zero3-documents": (MODEL, {"tp": 2, "pp": 1, "zero": 3, "attention_mask": "document"}),
    "gpt2": (GPT2, {"tp": 2, "pp": 1, "dp": 1, "zero": 0}),
    "gemma3": (GEMMA3, {"tp": 2, "dp": 1, "zero": 0}),
    "olmo2": (OLMO2, {"tp": 4, "dp": 1, "zero": 0}),
    "neox": (NEOX, {"tp": 4, "pp": 1, "dp": 1, "zero": 0, "sequence_sharding": False}),
    "baichuan": (MODELS["baichuan"], {"tp": 2, "pp": 1, "dp": 1, "zero": 0}),
}
"""Models that tensor-parallel ranks share out, with plans."""


def _grid(names: Any, *, gate: bool) -> list[Any]:
    """What is trained, with kernel sets and types; the gate has each with one type, by turns, on `torch-device`."""
    return [
        pytest.param(
            name,
            kernels,
            dtype,
            id=f"{name}-{kernels}-{dtype}",
            marks=[] if gate and kernels == "torch-device" and turn == number % len(NEAR) else [pytest.mark.full],
        )
        for number, name in enumerate(names)
        for kernels in ("torch-device", "torch")
        for turn, dtype in enumerate(NEAR)
    ]


@cache
def _expected(program: Program) -> Any:
    return train(program, STEPS, kernels="reference")


@cache
def _of_family(name: str, dtype: str) -> Program:
    return make_program(MODELS[name], view_dtype=dtype, dp=1, micro_batches=2, zero=0)


@cache
def _of_shape(name: str, dtype: str) -> Program:
    _, keys = SHAPES[name]
    plan = make_plan(DEEP, view_dtype=dtype, dp=1, zero=0, **keys)
    return api.emit(api.compile(DEEP, plan, passes="recompute{policy=mlp},allocate-ddr"))


@cache
def _of_state(name: str, dtype: str) -> Program:
    return make_program(view_dtype=dtype, **STATES[name])


@cache
def _of_peers(name: str, dtype: str) -> Program:
    model, keys = PEERS[name]
    return make_program(model, view_dtype=dtype, **keys)


def trains_near(program: Program, kernels: str, dtype: str) -> None:
    """Fail unless losses, and in float32 norms, are those of the reference kernels, nearly."""
    ours, reference = train(program, STEPS, kernels=kernels), _expected(program)
    np.testing.assert_allclose(losses(ours), losses(reference), rtol=NEAR[dtype])
    if dtype == "f32":
        norms, exact = ([step.report.gradient_norm for step in run.done] for run in (ours, reference))
        assert norms == pytest.approx(exact, rel=NORMS)


def test_every_family_and_schedule_is_here() -> None:
    assert MODELS.keys() == set(FAMILIES)
    assert {kind for kind, _ in SHAPES.values()} == set(SCHEDULES)


@pytest.mark.parametrize(("family", "kernels", "dtype"), _grid(MODELS, gate=True))
@pytest.mark.sampled(3, first=1)
def test_every_family_trains_near_the_reference_kernels(family: str, kernels: str, dtype: str) -> None:
    trains_near(_of_family(family, dtype), kernels, dtype)


@pytest.mark.parametrize(("shape", "kernels", "dtype"), _grid(SHAPES, gate=False))
def test_every_schedule_trains_near_the_reference_kernels(shape: str, kernels: str, dtype: str) -> None:
    trains_near(_of_shape(shape, dtype), kernels, dtype)


@pytest.mark.parametrize(("state", "kernels", "dtype"), _grid(STATES, gate=False))
def test_every_kind_of_state_trains_near_the_reference_kernels(state: str, kernels: str, dtype: str) -> None:
    trains_near(_of_state(state, dtype), kernels, dtype)


@pytest.mark.parametrize(("peers", "kernels", "dtype"), _grid(PEERS, gate=True))
@pytest.mark.sampled(len(PEERS))
def test_tensor_peers_train_near_the_reference_kernels(peers: str, kernels: str, dtype: str) -> None:
    trains_near(_of_peers(peers, dtype), kernels, dtype)
