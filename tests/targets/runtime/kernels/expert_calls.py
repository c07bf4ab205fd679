"""A call of each kernel of expert blocks, for tests that go through all kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.targets.runtime.kernels.test_kernels_experts import choice, grouped, random


def expert_calls(tokens: int, experts: int, choices: int, hidden: int, width: int) -> dict[str, dict[str, Any]]:
    """Return arguments by kernel, in float16, with some experts that have many rows and some that have few."""
    chosen = choice(tokens, experts, choices, "ragged")
    order, bounds = grouped(chosen, experts)
    rows, half = tokens * choices, np.float16
    router = {"logits": random(3, tokens, experts), "chosen": chosen, "weights": np.abs(random(4, tokens, choices))}
    x = random(5, tokens, hidden, dtype=half)
    act, gate, up, dprod = (random(seed, rows, width, dtype=half) for seed in range(6, 10))
    sorted_rows = {"order": order, "bounds": bounds}
    swiglu = {"gate": gate, "up": up, "weights": router["weights"], "order": order}
    shared = random(10, tokens, 1)
    return {
        "route_forward": {**router, "normalise": True, "bias": random(22, experts)},
        "route_backward": {
            **router,
            "dweights": random(11, tokens, choices),
            "bounds": bounds,
            "dlogits": random(12, tokens, experts),
            "scale": np.ones(2, np.float32),
            "normalise": False,
            "balance": 0.01,
            "z": 0.001,
        },
        "group_rows": {"chosen": chosen, "order": order.copy(), "bounds": bounds.copy()},
        "add_rows": {"bounds": bounds, "counts": np.ones(experts, np.int32)},
        "expert_rows": {
            "a": x,
            "b": random(13, experts, width, hidden, dtype=half),
            **sorted_rows,
            "out": act,
            "trans_b": True,
        },
        "expert_sums": {
            "a": act,
            "b": random(14, experts, width, hidden, dtype=half),
            **sorted_rows,
            "sums": np.empty((tokens, hidden), np.float32),
            "out": x,
            "residual": x,
        },
        "choice_sums": {
            "a": random(19, rows, hidden, dtype=half),
            "out": random(20, tokens, hidden, dtype=half),
            "residual": random(21, tokens, hidden, dtype=half),
            "accumulate": True,
        },
        "expert_gradients": {
            "a": act,
            "b": x,
            **sorted_rows,
            "out": random(15, experts, width, hidden, dtype=half),
            "gathers_a": False,
            "accumulate": True,
        },
        "weighted_swiglu_forward": {**swiglu, "prod": act},
        "weighted_swiglu_backward": {
            **swiglu,
            "dprod": dprod,
            "dgate": gate,
            "dup": dprod,
            "dweights": random(16, tokens, choices),
        },
        "sigmoid_forward": {"x": shared, "y": shared},
        "sigmoid_backward": {"y": shared, "dy": random(17, tokens, 1), "dx": random(18, tokens, 1)},
    }
