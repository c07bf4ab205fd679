"""Learning rates of imported plans, step by step, against the formulas of the frameworks that the files are for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.settings import Asked

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.optimizer import Optimizer

Shape = Callable[[float], float]


def line(done: float) -> float:
    return 1.0 - done


def wave(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


SHAPES: dict[str, Shape] = {"linear": line, "cosine": wave}
MEGATRON = "torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 4 --seq-length 64 --lr"


def follows(own: Optimizer, rate: Callable[[int], float], first: int, last: int) -> None:
    """Check that a plan's learning rate is `rate` in the steps from `first` to before `last`."""
    for step in range(first, last):
        assert own.learning_rate(step) == pytest.approx(rate(step), rel=1e-9, abs=1e-15), step


# Megatron-LM: megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler.get_lr, in samples


def megatron_rate(step: int, warm: int, total: int, falls: int, shape: Shape, least: float) -> float:
    batch, lr = 4, 1e-3
    count, begin = step * batch, (total - falls) * batch
    if count > total * batch:
        return least
    left = 1.0 if count <= begin else shape((count - begin) / (falls * batch))
    assert step > warm
    return least + left * (lr - least)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_the_rate_of_megatron_comes_down_alike(shape: str, late: bool, unit: str) -> None:
    times = 1 if unit == "iters" else 4
    said = f"--lr-decay-style {shape}"
    if late:
        said = f"--lr-decay-style WSD --lr-wsd-decay-style {shape} --lr-wsd-decay-{unit} {7 * times}"
    text = f"{MEGATRON} 1e-3 --min-lr 1e-4 --lr-warmup-{unit} {5 * times} --train-{unit} {40 * times} {said}"
    made = imported(FRAMEWORKS["megatron"], "x", text, Asked())
    own = made.plan.optimizer
    assert (own.decay, own.total_steps, own.decay_steps) == (shape, 40, 7 if late else None)
    follows(own, lambda step: megatron_rate(step, 5, 40, 7 if late else 35, SHAPES[shape], 1e-4), 6, 45)
    assert "lr-decay-style" not in {each.key for each in made.left}


@pytest.mark.parametrize("style", ["", "exponential", "minus_sqrt"])
def test_other_curves_of_megatron_are_named(style: str) -> None:
    said = f" --lr-wsd-decay-style {style}" if style else ""
    text = f"{MEGATRON} 1e-3 --train-iters 40 --lr-decay-style WSD --lr-wsd-decay-iters 7{said}"
    made = imported(FRAMEWORKS["megatron"], "x", text, Asked())
    assert {each.key for each in made.left if each.trains} >= {"lr-wsd-decay-style", "lr-wsd-decay-iters"}
    assert made.plan.optimizer.total_steps is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("--train-iters 40", "in how many steps the rate of WSD comes down"),
        ("--train-iters 40 --lr-wsd-decay-samples 9", "in how many steps the rate of WSD comes down"),
        ("--train-iters 40 --lr-wsd-decay-iters 41", "do not fit into 40 steps"),
        ("--lr-wsd-decay-iters 9", "over how many steps"),
        ("--train-iters 40 --lr-wsd-decay-iters 9 --lr-wsd-decay-style square", "one of exponential, linear"),
    ],
)
def test_a_late_decay_of_no_length_is_refused(said: str, message: str) -> None:
    more = "" if "square" in said else " --lr-wsd-decay-style linear"
    text = f"{MEGATRON} 1e-3 --lr-warmup-iters 2 --lr-decay-style WSD {said}{more}"
    with pytest.raises(DiagnosticError, match=message):
        imported(FRAMEWORKS["megatron"], "x", text, Asked())


# torchtitan: torchtitan/components/optimizer/lr_scheduler.py, LRSchedulersContainer.Config.build


