"""The MPI engine trains what the local engine trains, bit for bit, and has communication under way while it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import asdict, evolve
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrain_ir.frontend.hf_export import hugging_face_config
from ratrain.ratrain_ir.frontend.plan import Optimizer
from ratrain.ratrain_ir.frontend.rank_mapping import RankMapping
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.topology import grid
from ratrain.ratrainc.commands.run import command as run_command
from ratrain.ratrainc.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.mpi.layout import Layout
from tests.end_to_end.chunk_runs import program_of
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program, train
from tests.end_to_end.toys import GPT2
from tests.targets.runtime.mpi_tools import needs_mpi, run_ranks

TIED = evolve(MODEL, tied_embeddings=True)
CLIPPED = Optimizer(lr=5e-3, warmup_steps=3, clip="global")
STEPS = 3
PLANS: dict[str, dict[str, Any]] = {
    "2x2": {},
    "2x2-each-micro-batch": {"zero": 2, "reduce": "each-micro-batch"},
    "2x2-views-gathered-for-each-use": {"zero": 3, "reduce": "each-micro-batch"},
    "2x2-nothing-sharded-clipped": {"zero": 0, "optimizer": CLIPPED},
    "2x2-tied-clipped": {"model": TIED, "optimizer": CLIPPED},
    "2x2-baseline": {"name": "baseline-1f1b"},
    "2x2-f32": {"view_dtype": "f32"},
    "2x2-bf16": {"view_dtype": "bf16", "zero": 2, "reduce": "each-micro-batch"},
    "2x2-bf16-tied-clipped": {"model": TIED, "optimizer": CLIPPED, "view_dtype": "bf16"},
    "2x2-gpt2-clipped": {"model": GPT2, "optimizer": CLIPPED},
    "2x2-overflow": {"loss_scale": 2.0**19},
    "2x2-slices": {"slices": (4, 1, 5), "zero": 2, "reduce": "each-micro-batch"},
    "1x4-tied": {"model": TIED, "pp": 1, "dp": 4},
    "4x1-tied": {"model": evolve(TIED, layers=4), "pp": 4, "dp": 1},
}


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["pp-first", "dp-first"]))
def test_every_process_has_its_place(stages: int, replicas: int, order: Any) -> None:
    layout = Layout(grid(stages, replicas), order)
    places = [layout.place(process) for process in range(layout.size)]
    assert sorted(places) == [(s, r) for s in range(stages) for r in range(replicas)]
    assert [layout.process(*place) for place in places] == list(range(layout.size))


def test_rank_order_says_what_is_next_to_each_other() -> None:
    assert [Layout(grid(3, 2), "pp-first").place(i) for i in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert [Layout(grid(3, 2), "dp-first").place(i) for i in range(3)] == [(0, 0), (0, 1), (1, 0)]
    tiled = Layout.of_plan(make_plan(pp=2, dp=4, mapping=RankMapping.parse("chip 2x2")), "mapping")
    assert [tiled.place(i) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert [tiled.process(*tiled.place(i)) for i in range(8)] == list(range(8))
    with pytest.raises(DiagnosticError, match="has no mapping to order ranks by"):
        Layout.of_plan(make_plan(pp=2, dp=4), "mapping")


def trained_by_ranks(folder: Path, tasks: list[dict[str, Any]], *, ranks: int = 4) -> list[dict[str, Any]]:
    for number, task in enumerate(tasks):
        path = folder / f"{number}.rtx"
        write_program(task.pop("made"), str(path))
        task["program"] = str(path)
    result = run_ranks(ranks, Path(__file__).with_name("mpi_program.py"), json.dumps(tasks))
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def as_read(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(reports))
    return found


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
    local = {
        name: as_read([asdict(step.report) for step in train(program, STEPS).done])
        for name, program in programs.items()
    }
    assert any(report["skipped_blocks"] for report in local["2x2-overflow"])
    for (name, order), found in zip(orders, trained_by_ranks(tmp_path, tasks), strict=True):
        assert found["reports"] == local[name], (name, order)


CHUNKED = {
    "interleaved": ("interleaved", PipelineShape(2, 4, 2)),
    "breadth-first": ("breadth-first", PipelineShape(2, 3, 2)),
    "zb-v": ("zb-v", PipelineShape(2, 4, 2, "vee")),
    "v-half": ("v-half", PipelineShape(2, 3, 2, "vee")),
    "three-chunks": ("breadth-first", PipelineShape(2, 2, 3, "vee")),
}


@needs_mpi
@pytest.mark.full
def test_two_ranks_of_several_chunks_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    """Two channels between the same two ranks are told apart; in a vee the first rank knows the loss."""
    states = {"zero-0": {"zero": 0}, "tied-clipped": {"model": evolve(TIED, layers=4), "optimizer": CLIPPED}}
    programs = {}
    for name, (kind, shape) in CHUNKED.items():
        for state, keys in states.items():
            model = evolve(keys.get("model", MODEL), layers=shape.stages * shape.chunks)
            rest = {key: value for key, value in keys.items() if key != "model"}
            programs[name, state] = program_of(model, kind, shape, dp=1, **rest)
    task = {"order": "pp-first", "reduction": "ordered", "steps": STEPS, "settings": {"poison": True}}
    found = trained_by_ranks(tmp_path, [{"made": program, **task} for program in programs.values()], ranks=2)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == as_read([asdict(step.report) for step in train(program, STEPS).done]), name


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 1e-4), ("bf16", 1e-3), ("f32", 1e-4)])
def test_sums_in_the_order_that_mpi_likes_train_the_same_within_rounding(
    dtype: str, tolerance: float, tmp_path: Path
) -> None:
    program = make_program(pp=1, dp=4, view_dtype=dtype)
    task = {"made": program, "order": "pp-first", "reduction": "mpi", "steps": 8}
    (found,) = trained_by_ranks(tmp_path, [task])
    losses = [report["loss"] for report in found["reports"]]
    local = [step.report.loss for step in train(program, 8).done]
    np.testing.assert_allclose(losses, local, rtol=tolerance)


@needs_mpi
@pytest.mark.full
def test_collectives_and_messages_are_under_way_while_the_rank_computes(tmp_path: Path) -> None:
    """Whether time is saved depends on the machine; that the calls are made in this order does not."""
    program = make_program(zero=2, reduce="each-micro-batch")
    task = {"made": program, "order": "pp-first", "reduction": "ordered", "steps": 2}
    (found,) = trained_by_ranks(tmp_path, [task])
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
    (first,) = trained_by_ranks(tmp_path, [task])
    second = train(program, 2, resume=place, **saved)
    second.close()  # it keeps its place as long as it lives
    task = {"made": program, "order": "dp-first", "reduction": "ordered", "steps": 2}
    (third,) = trained_by_ranks(tmp_path, [{**task, "settings": {**saved, "resume": place}}])
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
