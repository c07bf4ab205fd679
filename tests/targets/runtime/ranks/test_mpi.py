"""Ranks over MPI train what the local engine trains, bit for bit, and have communication under way while they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from click.testing import CliRunner

from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrainc.commands.training.run import command as run_command
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import MODEL, make_program, train
from tests.targets.runtime.ranks.mpi_tools import needs_mpi, run_ranks
from tests.targets.runtime.ranks.rank_jobs import PLANS, STEPS, chunked_programs, local_reports, trained_by_ranks


@needs_mpi
@pytest.mark.full
def test_four_ranks_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    programs = {name: make_program(**keys) for name, keys in PLANS.items()}
    orders = [(name, order) for name in programs for order in ("pp-first", "dp-first")]
    tasks = [
        {
            "made": programs[name],
            "order": order,
            "reduction": "ordered",
            "steps": STEPS,
            "settings": {"poison": order == "dp-first"},
        }
        for name, order in orders
    ]
    local = {name: local_reports(program) for name, program in programs.items()}
    assert any(report["skipped_blocks"] for report in local["2x2-overflow"])
    for (name, order), found in zip(orders, trained_by_ranks("mpi", tmp_path, tasks), strict=True):
        assert found["reports"] == local[name], (name, order)


@needs_mpi
@pytest.mark.full
def test_two_ranks_of_several_chunks_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    """Two channels between the same two ranks are told apart; in a vee the first rank knows the loss."""
    programs = chunked_programs()
    task = {"order": "pp-first", "reduction": "ordered", "steps": STEPS, "settings": {"poison": True}}
    found = trained_by_ranks("mpi", tmp_path, [{"made": program, **task} for program in programs.values()], ranks=2)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 1e-4), ("bf16", 1e-3), ("f32", 1e-4)])
def test_sums_in_the_order_that_mpi_likes_train_the_same_within_rounding(
    dtype: str, tolerance: float, tmp_path: Path
) -> None:
    program = make_program(pp=1, dp=4, view_dtype=dtype)
    task = {"made": program, "order": "pp-first", "reduction": "fast", "steps": 8}
    (found,) = trained_by_ranks("mpi", tmp_path, [task])
    losses = [report["loss"] for report in found["reports"]]
    local = [step.report.loss for step in train(program, 8).done]
    np.testing.assert_allclose(losses, local, rtol=tolerance)


@needs_mpi
@pytest.mark.full
def test_collectives_and_messages_are_under_way_while_the_rank_computes(tmp_path: Path) -> None:
    """Whether time is saved depends on the machine; that the calls are made in this order does not."""
    program = make_program(zero=2, reduce="each-micro-batch")
    task = {"made": program, "order": "pp-first", "reduction": "ordered", "steps": 2}
    (found,) = trained_by_ranks("mpi", tmp_path, [task])
    overlapped: set[str] = set()
    under_way: dict[str, str] = {}
    for keyword, title, moment in found["events"]:
        if keyword in ("send", "recv", "reduce_scatter", "all_gather"):
            if moment == "begin":
                under_way[title] = keyword
            else:
                del under_way[title]
        elif keyword in ("forward", "backward") and moment == "begin":
            overlapped |= set(under_way.values())
    assert {"recv", "reduce_scatter"} <= overlapped


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize("keys", [{}, {"zero": 0}], ids=["sharded", "whole"])
def test_ranks_go_on_from_each_others_checkpoints(keys: dict[str, Any], tmp_path: Path) -> None:
    """Two steps over MPI, two in one process, two over MPI in the other rank order: six steps that never stopped."""
    program = make_program(**keys)
    whole = [step.report.loss for step in train(program, 6).done]
    place = str(tmp_path / "run")
    saved = {"save": place, "save_every": 1}
    task = {"made": program, "order": "pp-first", "reduction": "ordered", "steps": 2, "settings": saved}
    (first,) = trained_by_ranks("mpi", tmp_path, [task])
    second = train(program, 2, resume=place, **saved)
    second.close()  # it keeps its place as long as it lives
    task = {"made": program, "order": "dp-first", "reduction": "ordered", "steps": 2}
    (third,) = trained_by_ranks("mpi", tmp_path, [{**task, "settings": {**saved, "resume": place}}])
    found = [report["loss"] for report in first["reports"]]
    found += [step.report.loss for step in second.done]
    found += [report["loss"] for report in third["reports"]]
    assert found == whole


@needs_mpi
@pytest.mark.full
def test_an_evaluation_over_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """Held-out losses are equal, and training goes on as if nothing had been evaluated."""
    out = tmp_path / "p.rtx"
    write_program(make_program(evolve(MODEL, vocab_size=256)), str(out))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    words = [out, "--data", text, "--steps", "4", "--eval-every", "2", "--eval-fraction", "0.1", "--json"]
    alone = CliRunner().invoke(run_command, list(map(str, words)), standalone_mode=False, catch_exceptions=False)
    ranks = run_ranks(4, "-m", "ratrain", "run", *words, "--engine", "mpi")
    assert ranks.returncode == 0, ranks.stderr
    found, expected = (json.loads(output)["steps"] for output in (ranks.stdout, alone.stdout))
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("loss", "eval_loss", "gradient_norm", "loss_scale"):
            assert mine[key] == theirs[key], key
    assert [step["eval_loss"] is None for step in found] == [True, False, True, False]


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "keys", [{}, {"zero": 2, "reduce": "each-micro-batch", "view_dtype": "f32"}], ids=["f16", "f32"]
)
def test_completions_over_ranks_are_those_of_one_process(ranks: int, keys: dict[str, Any], tmp_path: Path) -> None:
    """How many tokens count differs from replica to replica: the mean is that of the global batch, evaluated too, and after a resumption."""
    out, data, saved = tmp_path / "p.rtx", tmp_path / "pairs.jsonl", tmp_path
    layout = {"pp": 2, "dp": 2} if ranks == 4 else {"pp": 1, "dp": 2}
    write_program(make_program(evolve(MODEL, vocab_size=256), **layout, **keys), str(out))
    pairs = [{"prompt": "how many? " * (number % 5), "completion": f"{number} foxes. "} for number in range(600)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = [out, "--data", data, "--train-on", "completion", "--eos", "0", "--steps", "3", "--json"]
    words += ["--eval-every", "2", "--eval-fraction", "0.1", "--save"]
    resumed = [*words[:-1], "--resume"]
    alone = [
        CliRunner().invoke(run_command, list(map(str, each)), standalone_mode=False, catch_exceptions=False).stdout
        for each in ([*words, saved / "alone"], [*resumed, saved / "alone"])
    ]
    over_ranks = []
    for each in ([*words, saved / "ranks"], [*resumed, saved / "ranks"]):
        result = run_ranks(ranks, "-m", "ratrain", "run", *each, "--engine", "mpi")
        assert result.returncode == 0, result.stderr
        over_ranks.append(result.stdout)
    for mine, theirs in zip(over_ranks, alone, strict=True):
        found, expected = (json.loads(output)["steps"] for output in (mine, theirs))
        assert len(found) == 3
        for one, other in zip(found, expected, strict=True):
            assert 0 < one["loss_tokens"] < one["tokens"]
            for key in ("loss", "loss_tokens", "eval_loss", "gradient_norm", "loss_scale", "skipped_blocks"):
                assert one[key] == other[key], key


@needs_mpi
@pytest.mark.full
def test_data_of_another_run_and_weights_of_another_model_are_refused_once(tmp_path: Path) -> None:
    """All ranks meet the same contradiction; it is said, and the job ends."""
    model = evolve(MODEL, vocab_size=256)
    out = tmp_path / "p.rtx"
    write_program(make_program(model), str(out))
    texts = [tmp_path / name for name in ("one.txt", "other.txt")]
    for text in texts:
        text.write_text(f"{text.name}: the quick brown fox jumps over the lazy dog. " * 200)
    words = ["-m", "ratrain", "run", out, "--engine", "mpi", "--steps", "1", "--data"]
    saved = run_ranks(4, *words, texts[0], "--save", tmp_path / "run")
    assert saved.returncode == 0, saved.stderr
    export_weights(str(tmp_path / "run"), str(tmp_path / "weights"))
    config = hugging_face_config(evolve(model, rope_theta=5e5))
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    for choice, code in (
        ([texts[1], "--resume", tmp_path / "run"], "RT092"),
        ([texts[0], "--init", tmp_path / "weights"], "RT091"),
    ):
        ended = run_ranks(4, *words, *choice)
        assert ended.returncode != 0
        assert ended.stderr.count(f"error[{code}]") >= 1, ended.stderr
        assert "Traceback" not in ended.stderr
