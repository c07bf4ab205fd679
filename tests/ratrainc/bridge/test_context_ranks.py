"""Context ranks of other frameworks become those of a plan, and share out state as each framework lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.exporting import export_plan
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, imported
from ratrain.ratrainc.bridge.settings import Asked
from tests.ratrainc.bridge.test_job_plans import BRIDGE_PRETRAIN, FSDP, JOBS, SMALL, TUNE

MODEL = load_model("llama-2-7b")
MEGATRON = (
    "WORLD_SIZE=16\n--micro-batch-size 1 --global-batch-size 16 --seq-length 64 --lr 1 --lr-decay-style constant "
)
TORCHTITAN = "[training]\nlocal_batch_size = 2\nseq_len = 64\n[parallelism]\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4, "zero_optimization": {"stage": %d%s}}'
OWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Megatron-LM": ("megatron", "--context-parallel-size 4", {"dp": 4, "cp": 4, "zero": 0, "micro_batches": 4}),
    "Megatron-LM, one": ("megatron", "--context-parallel-size 1", {"dp": 16, "cp": 1}),
    "Megatron-LM, sharded": (
        "megatron",
        "--context-parallel-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        {"dp": 4, "cp": 4, "zero": 1, "shard_group": 8},
    ),
    "Megatron-LM, each replica with its state": (
        "megatron",
        "--context-parallel-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 16",
        {"zero": 0, "shard_group": None},
    ),
    "torchtitan": (
        "torchtitan",
        "context_parallel_degree = 4",
        {"dp": 4, "cp": 4, "zero": 3, "shard_group": None, "context_layout": "zigzag"},
    ),
    "torchtitan, balanced": (
        "torchtitan",
        'context_parallel_degree = 4\ncontext_parallel_load_balancer = "headtail"',
        {"cp": 4, "context_layout": "zigzag"},
    ),
    "torchtitan, copies": (
        "torchtitan",
        "context_parallel_degree = 4\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4",
        {"dp": 4, "cp": 4, "zero": 3, "shard_group": 4, "view_dtype": "bf16"},
    ),
    "torchtitan, groups": (
        "torchtitan",
        "context_parallel_degree = 2\ndata_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 2",
        {"dp": 8, "cp": 2, "shard_group": 8},
    ),
    "torchtitan, older": (
        "torchtitan",
        "tensor_parallel_degree = 1\n[experimental]\ncontext_parallel_degree = 2",
        {"dp": 8, "cp": 2, "zero": 3},
    ),
    "DeepSpeed": ("deepspeed", DEEPSPEED % (1, ""), {"dp": 4, "cp": 4, "zero": 1, "micro_batches": 1}),
    "DeepSpeed, all state in a sequence": (
        "deepspeed",
        DEEPSPEED % (3, ', "mics_shard_size": 4'),
        {"dp": 4, "shard_group": 4},
    ),
    "DeepSpeed, a group of all": ("deepspeed", DEEPSPEED % (3, ', "mics_shard_size": 16'), {"shard_group": None}),
    "DeepSpeed, views of a sequence": (
        "deepspeed",
        DEEPSPEED % (3, ', "zero_hpz_partition_size": 4'),
        {"dp": 4, "cp": 4, "view_group": 4},
    ),
}


STARTS = {"megatron": MEGATRON, "torchtitan": TORCHTITAN, "deepspeed": ""}
ASKED = {"megatron": Asked(), "torchtitan": Asked(clusters=16), "deepspeed": Asked(clusters=16, seq_len=64)}


def read(framework: str, text: str) -> Imported:
    return imported(FRAMEWORKS[framework], "x", STARTS[framework] + text, ASKED[framework])


@pytest.mark.parametrize("name", OWN)
def test_context_ranks_become_those_of_the_plan(name: str) -> None:
    framework, text, expected = OWN[name]
    made = read(framework, text)
    assert {key: getattr(made.plan, key) for key in expected} == expected
    assert made.plan.cp * made.plan.dp == 16
    assert not any("context" in line or "sequence" in line for line in made.told())


@pytest.mark.parametrize(
    ("framework", "text", "line"),
    [
        ("megatron", "--context-parallel-size 4 --seq-length 62", 2),
        ("torchtitan", "context_parallel_degree = 4\n[debug]\nseed = 1\n", 3),
    ],
)
def test_a_length_that_context_ranks_cannot_share_is_refused_at_its_place(framework: str, text: str, line: int) -> None:
    whole = STARTS[framework].replace("seq_len = 64", "seq_len = 62") + text
    with pytest.raises(DiagnosticError, match="4 context ranks cut a sequence of 62 tokens into 8") as caught:
        imported(FRAMEWORKS[framework], "x", whole, ASKED[framework])
    (problem,) = caught.value.diagnostics
    assert problem.location is not None
    assert problem.location.line == line


def test_a_balancer_that_follows_a_mask_is_named_and_one_without_context_ranks_is_idle() -> None:
    made = read("torchtitan", 'context_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"')
    idle = read("torchtitan", 'context_parallel_load_balancer = "headtail"')
    key = "parallelism.context_parallel_load_balancer"
    assert "follows no mask" in {each.key: each.why for each in made.left}[key]
    assert "one context rank" in {each.key: each.why for each in idle.left}[key]
    assert (made.plan.cp, made.plan.context_layout, idle.plan.cp) == (2, "zigzag", 1)


CONTEXT_FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}
mixed_precision: bf16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
"""
GROUPS = "dp_shard_size: 2\ncontext_parallel_size: 2\n"
NANOTRON = (JOBS / "nano_llama.yaml").read_text().replace("zero_stage: 0", "zero_stage: 1")
SAID = {"seq_len": 64, "micro_batch_size": 1, "global_batch": 8}
JOB: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "axolotl": (f"{SMALL}{FSDP}context_parallel_size: 2\n", "axolotl", {}, {"dp": 2, "cp": 2, "shard_group": None}),
    "axolotl's older name": (
        f"{SMALL}{FSDP}sequence_parallel_degree: 4\n",
        "axolotl",
        {},
        {"dp": 1, "cp": 4, "zero": 3, "grad_shard_dtype": "f32", "context_layout": "zigzag"},
    ),
    "axolotl's groups": (
        f"{SMALL}fsdp_version: 2\nfsdp_config: {{reshard_after_forward: false}}\n{GROUPS}",
        "axolotl",
        {"f32_state": True, "clusters": 8},
        {"dp": 4, "cp": 2, "zero": 2, "shard_group": 4},
    ),
    "accelerate": (
        f"{CONTEXT_FSDP}  parallelism_config_cp_size: 2\n",
        "accelerate",
        {**SAID, "clusters": 8},
        {"dp": 4, "cp": 2, "shard_group": 4, "micro_batches": 2},
    ),
    "accelerate's heads": (
        f"{CONTEXT_FSDP}  parallelism_config_sp_size: 4\n",
        "accelerate",
        {**SAID, "clusters": 16},
        {"dp": 4, "cp": 4, "shard_group": 8},
    ),
    "torchtune": (
        f"{TUNE}context_parallel_dim: 2\ndata_parallel_replicate_dim: 2\n",
        "torchtune",
        {"clusters": 8},
        {"dp": 4, "cp": 2, "zero": 3, "shard_group": 4},
    ),
    "nanotron": (
        NANOTRON.replace("dp: 4,", "dp: 4, context_parallel_size: 2,"),
        "nanotron",
        {"clusters": None},
        {"dp": 4, "cp": 2, "tp": 2, "zero": 1, "shard_group": 4},
    ),
    "nanotron's one replica": (
        NANOTRON.replace("dp: 4,", "dp: 1, context_parallel_size: 2,"),
        "nanotron",
        {"clusters": None},
        {"dp": 1, "cp": 2, "zero": 0, "shard_group": None},
    ),
    "Megatron-Bridge": (
        BRIDGE_PRETRAIN.replace("parallel_size: 1", "parallel_size: 2"),
        "megatron-bridge",
        {"clusters": 8},
        {"cp": 2, "zero": 1, "shard_group": None},
    ),
}