def titan_rate(step: int, warm: int, total: int, ratio: float | None, shape: Shape, least: float) -> float:
    warm = min(warm, total)
    falls = total - warm if ratio is None else min(round(total * ratio), total - warm)
    level = warm + total + 1 - warm - falls
    if step < warm:
        return (step + 1) / warm
    return 1.0 if step < level else least + (1 - least) * shape((step + 1 - level) / falls)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.none() | st.floats(0, 1.2),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from([0.0, 0.25]),
)
def test_the_rate_of_torchtitan_is_that_of_the_plan(
    warm: int, total: int, ratio: float | None, shape: str, least: float
) -> None:
    lines = [f"warmup_steps = {warm}", f'decay_type = "{shape}"', f"min_lr_factor = {least}"]
    lines += [] if ratio is None else [f"decay_ratio = {ratio}"]
    text = f"[training]\nsteps = {total}\n[optimizer]\nlr = 1.0\n[lr_scheduler]\n" + "\n".join(lines)
    own = imported(FRAMEWORKS["torchtitan"], "x", text, Asked(clusters=2, seq_len=None)).plan.optimizer
    follows(own, lambda step: titan_rate(step, warm, total, ratio, SHAPES[shape], least), 0, total)


def test_a_root_of_torchtitan_is_named() -> None:
    text = '[training]\nsteps = 900\n[lr_scheduler]\ndecay_type = "sqrt"\ndecay_ratio = 0.1\n'
    made = imported(FRAMEWORKS["torchtitan"], "x", text, Asked(clusters=2))
    assert {each.key for each in made.left if each.trains} >= {"lr_scheduler.decay_type", "lr_scheduler.decay_ratio"}
    assert made.plan.optimizer.total_steps is None


# DeepSpeed: deepspeed/runtime/lr_schedules.py, WarmupDecayLR._get_gamma; step s runs at the iteration before it


def test_the_line_of_deepspeed_is_a_step_behind() -> None:
    parameters = {"total_num_steps": 40, "warmup_num_steps": 5, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
    data = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": parameters},
    }
    made = imported(FRAMEWORKS["deepspeed"], "x", json.dumps(data), Asked(clusters=2, seq_len=64))
    own = made.plan.optimizer
    assert (own.decay, own.total_steps, own.min_lr) == ("linear", 40, 0.0)
    theirs = [1e-3 * max(0.0, (40 - (step - 1)) / 35) for step in range(6, 41)]
    assert [own.learning_rate(step - 1) for step in range(6, 41)] == pytest.approx(theirs)
    assert not {each.key for each in made.left} & {f"scheduler.params.{name}" for name in parameters}


# files of trainers

TRAINER = "model_name_or_path: org/unknown\nmax_length: 64\ndataset_name: d\npacking: true\nlearning_rate: 1.0e-3\n"
FACTORY = """model_name_or_path: org/unknown
stage: pt
do_train: true
finetuning_type: full
dataset: d
cutoff_len: 64
learning_rate: 1.0e-3
max_steps: 100
warmup_steps: 10
lr_scheduler_type: warmup_stable_decay
"""
FOUNDRY = """max_seq_len: 64
model: {name: mpt_causal_lm, d_model: 128, n_heads: 4, n_layers: 4, vocab_size: 256, attn_config: {attn_impl: flash}}
train_loader: {name: text, dataset: {local: d, max_seq_len: 64}}
scheduler: {name: linear_decay_with_warmup, t_warmup: 5ba, alpha_f: 0.1, alpha_i: 1.0}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
max_duration: 100ba
global_train_batch_size: 16
device_train_microbatch_size: 2
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: DEFAULT}
"""
BRIDGE = """# over llama31_8b_sft_2gpu_h100_bf16_config
train: {train_iters: 400, global_batch_size: 32}
optimizer: {lr: 1.0e-3, min_lr: 1.0e-4}
"""
NANOTRON = (Path(__file__).parents[2] / "data" / "bridge" / "jobs" / "nano_old_optimizer.yaml").read_text()


def read(folder: Path, framework: str, text: str, **options: int | bool) -> Imported:
    path = folder / "a.yaml"
    path.write_text(text)
    return api.import_plan(framework, path, **{"clusters": 4, **options})  # type: ignore[arg-type]


