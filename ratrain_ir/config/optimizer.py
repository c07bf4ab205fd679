"""Keys of a plan's optimizer: AdamW, and its learning rate over the steps.

warmup_steps 2, total_steps 10                    lr up to step 2, then down along a cosine until step 10
warmup_steps 2, total_steps 10, decay_steps 3     lr up to step 2, level until step 7, then down (WSD)
warmup_steps 2                                    lr up to step 2, then level
"""

from __future__ import annotations

import math

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan_keys import integer, integer_or_none, key, number, numbers, word
from ratrain.ratrain_ir.support.limits import MAX_STEPS

CLIPS = ("none", "global")
COSINE, LINEAR = "cosine", "linear"
DECAYS = (COSINE, LINEAR)
"""Curves along which the learning rate comes down."""

_MAX_RATE = 1000
_RATE = number(lambda value: 0 <= value <= _MAX_RATE, f"a number from 0 to {_MAX_RATE}")


@frozen
class Optimizer:
    """AdamW with decoupled weight decay, and its learning rate over the steps."""

    lr: float = field(default=3e-4, metadata=key("optimizer", "the learning rate", _RATE))
    betas: tuple[float, float] = field(
        default=(0.9, 0.95),
        metadata=key(
            "optimizer",
            "the memory of Adam's moments",
            numbers(2, lambda value: 0 <= value < 1, "a list of two numbers, each at least 0 and below 1"),
        ),
    )
    eps: float = field(
        default=1e-8,
        # far above the smallest normal f32, 1.2e-38: in f32 a smaller eps could be zero
        metadata=key(
            "optimizer",
            "the least divisor of an update",
            number(lambda value: 1e-30 <= value <= 1, "a number from 1e-30 to 1"),
        ),
    )
    weight_decay: float = field(default=0.1, metadata=key("optimizer", "how fast weights shrink", _RATE))
    warmup_steps: int = field(
        default=0, metadata=key("optimizer", "steps until the learning rate is reached", integer(0, MAX_STEPS))
    )
    total_steps: int | None = field(
        default=None,
        metadata=key(
            "optimizer",
            "the step at which the learning rate has come down to `min_lr`",
            integer_or_none(1, MAX_STEPS),
        ),
    )
    """Step at which the learning rate has come down to `min_lr`; None: it stays at `lr`."""
    min_lr: float = field(
        default=0.0,
        metadata=key(
            "optimizer",
            "the learning rate after `total_steps`; refused without",
            _RATE,
            not_in_file=lambda own: own.total_steps is None and own.min_lr == 0,
        ),
    )
    clip: str = field(
        default="none",
        metadata=key("optimizer", "whether the norm of the whole gradient is held under `max_norm`", word(CLIPS)),
    )
    """`none`, or `global`: the norm of the whole gradient is held under `max_norm`."""
    max_norm: float = field(
        default=1.0,
        metadata=key(
            "optimizer",
            "the largest norm; a value other than the default is refused where gradients are not clipped",
            number(lambda value: 0 < value <= 1e30, "a number above 0"),
            not_in_file=lambda own: own.clip == "none" and own.max_norm == 1,
        ),
    )
    decay: str = field(
        default=COSINE,
        metadata=key(
            "optimizer",
            "the curve along which the learning rate comes down: `cosine`, half a wave of it, or `linear`; refused "
            "without `total_steps`",
            word(DECAYS),
            in_header_if_default=False,
            not_in_file=lambda own: own.decay == COSINE,
        ),
    )
    decay_steps: int | None = field(
        default=None,
        metadata=key(
            "optimizer",
            "the last steps before `total_steps`, in which the learning rate comes down; it stays at `lr` until then",
            integer_or_none(1, MAX_STEPS),
            in_header_if_default=False,
            not_in_file=lambda own: own.decay_steps is None,
        ),
    )
    """None: it comes down from the warm-up's end on."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: linear warm-up, then constant, then down to `min_lr`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        if step >= self.total_steps:
            return self.min_lr
        start = self.warmup_steps if self.decay_steps is None else self.total_steps - self.decay_steps
        if step <= start:
            return self.lr
        done = (step - start) / (self.total_steps - start)
        left = 1.0 - done if self.decay == LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left