def of_job(folder: Path, text: str, framework: str, **options: Any) -> Imported:
    (folder / "a.yaml").write_text(text)
    return api.import_plan(framework, folder / "a.yaml", **{"clusters": 4, **options})


@pytest.mark.parametrize("name", JOB)
def test_context_ranks_of_a_job_become_those_of_the_plan(name: str, tmp_path: Path) -> None:
    text, framework, options, expected = JOB[name]
    plan = of_job(tmp_path, text, framework, **options).plan
    assert {key: getattr(plan, key) for key in expected} == expected


ONE_RUN: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "axolotl": (
        f"{SMALL.replace('sequence_len: 64', 'sequence_len: 62')}{FSDP}context_parallel_size: 2\n",
        "axolotl",
        {},
        "apply_sequence_parallelism",
    ),
    "accelerate's heads": (
        f"{CONTEXT_FSDP}  parallelism_config_sp_size: 2\n",
        "accelerate",
        {**SAID, "seq_len": 62, "clusters": 8},
        "UlyssesSPAttentionHF",
    ),
    "nanotron's rings": (
        NANOTRON.replace("dp: 4,", "dp: 1, context_parallel_size: 2,")
        .replace("sequence_length: 2048", "sequence_length: 62")
        .replace("tp: 2", "tp: 1"),
        "nanotron",
        {"clusters": None},
        "clm_collator.py",
    ),
}