def test_the_line_of_transformers_is_that_of_a_plan(tmp_path: Path) -> None:
    text = f"{TRAINER}max_steps: 50\nwarmup_steps: 4\n"
    for said in ("", "lr_scheduler_type: linear\n"):  # the default is a line
        own = read(tmp_path, "trl", text + said).plan.optimizer
        follows(own, lambda step: 1e-3 * max(0.0, (50 - step) / (50 - 4)), 4, 55)
    with pytest.raises(DiagnosticError, match="linear ends at the last step"):
        read(tmp_path, "trl", TRAINER)
    with pytest.raises(DiagnosticError, match="linear comes down to 0: transformers stops"):
        read(tmp_path, "trl", f"{text}lr_scheduler_kwargs: {{min_lr: 1.0e-5}}\n")


def stable_rate(step: int, warm: int, level: int, falls: int, shape: Shape, least: float) -> float:
    """Return a share of lr as transformers' _get_wsd_scheduler_lambda does after the warm-up."""
    assert step >= warm
    if step < warm + level:
        return 1.0
    done = step - warm - level
    return least if done >= falls else shape(done / falls) * (1 - least) + least


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", [None, 20, 0])
def test_the_late_decay_of_transformers_is_that_of_a_plan(shape: str, level: int | None, tmp_path: Path) -> None:
    table = {
        "num_decay_steps": 12,
        "decay_type": shape,
        "min_lr_ratio": 0.1,
        "warmup_type": "linear",
        "num_cycles": 0.5,
    }
    table |= {} if level is None else {"num_stable_steps": level}
    text = f"{TRAINER}max_steps: 50\nwarmup_steps: 4\nlr_scheduler_type: warmup_stable_decay\n"
    made = read(tmp_path, "trl", f"{text}lr_scheduler_kwargs: {json.dumps(table)}\n")
    own, stays = made.plan.optimizer, 50 - 4 - 12 if level is None else level
    follows(own, lambda step: 1e-3 * stable_rate(step, 4, stays, 12, SHAPES[shape], 0.1), 4, 55)
    assert not {each.key for each in made.left if "lr_scheduler_kwargs" in each.key}
    assert ("max_steps" in {each.key for each in made.left}) is (level is not None)


def test_other_late_decays_of_transformers_are_named_or_refused(tmp_path: Path) -> None:
    text = f"{TRAINER}max_steps: 50\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: "
    made = read(tmp_path, "trl", f"{text}{{num_decay_steps: 9, decay_type: 1-sqrt, warmup_type: cosine}}\n")
    names = {"lr_scheduler_type", *(f"lr_scheduler_kwargs.{name}" for name in ("decay_type", "warmup_type"))}
    assert {each.key for each in made.left if each.trains} >= names
    assert made.plan.optimizer.total_steps is None
    with pytest.raises(DiagnosticError, match="needs the number of its last steps"):
        read(tmp_path, "trl", f"{text}{{num_stable_steps: 9}}\n")
    with pytest.raises(DiagnosticError, match="at least 0 is expected"):
        read(tmp_path, "trl", f"{text}{{num_stable_steps: -1, num_decay_steps: 2}}\n")


def test_llama_factory_keeps_a_third_level(tmp_path: Path) -> None:
    own = read(tmp_path, "llama-factory", FACTORY).plan.optimizer
    assert (own.decay, own.total_steps, own.decay_steps) == ("cosine", 100, 60)
    own = read(tmp_path, "llama-factory", f"{FACTORY}lr_scheduler_kwargs: {{num_decay_steps: 20}}\n").plan.optimizer
    assert (own.total_steps, own.decay_steps) == (10 + 30 + 20, 20)


def test_the_line_of_llm_foundry_is_that_of_a_plan(tmp_path: Path) -> None:
    made = read(tmp_path, "llm-foundry", FOUNDRY)
    follows(made.plan.optimizer, lambda step: 1e-3 * (1 + min(1.0, (step - 5) / 95) * (0.1 - 1)), 5, 105)
    assert "scheduler.alpha_i" not in {each.key for each in made.left}
    other = read(tmp_path, "llm-foundry", FOUNDRY.replace("alpha_i: 1.0", "alpha_i: 0.5"))
    assert "scheduler.alpha_i" in {each.key for each in other.left if each.trains}


