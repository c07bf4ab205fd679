"""Published runs of frameworks: the bytes that formulas give them, what these decide, and what is refused."""

from __future__ import annotations

import csv
import json
from math import ceil
from pathlib import Path
from statistics import median

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.examples import example_path
from ratrain.ratrainc.validation.frameworks import ALLOCATOR_LOSS, FRAMEWORKS, framework_bytes
from ratrain.ratrainc.validation.outcome import RowOutcome, validate
from ratrain.ratrainc.validation.validation_rows import ValidationRow, read_validation_table
from ratrain.ratrainc.validation.validation_tables import class_tables
from ratrain.targets.machine.machine import load_machine

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
HEAD = "id,class,split,model,machine,pp,dp,zero,micro_batch_size,micro_batches,seq_len,reduce,attention,logits,strategy,framework"
KEYS = "2,4,16,last,scores-kept,whole"
MODEL = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 64, "n_layer": 4, "n_head": 4}
EMBEDDING, LAYER, NORM = (256 + 16) * 64, 12 * 64**2 + 13 * 64, 2 * 64
TOKENS, SCORES = 2 * 16, 2 * 4 * 16 * 2 * 16
LOGITS = TOKENS * 256
ACTIVATIONS = TOKENS * 64 * 34 + 5 * SCORES // 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small GPT-2s."""
    (tmp_path / "m.json").write_text(json.dumps(MODEL | {"tie_word_embeddings": True}))
    (tmp_path / "l.json").write_text(json.dumps(MODEL | {"n_inner": 128}))
    return tmp_path


def table(folder: Path, head: str, *rows: str) -> str:
    path = folder / "t.csv"
    path.write_text("\n".join((head, *rows)) + "\n")
    return str(path)


def outcomes(folder: Path, head: str, *rows: str) -> list[RowOutcome]:
    return list(validate([read_validation_table(table(folder, head, *rows))]).outcomes)


def accounts(folder: Path, row: str) -> list[dict[str, int]]:
    """What each stage holds, without what follows from the schedule and what is lost."""
    (found,) = outcomes(folder, f"{HEAD},peak_bytes", f"a,memory,held-out,m.json,mt3000,{row},1")
    for account in found.accounts:
        lost, counted = account.pop("lost by the allocator"), sum(account.values())
        assert 0 <= lost - ALLOCATOR_LOSS * counted < 1
        assert account.pop("checkpoints, boundaries and inputs") > 0
    return found.accounts


def published(name: str) -> list[ValidationRow]:
    return [row for row in read_validation_table(str(PUBLISHED / f"{name}.csv")).rows if row.task is not None]


def test_megatron_lm_keeps_f32_gradients_and_flattens_those_of_all_parameters(folder: Path) -> None:
    parameters = EMBEDDING + 4 * LAYER + NORM
    assert accounts(folder, f"1,1,0,{KEYS},baseline-1f1b,megatron-lm") == [
        {
            "state": (2 + 2 + 4 + 12) * parameters,
            "kept activations": ACTIVATIONS,
            "gradient of scores": SCORES,
            "logits": 0,
            "reduction bucket": 0,
            "buffers of the step's end": 2 * parameters,
        }
    ]


def test_deepspeeds_pipeline_keeps_the_outputs_of_two_micro_batches_on_its_last_stage(folder: Path) -> None:
    first, last = accounts(folder, f"2,2,1,{KEYS},baseline-1f1b,megatron-deepspeed")
    state = 2 + 2 + 12 // 2
    assert first["state"] == state * (EMBEDDING + 2 * LAYER)
    assert first["kept activations"] == ACTIVATIONS
    assert first["logits"] == 0
    assert last["state"] == state * (2 * LAYER + NORM + 256 * 64)
    assert last["kept activations"] + last["logits"] == ACTIVATIONS + 8 * LOGITS
    assert [each["buffers of the step's end"] for each in (first, last)] == [10**9, 10**9]


def test_without_recomputation_every_micro_batch_in_flight_keeps_its_layers(folder: Path) -> None:
    first, last = accounts(folder, f"2,2,1,{KEYS},full-save,megatron-deepspeed")
    assert first["kept activations"] == 2 * 2 * ACTIVATIONS
    assert last["kept activations"] == 2 * ACTIVATIONS
    assert last["logits"] == 14 * LOGITS
    assert "gradient of scores" not in last


