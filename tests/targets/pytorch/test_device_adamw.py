"""AdamW whose numbers are on the device: the bits of `adamw`, and nothing but the view where it is skipped."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets.runtime.kernels.kernels_oracle import same_bits

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.targets.pytorch.device.device_kernels import TorchDevice  # noqa: E402
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch  # noqa: E402
from tests.targets.pytorch.tensor_calls import as_tensors  # noqa: E402

TYPES = st.sampled_from((np.float16, ml_dtypes.bfloat16, np.float32))


def state(seed: int, grad: Any, view: Any | None) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    master, m, v = rng.normal(size=(3, 700)).astype(np.float32)
    arrays = {"master": master, "m": m / 8, "v": v**2, "grad": (rng.normal(size=700) * 64).astype(grad)}
    return arrays if view is None else {**arrays, "view": rng.normal(size=700).astype(view)}


def numbers(step: int, multiplier: float, lr: float, *, skip: Any, scalar: bool) -> dict[str, Any]:
    shape: tuple[int, ...] = () if scalar else (1,)
    return {
        "t": torch.full(shape, step, dtype=torch.int64),
        "multiplier": torch.full(shape, multiplier),
        "lr": torch.full(shape, lr),
        "skip": torch.full(shape, skip),
    }


def update(kernels: Any, arrays: dict[str, Any], method: str, **options: Any) -> None:
    scratch = TensorScratch(kernels.scratch_bytes("adamw", **arrays))
    scratch.take(scratch.capacity, np.uint8).fill_(0xFF)
    scratch.reset()
    given = {name: as_tensors(value) for name, value in arrays.items()}
    rest = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay": [(100, 300), (600, 700)]}
    getattr(kernels, method)(**given, **{**rest, **options}, scratch=scratch)


def check_bits_of_the_host(
    kernels: Any, *, step: int, multiplier: float, lr: float, betas: tuple[float, float], types: Any, scalar: bool
) -> None:
    """An update by numbers of the device has the bits of one by the host's."""
    one, other = state(0, *types), state(0, *types)
    options = dict(zip(("beta1", "beta2"), betas, strict=True))
    update(kernels, one, "adamw", step=step, grad_multiplier=multiplier, lr=lr, **options)
    update(kernels, other, "adamw_on_device", **numbers(step, multiplier, lr, skip=False, scalar=scalar), **options)
    for name in one:
        same_bits(one[name], other[name])


def check_nothing_but_the_view(kernels: Any, skip: Any, view: Any) -> None:
    """A skipped update changes nothing but the view; the next one changes all."""
    arrays = state(1, np.float16, view)
    arrays["grad"][5], arrays["grad"][6] = np.inf, np.nan
    before = {name: value.copy() for name, value in arrays.items()}
    update(kernels, arrays, "adamw_on_device", **numbers(3, 1.0, 1e-3, skip=skip, scalar=False))
    for name, value in arrays.items():
        same_bits(value, before["master"].astype(view) if name == "view" else before[name])
    update(kernels, arrays, "adamw_on_device", **numbers(3, 1.0, 1e-3, skip=False, scalar=False))
    assert np.isnan(arrays["master"][5:7]).all()
    assert (arrays["master"][7:] != before["master"][7:]).any()


@settings(max_examples=40)
@given(
    step=st.integers(1, 100_000),
    multiplier=st.floats(2.0**-20, 4, width=32),
    lr=st.floats(1e-7, 1),
    betas=st.tuples(st.sampled_from((0.0, 0.5, 0.9, 0.999)), st.sampled_from((0.0, 0.95, 0.9999))),
    types=st.tuples(TYPES, st.none() | TYPES),
    scalar=st.booleans(),
)
def test_it_has_the_bits_of_the_update_on_the_host(step, multiplier, lr, betas, types, scalar):
    check_bits_of_the_host(
        TorchDevice(), step=step, multiplier=multiplier, lr=lr, betas=betas, types=types, scalar=scalar
    )


@pytest.mark.parametrize("skip", [True, 1, 2.0])
@pytest.mark.parametrize("view", [None, np.float16, ml_dtypes.bfloat16, np.float32])
def test_nothing_but_the_view_changes_where_it_is_skipped(skip: Any, view: Any) -> None:
    check_nothing_but_the_view(TorchDevice(), skip, view)