def nanotron_rate(step: int, warm: int, begin: int | None, falls: int | None, shape: Shape) -> float:
    """Return the rate of helpers.py, lr_scheduler_builder, over 100 steps after the warm-up, from 1e-3 to 1e-5."""
    length = 100 - warm - (begin or 0) if falls is None else falls
    starts = warm if begin is None else begin
    if step < starts:
        return 1e-3
    return 1e-5 + (1e-3 - 1e-5) * (shape((step - starts) / length) if step < starts + length else 0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [None, 10, 40])
@pytest.mark.parametrize("falls", [None, 30])
def test_the_rate_of_nanotron_comes_down_alike(
    shape: str, begin: int | None, falls: int | None, tmp_path: Path
) -> None:
    more = f", lr_warmup_steps: 10, lr_decay_style: {shape}, min_decay_lr: 1.0e-05"
    more += "" if begin is None else f", lr_decay_starting_step: {begin}"
    more += "" if falls is None else f", lr_decay_steps: {falls}"
    text = NANOTRON.replace("lr_warmup_style: linear", f"lr_warmup_style: linear{more}")
    made = read(tmp_path, "nanotron", text, f32_state=True)
    follows(made.plan.optimizer, lambda step: nanotron_rate(step, 10, begin, falls, SHAPES[shape]), 11, 105)
    assert not {each.key for each in made.left if "learning_rate_scheduler" in each.key}


def test_other_decays_of_nanotron_are_named_or_refused(tmp_path: Path) -> None:
    def text(more: str) -> str:
        return NANOTRON.replace("lr_warmup_style: linear", f"lr_warmup_style: linear, min_decay_lr: 1.0e-05, {more}")

    made = read(tmp_path, "nanotron", text("lr_decay_style: 1-sqrt, lr_decay_steps: 9"), f32_state=True)
    prefix = "optimizer.learning_rate_scheduler."
    assert {each.key for each in made.left if each.trains} >= {f"{prefix}lr_decay_style", f"{prefix}lr_decay_steps"}
    assert made.plan.optimizer.total_steps is None
    for more, message in (
        ("lr_warmup_steps: 20, lr_decay_starting_step: 10", "before the 20 steps of warm-up end"),
        ("lr_warmup_steps: 20, lr_decay_starting_step: 90", "leaves -10 of 100 steps"),
    ):
        with pytest.raises(DiagnosticError, match=message):
            read(tmp_path, "nanotron", text(more), f32_state=True)


def test_the_late_decay_of_megatron_bridge_is_that_of_a_plan(tmp_path: Path) -> None:
    said = "lr_warmup_iters: 5, lr_decay_style: WSD, lr_wsd_decay_iters: 60"
    own = read(
        tmp_path, "megatron-bridge", f"{BRIDGE}scheduler: {{{said}, lr_wsd_decay_style: linear}}\n"
    ).plan.optimizer
    follows(own, lambda step: megatron_rate(step, 5, 400, 60, line, 1e-4), 6, 405)
    made = read(tmp_path, "megatron-bridge", f"{BRIDGE}scheduler: {{{said}}}\n")
    assert "scheduler.lr_decay_style" in {each.key for each in made.left if each.trains}
    assert made.plan.optimizer.total_steps is None
    with pytest.raises(DiagnosticError, match="needs the number of its last steps"):
        read(
            tmp_path,
            "megatron-bridge",
            f"{BRIDGE}scheduler: {{lr_decay_style: WSD, lr_wsd_decay_style: linear}}\n",
        )
    own = read(tmp_path, "megatron-bridge", f"{BRIDGE}scheduler: {{lr_decay_style: linear}}\n").plan.optimizer
    assert (own.decay, own.total_steps, own.decay_steps) == ("linear", 400, None)
