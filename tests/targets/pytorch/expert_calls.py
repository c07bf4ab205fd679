"""A call of every kernel of expert blocks: 300 tokens, 3 of 11 experts each, one of them with more than a block of rows, one with none."""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 300, 11, 3, 24, 40
IDLE = 7
"""The expert without rows."""


def random(seed: int, *shape: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def expert_calls() -> dict[str, dict[str, Any]]:
    """Arguments by kernel, new each time; those that are written come from the same seeds."""
    rows, f32 = TOKENS * CHOICES, np.float32
    logits = random(40, TOKENS, EXPERTS, dtype=f32) - 0.3 * np.arange(EXPERTS, dtype=f32)
    logits[:, IDLE] = -100
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :CHOICES], axis=1).astype(np.int32)
    weights = np.abs(random(41, TOKENS, CHOICES, dtype=f32))
    order = np.argsort(chosen.reshape(-1), kind="stable").astype(np.int32)
    bounds = np.append(0, np.cumsum(np.bincount(chosen.reshape(-1), minlength=EXPERTS))).astype(np.int32)
    assert bounds[1] > 64 * 3
    assert bounds[IDLE] == bounds[IDLE + 1]
    grouped = {"order": order, "bounds": bounds}
    x, wide = random(42, TOKENS, WIDTH), random(43, rows, INNER)
    gate, up, dprod = (random(seed, rows, INNER) for seed in (44, 45, 46))
    route = {"logits": logits, "chosen": chosen, "weights": weights, "normalise": False}
    return {
        "route_forward": {**route, "chosen": np.empty_like(chosen)},
        "route_backward": {
            **route, "dweights": random(47, TOKENS, CHOICES, dtype=f32), "bounds": bounds, "dlogits": np.empty_like(logits),
            "scale": np.array([4, 0], f32), "balance": 0.3, "z": 0.2,
        },
        "group_rows": {"chosen": chosen, "order": np.empty_like(order), "bounds": np.empty_like(bounds)},
        "add_rows": {"bounds": bounds, "counts": np.ones(EXPERTS, np.int32)},
        "expert_rows": {"a": x, "b": random(48, EXPERTS, INNER, WIDTH), **grouped, "out": wide, "trans_b": True},
        "expert_sums": {
            "a": wide, "b": random(49, EXPERTS, INNER, WIDTH), **grouped, "sums": np.zeros((TOKENS, WIDTH), f32),
            "out": x, "residual": random(50, TOKENS, WIDTH),
        },
        "choice_sums": {
            "a": random(56, rows, WIDTH), "out": random(57, TOKENS, WIDTH), "residual": random(58, TOKENS, WIDTH), "accumulate": True,
        },
        "expert_gradients": {
            "a": x, "b": wide, **grouped, "out": random(51, EXPERTS, WIDTH, INNER), "gathers_a": True, "accumulate": True,
        },
        "weighted_swiglu_forward": {"gate": gate, "up": up, "weights": weights, "prod": random(52, rows, INNER), "order": order},
        "weighted_swiglu_backward": {
            "gate": gate, "up": up, "weights": weights, "dprod": dprod, "dgate": gate, "dup": dprod,
            "dweights": np.empty_like(weights), "order": order,
        },
        "sigmoid_forward": {"x": random(53, TOKENS, 1, dtype=f32), "y": np.empty((TOKENS, 1), f32)},
        "sigmoid_backward": {
            "y": np.abs(random(54, TOKENS, 1, dtype=f32)), "dy": random(55, TOKENS, 1, dtype=f32), "dx": np.empty((TOKENS, 1), f32),
        },
    }  # fmt: skip
