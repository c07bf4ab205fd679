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

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.optimizer import COSINE, LINEAR, Optimizer
from ratrain.ratrainc.bridge.jobs.job import OF_TRAINER
from ratrain.ratrainc.bridge.settings import Left

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
    from ratrain.ratrainc.bridge.jobs.job import Job, Training

_CONSTANTS = ("constant", "constant_with_warmup")
_LEVEL_FIRST = ("warmup_stable_decay", "wsd")
"""Words for a rate that stays level before it comes down: transformers and Megatron-Bridge."""
_CURVES: Mapping[str, str] = {
    **dict.fromkeys(("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_warmup"), COSINE),
    "get_cosine_schedule_with_warmup": COSINE,
    **dict.fromkeys(("linear", "linear_decay_with_warmup", "get_linear_schedule_with_warmup"), LINEAR),
}
"""Curve of a plan for words of schedules, torchtune's components among them (torchtune/training/lr_schedulers.py)."""
_LENGTH = "'run --steps' sets the length of a run"
_WARM_UP_SHARE, _MOST_WARM_UP = 0.03, 100
"""axolotl's warm-up without a setting (src/axolotl/core/builders/base.py, _configure_warmup_and_logging)."""
_OTHER_SHAPE = "no plan follows this learning rate: it stays at lr after the warm-up"


@frozen
class _Fall:
    """Curve along which a rate comes down, the step at its end, and its steps (None: from the warm-up's end on)."""

    decay: str
    total_steps: int
    decay_steps: int | None = None


def put_rate(made: JobPlan) -> None:
    """Put warm-up and decay of the learning rate."""
    told, asked = made.job.training, made.asked
    whole = made.job.framework != "torchtune"  # there steps are those of an epoch (max_steps_per_epoch)
    steps = made.told("steps", "--steps", asked.steps) if whole else asked.steps
    warm = _warm_up(made, steps)
    if warm is not None:
        made.put("warmup_steps", warm, "warmup_steps", "warmup_ratio")
    curve = _curve_of(told)
    if curve is not None:
        _fall(made, curve, warm or 0, steps)
    elif not _stays_level(told):
        made.leave("scheduler", told.scheduler, _OTHER_SHAPE, trains=True)
        for name in ("decay_style", "stable_steps", "decay_steps", "min_lr"):
            if (value := getattr(told, name)) and made.key(name) not in {each.key for each in made.left}:
                made.leave(name, value, _OTHER_SHAPE, trains=True)
    elif not told.scheduler and made.job.framework == "accelerate":
        why = "the training script says it: without total_steps the rate stays at lr after the warm-up"
        made.left.append(Left("scheduler", None, why, trains=True))
    used = _share_of_steps(made) or (curve is not None and _needs_end(made.job))
    if asked.steps is not None and not used:
        text = f"--steps {asked.steps} changes nothing: the learning rate depends on no number of steps"
        made.report.error("RT064", text, made.top.location, help="leave it out; 'run --steps' sets a run's length")
    if told.steps is not None and not (curve is not None and _needs_end(made.job)):
        made.leave("steps", told.steps, _LENGTH)
    if told.epochs is not None:
        made.leave("epochs", told.epochs, _LENGTH)


def _fall(made: JobPlan, curve: str, warm: int, steps: int | None) -> None:
    """Put the end, curve and length of a rate that comes down after `warm` steps; report an open length."""
    told, fall = made.job.training, _fall_of(made.job, curve, warm, steps)
    said = f"{made.key('scheduler')} {told.scheduler}"
    if fall is None and steps is None:
        text = f"{said} ends at the last step, which the file does not say"
        made.wrong("scheduler", text, "give --steps N", code="RT063")
        return
    if fall is None:
        text = f"{said} needs the number of its last steps, in which the rate comes down: {made.title} stops there"
        made.wrong("scheduler", text, "say it in the file", code="RT063")
        return
    ends_at_0 = fall.decay == LINEAR and made.job.framework in OF_TRAINER and not _is_level_first(told)
    if ends_at_0 and told.min_lr is not None:
        text = f"{said} comes down to 0: transformers stops at {made.key('min_lr')}"
        made.wrong("min_lr", text, "take it out of the file")
        return
    made.put("total_steps", fall.total_steps, "steps", "scheduler")
    if fall.decay != Optimizer().decay:
        made.put("decay", fall.decay, "decay_style", "scheduler")
    if fall.decay_steps is not None:
        made.put("decay_steps", fall.decay_steps, "decay_steps", "scheduler")
    if told.min_lr:
        made.put("min_lr", told.min_lr, "min_lr")


