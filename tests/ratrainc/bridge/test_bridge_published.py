"""Settings files in the form that people publish: each becomes the plan of the job that the framework would run, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.text import Source
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.bridge.deepspeed_rules import FORBIDDEN, OPTIONS
from ratrain.ratrainc.bridge.hjson_text import hjson_settings
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.settings import Asked, flat
from ratrain.ratrainc.bridge.torchtitan_rules import RENAMED
from ratrain.ratrainc.cli import main

FOLDER = Path(__file__).parents[2] / "data" / "bridge" / "published"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
ASKED = {"deepspeed": Asked(clusters=8, seq_len=128), "torchtitan": Asked(clusters=8)}


def read(framework: str, text: str, asked: Asked | None = None) -> Imported:
    return imported(FRAMEWORKS[framework], "x", text, asked or ASKED[framework])


def refused(framework: str, text: str, asked: Asked | None = None) -> DiagnosticError:
    with pytest.raises(DiagnosticError) as caught:
        read(framework, text, asked)
    assert all(each.location is not None for each in caught.value.diagnostics)
    return caught.value


def ds(**settings_: Any) -> str:
    return json.dumps(
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}} | settings_
    )


def adam(**parameters: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 1e-4} | parameters}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_file_becomes_the_plan_of_its_job(name: str) -> None:
    case = EXPECTED[name]
    made = api.import_plan(
        case["from"],
        FOLDER / name,
        clusters=case.get("clusters"),
        seq_len=case.get("seq_len"),
        **case.get("options", {}),
    )
    for key, value in case["plan"].items():
        found = getattr(made.plan if hasattr(made.plan, key) else made.plan.optimizer, key)
        found = list(found) if isinstance(found, tuple) else found
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key
    assert set(made.unsaid) == set(case["unsaid"])
    assert {key: made.defaults[key].value for key in case["defaults"]} == case["defaults"]
    assert {each.key for each in made.left} >= set(case["named"])


@pytest.mark.parametrize("name", EXPECTED)
def test_the_head_names_each_default_with_its_source_and_each_setting_once(name: str) -> None:
    case = EXPECTED[name]
    made = api.import_plan(
        case["from"],
        FOLDER / name,
        clusters=case.get("clusters"),
        seq_len=case.get("seq_len"),
        **case.get("options", {}),
    )
    text = made.text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert len(head) == len(set(head))
    for key, each in made.defaults.items():
        assert each.source.endswith("__init__") or ", " in each.source, key
        lines = [line for line in head if f"defaults: {key} = " in line]
        assert len(lines) == 1
        assert each.source in lines[0]
    keys = {line.partition(" = ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert not keys & made.unsaid


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
TABLES = st.recursive(VALUES, lambda inner: st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("abc_ 1\"'\\é", min_size=1, max_size=6), TABLES, min_size=1, max_size=4),
    st.sampled_from([None, 1]),
)
def test_what_is_json_is_read_as_json(data: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(data, indent=indent)
    found = hjson_settings(Source("x", text), "it")
    wanted = dict(flat(data))
    if not any("." in key for key in wanted):
        assert {name: each.value for name, each in found.items()} == wanted
    for each in found.values():
        assert each.place.location is not None


@pytest.mark.parametrize(
    "text",
    [
        '{\n  # sizes\n  "train_batch_size": 64, // of all\n  "train_micro_batch_size_per_gpu": 4,\n  "bf16": {"enabled": true,},\n}',
        "train_batch_size: 64\ntrain_micro_batch_size_per_gpu: 4\nbf16: {\n  enabled: true\n}\n",
        "{/* sizes\n*/ 'train_batch_size': 6.4e1, train_micro_batch_size_per_gpu: 4\n bf16: {'enabled': true}}",
    ],
)
def test_a_file_of_deepspeed_is_read_by_the_rules_of_hjson(text: str) -> None:
    plan = read("deepspeed", text).plan
    assert (plan.dp, plan.micro_batch_size, plan.micro_batches, plan.view_dtype) == (8, 4, 2, "bf16")


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ('{\n  "a": 1,\n  "a": 2\n}', 3, 4, "a is said twice"),
        ('{"zero_optimization": {"stage": 1,\n "stage": 2}}', 2, 3, "zero_optimization.stage is said twice"),
        ('{"a": 1,\n "b": [1, 2\n', 3, 1, "Expecting value"),
        ('{\n  "a": 1 /* of the\n', 2, 10, "comment does not end"),
        ('{\n  "a" 1\n}', 2, 7, "':'"),
        ("[1, 2]", 1, 1, "object"),
    ],
)
def test_what_is_wrong_in_a_file_of_deepspeed_has_its_place(text: str, line: int, column: int, reason: str) -> None:
    first = refused("deepspeed", text).diagnostics[0]
    assert reason in first.message
    assert first.location is not None
    assert (first.location.line, first.location.column or 1) == (line, column)


def test_a_key_with_a_dot_is_not_the_key_of_a_table() -> None:
    assert "'zero_optimization.stage' is not known" in str(refused("deepspeed", ds(**{"zero_optimization.stage": 3})))
    made = read("deepspeed", ds(**{"my.key": 3}))
    assert "'my.key'" in {each.key for each in made.left}


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}


def test_what_is_auto_is_asked_for_and_the_advice_leads_to_a_plan() -> None:
    text = json.dumps(AUTO)
    error = refused("deepspeed", text)
    helps = [each.help or "" for each in error.diagnostics]
    assert helps == ["give --micro-batch-size N and --global-batch N", "give --dtype bf16, f16 or f32"]
    assert "neither" not in str(error)
    made = read("deepspeed", text, Asked(clusters=8, seq_len=128, micro_batch_size=2, global_batch=64, dtype="bf16"))
    assert (made.plan.micro_batch_size, made.plan.micro_batches, made.plan.view_dtype) == (2, 4, "bf16")
    assert {"clip", "max_norm"} <= made.unsaid
    assert "\nclip = " not in made.text()


OF_CALLER: dict[str, tuple[dict[str, Any], set[str]]] = {
    **{key: ({"optimizer": adam(**{key: "auto"})}, {key}) for key in ("lr", "betas", "eps", "weight_decay")},
    "highest": (
        {"optimizer": adam(lr="auto"), "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
        {"lr"},
    ),
    "length": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}, "optimizer": adam()},
        {"total_steps"},
    ),
    "warm-up": (
        {
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": 9}},
            "optimizer": adam(),
        },
        {"warmup_steps"},
    ),
    "least": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9999}}, "optimizer": adam(lr="auto")},
        {"lr", "min_lr"},
    ),
    "clipping": ({"gradient_clipping": "auto"}, {"clip"}),
    "optimizer": ({}, {"lr", "weight_decay", "betas", "eps"}),
}


@pytest.mark.parametrize("case", OF_CALLER)
def test_what_the_plan_has_in_the_place_of_what_the_caller_says_is_printed(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_, keys = OF_CALLER[case]
    path, output = tmp_path / "ds.json", tmp_path / "p.toml"
    path.write_text(ds(**settings_))
    words = ["import-plan", "--from", "deepspeed", str(path), "--clusters", "8", "--seq-len", "128"]
    assert main([*words, "-o", str(output)]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    own = plan_words(parse_plan(output.read_text(), file="p.toml", model=None))
    for key in keys:
        assert (f"{key} = {own[key]}" if key in own else f"no {key}") in printed, key


@pytest.mark.parametrize(
    ("known", "asked", "sizes"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, {}, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, {}, (2, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, {}, (2, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, {"global_batch": 64}, (2, 4)),
        ({"gradient_accumulation_steps": 4}, {"micro_batch_size": 2}, (2, 4)),
        ({"gradient_accumulation_steps": 4}, {"global_batch": 64}, (2, 4)),
        ({"train_batch_size": 64}, {"micro_batch_size": 2}, (2, 4)),
    ],
)
def test_of_three_sizes_two_say_the_third(known: dict[str, int], asked: dict[str, int], sizes: tuple[int, int]) -> None:
    text = json.dumps(AUTO | known)
    plan = read("deepspeed", text, Asked(clusters=8, seq_len=128, dtype="f32", **asked)).plan
    assert (plan.micro_batch_size, plan.micro_batches) == sizes
    if asked:  # one size of three is no batch, whatever DeepSpeed took if the others were not there
        assert refused("deepspeed", text, Asked(clusters=8, seq_len=128, dtype="f32"))


@pytest.mark.parametrize(
    ("bf16", "fp16", "asked", "view"),
    [
        (True, "auto", None, "bf16"),
        ("auto", True, None, "f16"),
        ("auto", False, "bf16", "bf16"),
        ("auto", "auto", "f32", "f32"),
        ("auto", None, None, None),
        (False, "auto", "bf16", None),
        (True, None, "f16", None),
        (True, True, None, None),
        (False, False, None, "f32"),
        (None, None, "f16", "f16"),
        (None, None, None, "f32"),
    ],
)
@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_a_type_that_is_not_known_is_never_f32(
    bf16: Any, fp16: Any, asked: str | None, view: str | None, name: str
) -> None:
    data = {"train_batch_size": 32} | ({} if bf16 is None else {name: {"enabled": bf16}})
    data |= {} if fp16 is None else {"fp16": {"enabled": fp16}}
    given_words = Asked(clusters=8, seq_len=128, dtype=asked)
    if view is None:
        assert refused("deepspeed", json.dumps(data), given_words)
    else:
        assert read("deepspeed", json.dumps(data), given_words).plan.view_dtype == view


SCHEDULERS = {
    "WarmupLR": ({"warmup_max_lr": 3e-4, "warmup_num_steps": 50}, (3e-4, 50, None)),
    "WarmupDecayLR": ({"total_num_steps": 2000}, (1e-3, 1000, 2000)),
    "WarmupCosineLR": ({"total_num_steps": 5000, "warmup_num_steps": 7}, (1e-4, 7, 5000)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("shape", [None, "log", "linear", "other"])
def test_a_scheduler_sets_the_learning_rate_as_in_deepspeed(kind: str, shape: str | None) -> None:
    parameters, wanted = SCHEDULERS[kind]
    parameters = parameters | ({} if shape is None else {"warmup_type": shape})
    made = read("deepspeed", ds(optimizer=adam(), scheduler={"type": kind, "params": parameters}))
    own = made.plan.optimizer
    assert (own.lr, own.warmup_steps, own.total_steps) == wanted
    named = {each.key for each in made.left}
    assert ("scheduler.params.warmup_type" in named) is (shape != "linear")
    assert ("optimizer.params.lr" in named) is (own.lr != 1e-4)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}},
        {"type": "LRRangeTest"},
        {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
        {"type": "Warmuplr"},
        {"type": "WarmupLR"},  # whose versions differ in what they take then
        {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 0}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "total_num_steps": 10}},
        {"type": "WarmupCosineLR", "params": {"warmup_max_lr": 1e-3, "total_num_steps": 10}},
        {"type": "WarmupCosineLR"},
        {"type": "WarmupDecayLR"},
        {"type": "auto"},
    ],
)
def test_a_scheduler_that_no_plan_follows_is_refused(scheduler: dict[str, Any]) -> None:
    error = refused("deepspeed", ds(optimizer=adam(), scheduler=scheduler))
    assert len(error.diagnostics) == 1


@pytest.mark.parametrize("kind", ["Lamb", "SGD", "Lion", "OneBitAdam", "FusedAdam", "Muon", "auto"])
def test_another_optimizer_is_refused(kind: str) -> None:
    error = refused("deepspeed", ds(optimizer={"type": kind, "params": {"lr": 1e-3, "momentum": 0.9}}))
    message = error.diagnostics[0].message
    assert kind in message
    assert "takes over none of its values (lr, momentum)" in message or kind == "auto"


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("mode", [None, True, False])
@pytest.mark.parametrize("of_torch", [None, True])
@pytest.mark.parametrize("decay", [None, 0.0, 0.2])
def test_weight_decay_is_decoupled_or_named(
    kind: str, mode: bool | None, of_torch: bool | None, decay: float | None
) -> None:
    said = {"adam_w_mode": mode, "torch_adam": of_torch, "weight_decay": decay}
    made = read("deepspeed", ds(optimizer={"type": kind, "params": {k: v for k, v in said.items() if v is not None}}))
    l2 = kind == "Adam" and mode is False
    theirs = decay if decay is not None else 0.01 if of_torch and not l2 else 0.0
    assert made.plan.optimizer.weight_decay == (0.0 if l2 else theirs)
    assert any(each.key == "optimizer.params.weight_decay" for each in made.left) is bool(l2 and theirs)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_changes_training_beyond_a_plan_is_refused_where_it_is_on(name: str) -> None:
    for on in (True, False):
        data = json.loads(ds(optimizer=adam()))
        within = data
        *tables, last = name.split(".")
        for table in tables:
            within = within.setdefault(table, {})
        within[last] = on
        if on:
            assert any(f"{name} is on" in each.message for each in refused("deepspeed", json.dumps(data)).diagnostics)
        else:
            made = read("deepspeed", json.dumps(data))
            assert name not in {each.key for each in made.left}
            assert made.plan == read("deepspeed", ds(optimizer=adam())).plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero_optimization": {"stages": 2}},
        {"zero_optimisation": {"stage": 2}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": 2},
        {"bf16": True},
        {"train_batchsize": 32},
        {"micro": {"train_micro_batch_size_per_gpu": 3}},
        {"optimizer": adam(learning_rate=1e-3)},
        {"optimizer": adam(max_grad_norm=1.0)},
        {"optimizer": adam(bias_correction=False)},
        {"tensor_parallel": {"size": 2}},
        {"gradient_allreduce_op": "sum"},
        {"data_parallel_size": 3},
        {"pipeline": {"stages": "auto"}},
        {"zero_optimization": {"stage": "auto"}},
    ],
)
def test_an_unknown_name_or_value_never_lets_a_default_take_its_place(wrong: dict[str, Any]) -> None:
    assert refused("deepspeed", ds(**wrong))


@pytest.mark.parametrize(("old", "zero"), [(True, 1), (False, 0)])
def test_the_old_form_of_zero_was_stage_1(old: bool, zero: int) -> None:
    assert read("deepspeed", ds(zero_optimization=old)).plan.zero == zero


def test_the_optimizer_of_the_caller_is_left_out_of_the_plan() -> None:
    made = read("deepspeed", ds())
    assert made.unsaid == {"lr", "weight_decay", "betas", "eps", "warmup_steps"}
    assert not {"lr", "betas"} & {line.partition(" = ")[0] for line in made.text().splitlines()}
    asked = Asked(clusters=8, seq_len=128, lr=1e-5, weight_decay=0.01, warmup_steps=9)
    said = read("deepspeed", ds(), asked)
    assert (said.plan.optimizer.lr, said.plan.optimizer.weight_decay, said.plan.optimizer.warmup_steps) == (
        1e-5,
        0.01,
        9,
    )


ON_THE_COMMAND_LINE = {
    "micro_batch_size": 2,
    "global_batch": 16,
    "dtype": "f16",
    "lr": 0.5,
    "weight_decay": 0.5,
    "max_norm": 0.5,
    "warmup_steps": 5,
    "steps": 5000,
}


@pytest.mark.parametrize("field", ON_THE_COMMAND_LINE)
def test_an_option_is_honoured_or_refused(field: str) -> None:
    assert {field for _, field in OPTIONS.values()} | {"dtype"} == set(ON_THE_COMMAND_LINE)
    value: Any = ON_THE_COMMAND_LINE[field]
    text = ds(gradient_clipping=1.0, optimizer=adam(weight_decay=0.1))
    text_with_end = ds(
        gradient_clipping=1.0,
        optimizer=adam(weight_decay=0.1),
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    )
    for each in (text_with_end, text) if field != "warmup_steps" else (text_with_end,):
        error = refused("deepspeed", each, Asked(clusters=8, seq_len=128, **{field: value}))
        assert f"--{field.replace('_', '-')}" in str(error)


@pytest.mark.parametrize("field", ON_THE_COMMAND_LINE)
def test_an_option_of_deepspeed_is_refused_for_others(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-plan", "--from", "torchtitan", str(FOLDER / "titan_2024_ddp.toml")]
    assert main([*words, f"--{field.replace('_', '-')}", str(ON_THE_COMMAND_LINE[field])]) == 2
    assert "--from deepspeed" in capsys.readouterr().err


def titan(**sections: dict[str, Any]) -> str:
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *[f"{key} = {json.dumps(value)}" for key, value in values.items()]]
    return "\n".join(lines) + "\n"


def merged(name: str, value: Any) -> str:
    base: dict[str, dict[str, Any]] = {
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}
    }
    section, _, key = name.partition(".")
    if key == "pipeline_parallel_degree":
        base = {"parallelism": {"pipeline_parallel_microbatch_size": 1}}
    base.setdefault(section, {})[key] = value
    if key == "pipeline_parallel_microbatches":
        del base["parallelism"]["pipeline_parallel_microbatch_size"]
    return titan(**base)


SAMPLES: dict[str, Any] = {
    "batch_size": 4,
    "warmup_steps": 17,
    "data_parallel_shard_degree": 4,
    "lr_min": 0.25,
    "fsdp_reshard_after_forward": "always",
    "pipeline_parallel_schedule": "GPipe",
    "pipeline_parallel_split_points": ["layers.3"],
    "pipeline_parallel_schedule_csv": "",
    "pipeline_parallel_microbatches": 4,
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_older_name_says_what_the_newer_one_says(old: str) -> None:
    value = SAMPLES.get(old.partition(".")[2], 2)
    before = read("torchtitan", merged(old, value)).plan
    assert before == read("torchtitan", merged(RENAMED[old], value)).plan
    if old.partition(".")[2] not in ("lr_min", "pipeline_parallel_schedule_csv"):
        assert before != read("torchtitan", merged("job.description", "as it is")).plan or "degree" in old
    both = merged(old, value) + titan(**{RENAMED[old].partition(".")[0] + "_": {}})
    assert read("torchtitan", both.replace(f"[{RENAMED[old].partition('.')[0]}_]\n", "")).plan == before


def test_an_older_name_may_not_contradict_the_newer_one() -> None:
    error = refused("torchtitan", titan(training={"batch_size": 2, "local_batch_size": 4}))
    assert "training.batch_size" in str(error)


def test_all_unknown_names_of_sections_that_decide_are_told_at_once() -> None:
    unknown = {
        "training": {"localbatch": 3, "sequence": 4},
        "parallelism": {"pipeline_degree": 2},
        "experimental": {"tensor_degree": 2},
        "optimizer": {"beta3": 0.5},
        "lr_scheduler": {"kind": "wsd"},
        "model": {"layers": 4},
        "paralelism": {"x": 1},
        "mine": {"local_batch_size": 2},
    }
    error = refused("torchtitan", titan(**unknown))
    messages = " ".join(each.message for each in error.diagnostics)
    names = [f"{section}.{key}" for section, keys in unknown.items() for key in keys]
    assert [name for name in names if f"{name} is not known" not in messages] == []
    assert len(error.diagnostics) == len(names)
    lines = [each.location.line for each in error.diagnostics if each.location is not None]
    assert len(set(lines)) == len(names)


def test_unknown_names_elsewhere_are_named() -> None:
    made = read("torchtitan", titan(checkpoint={"new_key": 1}, mine={"key": 2}))
    assert {each.key for each in made.left} >= {"checkpoint.new_key", "mine.key"}


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"warmup_pct": 0.2}},
        {"training": {"dtype": "bfloat16"}},
        {"training": {"data_parallel_degree": 4, "data_parallel_shard_degree": 4}},
        {"training": {"data_parallel_type": "zero"}},
        {"optimizer": {"name": "Adam"}},
        {"optimizer": {"name": "Muon"}},
        {"lr_scheduler": {"decay_type": "wsd"}},
        {"activation_checkpoint": {"mode": "some"}},
        {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "2F2B"}},
        {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule_csv": "order.csv"}},
        {
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_layers_per_stage": 4,
            }
        },
        {"training": {"batch_size": 8}, "parallelism": {"pipeline_parallel_degree": 2}},  # versions differ
        {"training": {"batch_size": 2}, "experimental": {"pipeline_parallel_degree": 4}},  # 4 micro-batches of 2
        {
            "training": {"local_batch_size": 6},
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4},
        },
        {
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_microbatch_size": 4,
                "pipeline_parallel_microbatches": 2,
            }
        },
        {
            "experimental": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_split_points": ["layers.2", "layers.4", "layers.6"],
            }
        },
    ],
)
def test_what_no_plan_says_of_a_job_is_refused(sections: dict[str, dict[str, Any]]) -> None:
    assert refused("torchtitan", titan(**sections))


@pytest.mark.parametrize(
    ("ratio", "steps", "total"),
    [(None, 1000, 1000), (0.8, 1000, 1000), (0.81, 1000, 1000), (0.79, 1000, 1000), (0.0, 1000, None)],
)
def test_a_cosine_that_begins_at_the_end_of_the_warm_up_is_that_of_a_plan(
    ratio: float | None, steps: int, total: int | None
) -> None:
    scheduler = {"decay_type": "cosine", "min_lr_factor": 0.5} | ({} if ratio is None else {"decay_ratio": ratio})
    own = read(
        "torchtitan", titan(training={"steps": steps}, optimizer={"lr": 0.5}, lr_scheduler=scheduler)
    ).plan.optimizer
    assert (own.warmup_steps, own.total_steps, own.min_lr) == (200, total, 0.25 if total else 0.0)


@pytest.mark.parametrize(
    ("sections", "view"),
    [
        ({"parallelism": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 8}}, "bf16"),
        ({"parallelism": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 8}}, "f32"),
        ({"parallelism": {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 8}}, "f32"),
        ({"parallelism": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 4}}, "bf16"),
        ({"training": {"data_parallel_degree": 8, "data_parallel_type": "ddp"}}, "f32"),
        ({"training": {"data_parallel_degree": 8}}, "bf16"),
    ],
)
def test_parameters_are_cast_where_torchtitan_casts_them(sections: dict[str, dict[str, Any]], view: str) -> None:
    made = read("torchtitan", titan(**sections))
    assert made.plan.view_dtype == view
    assert ("training.mixed_precision_param" in {each.key for each in made.left}) is (view == "f32")


def test_a_length_of_the_command_line_takes_the_place_of_a_default() -> None:
    assert read("torchtitan", titan(training={"steps": 3}), Asked(clusters=2, seq_len=99)).plan.seq_len == 99


def test_what_is_left_out_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-plan", "--from", "torchtitan", str(FOLDER / "titan_2024_ddp.toml")]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).lower().count("not carried over: training.mixed_precision_param") == 1
    assert main([*words, "-o", str(tmp_path / "p.toml")]) == 0
    assert capsys.readouterr().err.count("not carried over: training.mixed_precision_param") == 1
