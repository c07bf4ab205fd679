"""Loss of tensor-parallel ranks on a device against the host: every row, sums, infinities, ignored labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.program.kernels import IGNORED_LABEL, OTHER_RANKS
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.kernels.host_scalars import HostScalars

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.targets.pytorch.device.device_kernels import TorchDevice  # noqa: E402
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch  # noqa: E402
from tests.targets.pytorch.allocations import allocations  # noqa: E402

NEITHER = (float("-inf"), float("inf"), float("nan"))


@st.composite
def logs_of_peers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What some peers know: of each row its labels on one of them at most, and logs of any size, or none that is a number."""
    peers, rows = draw(st.integers(2, 4)), draw(st.integers(1, 70))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    owners = random.integers(-1, peers, rows)
    parts = (random.normal(size=(peers, rows)) * draw(st.sampled_from([1.0, 300.0]))).astype(np.float32)
    for row in draw(st.lists(st.integers(0, rows - 1), max_size=3)):
        parts[random.integers(peers), row] = draw(st.sampled_from(NEITHER))
    return [
        {
            "lse_part": parts[peer],
            "loss_part": random.normal(size=1) * 50,
            "labels": np.where(owners < 0, IGNORED_LABEL, np.where(owners == peer, 5, OTHER_RANKS)).astype(np.int32),
            "lse": np.full(rows, np.nan, np.float32),
            "loss": random.normal(size=1),
        }
        for peer in range(peers)
    ]


def combined(scalars: Any, peers: list[dict[str, Any]], at_labels: Any, scratch: Any, *, accumulate: bool) -> None:
    scalars.logits_of_labels(peers, at_labels, scratch=scratch)
    parts = [mine["lse_part"] for mine in peers]
    scalars.combine_losses(parts, at_labels, peers, scratch=scratch, accumulate=accumulate)


@given(logs_of_peers(), st.booleans())
def test_a_device_combines_what_the_host_does(peers: list[dict[str, Any]], accumulate: bool) -> None:
    kernels = TorchDevice()
    scalars = kernels.scalars({})
    given_ = [{role: torch.tensor(view) for role, view in mine.items()} for mine in peers]
    scratch, at_labels = TensorScratch(kernels.combined_loss_bytes(len(peers[0]["labels"]))), torch.empty(len(peers))
    at_labels = at_labels.double()
    combined(scalars, given_, at_labels, scratch, accumulate=accumulate)
    assert scratch.high_water == scratch.capacity
    with np.errstate(all="ignore"):
        combined(HostScalars(kernel_set("fast")), peers, np.empty(len(peers)), Scratch(0), accumulate=accumulate)
    for mine, theirs in zip(given_, peers, strict=True):
        np.testing.assert_allclose(mine["lse"].numpy(), theirs["lse"], rtol=2e-7)
        np.testing.assert_allclose(mine["loss"].numpy(), theirs["loss"], rtol=1e-6, atol=1e-3)


def test_it_asks_for_no_memory() -> None:
    kernels = TorchDevice()
    scalars, rows = kernels.scalars({}), 100
    peers = [
        {
            "lse_part": torch.ones(rows),
            "loss_part": torch.ones(1, dtype=torch.float64),
            "labels": torch.zeros(rows, dtype=torch.int32),
            "lse": torch.empty(rows),
            "loss": torch.empty(1, dtype=torch.float64),
        }
    ] * 2
    scratch, at_labels = TensorScratch(kernels.combined_loss_bytes(rows)), torch.empty(2, dtype=torch.float64)
    with allocations() as found:
        combined(scalars, peers, at_labels, scratch, accumulate=False)
    assert found.peak <= 64, "a number that PyTorch makes a tensor of on the host is no more"
