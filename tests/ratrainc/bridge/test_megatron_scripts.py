"""Launch scripts of Megatron-LM in the shapes that people publish: what the shell and argparse do, or a refusal at its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, import_plan, imported
from ratrain.ratrainc.bridge.megatron_flags import BARE, COUNTS, KNOWN, MANY, NONE_OR_MORE
from ratrain.ratrainc.bridge.megatron_rules import RULES
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.cli import main

FOLDER = Path(__file__).parents[2] / "data" / "bridge" / "megatron"
BARE_RUN = "torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size 1 --seq-length 64 --lr 1e-3"
RUN = f"{BARE_RUN} --lr-decay-style constant"


def read(text: str, asked: Asked | None = None) -> Imported:
    return imported(FRAMEWORKS["megatron"], "x", text, Asked() if asked is None else asked)


def of_file(name: str, clusters: int | None = None, **given_: str) -> Imported:
    variables = {key.removeprefix("_"): value for key, value in given_.items()}
    return import_plan("megatron", FOLDER / name, Asked(clusters, given=variables))


def refused(text: str, asked: Asked | None = None) -> list[tuple[str, str, str | None]]:
    """The messages, the text under each caret, and the way out."""
    with pytest.raises(DiagnosticError) as caught:
        read(text, asked)
    found = []
    for each in caught.value.diagnostics:
        place = each.location
        assert place is not None
        line = text.split("\n")[place.line - 1]
        under = line[(place.column or 1) - 1 :][: place.length or 1]
        found.append((each.message, under, each.help))
    return found


# files of the shapes that are published

PLANS = {
    "dense.sbatch": {
        "tp": 2,
        "dp": 8,
        "micro_batch_size": 2,
        "micro_batches": 4,
        "seq_len": 1024,
        "view_dtype": "bf16",
    },
    "strings.sh": {"dp": 4, "micro_batches": 2, "seq_len": 128, "view_dtype": "f16", "seed": 1234},
    "functions.sh": {"dp": 2, "micro_batch_size": 3, "seed": 5, "tp": 1},
    "options.sh": {"tp": 1, "dp": 8, "micro_batch_size": 2},
    "written.sh": {"pp": 2, "dp": 4, "micro_batch_size": 4},
    "sourcing.sh": {"dp": 2, "micro_batch_size": 2},
    "mpi.sh": {"dp": 16},
    "nodes.sh": {"dp": 12},
    "harmless.sh": {"dp": 2, "micro_batch_size": 1},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_script_is_followed(name: str) -> None:
    made = of_file(name)
    assert {key: getattr(made.plan, key) for key in PLANS[name]} == PLANS[name]
    lines = made.text().split("\n")
    assert len({line for line in lines if line.startswith("# ")}) == sum(line.startswith("# ") for line in lines)


def test_the_last_of_two_values_counts() -> None:
    dense = of_file("dense.sbatch").plan.optimizer
    assert (dense.lr, dense.total_steps, dense.max_norm) == (2e-4, 2000, 1.0)
    assert of_file("strings.sh").plan.optimizer.total_steps == 80
    assert 'log-interval = "50"' in of_file("strings.sh").text()


@pytest.mark.parametrize(
    ("name", "message", "way_out"),
    [
        ("sizes.sh", '--num-layers is "4" or "32": \'case $1 in small)\' decides', "--set 1=VALUE"),
        ("hosts.sh", '--nproc-per-node is "16" or "8": \'case $(hostname) in big*)\' decides', "the way that is meant"),
        ("unread.sh", "/etc/cluster/env.sh is not read", "--set BATCH=VALUE"),
        ("strict.sh", "'set -u' ends the script", "--set MORE=VALUE"),
        ("substituted.sh", "on how many ranks", "--clusters"),
    ],
)
def test_what_a_script_does_not_say_is_asked_for(name: str, message: str, way_out: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        of_file(name)
    assert any(message in each.message and way_out in (each.help or "") for each in caught.value.diagnostics), (
        caught.value
    )


def test_what_is_asked_for_can_be_given() -> None:
    assert of_file("sizes.sh", _1="huge").plan.pp == 4
    assert of_file("sizes.sh", _1="small").plan.pp == 1
    assert of_file("options.sh", _1="-t", _2="4", _3="-b3").plan.tp == 4
    assert of_file("options.sh", _1="-t", _2="4", _3="-b3").plan.micro_batch_size == 3
    assert of_file("unread.sh", BATCH="3").plan.micro_batch_size == 3
    assert of_file("sourcing.sh", BATCH="3").plan.micro_batch_size == 3
    assert of_file("strict.sh", MORE="--seed 9").plan.seed == 9
    assert of_file("strict.sh", MORE="").plan.seed == 1234
    assert of_file("substituted.sh", clusters=6).plan.micro_batch_size == 4
    assert of_file("dense.sbatch", SLURM_NNODES="4").plan.dp == 16
    with pytest.raises(DiagnosticError, match=r"nothing in the script starts"):
        of_file("sizes.sh", _1="medium")
    assert of_file("dense.sbatch", FP8="1").plan.micro_batch_size == 4


# argparse


def test_arguments_are_read_as_argparse_reads_them() -> None:
    assert read(f"{RUN} --seed=7").plan.seed == 7
    assert read(f"{RUN} --weight-decay -1.5 --weight-decay 0.5").plan.optimizer.weight_decay == 0.5
    assert read(f"{RUN.replace('--seq-length', '--seq_length')}").plan.seq_len == 64
    made = read(f"A=--swiglu\nB='--seed 3'\n{RUN} --data-path 0.7 a 0.3 b --rampup-batch-size 1 2 3 $A $B --bf16")
    assert made.plan.seed == 3
    assert {each.key: each.value for each in made.left}["data-path"] == "0.7 a 0.3 b"


@pytest.mark.parametrize(
    ("more", "message", "under"),
    [
        ("--micro-batch 2", "has no argument --micro-batch", "--micro-batch"),
        ("--tensor-model-paralel-size 2", "has no argument --tensor-model-paralel-size", "--tensor-model-paralel-size"),
        ("--bf16=1", "--bf16 takes no value", "--bf16=1"),
        ("--bf16 true", 'the word "true" is no argument', "true"),
        ("--seed --bf16", "--seed has no value", "--seed"),
        ("--recompute-modules --bf16", "--recompute-modules has no value", "--recompute-modules"),
        ('"--seed 3"', "is no argument", "--seed 3"),
        ('""', "an empty word is no argument", None),
        ("--lr-decay-style cosin", "one of constant, linear, cosine", "--lr-decay-style"),
        ("--seed 1x", "a whole number is expected", "--seed"),
        ("--model-parallel-size 2", "no longer valid", "--model-parallel-size"),
        ("--deepspeed --deepspeed_config $X/c.json", "deepspeed is not carried over: its ds_config", "--deepspeed"),
        ("--yaml-cfg a.yaml", "in another file", "--yaml-cfg"),
    ],
)
def test_what_argparse_refuses_is_refused_at_its_place(more: str, message: str, under: str | None) -> None:
    found = refused(f"{RUN} {more}")
    assert any(message in each[0] for each in found), found
    if under is not None:
        assert [each[1].strip('"') for each in found if message in each[0]] == [under]


def test_all_errors_are_told_at_once_and_their_advice_holds() -> None:
    found = refused(f"{RUN} --micro-batch 2 --sed 3 --bf16 yes --tensor-model-parallel-size $TP")
    assert len(found) == 4
    assert "write --micro-batch-size" in str(found[0][2])
    assert "--seed" in str(refused(f"{RUN} --see 3")[0][2])
    assert read(f"{RUN} --tensor-model-parallel-size $TP", Asked(given={"TP": "2"})).plan.tp == 2


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.integers(0, 3))
def test_every_argument_takes_as_many_values_as_it_has(name: str, more: int) -> None:
    if RULES.get(name) is not None and (RULES[name].keys or RULES[name].refused):
        return
    several = more if name in NONE_OR_MORE else max(1, more)
    count = 0 if name in BARE else COUNTS.get(name, several if name in MANY else 1)
    made = read(f"{RUN} --{name}{' 1' * count} --seed 77")
    assert made.plan.seed == 77
    assert {each.key for each in made.left} == {name, "attention-dropout", "hidden-dropout"}
    if name not in MANY:
        found = refused(f"{RUN} --{name}{' 1' * (count + 1)} --seed 77")
        assert 'the word "1" is no argument' in found[0][0]


# the shell


def test_a_bare_flag_takes_no_variable_for_its_value() -> None:
    made = read(f'SHAPE="--seed 4 --num-layers 2"\n{RUN} --use-flash-attn $SHAPE')
    assert made.plan.seed == 4


def test_flags_of_other_programs_are_not_read() -> None:
    text = f"curl --lr 9 x\npython other.py --seed 8 --tensor-model-parallel-size 4\necho {RUN} --seed 5\n{RUN}\n"
    assert (read(text).plan.seed, read(text).plan.tp) == (1234, 1)
    assert read(f"ARGS='--seed 5'\nOTHER=(--seed 6)\n{RUN} # --seed 7\n").plan.seed == 1234


def test_two_trainings_are_not_one() -> None:
    found = refused(f"{RUN} --train-iters 5\n{RUN} --train-iters 5 --seed 7")
    assert "more than one training" in found[0][0]
    assert found[0][1] == "--seed"
    assert read(f"{RUN} --train-iters 5\n{RUN} --train-iters 5 --save a").plan.seed == 1234


CONDITION = "if {} ; then B=2; else B=4; fi\n" + RUN.replace("--micro-batch-size 1", "--micro-batch-size $B")


@pytest.mark.parametrize(
    ("condition", "given_", "size"),
    [
        ('[ "$X" = 1 ]', {"X": "1"}, 2),
        ('[ "$X" = 1 ]', {"X": "0"}, 4),
        ('[[ $X == a* && -n "$Y" ]]', {"X": "ab", "Y": "c"}, 2),
        ("(( X > 3 ))", {"X": "4"}, 2),
        ("[ $X -ge 3 ] || [ $Y -lt 2 ]", {"X": "1", "Y": "5"}, 4),
        ("! test $X != 1", {"X": "1"}, 2),
        ('[ -z "${X:-}" ]', {}, 2),
        ('[[ "${X:-0}" == 1 ]]', {}, 4),
        ("[[ $X =~ ^a.c$ ]]", {"X": "abc"}, 2),
    ],
)
def test_a_condition_of_known_variables_is_decided(condition: str, given_: dict[str, str], size: int) -> None:
    assert read(CONDITION.format(condition), Asked(given=given_)).plan.micro_batch_size == size


@pytest.mark.parametrize("condition", ['[ "$X" = 1 ]', "(( X > 3 ))", "[ $X -ge 3 ]", "[[ $X == a* ]]", "[ -f $X ]"])
def test_a_condition_that_is_not_known_is_refused_and_can_be_said(condition: str) -> None:
    found = refused(CONDITION.format(condition))
    assert len(found) == 1
    message, under, way_out = found[0]
    assert '--micro-batch-size is "2" or "4"' in message
    assert under.strip() == condition
    assert "--set X=VALUE" in str(way_out)


def test_a_way_that_ends_before_the_training_does_not_count() -> None:
    guard = 'if [ -z "$DATA" ]; then echo "set DATA"; exit 1; fi\n[ -d "$DATA" ] || exit 2\n'
    assert read(guard + RUN).plan.dp == 2
    assert "--set MODEL=VALUE" in str(
        refused('if [ -z "$MODEL" ]; then exit; fi\nif [ -n "$MODEL" ]; then exit; fi\n' + RUN)[0][2]
    )


def test_the_default_of_a_script_counts_where_its_variable_is_not_set() -> None:
    text = 'if [ -z "$B" ]; then B=2; fi\n' + RUN.replace("size 1", "size $B")
    assert read(text).plan.micro_batch_size == 2
    assert read(text).unset == {"B": ""}
    assert read(text, Asked(given={"B": "3"})).plan.micro_batch_size == 3


def test_a_variable_is_what_the_way_to_the_training_says() -> None:
    check = "case $B in 2|4) ;; *) exit 1 ;; esac\n" + RUN.replace("size 1", "size $B")
    assert "--set B=VALUE" in str(refused(check)[0][2])
    assert read(check.replace("2|4", "2")).plan.micro_batch_size == 2


def test_another_shell_has_only_what_is_exported() -> None:
    inner = f"bash -c '{RUN.replace('size 1', 'size $B')}'"
    assert read(f"export B=2\n{inner}").plan.micro_batch_size == 2
    assert read(f"B=2 {inner}").plan.micro_batch_size == 2
    assert "B is not set" in refused(f"B=2\n{inner}")[0][0]


def test_line_ends_of_windows_are_line_ends() -> None:
    text = f"B=2\n{RUN.replace('size 1', 'size $B')} \\\n  --seed 3\n"
    assert read(text.replace("\n", "\r\n")).plan == read(text).plan


def test_a_variable_that_is_given_in_vain_is_named() -> None:
    assert "nothing in the script reads X" in refused(RUN, Asked(given={"X": "1"}))[0][0]
    found = refused(f"TP=2\n{RUN} --tensor-model-parallel-size $TP", Asked(given={"TP": "4"}))
    assert "the script sets TP itself" in found[0][0]
    assert found[0][1] == "2"


def test_what_is_not_known_names_what_would_say_it() -> None:
    text = f"NODES=$(wc -l < hosts)\n{RUN.replace('torchrun', 'torchrun --nnodes $NODES')}"
    found = refused(text)
    assert found[0][1] == "--nnodes"
    assert "$(wc -l < hosts)" in found[0][0]
    assert "--set NODES=VALUE" in str(found[0][2])
    assert read(text, Asked(given={"NODES": "3"})).plan.dp == 6
    assert read(text, Asked(clusters=8)).plan.dp == 8


def test_defaults_stand_in_the_head_with_their_source() -> None:
    made = read(f"{BARE_RUN} --train-iters 40")
    assert (
        "# Taken from Megatron-LM's defaults: adam-eps = 1e-08 (megatron/training/arguments.py, --adam-eps)"
        in made.text()
    )
    assert made.defaults["lr-decay-style"].value == "linear"
    line = made.plan.optimizer
    assert (line.decay, line.total_steps, line.decay_steps) == ("linear", 40, None)
    assert made.plan.optimizer.betas == (0.9, 0.999)
    assert (made.plan.optimizer.weight_decay, made.plan.optimizer.max_norm) == (0.01, 1.0)
    cosine = read(f"{BARE_RUN} --lr-decay-style cosine --train-iters 40").plan.optimizer
    assert (cosine.total_steps, cosine.min_lr, cosine.warmup_steps) == (40, 0.0, 0)
    for style in ("", " --lr-decay-style cosine", " --lr-decay-style WSD --lr-wsd-decay-style linear"):
        assert any("over how many steps" in each[0] for each in refused(f"{BARE_RUN}{style}"))
    assert "lr is missing" in refused(RUN.replace("--lr 1e-3", ""))[0][0]


@pytest.mark.parametrize(
    ("launcher", "dp"),
    [
        ("torchrun --standalone --nproc-per-node=4 --tee 3 pretrain_gpt.py", 4),
        ("torchrun --nproc_per 4 -m pretrain_gpt", 4),
        ("torchrun pretrain_gpt.py", 1),
        ("python3 -u -m torch.distributed.run --nnodes=2 --nproc_per_node=4 pretrain_gpt.py", 8),
        ("exec nohup torchrun --nproc_per_node 4 pretrain_gpt.py", 4),
        ("srun -N2 --ntasks-per-node=4 --nodes 2 python pretrain_gpt.py", 8),
        ("env A=1 mpirun --np 6 python pretrain_gpt.py", 6),
        ("deepspeed --num_gpus 4 --num_nodes 2 pretrain_gpt.py", 8),
        ("accelerate launch --num_processes 4 pretrain_gpt.py", 4),
        ("singularity exec --nv img.sif bash -c 'torchrun --nproc_per_node 4 pretrain_gpt.py \"$@\"' --", 4),
    ],
)
def test_launchers_say_the_ranks(launcher: str, dp: int) -> None:
    flags = RUN.partition("pretrain_gpt.py ")[2]
    assert read(f"{launcher} {flags}").plan.dp == dp


def test_ranks_that_a_condition_decides_are_asked_for() -> None:
    text = f"if [ $X = 1 ]; then WORLD_SIZE=2; else WORLD_SIZE=4; fi\n{RUN.replace('torchrun --nproc_per_node 2', 'python')}"
    assert 'WORLD_SIZE is "4" or "2"' in refused(text)[0][0] or 'WORLD_SIZE is "2" or "4"' in refused(text)[0][0]
    assert read(text, Asked(given={"X": "1"})).plan.dp == 2


def test_lora_and_yaml_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "torchrun --nproc_per_node=8 finetune.py --config-file a.yaml train.global_batch_size=64\n"
    assert "finetune.py has none of its arguments" in refused(script)[0][0]
    file = tmp_path / "a.yaml"
    file.write_text("peft:\n  dim: 16\n")
    assert main(["import-plan", "--from", "megatron", str(file)]) == 1
    assert "no launch script" in capsys.readouterr().err


def test_the_command_takes_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-plan", "--from", "megatron", str(FOLDER / "sizes.sh"), "--json"]
    assert main([*words, "--set", "1=large"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["pp"] == 4
    assert main([*words, "--set", "1"]) == 2
    assert main([*words, "--set", "1=small", "--set", "1=large"]) == 2
    job = Path(__file__).parents[2] / "data" / "bridge" / "job.toml"
    capsys.readouterr()
    assert main(["import-plan", "--from", "torchtitan", str(job), "--set", "A=1"]) == 2
    assert "--set is for --from megatron" in capsys.readouterr().err