def test_zero_3_has_shards_what_is_gathered_and_the_gradient_of_one_matrix(folder: Path) -> None:
    row = "1,2,3,2,1,16,each-micro-batch,fused,whole,zero3-blocking,megatron-deepspeed-zero3"
    (held,) = accounts(folder, row)
    parameters = EMBEDDING + 4 * LAYER + NORM
    assert held["state"] == 16 * parameters // 2 + 2 * (10**9 + 4 * 64**2)
    assert held["kept activations"] == TOKENS * 64 * 34
    assert held["reduction bucket"] == 10**9


def test_a_flat_buffer_is_cut_from_a_cached_segment_that_is_large_enough() -> None:
    rows = {row.id: row for row in published("bigscience-1b3-out-of-memory")}

    def buffers(name: str) -> list[int]:
        task = rows[f"bigscience-1b3-v100-32gb-full-{name}"].task
        assert task is not None
        held = framework_bytes(FRAMEWORKS["megatron-deepspeed"], task, [0] * task.plan.pp)
        return [account["buffers of the step's end"] for account in held]

    gathered = 2 * 1_315_819_520
    assert buffers("tp1-pp1-dp8-b1") == [10**9 + gathered]  # both buckets are larger than the reduction's
    assert buffers("tp1-pp1-dp8-b4") == [gathered // 2]  # one is cut from the f32 logits, 1.65 GB
    assert buffers("tp1-pp1-dp8-b8") == [0]  # 3.3 GB of logits have room for all


def test_the_frameworks_bytes_decide_what_fits_and_the_program_is_simulated_all_the_same(folder: Path) -> None:
    row = "out-of-memory,held-out,m.json,mt3000,2,2,1,2,4,16,last,scores-kept,whole,baseline-1f1b"
    bare, held, small = outcomes(
        folder,
        f"{HEAD},capacity,fits",
        f"bare,{row},,1GB,no",
        f"held,{row},megatron-deepspeed,1GB,no",
        f"small,{row},megatron-deepspeed,1MB,no",
    )
    assert (bare.fits, bare.verdict) == (True, "miss")
    assert (held.fits, held.verdict) == (False, "right")
    assert held.row.left_bytes == 10**9 < held.needed_bytes
    assert held.evaluation is not None
    assert held.program_peak_bytes == bare.peak_bytes == bare.needed_bytes < held.peak_bytes
    assert small.evaluation is not None
    assert small.evaluation.step_seconds == held.evaluation.step_seconds
    assert not small.fits
    data = held.to_json()["bytes"]
    assert (data["needed"], data["left"], data["program"]) == (held.needed_bytes, 10**9, bare.needed_bytes)
    assert sum(data["account"].values()) == held.needed_bytes


def test_what_a_machine_states_of_an_allocators_slack_is_not_taken_twice(folder: Path) -> None:
    machine = example_path("a100-80gb-8.toml")
    row = f"memory,held-out,m.json,{machine},1,1,0,{KEYS},baseline-1f1b"
    head = f"{HEAD},peak_of,peak_bytes"
    bare, held = (each.row for each in outcomes(folder, head, f"bare,{row},,rank,1", f"held,{row},megatron-lm,rank,1"))
    slack = ceil(0.02 * load_machine(str(machine)).whole("ddr_capacity"))
    assert held.left_bytes - bare.left_bytes == bare.overhead_bytes - held.overhead_bytes == slack


def test_a_peak_is_of_the_stages_it_was_read_of(folder: Path) -> None:
    row = f"memory,held-out,m.json,mt3000,2,2,1,{KEYS},baseline-1f1b"
    head = f"{HEAD},peak_stages,peak_bytes"
    lines = [
        f'{name},{row},{name},"{stages}",1'
        for name in ("", "megatron-deepspeed")
        for stages in ("", "[0]", "[1]", "[0, 1]")
    ]
    found = outcomes(folder, head, *(f"{number}{line}" for number, line in enumerate(lines)))
    for every, first, last, both in (found[:4], found[4:]):
        assert max(first.peak_bytes, last.peak_bytes) == every.peak_bytes == both.peak_bytes
        assert first.peak_bytes != last.peak_bytes
        assert every.simulated == every.peak_bytes


def test_tables_have_the_programs_own_peak_beside_the_frameworks_and_what_was_left(folder: Path) -> None:
    row = f"held-out,m.json,mt3000,1,1,0,{KEYS},baseline-1f1b,megatron-lm"
    path = table(folder, f"{HEAD},peak_bytes,fits", f"a,memory,{row},10MB,", f"b,out-of-memory,{row},,yes")
    validation = validate([read_validation_table(path)])
    memory, edges = class_tables(validation)
    peak = validation.outcomes[0]
    assert list(memory.columns[-2:]) == ["the program itself", "error"]
    assert memory.rows[0][-2] == f"{peak.program_peak_bytes / 1e6:.2f} MB"
    assert memory.rows[0][3] == f"~{peak.peak_bytes / 1e6:.2f} MB"
    assert list(edges.columns[-2:]) == ["needed", "left"]
    assert list(edges.rows[0][-2:]) == [f"{peak.needed_bytes / 1e6:.2f} MB", f"{peak.row.left_bytes / 1e9:.2f} GB"]


RAN = f"memory,held-out,m.json,mt3000,1,1,0,{KEYS},baseline-1f1b,megatron-lm"


@pytest.mark.parametrize(
    ("change", "column", "said"),
    [
        (("megatron-lm", "megatron"), "framework", "framework is megatron-lm or"),
        (("m.json", "l.json"), "framework", "of the GPT-2 family"),
        (("m.json", "llama-2-7b"), "framework", "of the GPT-2 family"),
        (("1,1,0", "1,2,1"), "framework", "with zero = 0"),
        (("whole", "chunked"), "framework", "logits = whole"),
        (("baseline-1f1b", "recompute{policy=auto}"), "framework", "recompute{policy=full}"),
        (("baseline-1f1b", "place-gpipe"), "framework", "with the schedule 1f1b"),
        (("baseline-1f1b", "recompute{policy=mlp}"), "framework", "recompute{policy=full}"),
        (("[0]", "[1]"), "peak_stages", "stages of the plan"),
        (("[0]", "first"), "peak_stages", "stages of the plan"),
        (("memory", "step-time"), "framework", "framework says what a run held"),
        (("memory", "step-time"), "peak_stages", "peak_stages says where a peak was read"),
    ],
)
def test_what_formulas_are_not_for_is_refused_at_its_column(
    folder: Path, change: tuple[str, str], column: str, said: str
) -> None:
    measure = "step_seconds" if change[1] == "step-time" else "peak_bytes"
    header, row = f"{HEAD},peak_stages,{measure}", f"a,{RAN},[0],1".replace(*change)
    (cells,) = csv.DictReader([header, row])
    with pytest.raises(DiagnosticError) as raised:
        read_validation_table(table(folder, header, row))
    (found,) = [each for each in raised.value.diagnostics if said in each.message]
    assert found.location is not None
    assert row[found.location.column - 1 :].startswith(cells[column])


def test_tensor_parallel_ranks_share_out_all_but_the_ends_of_blocks(folder: Path) -> None:
    row = f"a,{RAN},2,false,1"
    (found,) = outcomes(folder, f"{HEAD},tp,sequence_sharding,peak_bytes", row)
    (held,) = found.accounts
    layer = 12 * 64**2 // 2 + (
        4 * 64 + 3 * 64 // 2 + 64 + 4 * 64 // 2 + 64
    )  # norms, and biases of q k v, o, both of the mlp
    assert held["state"] == (2 + 2 + 4 + 12) * ((256 // 2 + 16) * 64 + 4 * layer + NORM)
    assert held["kept activations"] == TOKENS * 64 * (10 + 24 // 2) + 5 * SCORES // 2 // 2
    assert held["gradient of scores"] == SCORES // 2


def test_rows_that_tensor_parallel_ranks_share_out_are_refused(folder: Path) -> None:
    with pytest.raises(DiagnosticError, match="with sequence_sharding = false"):
        read_validation_table(table(folder, f"{HEAD},tp,peak_bytes", f"a,{RAN},2,1"))


def test_megatron_lm_of_2023_copies_f16_gradients_for_the_step(folder: Path) -> None:
    """With few activations the step is the fullest moment: f16 gradients and their f32 copies."""
    row = f"a,memory,held-out,m.json,mt3000,1,1,0,{KEYS},full-save,megatron-lm-2023,1"
    (found,) = outcomes(folder, f"{HEAD},peak_bytes", row)
    (account,) = found.accounts
    parameters = EMBEDDING + 4 * LAYER + NORM
    assert account["weights"] == 2 * parameters
    assert account["master weights"] + account["optimizer"] == 12 * parameters
    assert account["gradients"] == 2 * parameters
    assert found.peak_bytes == sum(account.values()) >= (2 + 12 + 2 + 4) * parameters


def test_tables_of_one_pipeline_come_out_within_a_tenth_without_a_fitted_constant() -> None:
    """All are too low, as bytes of tensors must be against what an allocator reserves. Masks of dropout are there."""
    for row in published("zero-bubble-memory"):
        assert row.task is not None
        assert row.framework == FRAMEWORKS["megatron-lm-2023"]
        held = framework_bytes(FRAMEWORKS["megatron-lm-2023"], row.task, [0] * row.task.plan.pp)
        assert 0.9 < max(sum(each.values()) for each in held) / row.measured < 1, row.id
        assert held[0]["activations: masks"] > 0


def test_layers_that_keep_everything_beside_others_are_refused_by_the_formulas_of_2021(folder: Path) -> None:
    row = f"a,{RAN},1".replace("baseline-1f1b", "recompute{policy=full every=2}")
    with pytest.raises(DiagnosticError, match="of all layers"):
        read_validation_table(table(folder, f"{HEAD},peak_bytes", row))


def test_the_fitted_constant_is_the_median_of_the_rows_it_says() -> None:
    rows = published("dlperf-v100-memory")
    losses = []
    for outcome in validate([read_validation_table(str(PUBLISHED / "dlperf-v100-memory.csv"))]).outcomes:
        counted = outcome.needed_bytes / (1 + ALLOCATOR_LOSS)
        losses.append((outcome.row.measured - outcome.row.overhead_bytes) / counted - 1)
    assert len(losses) == len(rows) == 6
    assert median(losses) == pytest.approx(ALLOCATOR_LOSS, abs=0.005)
    assert {row.split for row in rows} == {"fit"}


def test_rows_that_name_no_framework_need_what_the_program_has() -> None:
    rows = [row for row in published("torchtitan-a100-out-of-memory") if row.framework is None]
    assert rows
    assert all(row.task is not None and not row.task.apportioned and row.left_bytes > 0 for row in rows)


def test_megatron_core_gives_the_b200_peaks_of_llamas_with_tensor_parallel_ranks() -> None:
    """The peaks are bytes of tensors alone, to four digits. No constant is fitted."""
    for row in published("b200-memory"):
        assert row.task is not None
        held = framework_bytes(FRAMEWORKS["megatron-core"], row.task, [0] * row.task.plan.pp)
        assert max(sum(each.values()) for each in held) == pytest.approx(row.measured, rel=0.004), row.id


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan"])
def test_a_row_of_a_llama_is_compared_with_its_frameworks_bytes(folder: Path, framework: str) -> None:
    zero, dp = {"megatron-core": (1, 2), "torchtitan": (3, 2)}[framework]
    strategy = {"megatron-core": "full-save", "torchtitan": '"insert-prefetch,recompute{policy=full},allocate-ddr"'}[
        framework
    ]
    reduce = {"megatron-core": "last", "torchtitan": "each-micro-batch"}[framework]
    row = f"a,memory,held-out,tinyllama-1.1b,mt3000,1,{dp},{zero},1,2,256,{reduce},fused,whole,{strategy},{framework}"
    (found,) = outcomes(folder, f"{HEAD},peak_bytes", f"{row},1")
    (account,) = found.accounts
    assert account["weights"] > 0
    assert found.peak_bytes == sum(account.values())
    assert found.program_peak_bytes > 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (f"1,1,0,{KEYS},baseline-1f1b,megatron-core", "with zero = 1"),
        (f"1,2,1,{KEYS},recompute{{policy=mlp}},megatron-core", "with one of recompute"),
        ("1,2,1,2,4,16,last,scores-kept,chunked,baseline-1f1b,megatron-core", "logits = whole"),
    ],
)
def test_plans_without_a_job_are_refused_by_the_condition(folder: Path, row: str, said: str) -> None:
    with pytest.raises(DiagnosticError, match=said):
        read_validation_table(table(folder, f"{HEAD},peak_bytes", f"a,memory,held-out,m.json,mt3000,{row},1"))


def test_a_model_with_experts_is_refused_by_name(folder: Path) -> None:
    whole = '"recompute{policy=full},allocate-ddr"'
    row = f"a,memory,held-out,mixtral-8x7b,mt3000,1,2,1,1,2,256,last,fused,whole,{whole},megatron-core"
    with pytest.raises(DiagnosticError, match="experts: code of megatron-lm for experts was not read"):
        read_validation_table(table(folder, f"{HEAD},peak_bytes", f"{row},1"))
