"""No setting is lost: each changes the plan, or says what holds anyway, or is named with a reason of its own, or is refused."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.megatron_flags import BARE, COUNTS, GROUPS, KNOWN
from ratrain.ratrainc.bridge.megatron_reasons import reason
from ratrain.ratrainc.bridge.megatron_rules import CHOICES
from ratrain.ratrainc.bridge.settings import UNREAD, Asked, Setting
from ratrain.ratrainc.bridge.torchtitan_rules import RENAMED, SEEDS

WORDS: dict[str, list[Any]] = {
    "deepspeed": [
        *(1, 2, 4, 0, 0.1, True, False, "auto", "fp32", "linear", "mean", [0.9, 0.99]),
        *("AdamW", "Adam", "Lion", "WarmupLR", "WarmupCosineLR", "WarmupDecayLR"),
    ],
    "torchtitan": [
        *("1", "2", "4", "0", "-1", "0.5", "true", "[]", '"cosine"', '"1F1B"', '"Interleaved1F1B"', '"full"', '"ddp"'),
        *(
            '"always"',
            '"AdamW"',
            '"float32"',
            '"bfloat16"',
            '"fsdp"',
            '"none"',
            '""',
            '["layers.1"]',
            '"headtail"',
            '"ptrr"',
        ),
    ],
    "megatron": [
        *("1", "2", "4", "0", "0.1", "cosine", "constant", "flash", "unfused", "full", "selective", "uniform", "block"),
        *("optim", "optim_grads", "adam", "lion", "bf16", "fp32", "core_attn", "mlp", "Et|tL"),
    ],
}
ASKED = {"megatron": Asked(), "deepspeed": Asked(clusters=8, seq_len=128, pp=1), "torchtitan": Asked(clusters=8)}
SAME: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepspeed": {
        "bf16.enabled": (False,),
        "data_parallel_size": (4,),
        "bfloat16.enabled": (False,),
        "gradient_accumulation_steps": (1,),
        "gradient_allreduce_op": ("mean",),
        "optimizer.params.bias_correction": (True,),
        "optimizer.params.torch_adam": (True, False),
        "pipeline.stages": (1, "auto"),
        "sequence_parallel_size": (1,),
        "tensor_parallel.autotp_size": (0, 1),
        "zero_optimization": (False,),
        "scheduler.params.warmup_min_lr": (0,),
        "scheduler.params.warmup_min_ratio": (0,),
    },
    "torchtitan": {
        "debug.seed": (0,),
        "training.seed": (0,),
        "training.dtype": ("float32",),
        "training.data_parallel_type": ("fsdp", "ddp"),
        "lr_scheduler.decay_ratio": (1, 2, 4),
        "parallelism.context_parallel_load_balancer": ("headtail",),
        "parallelism.pipeline_parallel_split_points": ([], ""),
        "parallelism.module_fqns_per_model_part": ([],),
    },
    "megatron": {
        "accumulate-allreduce-grads-in-fp32": (True,),
        "attention-backend": ("flash",),
        "checkpoint-activations": (True,),
        "global-batch-size": ("2",),
        "loss-scale": ("0",),
        "use-flash-attn": (True,),
        "lr-warmup-fraction": ("0",),
        "lr-warmup-samples": ("0",),
        "main-grads-dtype": ("fp32",),
        "grad-reduce-in-bf16": (True,),
        "num-virtual-stages-per-pipeline-rank": ("1", "2", "4"),
        "tensor-parallel-num-weight-shards": ("1", "2", "4"),
        "use-distributed-optimizer": (True,),
        "use-megatron-fsdp": (True,),
        "use-custom-fsdp": (True,),
        "recompute-modules": ("core_attn",),
        "recompute-activations": (True,),
        "recompute-method": ("uniform",),
        "recompute-num-layers": ("1",),
    },
}
"""Values that say what holds in the plan anyway: without them, or by another setting beside them."""


def file_of(framework: str, said: dict[str, Any]) -> str:
    """A file with the settings, and those without which there is no plan."""
    if framework == "megatron":
        words = [f"--{name}" + ("" if name in BARE else f" '{value}'") for name, value in said.items()]
        return (
            f"WORLD_SIZE=8\n--micro-batch-size 1 --seq-length 64 --lr 1e-3 --lr-decay-style constant {' '.join(words)}"
        )
    if framework == "torchtitan":
        tables = defaultdict(list)
        for name, value in said.items():
            table, _, key = name.rpartition(".")
            tables[table].append(f"{key} = {value}")
        return "\n".join(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items())
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4}
    for name, value in said.items():
        *outer, key = name.split(".")
        within = data
        for each in outer:
            if not isinstance(within.get(each), dict):
                within[each] = {}
            within = within[each]
        within[key] = value
    return json.dumps(data)


def read(framework: str, text: str, without: str | None = None) -> Imported | None:
    """The import of a file, also without one of its settings; None if it is refused."""
    known = FRAMEWORKS[framework]

    def fewer(*given_: Any) -> dict[str, Setting]:
        found = known.settings(*given_)
        found.pop(without, None)
        return found

    try:
        return imported(known if without is None else evolve(known, settings=fewer), "x", text, ASKED[framework])
    except DiagnosticError:
        return None


@st.composite
def files(draw: st.DrawFn, framework: str) -> str:
    rules = FRAMEWORKS[framework].rules
    # of an older name and the newer one at most one: beside it the other says nothing
    twice = {*RENAMED, SEEDS[1]} if draw(st.booleans()) else {*RENAMED.values(), SEEDS[0]}
    names = st.sampled_from(
        sorted(name for name, rule in rules.items() if rule.keys and name not in {"WORLD_SIZE", *twice})
    )
    said = draw(st.dictionaries(names, st.sampled_from(WORDS[framework]), min_size=1, max_size=6))
    if framework == "deepspeed":
        if draw(st.booleans()):
            said |= {"optimizer.type": draw(st.sampled_from(["AdamW", "Adam"]))}
        if draw(st.booleans()):
            said |= {"scheduler.type": draw(st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]))}
    return file_of(framework, said)


BESIDE: dict[str, list[dict[str, Any]]] = {
    "deepspeed": [
        {},
        {"optimizer.type": "AdamW"},
        {
            "optimizer.type": "Adam",
            "optimizer.params.lr": 0.5,
            "scheduler.type": "WarmupDecayLR",
            **{f"scheduler.params.{name}": 9 for name in ("total_num_steps", "warmup_max_lr")},
        },
        {"optimizer.type": "AdamW", "scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": 99},
        {"fp16.enabled": True, "zero_optimization.stage": 3},
        {"sequence_parallel_size": 2, "zero_optimization.stage": 3},
    ],
    "torchtitan": [
        {},
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": '"Interleaved1F1B"'},
        {"parallelism.data_parallel_shard_degree": 1, "parallelism.tensor_parallel_degree": 2},
        {"lr_scheduler.decay_type": '"cosine"', "training.steps": 9000},
        {"parallelism.context_parallel_degree": 2, "parallelism.data_parallel_replicate_degree": 2},
    ],
    "megatron": [
        {},
        {"bf16": True, "use-distributed-optimizer": True, "lr-decay-style": "cosine", "lr-decay-iters": 50},
        {"fp16": True, "use-torch-fsdp2": True, "attention-backend": "unfused"},
        {"recompute-granularity": "selective", "attention-backend": "unfused", "lr-decay-style": "constant"},
        {"recompute-granularity": "full", "recompute-method": "block", "accumulate-allreduce-grads-in-fp32": True},
        {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "num-layers": 8},
        {"context-parallel-size": 4, "use-distributed-optimizer": True},
    ],
}
"""Settings beside which each one is tried."""


def lost(framework: str, text: str, tried: str | None = None) -> list[str]:
    """The settings of a file, or the one that is tried, that leave no trace, or have no reason of their own; none where the file is refused."""
    made = read(framework, text)
    if made is None:
        return []
    found = [f"{each.key}: {each.why}" for each in made.left if each.why in ("", UNREAD)]
    named = {each.key for each in made.left}
    for name, each in FRAMEWORKS[framework].settings_of("x", text, ASKED[framework]).items():
        if tried not in (None, name) or name in named or each.value in SAME[framework].get(name, ()):
            continue
        less = read(framework, text, name)
        if less is not None and less.text() == made.text():
            found.append(f"{name} = {each.value} is lost")
    return found


@pytest.mark.parametrize(
    ("framework", "beside"), [(framework, number) for framework in BESIDE for number in range(len(BESIDE[framework]))]
)
def test_each_value_of_a_setting_is_used_or_named_with_a_reason(framework: str, beside: int) -> None:
    near = BESIDE[framework][beside]
    wrong = []
    for name, rule in FRAMEWORKS[framework].rules.items():
        if rule.keys and name != "WORLD_SIZE" and RENAMED.get(name) not in near:
            wrong += [
                text
                for word in WORDS[framework][: 1 if framework == "megatron" and name in BARE else None]
                if (text := file_of(framework, near | {name: word})) and lost(framework, text, name)
            ]
    assert wrong == []


@pytest.mark.parametrize("framework", WORDS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_settings_beside_one_another_are_used_or_named(framework: str, data: st.DataObject) -> None:
    assert lost(framework, data.draw(files(framework))) == []


def test_what_deepspeed_does_not_read_is_not_said_to_be_beside_the_point() -> None:
    text = file_of("deepspeed", {"optimizer.params.lr": 0.1, "scheduler.params.warmup_num_steps": 5})
    made = read("deepspeed", text)
    assert made is not None
    why = {each.key: each.why for each in made.left}
    assert why["optimizer.params.lr"] == "DeepSpeed reads it only where optimizer.type is said"
    assert why["scheduler.params.warmup_num_steps"] == "DeepSpeed reads it only where scheduler.type is said"
    assert "lr" in made.unsaid


# each argument of Megatron-LM


def fate(name: str) -> str:
    """Return "refused" for an argument that sets no key, or the reason for which it is left out."""
    value = CHOICES[name][-1] if name in CHOICES else "7"
    more = " --use-distributed-optimizer" * (name == "overlap-param-gather")  # Megatron-LM stops without
    said = "" if name in BARE else f" {value}" * COUNTS.get(name, 1)
    try:
        made = imported(FRAMEWORKS["megatron"], "x", f"{file_of('megatron', {})} --{name}{said}{more}", Asked())
    except DiagnosticError as error:
        return "refused" if all(name in each.message for each in error.diagnostics) else str(error)
    return next(each.why for each in made.left if each.key == name)


@pytest.mark.parametrize("group", sorted(set(GROUPS.values())))
def test_each_argument_of_megatron_is_used_named_or_refused(group: str) -> None:
    rules = FRAMEWORKS["megatron"].rules
    for name in [each for each in GROUPS if GROUPS[each] == group]:
        if name not in rules:
            assert fate(name) == reason(name)
        elif not rules[name].keys:
            assert fate(name) == ("refused" if rules[name].refused else rules[name].says), name


def test_each_argument_without_a_rule_has_a_reason() -> None:
    assert [name for name in KNOWN if name not in FRAMEWORKS["megatron"].rules and not reason(name)] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--tensor-parallel-num-weight-shards 4", "for 1 tensor-parallel ranks"),
        ("--freeze-all-layers", "trains all parameters"),
        ("--perform-rl-step", "by reinforcement"),
        ("--encoder-seq-length 8", "exclude one another"),
        ("--main-grads-dtype fp8", "one of fp32, bf16"),
        ("--recompute-module mlp", "has no argument --recompute-module"),
    ],
)
def test_what_a_plan_cannot_follow_is_refused(more: str, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        imported(FRAMEWORKS["megatron"], "x", file_of("megatron", {}) + more, Asked())


def test_arguments_of_today_set_keys() -> None:
    made = read("megatron", file_of("megatron", {"use-torch-fsdp2": 1, "torch-fsdp2-no-reshard-after-forward": 1}))
    assert made is not None
    assert made.plan.zero == 2
    text = file_of("megatron", {"encoder-seq-length": 32}).replace("--seq-length 64", "")
    of_encoder = read("megatron", text)
    assert of_encoder is not None
    assert of_encoder.plan.seq_len == 32


@pytest.mark.parametrize("said", [{}, {"hidden-dropout": "0.2"}, {"hidden-dropout": "0.0"}])
def test_dropout_is_named_also_where_it_is_the_default_and_not_where_there_is_none(said: dict[str, Any]) -> None:
    made = read("megatron", file_of("megatron", said))
    assert made is not None
    named = {each.key: str(each.value) for each in made.left}
    value = str(said.get("hidden-dropout", 0.1))
    assert named.get("hidden-dropout") == (None if value == "0.0" else value)
    assert named["attention-dropout"] == "0.1"


FLOAT8 = {
    "megatron": [f"--{name}" for name in ("fp8-format hybrid", "fp8-margin 1", "fp4-format e2m1", "fp8-param-gather")],
    "deepspeed": ["fp8", "float8"],
    "torchtitan": ["float8", "mx", "quantize.linear.float8", "quantize.grouped_mm.mx"],
}


@pytest.mark.parametrize(
    ("framework", "name"), [(framework, each) for framework in FLOAT8 for each in FLOAT8[framework]]
)
def test_float8_is_named(framework: str, name: str) -> None:
    if framework == "megatron":
        text, key = f"{file_of(framework, {})}{name}", name.split(maxsplit=1)[0].removeprefix("--")
    else:
        key = f"{name}.enabled"
        text = file_of(framework, {key: True if framework == "deepspeed" else "true"})
    made = read(framework, text)
    assert made is not None
    assert next(each.why for each in made.left if each.key == key).startswith("float8 is no type of a plan")


TRAINS: dict[str, dict[str, Any]] = {
    "megatron": {
        "hidden-dropout": "0.1",
        "fp8-format": "hybrid",
        "lr-decay-style": "inverse-square-root",
        "optimizer": "lion",
        "rampup-batch-size": "1' '1' '9",
        "lr-warmup-init": "1e-6",
        "weight-decay-incr-style": "cosine",
        "multi-latent-attention": True,
        "main-grads-dtype": "bf16",
    },
    "deepspeed": {"gradient_clipping": "auto", "fp8.enabled": True, "my.key": 7},
    "torchtitan": {
        "lr_scheduler.decay_type": '"sqrt"',
        "model.converters": '["float8"]',
        "mine.key": "7",
    },
}
HARMLESS: dict[str, dict[str, Any]] = {
    "megatron": {"save": "x", "log-interval": "5", "hidden-size": "64", "overlap-grad-reduce": True},
    "deepspeed": {"steps_per_print": 5, "zero_optimization.overlap_comm": True, "wandb.enabled": True},
    "torchtitan": {"checkpoint.interval": "5", "training.compile": "true", "activation_checkpoint.debug": "true"},
}
AGREE: dict[str, dict[str, Any]] = {
    "megatron": {
        "attention-dropout": "0.0",
        "hidden-dropout": "0",
        "num-experts": "1",
        "expert-model-parallel-size": "1",
        "weight-decay-incr-style": "constant",
        "lr-warmup-init": "0.0",
    },
    "deepspeed": {
        "fp8.enabled": False,
        "amp.enabled": False,
        "elasticity.enabled": False,
        "elasticity.max_train_batch_size": 2000,
        "expert_parallel.enabled": False,
        "compression_training.weight_quantization": {},
    },
    "torchtitan": {
        "float8.enable_float8_linear": "false",
        "quantize.linear.float8.filter_fqns": '["output"]',
        "model.converters": "[]",
        "parallelism.expert_parallel_degree": "1",
    },
}


@pytest.mark.parametrize("framework", WORDS)
def test_what_trains_something_else_is_told_first_and_what_agrees_not_at_all(framework: str) -> None:
    off = {"attention-dropout": "0", "hidden-dropout": "0"} if framework == "megatron" else {}
    made = read(framework, file_of(framework, HARMLESS[framework] | TRAINS[framework]))
    assert made is not None
    assert {each.key for each in made.left if each.trains} >= TRAINS[framework].keys()
    assert {each.key for each in made.left if not each.trains} >= HARMLESS[framework].keys()
    assert [each.trains for each in made.left] == sorted((each.trains for each in made.left), reverse=True)
    *first, others = made.told()
    assert len(first) == sum(each.trains for each in made.left)
    assert [name for name in TRAINS[framework] if not any(f" {name} = " in line for line in first)] == []
    assert {*others.rpartition(": ")[2].split(", ")} >= HARMLESS[framework].keys()
    without = read(framework, file_of(framework, off | HARMLESS[framework] | AGREE[framework]))
    plain = read(framework, file_of(framework, off))
    assert without is not None
    assert plain is not None
    assert without.plan == plain.plan
    assert {each.key for each in without.left} == {each.key for each in plain.left} | HARMLESS[framework].keys()


@pytest.mark.parametrize(
    ("framework", "name", "value"),
    [
        ("megatron", "num-experts", "8"),
        ("megatron", "expert-model-parallel-size", "2"),
        ("megatron", "num-experts", "$N"),
        ("deepspeed", "expert_parallel.enabled", True),
        ("torchtitan", "parallelism.expert_parallel_degree", "2"),
    ],
)
def test_experts_become_no_dense_plan(framework: str, name: str, value: Any) -> None:
    text = file_of(framework, {name: value}).replace("'", "")
    with pytest.raises(DiagnosticError) as caught:
        imported(FRAMEWORKS[framework], "x", text, ASKED[framework])
    (problem,) = caught.value.diagnostics
    assert name in problem.message
    assert "another model would be trained" in problem.message or value == "$N"
    assert problem.help


@pytest.mark.parametrize(
    ("framework", "name", "value", "taken"),
    [
        ("torchtitan", "optimizer.lr", "3e-4", False),
        ("torchtitan", "training.seq_len", "64", False),
        ("torchtitan", "training.max_norm", "1.0", False),
        ("torchtitan", "parallelism.data_parallel_shard_degree", "8", False),
        ("deepspeed", "optimizer.params.lr", "3e-4", False),
        ("deepspeed", "gradient_clipping", "1.0", False),
        ("deepspeed", "gradient_accumulation_steps", "2", False),
        ("deepspeed", "zero_optimization.stage", "2", True),
        ("deepspeed", "bf16.enabled", "true", True),
        ("deepspeed", "fp16.loss_scale", "8", True),
    ],
)
def test_a_number_in_quotation_marks_is_taken_where_the_framework_takes_it(
    framework: str, name: str, value: str, taken: bool
) -> None:
    beside = {"optimizer.type": "AdamW"} if framework == "deepspeed" else {}
    beside |= {"fp16.enabled": True} if name == "fp16.loss_scale" else {}
    plain: Any = value if framework == "torchtitan" else json.loads(value)
    quoted = f'"{value}"' if framework == "torchtitan" else value
    assert read(framework, file_of(framework, beside | {name: plain})) is not None
    text = file_of(framework, beside | {name: quoted})
    if taken:
        assert read(framework, text) is not None
        return
    with pytest.raises(DiagnosticError, match=f"{name} is the text") as caught:
        imported(FRAMEWORKS[framework], "x", text, ASKED[framework])
    assert f"without quotation marks: {value}" in str([each.help for each in caught.value.diagnostics])
