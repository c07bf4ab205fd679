"""Small launch scripts and settings files, each with one thing that a framework or bash does in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.exporting import export_plan

LAUNCH = (
    "torchrun --nproc_per_node {ranks} pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 64 --max-position-embeddings 64 --lr 1e-4 --lr-decay-style constant --micro-batch-size 1 {more}\n"
)
UNEVEN = "--decoder-first-pipeline-num-layers 5"
TORCHTITAN = "[training]\nseq_len = 64\nlocal_batch_size = 1\nmax_norm = {norm}\n[optimizer]\nlr = 1e-4\n"


def launch(more: str, before: str = "", ranks: str = "8") -> str:
    return before + LAUNCH.format(more=more, ranks=ranks)


def plan_of(text: str, tmp_path: Path, framework: str = "megatron", **options: Any) -> api.Imported:
    path = tmp_path / {"megatron": "job.sh", "torchtitan": "job.toml", "deepspeed": "ds.json"}[framework]
    path.write_text(text)
    return api.import_plan(framework, path, **options)


PLANS = {
    "nothing in backquotes": (launch("`` --bf16"), {}, {"view_dtype": "bf16"}),
    "a comment in backquotes": (
        launch("`# of views` \\\n --bf16 `# and` \\\n --seed 3"),
        {},
        {"view_dtype": "bf16", "seed": 3},
    ),
    "a comment in a substitution": (launch("$(# views\n) --bf16 $()"), {}, {"view_dtype": "bf16"}),
    "a backquoted command": (launch("`echo --bf16`"), {}, {"view_dtype": "bf16"}),
    "printf into a variable": (launch("--seed $SEED", "printf -v SEED '%d' 77\n"), {}, {"seed": 77}),
    "an array of lines, given": (
        launch("", "mapfile -t H < hosts\n", "$((2 * ${#H[@]}))"),
        {"given": {"H": "n1 n2 n3"}},
        {"dp": 6},
    ),
    "arguments on lines": (
        "--tensor-model-parallel-size 2\n--micro-batch-size 3\n--lr 1e-3\n--lr-decay-style constant\n--seq-length 64\n",
        {"clusters": 4},
        {"tp": 2, "dp": 2, "micro_batch_size": 3},
    ),
    "a loss scale of 0": (launch("--fp16 --loss-scale 0"), {}, {"loss_scale": None}),
    "modules without scores": (
        launch("--recompute-granularity selective --recompute-modules mlp --attention-backend unfused"),
        {},
        {"attention": "scores-kept"},
    ),
    "modules with scores": (
        launch("--recompute-granularity selective --recompute-modules mlp core_attn --attention-backend unfused"),
        {},
        {"attention": "scores-recomputed"},
    ),
    "instances of the optimizer": (
        launch("--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
        {},
        {"zero": 1, "shard_group": 4},
    ),
    "an instance a replica": (
        launch("--use-distributed-optimizer --num-distributed-optimizer-instances 8"),
        {},
        {"zero": 0, "shard_group": None},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_script_means_what_bash_and_megatron_take_it_for(name: str, tmp_path: Path) -> None:
    text, options, expected = PLANS[name]
    plan = plan_of(text, tmp_path, **options).plan
    assert {key: getattr(plan, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("modules", "backend", "attention"),
    [
        ("layernorm", "unfused", "scores-kept"),
        ("layernorm core_attn", "unfused", "scores-recomputed"),
        ("layernorm", "flash", "fused"),
    ],
)
def test_norms_that_are_computed_again(modules: str, backend: str, attention: str, tmp_path: Path) -> None:
    said = f"--recompute-granularity selective --recompute-modules {modules} --attention-backend {backend}"
    found = plan_of(launch(said), tmp_path)
    assert found.plan.attention == attention
    assert found.passes == ("recompute{policy=norms}",)
    assert not [left.key for left in found.left if "recompute" in left.key]


REFUSED = {
    "the last of two arguments is given": (launch("--seed $1 --lr $2"), {"given": {"2": "1e-3"}}, "--set 1=VALUE"),
    "a name hangs on an argument": (
        launch('"${F[@]}"', 'for kv in seed=$1; do F+=("--${kv%%=*}" "${kv#*=}"); done\n'),
        {},
        "--set 1=VALUE",
    ),
    "lines of hosts": (launch("", "mapfile -t H < hosts\nN=${#H[@]}\n", "$N"), {}, "--set N=VALUE"),
    "words that a program prints": (launch("$(date -R | cut -c1-3)"), {}, "write into the script"),
    "lengths in two units": (launch("--train-iters 9 --lr-warmup-samples 8"), {}, None),
    "warm-up as long as decay": (launch("--train-iters 9 --lr-warmup-iters 9"), {}, None),
    "everything again, by no method": (launch("--recompute-granularity full"), {}, None),
    "gathers beside compute of nothing shared": (launch("--overlap-param-gather"), {}, None),
    "instances of no optimizer": (launch("--num-distributed-optimizer-instances 2"), {}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_or_nobody_knows_is_refused(name: str, tmp_path: Path) -> None:
    text, options, way_out = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        plan_of(text, tmp_path, **options)
    (problem,) = caught.value.diagnostics
    assert way_out is None or way_out in (problem.help or "")


def test_an_argument_that_is_not_given_is_named(tmp_path: Path) -> None:
    made = plan_of(launch('${BF:+--bf16} --seed "${2:-3}"', "BF=$2; echo $1\n"), tmp_path, given={"1": "x"})
    assert made.plan.seed == 3
    assert "$2 is not given" in made.text()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("--recompute-method uniform --recompute-num-layers 1", False),
        ("--recompute-method uniform --recompute-num-layers 2", True),  # groups of layers
        ("--recompute-method block --recompute-num-layers 8", False),
        ("--recompute-method block --recompute-num-layers 7", True),
        ("--recompute-method block --recompute-num-layers 2 --pipeline-model-parallel-size 4", False),
        ("--recompute-method block --recompute-num-layers 1 --pipeline-model-parallel-size 4", True),
        ("--recompute-method block --recompute-num-layers 2 --pipeline-model-parallel-size 4 " + UNEVEN, True),
    ],
)
def test_megatron_recomputes_all_layers_by_either_method(said: str, named: bool, tmp_path: Path) -> None:
    made = plan_of(launch(f"--recompute-granularity full {said}"), tmp_path)
    assert made.passes == ("recompute{policy=full}",)
    assert ("recompute-method" in {each.key for each in made.left}) is named


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ("", ("recompute{policy=full every=2}",)),  # torchtitan's default
        ('[activation_checkpoint]\nmode = "none"', ()),
        ('[activation_checkpoint]\nmode = "full"\nselective_ac_option = "3"', ("recompute{policy=full}",)),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', ("recompute{policy=ops}",)),
        ('[activation_checkpoint]\nselective_ac_option = "3"', ("recompute{policy=full every=3}",)),
        ('[activation_checkpoint]\nselective_ac_option = "1"', ("recompute{policy=full}",)),
        ('[activation_checkpoint]\nselective_ac_option = "op"\n[parallelism]\ntensor_parallel_degree = 2', ()),
        ('[activation_checkpoint]\nselective_ac_option = "2"\n[parallelism]\npipeline_parallel_degree = 2', ()),
    ],
)
def test_torchtitan_recomputes_what_a_policy_does_or_it_is_named(
    more: str, passes: tuple[str, ...], tmp_path: Path
) -> None:
    made = plan_of(TORCHTITAN.format(norm="1.0") + more, tmp_path, "torchtitan", clusters=4)
    assert made.passes == passes
    option = "activation_checkpoint.selective_ac_option"
    named = "parallelism" in more or '"full"' in more
    assert (option in {each.key for each in made.left}) is named


def test_torchtitan_refuses_an_option_that_it_does_not_know(tmp_path: Path) -> None:
    text = TORCHTITAN.format(norm="1.0") + '[activation_checkpoint]\nselective_ac_option = "ops"'
    with pytest.raises(DiagnosticError, match="'op' or a whole number"):
        plan_of(text, tmp_path, "torchtitan", clusters=2)


def test_recomputation_of_an_imported_file_runs(tmp_path: Path) -> None:
    for option, kept in (("op", "ops"), ("2", "every")):
        text = TORCHTITAN.format(norm="1.0") + f'[activation_checkpoint]\nselective_ac_option = "{option}"'
        made = plan_of(text, tmp_path, "torchtitan", clusters=2)
        module = api.lowered(load_model(str(Path(__file__).parents[3] / "examples" / "tiny.json")), made.plan)
        api.run_passes(module, f"place-1f1b,{made.passes[0]}")
        assert kept in module.pipeline


@pytest.mark.parametrize(("norm", "clip"), [("inf", "none"), ("0.5", "global")])
def test_torchtitan_leaves_gradients_where_the_norm_is_infinite(norm: str, clip: str, tmp_path: Path) -> None:
    made = plan_of(TORCHTITAN.format(norm=norm), tmp_path, "torchtitan", clusters=2)
    assert made.plan.optimizer.clip == clip


def test_torchtitan_makes_gradients_0_where_the_norm_is_0(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="every gradient 0"):
        plan_of(TORCHTITAN.format(norm="0.0"), tmp_path, "torchtitan", clusters=2)


def test_a_scheduler_without_its_highest_rate_is_asked_for_it_in_a_way_that_works(tmp_path: Path) -> None:
    text = (
        '{"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": "true"},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},'
        ' "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}'
    )
    with pytest.raises(DiagnosticError) as caught:
        plan_of(text, tmp_path, "deepspeed", clusters=2, seq_len=64)
    (problem,) = caught.value.diagnostics
    assert "--lr 0.0001" in (problem.help or "")
    made = plan_of(text, tmp_path, "deepspeed", clusters=2, seq_len=64, lr=1e-4)
    assert (made.plan.optimizer.lr, made.plan.view_dtype) == (1e-4, "f16")


def test_a_file_of_stray_words_is_refused_with_some_of_them(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        plan_of(launch("{ x = " * 20_000), tmp_path)
    assert 10 <= len(caught.value.diagnostics) <= 100


@pytest.mark.parametrize(("times", "way_out"), [(2, "as make 8 replicas"), (3, None)])
def test_clusters_are_advised_where_some_make_the_sizes_fit(times: int, way_out: str | None, tmp_path: Path) -> None:
    text = (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1}},'
        f' "gradient_accumulation_steps": {times}}}'
    )
    with pytest.raises(DiagnosticError) as caught:
        plan_of(text, tmp_path, "deepspeed", clusters=4, seq_len=64)
    (problem,) = caught.value.diagnostics
    assert problem.help is not None
    assert (way_out or "leave one of the three out") in problem.help
    if way_out is None:
        assert "--clusters" not in problem.help
    else:
        assert plan_of(text, tmp_path, "deepspeed", clusters=8, seq_len=64).plan.dp == 8


@pytest.mark.parametrize(
    ("rate", "factor", "least"), [("3e-4", "0.1", "3e-05"), ("6e-5", "0.1", "6e-06"), ("0.7", "0.1", "0.07")]
)
def test_the_product_of_two_numbers_is_written_as_people_write_it(
    rate: str, factor: str, least: str, tmp_path: Path
) -> None:
    titan = f"[training]\nsteps = 900\n[optimizer]\nlr = {rate}\n[lr_scheduler]\ndecay_type = 'cosine'\nmin_lr_factor = {factor}\n"
    cosine = f'{{"total_num_steps": 9000, "cos_min_ratio": {factor}}}'
    deepspeed = (
        f'{{"train_batch_size": 8, "optimizer": {{"type": "AdamW", "params": {{"lr": {rate}}}}},'
        f' "scheduler": {{"type": "WarmupCosineLR", "params": {cosine}}}}}'
    )
    for framework, text in (("torchtitan", titan), ("deepspeed", deepspeed)):
        made = plan_of(text, tmp_path, framework, clusters=2, seq_len=64)
        assert f"\nmin_lr = {least}\n" in made.text()
    exported = export_plan("torchtitan", made.plan, load_model("llama-2-7b"))
    assert f"\nmin_lr_factor = {factor}\n" in exported.text


def test_keys_that_say_nothing_are_not_written(tmp_path: Path) -> None:
    constant = plan_of(launch("--lr-decay-style constant --clip-grad 0"), tmp_path).text()
    assert not {"min_lr", "max_norm"} & {line.partition(" = ")[0] for line in constant.splitlines()}
    cosine = plan_of(launch("--lr-decay-style cosine --train-iters 9"), tmp_path).text()
    assert {"min_lr", "max_norm"} <= {line.partition(" = ")[0] for line in cosine.splitlines()}


SAMPLES = {
    "megatron": launch(""),
    "deepspeed": '{\n  "train_batch_size": 8,\n  "bf16": {"enabled": true}\n}',
    "torchtitan": TORCHTITAN.format(norm="1.0"),
}


@pytest.mark.parametrize("said", SAMPLES)
@pytest.mark.parametrize("meant", SAMPLES)
@pytest.mark.parametrize("ending", [".sh", ".json", ".toml", ""])
def test_settings_of_another_framework_are_known_by_their_look(
    said: str, meant: str, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"job{ending}"
    path.write_text(SAMPLES[meant])
    if said == meant:
        if said != "megatron" or ending in ("", ".sh"):
            assert api.import_plan(meant, path, clusters=8, seq_len=64).plan.dp == 8
        return
    with pytest.raises(DiagnosticError, match="this looks like") as caught:
        api.import_plan(said, path, clusters=8, seq_len=64)
    (problem,) = caught.value.diagnostics
    assert problem.help == f"--from {meant}"


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [3, 5, 16])
def test_advice_about_ranks_says_where_the_number_is_from(tp: int, pp: int, tmp_path: Path) -> None:
    text = launch(f'--tensor-model-parallel-size "${{TP:-1}}" --pipeline-model-parallel-size {pp}')
    with pytest.raises(DiagnosticError, match="8 ranks are not a multiple") as caught:
        plan_of(text, tmp_path, given={"TP": str(tp)})
    (problem,) = caught.value.diagnostics
    advice = problem.help or ""
    assert "file" not in advice
    name, _, value = advice.partition("--set ")[2].partition("=")
    assert plan_of(text, tmp_path, given={name: value}).plan.tp > 1
    in_file = launch(f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}", "echo $N\n")
    with pytest.raises(DiagnosticError) as caught:
        plan_of(in_file, tmp_path, given={"N": "7"})
    assert "in the file" in str([each.help for each in caught.value.diagnostics])
    with pytest.raises(DiagnosticError) as caught:
        plan_of(in_file.replace("--nproc_per_node 8 ", "--nproc_per_node $M "), tmp_path, clusters=7, given={"N": "7"})
    (problem,) = caught.value.diagnostics
    ranks = int((problem.help or "").partition("--clusters ")[2])
    again = in_file.replace("--nproc_per_node 8 ", "--nproc_per_node $M ")
    assert plan_of(again, tmp_path, clusters=ranks, given={"N": "7"}).plan.tp == tp


def test_what_a_command_prints_is_said_once_not_to_be_known(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        plan_of(launch("--seed $(od -An /dev/urandom)"), tmp_path)
    (problem,) = caught.value.diagnostics
    wanted = "--seed is not known: $(od -An /dev/urandom) is a command, and scripts are read, not run"
    assert problem.message == wanted