def _share_of_steps(made: JobPlan) -> bool:
    """True if the warm-up is a share of all steps."""
    if made.asked.warmup_steps is not None or made.job.training.warmup_steps is not None:
        return False
    return made.job.training.warmup_ratio is not None or made.job.framework == "axolotl"


def _warm_up(made: JobPlan, steps: int | None) -> int | None:
    """Return the steps of the warm-up; None where nothing says them. Report a share of a length that is open."""
    told = made.job.training
    asked = made.told("warmup_steps", "--warmup-steps", made.asked.warmup_steps)
    if not _share_of_steps(made):
        if asked is not None and told.warmup_ratio is not None and steps is not None:
            _check_share(made, asked, told.warmup_ratio, steps)
        return None if asked is None else _least(made, int(asked))
    if steps is None:
        name = "warmup_ratio" if told.warmup_ratio is not None else "warmup_steps"
        share = told.warmup_ratio if told.warmup_ratio is not None else _WARM_UP_SHARE
        text = f"{made.key(name)}: the warm-up is {share:g} of the steps, whose number the file does not say"
        made.wrong(name, text, "give --steps N, or --warmup-steps N", code="RT063")
        return None
    if told.warmup_ratio is None:
        return _least(made, min(int(_WARM_UP_SHARE * steps), _MOST_WARM_UP))
    return _share(made, told.warmup_ratio, steps)


def _share(made: JobPlan, ratio: float, steps: int) -> int:
    """Return the steps of a warm-up that is a share of all steps.

    (transformers src/transformers/training_args.py, TrainingArguments.get_warmup_steps; axolotl
    src/axolotl/core/builders/base.py, _configure_warmup_and_logging; composer composer/optim/scheduler.py,
    _convert_time)
    """
    if made.job.framework not in ("axolotl", "llm-foundry"):
        return math.ceil(steps * ratio)
    return _least(made, max(int(ratio * steps), 0))


def _least(made: JobPlan, warm: int) -> int:
    """Return the steps of a warm-up as the framework takes them: axolotl makes two of one."""
    return 2 if made.job.framework == "axolotl" and warm == 1 else warm


def _check_share(made: JobPlan, asked: int, ratio: float, steps: int) -> None:
    """Report --warmup-steps that contradict the file's share of a known number of steps."""
    if (warm := _share(made, ratio, steps)) != asked:
        text = f"--warmup-steps {asked} contradicts {made.key('warmup_ratio')} {ratio:g} of {steps} steps: {warm}"
        made.wrong("warmup_ratio", text, "leave the option out, or change the file")


def _word_of(told: Training) -> str:
    """Return a schedule's name without the module it is in, in small letters; empty where nothing says one."""
    return (told.scheduler or "").lower().rpartition(".")[2]


def _curve_of(told: Training) -> str | None:
    """Return the curve along which a rate comes down; None if it stays level, or no plan follows its curve."""
    word = _word_of(told)
    if word in _LEVEL_FIRST:
        word = (told.decay_style or "").lower()
        return word if word in (COSINE, LINEAR) else None
    curve = _CURVES.get(word)
    # nanotron's min_decay_lr is its learning rate where nothing says it: a line from lr to lr is level
    level = curve == LINEAR and told.min_lr is not None and told.min_lr == told.lr
    return None if level else curve


def _stays_level(told: Training) -> bool:
    """Tell whether a rate stays at lr after the warm-up; without a schedule's name it does."""
    return _word_of(told) in (*_CONSTANTS, "") or (told.min_lr is not None and told.min_lr == told.lr)


def _is_level_first(told: Training) -> bool:
    """Tell whether the schedule needs to be told the steps of its decay."""
    return _word_of(told) in _LEVEL_FIRST


def _needs_end(job: Job) -> bool:
    """Tell whether a rate comes down until the run's last step; else its own lengths say until when."""
    told = job.training
    return told.stable_steps is None or told.decay_steps is None


def _fall_of(job: Job, curve: str, warm: int, steps: int | None) -> _Fall | None:
    """Return how a rate comes down, after a warm-up of `warm` steps; `steps` are those of the run, if known.

    Return None if the run's length is needed and not known, or a schedule that stays level first lacks its decay.
    """
    told = job.training
    level, falls = told.stable_steps, told.decay_steps
    if job.framework == "llama-factory" and _is_level_first(told) and steps is not None:
        # src/llamafactory/train/trainer_utils.py, create_custom_scheduler: a third of the rest stays level
        third = (steps - warm) // 3
        level = third if level is None else level
        falls = steps - warm - third if falls is None else falls
    if falls is not None and level is not None:
        return _Fall(curve, warm + level + falls, falls if level else None)
    if steps is None or (falls is None and (level is not None or _is_level_first(told))):
        return None
    return _Fall(curve, steps, falls)
