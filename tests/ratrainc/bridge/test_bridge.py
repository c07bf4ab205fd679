"""Plans from settings of other frameworks, and settings from plans: nothing is lost unsaid, and the way back gives the same plan."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.optimizer import COSINE, DECAYS
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import made_for, parse_plan
from ratrain.ratrainc.bridge.exporting import export_plan
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.launchers import LAUNCHER
from ratrain.ratrainc.bridge.megatron_flags import BARE, COUNTS
from ratrain.ratrainc.bridge.recomputing import Recomputing
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.cli import main
from ratrain.targets.machine.machine import _built_in_text

FOLDER = Path(__file__).parents[2] / "data" / "bridge"
EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = {"megatron": "pretrain.sh", "deepspeed": "ds_config.json", "torchtitan": "job.toml"}
ASKED = {"megatron": Asked(), "deepspeed": Asked(seq_len=2048, pp=1), "torchtitan": Asked()}
REASONS = {name: rule.says for name, rule in FRAMEWORKS["megatron"].rules.items()}
DROPOUT = REASONS["hidden-dropout"]
LAYERS = 8
MODEL = evolve(load_model("llama-2-7b"), layers=LAYERS)


def read(framework: str, text: str, asked: Asked | None = None) -> Imported:
    return imported(FRAMEWORKS[framework], "x", text, ASKED[framework] if asked is None else asked)


def sample(framework: str) -> str:
    return (FOLDER / FILES[framework]).read_text()


EXPECTED = {
    "megatron": {"pp": 4, "tp": 2, "dp": 4, "chunks": 2, "schedule": "interleaved", "micro_batches": 128, "zero": 1},
    "deepspeed": {"pp": 1, "dp": 16, "micro_batches": 4, "zero": 2, "reduce": "each-micro-batch", "loss_scale": None},
    "torchtitan": {"pp": 2, "tp": 2, "dp": 8, "cuts": (2, 4, 6), "shard_group": 4, "zero": 1, "micro_batches": 8},
}


@pytest.mark.parametrize("framework", FILES)
def test_a_realistic_file_becomes_a_plan_that_reads_back(framework: str) -> None:
    made = read(framework, sample(framework))
    assert {key: getattr(made.plan, key) for key in EXPECTED[framework]} == EXPECTED[framework]
    model = evolve(load_model("llama-2-7b"), layers=8 if framework == "torchtitan" else 32)
    again = parse_plan(made.text(), file="p.toml", model=model)
    assert evolve(again, cuts=made.plan.cuts) == made.plan
    assert len(again.cuts) == made.plan.pp * made.plan.chunks - 1


@pytest.mark.parametrize("framework", FILES)
def test_every_setting_is_carried_or_named(framework: str) -> None:
    known = FRAMEWORKS[framework]
    made = read(framework, sample(framework))
    left = {each.key for each in made.left}
    found = known.settings_of("x", sample(framework), Asked())
    for name in found:
        carried = (
            name in left or name.removeprefix("$") in made.unset or (name in known.rules and known.rules[name].keys)
        )
        assert carried or (found[name].value is False and name in AGREE), name
    assert all(each.why for each in made.left)


AGREE = {"float8.enable_fsdp_float8_all_gather"}
"""Settings of the samples that say what a plan does anyway."""


def with_unknown(framework: str, name: str) -> tuple[str, str]:
    """A file with a setting of a name that nothing has, and the name it is told by."""
    text = sample(framework)
    if framework == "deepspeed":
        return json.dumps(json.loads(text) | {f"x{name}": {"inner": 7}}), f"x{name}.inner"
    return f"{text}[x{name}]\ninner = 7\n", f"x{name}.inner"


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["deepspeed", "torchtitan"]), st.from_regex(r"[a-z]{1,12}", fullmatch=True))
def test_every_unknown_setting_is_named(framework: str, name: str) -> None:
    text, key = with_unknown(framework, name)
    made, before = read(framework, text), read(framework, sample(framework))
    assert {each.key for each in made.left} - {each.key for each in before.left} == {key}
    assert made.plan == before.plan
    assert f"# Not carried over: {key} = " in made.text()


@pytest.mark.parametrize("framework", FILES)
def test_every_rule_that_carries_nothing_over_names_its_setting(framework: str) -> None:
    for name, rule in FRAMEWORKS[framework].rules.items():
        if rule.keys or rule.refused or name in FRAMEWORKS[framework].settings_of("x", sample(framework), Asked()):
            continue
        if framework == "megatron":
            before = "--nnodes $NNODES" if name in LAUNCHER else "--swiglu"
            text = sample(framework).replace(
                before, f"{before} --{name}{'' if name in BARE else ' 7' * COUNTS.get(name, 1)}"
            )
        elif framework == "deepspeed":
            data = json.loads(sample(framework))
            within = data
            *tables, last = name.split(".")
            for table in tables:
                within = within.setdefault(table, {})
            within[last] = "auto" if "refused" in rule.says else 7
            text = json.dumps(data)
        else:
            section, key = name.split(".")
            body = sample(framework)
            head = f"[{section}]\n"
            text = body.replace(head, f"{head}{key} = 7\n") if head in body else f"{body}{head}{key} = 7\n"
        assert name in {each.key for each in read(framework, text).left}, name


CONTRADICTIONS = {
    "no argument": ("megatron", "--lr 3.0e-4", "--lr 3.0e-4 --lrs 1.0e-4", "has no argument --lrs"),
    "two types": ("megatron", "--bf16", "--bf16 --fp16", "exclude one another"),
    "a batch": ("megatron", "--global-batch-size 512", "--global-batch-size 511", "not a multiple"),
    "ranks": ("megatron", "GPUS_PER_NODE=8", "GPUS_PER_NODE=3", "not a multiple"),
    "chunks": ("megatron", "--num-layers 32", "--num-layers 30", "do not make up"),
    "no number": ("megatron", "--seq-length 4096", "--seq-length $1", "an argument of the script"),
    "three sizes": ("deepspeed", '"train_batch_size": 256', '"train_batch_size": 250', "not a multiple"),
    "both halves": ("deepspeed", '"steps_per_print": 10', '"bf16": {"enabled": true}', "exclude one another"),
    "a key twice": ("deepspeed", '"steps_per_print"', '"train_batch_size"', "said twice"),
    "parts": ("torchtitan", '    ["layers.2", "layers.3"],\n', "", "cannot be shared out evenly"),
    "global batch": ("torchtitan", "global_batch_size = 64", "global_batch_size = 60", "no multiple"),
    "a balancer": (
        "torchtitan",
        "[parallelism]",
        '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = ""',
        "headtail or ptrr is expected",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_at_its_place(case: str) -> None:
    framework, before, after, reason = CONTRADICTIONS[case]
    text = sample(framework).replace(before, after, 1)
    assert text != sample(framework)
    with pytest.raises(DiagnosticError) as caught:
        read(framework, text)
    assert any(reason in each.message for each in caught.value.diagnostics), str(caught.value)
    assert all(each.location is not None for each in caught.value.diagnostics)


def test_ranks_are_those_of_the_variable_where_no_launcher_says_them() -> None:
    bare = "--micro-batch-size 1 --seq-length 8 --lr 1e-4 --lr-decay-style constant"
    assert read("megatron", f"WORLD_SIZE=6\n{bare}").plan.dp == 6
    assert read("megatron", bare, Asked(clusters=5)).plan.dp == 5
    with pytest.raises(DiagnosticError, match="on how many ranks"):
        read("megatron", bare)
    assert read("megatron", f"WORLD_SIZE=6\ntorchrun --nproc-per-node=8 x.py {bare}").plan.dp == 8


def test_settings_without_effect_beside_the_others_are_named() -> None:
    bare = "WORLD_SIZE=2\n--micro-batch-size 1 --lr 1 --lr-decay-style constant --seq-length 8 --pipeline-model-parallel-size 2 --num-layers 4"
    idle = ["nnodes", "sequence-parallel", "recompute-activations", "recompute-granularity", "loss-scale", "min-lr"]
    idle += ["lr-wsd-decay-iters", "attention-dropout", "hidden-dropout"]
    said = "--nnodes 1 --sequence-parallel --recompute-activations --recompute-granularity selective --loss-scale 8"
    made = read(
        "megatron", f"{bare} {said} --min-lr 0.1 --lr-wsd-decay-iters 3 --pipeline-model-parallel-layout 'E(t|)*1tttL'"
    )
    assert made.plan.cuts == (1,)
    assert {each.key for each in made.left} == {*idle, "num-layers"}


@pytest.mark.parametrize(("framework", "asked"), [("megatron", Asked(clusters=7)), ("torchtitan", Asked(seq_len=5))])
def test_the_command_line_may_not_contradict_the_file(framework: str, asked: Asked) -> None:
    with pytest.raises(DiagnosticError, match="contradicts"):
        read(framework, sample(framework), asked)


@st.composite
def plans(draw: st.DrawFn, framework: str) -> Plan:
    """Plans that the settings of a framework can say."""
    pp = draw(st.integers(1, 4))
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    cuts = draw(st.permutations(range(1, LAYERS)))[: pp * chunks - 1]
    tp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2, 3]))
    dp = draw(st.sampled_from([2, 4, 6] if cp == 1 else [1, 2, 4, 6]))
    lr, total, warm = draw(st.floats(1e-6, 1)), draw(st.none() | st.integers(101, 10**6)), draw(st.integers(0, 100))
    zero, each, view, whole, shards, group = 0, False, "bf16", "f32", "f32", None
    if framework == "megatron":
        zero = draw(st.integers(0, 3))
        each = zero > 1
        view = draw(st.sampled_from(["bf16", "f16", "f32"]))
        whole = "f32" if view == "f32" else draw(st.sampled_from(["f32", view]))
        shards = whole
    else:
        view = draw(st.sampled_from(["bf16", "f32"]))
        zero = draw(st.sampled_from([0, 2, 3] if pp == 1 else [0, 1, 3]))
        if cp > 1:  # torchtitan's context ranks share out state in any case
            zero = zero or 3
        if not zero and (pp > 1 or tp > 1):
            view = "f32"  # torchtitan casts parameters by FSDP, and without it only where replicas are all there is
        each = pp == 1 and zero > 0
        shards = draw(st.sampled_from(["bf16", "f32"])) if zero else "f32"
        whole = "f32" if not zero else view if pp == 1 else shards
        groups = [cp * shard for shard in (1, 2) if zero and cp * shard > 1 and shard < dp]
        group = draw(st.none() | st.sampled_from(groups)) if groups else None
    clip = draw(st.sampled_from(["none", "global"]))
    return Plan(
        pp=pp,
        dp=dp,
        cuts=tuple(sorted(cuts)),
        micro_batch_size=draw(st.integers(1, 8)),
        micro_batches=pp * draw(st.integers(1, 9)),
        seq_len=draw(st.integers(320, 1 << 14)) * (1 if cp == 1 else 2 * cp),
        cp=cp,
        zero=zero,
        reduce="each-micro-batch" if each else "last",
        view_dtype=view,
        grad_dtype=whole,
        grad_shard_dtype=shards,
        loss_scale=draw(st.none() | st.floats(1, 2**20)) if view == "f16" else 1.0,
        schedule=None if pp == 1 else "interleaved" if chunks > 1 else "1f1b",
        seed=draw(st.integers(0, 1 << 31)),
        chunks=chunks,
        tp=tp,
        sequence_sharding=tp == 1 or framework == "torchtitan" or draw(st.booleans()),
        shard_group=group,
        optimizer=Optimizer(
            lr=lr,
            betas=(draw(st.floats(0, 0.99)), draw(st.floats(0, 0.999))),
            eps=draw(st.floats(1e-20, 1e-3)),
            weight_decay=draw(st.floats(0, 1)),
            warmup_steps=warm,
            total_steps=total,
            decay=draw(st.sampled_from(DECAYS)) if total else COSINE,
            decay_steps=draw(st.none() | st.integers(1, total - warm)) if total and total > warm else None,
            min_lr=0.0 if total is None else draw(st.sampled_from([0.0, lr / 8, lr])),
            clip=clip,
            max_norm=draw(st.floats(0.1, 10)) if clip == "global" else 1.0,
        ),
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["megatron", "torchtitan"]))
def test_what_is_exported_reads_back_as_an_equal_plan(data: st.DataObject, framework: str) -> None:
    plan = data.draw(plans(framework))
    again = Recomputing(data.draw(st.sampled_from(["none", "full"])))
    exported = export_plan(framework, plan, MODEL, again)
    assert not exported.missing
    back = read(framework, exported.text, Asked())
    assert back.plan == plan
    assert back.passes == (("recompute{policy=full}",) if again.kind == "full" else ())
    # the model is in its own file
    assert {each.why for each in back.left} <= {REASONS["hidden-size"], DROPOUT}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize(
    ("passes", "kind"),
    [
        ("", "assumed"),
        ("recompute{policy=full}", "full"),
        ("recompute{policy=full placement=forward-side}", "full"),
        ("recompute{policy=mlp}", "other"),
        ("recompute{policy=none}", "none"),
        ("recompute{policy=auto budget=1GiB}", "none"),  # all is kept, as all fits
        ("joint-order{policy=full}", "full"),
        ("joint-order{policy=attention}", "other"),
        ("joint-order{policy=none}", "none"),
    ],
)
def test_what_a_schedule_computes_again_is_said_or_named(framework: str, passes: str, kind: str) -> None:
    module = api.lowered(str(EXAMPLES / "tiny.json"), str(EXAMPLES / "tiny.toml"))
    if passes:
        api.run_passes(module, f"place-1f1b,{passes}")
    exported = api.export(module, framework)
    back = read(framework, exported.text, Asked())
    assert back.passes == (("recompute{policy=full}",) if kind == "full" else ())
    assert "activation_checkpoint.mode" not in {*back.defaults, *(each.key for each in back.left)}
    assert ("recompute" in {each.key for each in exported.missing}) is (kind == "other")
    assert ("# Assumed: nothing is computed again" in exported.text) is bool(exported.assumed) is (kind == "assumed")


@pytest.mark.parametrize("view", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("reduced", ["f16", "bf16", "f32"])
def test_torchtitan_is_given_types_that_it_has(view: str, reduced: str) -> None:
    plan = Plan(pp=1, dp=2, cuts=(), micro_batch_size=1, micro_batches=4, seq_len=128, zero=3, view_dtype=view)
    exported = export_plan("torchtitan", evolve(plan, grad_dtype="f32", grad_shard_dtype=reduced), MODEL)
    found = FRAMEWORKS["torchtitan"].settings_of("x", exported.text, Asked())
    types = {name.rpartition("_")[2]: each.value for name, each in found.items() if "mixed_precision" in name}
    assert types.keys() == {"param", "reduce"}
    assert {*types.values()} <= {"bfloat16", "float32"}
    missing = {each.key for each in exported.missing}
    assert ("view_dtype" in missing, "grad_shard_dtype" in missing) == (view == "f16", reduced == "f16")
    for name in ("param", "reduce"):
        text = re.sub(rf'{name} = "\w+"', f'{name} = "float16"', exported.text)
        with pytest.raises(DiagnosticError, match="one of float32, bfloat16 is expected"):
            read("torchtitan", text, Asked())


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize("total", [None, 900])
def test_the_length_of_a_run_is_left_to_be_said(framework: str, total: int | None) -> None:
    plan = Plan(pp=1, dp=2, cuts=(), micro_batch_size=1, micro_batches=4, seq_len=128)
    exported = export_plan(framework, evolve(plan, optimizer=Optimizer(total_steps=total)), MODEL)
    name = {"megatron": "train-iters", "torchtitan": "training.steps"}[framework]
    assert name not in FRAMEWORKS[framework].settings_of("x", exported.text, Asked())
    assert name.rpartition(".")[2] in exported.to_add
    assert read(framework, exported.text, Asked()).plan.optimizer.total_steps == total


OUTSIDE = {
    "mlp_chunk": {"mlp_chunk": 16},
    "head_chunk": {"head_chunk": 16},
    "slices": {"slices": (64, 64)},
    "logits": {"logits": "whole"},
    "schedule": {"schedule": "zb-h1"},
    "context_layout": {"cp": 2, "context_layout": "contiguous"},
}


@pytest.mark.parametrize("key", OUTSIDE)
@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_what_settings_cannot_express_is_named(framework: str, key: str) -> None:
    plan = Plan(pp=2, dp=2, cuts=(3,), micro_batch_size=1, micro_batches=4, seq_len=128, view_dtype="bf16")
    plan = evolve(plan, schedule="1f1b", grad_dtype="f32", grad_shard_dtype="f32", loss_scale=1.0)
    assert not export_plan(framework, plan, MODEL).missing
    exported = export_plan(framework, evolve(plan, **OUTSIDE[key]), MODEL)
    assert key in [each.key for each in exported.missing]
    assert f"# Not expressed: {key} = " in exported.text


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*FILES]), st.integers(0, 1 << 30))
def test_a_spoilt_file_becomes_a_plan_or_a_diagnostic(framework: str, seed: int) -> None:
    draw = random.Random(seed)
    words = re.split(r"(\s+|[\[\]{}:,=])", sample(framework))
    at = draw.randrange(len(words))
    words[at] = draw.choice(["", "-1", "0", "'", "$((9**9))", "1e400", "true", "[]", "{}", "--", "9" * 30, *words])
    with suppress(DiagnosticError):
        assert read(framework, "".join(words)).text()


def test_the_command_prints_a_plan_and_names_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "p.toml")
    given_words = ["import-plan", "--from", "megatron", str(FOLDER / "pretrain.sh")]
    assert main([*given_words, "-o", output, "--json"]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert data["plan"]["tp"] == 2
    assert data["passes"] == ["recompute{policy=full}"]
    assert data["defaults"]["seed"] == 1234
    assert {each["key"] for each in data["not_carried"]} >= {"moe-aux-loss-coeff", "save"}
    (others,) = [line for line in shown.err.replace("\n  ", " ").splitlines() if "without effect" in line]
    assert {"moe-aux-loss-coeff", "save"} <= {*others.rpartition(": ")[2].split(", ")}
    assert main(given_words) == 0
    assert capsys.readouterr().out == Path(output).read_text()


@pytest.mark.parametrize(("stage", "size", "group"), [(3, 4, 4), (3, 16, None), (3, 1, None), (2, 4, None)])
def test_the_secondary_partition_of_views_is_a_view_group(stage: int, size: int, group: int | None) -> None:
    data = json.loads(sample("deepspeed"))
    data["zero_optimization"] |= {"stage": stage, "zero_hpz_partition_size": size}
    made = read("deepspeed", json.dumps(data))
    assert made.plan is not None
    assert made.plan.view_group == group
    assert ("zero_optimization.zero_hpz_partition_size" in {each.key for each in made.left}) is (group is None)


def test_a_plan_that_goes_out_and_comes_back_keeps_the_machine_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import-plan --machine` writes what a plan's file has of its machine; without it, a line says which is taken."""
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("m/own.toml").write_text(_built_in_text("h100-node"))
    (tmp_path / "x.megatron").write_text(
        "WORLD_SIZE=2\nARGUMENTS=(--micro-batch-size 1 --global-batch-size 4 "
        "--seq-length 64 --bf16 --lr 1e-3 --lr-decay-style constant --num-layers 2)\n"
    )
    words = ["import-plan", "--from", "megatron", "x.megatron"]
    for machine, named in (("h100-node", "h100-node"), ("m/own.toml", "../m/own.toml")):
        Path("plans").mkdir(exist_ok=True)
        assert main([*words, "--machine", machine, "--capacity", "40GiB", "-o", "plans/P.toml"]) in (0, None)
        said = capsys.readouterr()
        assert "no machine is named" not in said.err
        text = Path("plans/P.toml").read_text()
        assert f'[made_for]\nmachine = "{named}"\ncapacity = {40 << 30}\n' in text
        found = made_for("plans/P.toml")
        assert found is not None
        assert (found.machine, found.capacity) == (machine, 40 << 30)
        assert main([*words, "--machine", machine, "--json"]) in (0, None)
        assert json.loads(capsys.readouterr().out)["made_for"] == {"machine": machine, "capacity": None}
    assert main([*words, "-o", "plans/P.toml"]) in (0, None)
    assert "no machine is named: commands take 'mt3000'" in " ".join(capsys.readouterr().err.split())
    assert made_for("plans/P.toml") is None