@pytest.mark.parametrize("name", ONE_RUN)
def test_one_run_a_rank_where_the_framework_cuts_so_and_two_do_not_go_in(name: str, tmp_path: Path) -> None:
    text, framework, options, source = ONE_RUN[name]
    made = of_job(tmp_path, text, framework, **options)
    assert (made.plan.seq_len, made.plan.cp, made.plan.context_layout) == (62, 2, "contiguous")
    assert (made.plan.context_exchange == "heads") is ("Ulysses" in source)
    assert not any("keys and values are gathered" in left.why for left in made.left if "heads" in name)
    assert source in made.defaults["context_layout"].source
    assert f'defaults: context_layout = "contiguous" ({made.defaults["context_layout"].source})' in "".join(
        made.text().replace("\n# ", " ")
    )


def test_one_run_a_rank_of_deepspeed_itself() -> None:
    asked = Asked(clusters=16, seq_len=60)
    made = imported(FRAMEWORKS["deepspeed"], "x", DEEPSPEED % (1, ""), asked)
    assert (made.plan.cp, made.plan.context_layout, made.plan.context_exchange) == (4, "contiguous", "heads")
    assert "UlyssesSPAttentionHF" in made.defaults["context_layout"].source
    assert "context_layout" not in read("deepspeed", DEEPSPEED % (1, "")).defaults


@pytest.mark.parametrize(
    ("text", "framework", "options", "message", "way_out"),
    [
        (
            f"{SMALL.replace('sequence_len: 64', 'sequence_len: 63')}{FSDP}context_parallel_size: 2\n",
            "axolotl",
            {},
            "2 context ranks cut a sequence of 63 tokens into 4 equal runs",
            "use a length that 4 divides",
        ),
        (
            NANOTRON.replace("dp: 4,", "dp: 1, context_parallel_size: 2,")
            .replace("sequence_length: 2048", "sequence_length: 62")
            .replace("tp: 2", "tp: 1")
            .replace("model_config:", "model_config:\n    _attn_implementation: llama3_ring_attention"),
            "nanotron",
            {"clusters": None},
            "2 context ranks cut a sequence of 62 tokens into 4 equal runs",
            "use a length that 4 divides",
        ),
        (
            f"{CONTEXT_FSDP}  parallelism_config_cp_size: 2\n",
            "accelerate",
            {**SAID, "seq_len": 62, "clusters": 8},
            "2 context ranks cut a sequence of 62 tokens into 4 equal runs",
            "use a length that 4 divides",
        ),
        (
            f"{CONTEXT_FSDP}  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2\n",
            "accelerate",
            SAID,
            "cp_size and sp_size both share out sequences",
            "say 1 in one of them",
        ),
        (f"{SMALL}{FSDP}context_parallel_size: 3\n", "axolotl", {}, "4 devices are not a multiple", "multiple"),
    ],
)
def test_context_ranks_that_cannot_be_are_refused_at_their_place(
    text: str, framework: str, options: dict[str, Any], message: str, way_out: str, tmp_path: Path
) -> None:
    with pytest.raises(DiagnosticError, match=message) as caught:
        of_job(tmp_path, text, framework, **options)
    found = next(each for each in caught.value.diagnostics if message in each.message)
    assert way_out in str(found.help)
    assert found.location is not None


@pytest.mark.parametrize(("group", "shard", "copies"), [(None, 9, 1), (12, 3, 3), (18, 1, 9), (4, 1, 9), (2, 1, 9)])
def test_torchtitan_is_given_groups_of_whole_sequences(group: int | None, shard: int, copies: int) -> None:
    plan = Plan(pp=1, dp=9, cp=4, cuts=(), micro_batch_size=1, micro_batches=2, seq_len=512, zero=3, shard_group=group)
    exported = export_plan("torchtitan", plan, MODEL)
    said = FRAMEWORKS["torchtitan"].settings_of("x", exported.text, Asked())
    degrees = [said[f"parallelism.data_parallel_{name}_degree"].value for name in ("shard", "replicate")]
    assert degrees == [shard, copies]
    expressed = group in (None, shard * 4)
    assert ("shard_group" in {each.key for each in exported.missing}) is not expressed
    back = imported(FRAMEWORKS["torchtitan"], "x", exported.text, Asked()).plan
    assert (back.dp, back.cp, back.micro_batches) == (9, 4, 2)


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_a_run_of_neighbouring_tokens_is_not_expressed_and_one_rank_says_nothing(framework: str) -> None:
    plan = Plan(
        pp=1, dp=2, cp=2, cuts=(), micro_batch_size=1, micro_batches=2, seq_len=512, context_layout="contiguous"
    )
    missing = {each.key: each for each in export_plan(framework, plan, MODEL).missing}
    assert missing["context_layout"].instead is None or "zigzag" in missing["context_layout"].instead
    assert "early and a late run" in missing["context_layout"].why
    heads = evolve(plan, context_layout="zigzag", context_exchange="heads")
    assert {each.key for each in export_plan(framework, heads, MODEL).missing} >= {"context_exchange"}
    alone = Plan(pp=1, dp=2, cuts=(), micro_batch_size=1, micro_batches=2, seq_len=512)
    assert "context" not in export_plan(framework, alone, MODEL).text
