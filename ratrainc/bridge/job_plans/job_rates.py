"""Learning rates of jobs as a plan's: the curve along which the rate comes down, the step at its end, and its length.

A job names its schedule in its framework's word. The rate of a plan rises over `warmup_steps`, stays level, and comes
down to `min_lr` in the last `decay_steps` before `total_steps`:

    lr_scheduler_type: linear, max_steps: 100                  decay linear, total_steps 100
    lr_scheduler_type: warmup_stable_decay, warmup_steps: 10,
      num_stable_steps: 50, num_decay_steps: 20                decay cosine, total_steps 80, decay_steps 20
    lr_decay_style: 1-sqrt                                     no curve of a plan: named, and the rate stays at lr

After the warm-up these frameworks give step s (from 0) the rate that a plan gives it: their line is (N - s) / (N - W)
for N steps with W of warm-up. Sources: transformers src/transformers/optimization.py, TYPE_TO_SCHEDULER_FUNCTION and
_get_wsd_scheduler_lambda; nanotron src/nanotron/helpers.py, lr_scheduler_builder; composer composer/optim/scheduler.py,
LinearWithWarmupScheduler, under its name in llmfoundry/optim/__init__.py; Megatron-LM
megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler.get_lr, which Megatron-Bridge calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.optimizer import COSINE, LINEAR

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job, Training

CONSTANTS = ("constant", "constant_with_warmup")
_LEVEL_FIRST = ("warmup_stable_decay", "wsd")
"""Words for a rate that stays level before it comes down: transformers and Megatron-Bridge."""
_CURVES: Mapping[str, str] = {
    **dict.fromkeys(("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_warmup"), COSINE),
    "get_cosine_schedule_with_warmup": COSINE,
    **dict.fromkeys(("linear", "linear_decay_with_warmup", "get_linear_schedule_with_warmup"), LINEAR),
}
"""Curve of a plan for words of schedules, torchtune's components among them (torchtune/training/lr_schedulers.py)."""
OTHER_SHAPE = "no plan follows this learning rate: it stays at lr after the warm-up"


@frozen
class Fall:
    """Curve along which a rate comes down, the step at its end, and its steps (None: from the warm-up's end on)."""

    decay: str
    total_steps: int
    decay_steps: int | None = None


def word_of(told: Training) -> str:
    """Return a schedule's name without the module it is in, in small letters; empty where nothing says one."""
    return (told.scheduler or "").lower().rpartition(".")[2]


def curve_of(told: Training) -> str | None:
    """Return the curve along which a rate comes down; None if it stays level, or no plan follows its curve."""
    word = word_of(told)
    if word in _LEVEL_FIRST:
        word = (told.decay_style or "").lower()
        return word if word in (COSINE, LINEAR) else None
    curve = _CURVES.get(word)
    # nanotron's min_decay_lr is its learning rate where nothing says it: a line from lr to lr is level
    level = curve == LINEAR and told.min_lr is not None and told.min_lr == told.lr
    return None if level else curve


def stays_level(told: Training) -> bool:
    """Tell whether a rate stays at lr after the warm-up; without a schedule's name it does."""
    return word_of(told) in (*CONSTANTS, "") or (told.min_lr is not None and told.min_lr == told.lr)


def is_level_first(told: Training) -> bool:
    """Tell whether the schedule needs to be told the steps of its decay."""
    return word_of(told) in _LEVEL_FIRST


def needs_end(job: Job) -> bool:
    """Tell whether a rate comes down until the run's last step; else its own lengths say until when."""
    told = job.training
    return told.stable_steps is None or told.decay_steps is None


def fall_of(job: Job, curve: str, warm: int, steps: int | None) -> Fall | None:
    """Return how a rate comes down, after a warm-up of `warm` steps; `steps` are those of the run, if known.

    Return None if the run's length is needed and not known, or a schedule that stays level first lacks its decay.
    """
    told = job.training
    level, falls = told.stable_steps, told.decay_steps
    if job.framework == "llama-factory" and is_level_first(told) and steps is not None:
        # src/llamafactory/train/trainer_utils.py, create_custom_scheduler: a third of the rest stays level
        third = (steps - warm) // 3
        level = third if level is None else level
        falls = steps - warm - third if falls is None else falls
    if falls is not None and level is not None:
        return Fall(curve, warm + level + falls, falls if level else None)
    if steps is None or (falls is None and (level is not None or is_level_first(told))):
        return None
    return Fall(curve, steps, falls)
