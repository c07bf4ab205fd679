"""Checkpoints know blocks, not chunks: a run goes on where another layout stopped, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrainc.running.weight_export import export_weights
from tests.end_to_end.chunk_runs import outcome, outcome_of, program_of
from tests.end_to_end.tiny_runs import MODEL, train
from tests.end_to_end.toys import GPT2

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

LLAMA = evolve(MODEL, layers=4)
SHAPES = {
    "loop": ("breadth-first", PipelineShape(2, 3, 2)),
    "one-chunk": ("1f1b", PipelineShape(4, 3)),
    "vee": ("zb-v", PipelineShape(2, 3, 2, "vee")),
    "one-stage": ("gpipe", PipelineShape(1, 3)),
    "interleaved": ("interleaved", PipelineShape(2, 3, 2)),
}
"""Schedules and shapes, in the order in which a run goes from one to the next."""
EACH = 2
"""Steps under each."""


@pytest.mark.parametrize(
    ("model", "every"), [(LLAMA, 0), (evolve(GPT2, layers=4), 1)], ids=["llama-whole", "gpt2-tied-sharded"]
)
@pytest.mark.sampled(2)
def test_a_run_goes_on_across_layouts_and_chunk_counts(model: ModelConfig, every: int, tmp_path: Path) -> None:
    """Moments, update counts and the loss scale among what goes on."""
    expected = outcome(program_of(model, *SHAPES["one-chunk"], zero=2), EACH * len(SHAPES))
    found: list[float] = []
    place = str(tmp_path / "run")
    saving = {"save": place, "save_every": every} if every else {"save": place}
    for number, (kind, shape) in enumerate(SHAPES.values()):
        run = train(program_of(model, kind, shape, zero=2), EACH, **saving, **({"resume": place} if number else {}))
        losses, state = outcome_of(run)
        found += losses
        run.close()  # it keeps its place as long as it lives
    assert found == expected[0]
    assert state == expected[1]


def test_weights_of_any_layout_are_exported_alike_and_start_any_other(tmp_path: Path) -> None:
    exported: dict[str, bytes] = {}
    for name, (kind, shape) in SHAPES.items():
        train(program_of(LLAMA, kind, shape), EACH, save=str(tmp_path / name)).close()
        export_weights(str(tmp_path / name), str(tmp_path / f"{name}-weights"))
        exported[name] = (tmp_path / f"{name}-weights" / "model.safetensors").read_bytes()
    assert len(set(exported.values())) == 1
    weights = str(tmp_path / "loop-weights")
    found = [outcome(program_of(LLAMA, *SHAPES[name]), EACH, init=weights) for name in ("vee", "one-chunk")]
    assert found[0] == found[1]


def test_a_checkpoint_says_chunks_and_layout_and_a_run_under_others_says_what_changed(tmp_path: Path) -> None:
    place = str(tmp_path / "run")

    def resumed(name: str) -> list[str]:
        run = train(program_of(LLAMA, *SHAPES[name]), 1, save=place, resume=place)
        run.close()
        return [note.message for warning in run.warnings for note in warning.notes]

    train(program_of(LLAMA, *SHAPES["vee"]), 1, save=place).close()
    plan = json.loads((tmp_path / "run" / "manifest.json").read_text())["run"]["plan"]
    assert {key: plan[key] for key in ("pp", "chunks", "layout")} == {"pp": 2, "chunks": 2, "layout": "vee"}
    assert resumed("vee") == []
    assert {"plan: chunks = 2 then, 1 now", "plan: layout = vee then, loop now"} <= set(resumed("one-chunk"))
    assert {"plan: pp = 4 then, 2 now", "plan: chunks = 1 then, 2 now"} <= set(resumed("loop"))
    assert resumed("vee") == ["plan: layout = loop then, vee now", "plan: schedule = breadth-first then, zb-v now"]
