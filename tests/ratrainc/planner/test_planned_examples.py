"""The plan files of the paper's models: they are plans, the bounds allow them, and folded they compile, fit and take no less than their bound."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from ratrain import api
from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placed_by import placed_by
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.compiling.opening import load_schedule
from ratrain.ratrainc.planner.answer.plan_files import plan_text
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate, folded_micro_batches
from ratrain.ratrainc.planner.space.search_setting import SearchSetting
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MODELS = ("llama-2-7b", "baichuan2-13b", "qwen2.5-32b", "llama-2-70b")
FILES = [path for model in MODELS for path in sorted(EXAMPLES.rglob(f"{model}-*.toml"))]
QUICK = ("llama-2-7b-8.toml", "llama-2-7b-1024.toml", "baichuan2-13b-256.toml")
"""Compiled in every run of the tests; the others with the slow ones."""


def of_file(path: Path):
    """The model, plan and pipeline of an example; the pipeline stands in the comments of planned ones."""
    model = load_model(next(name for name in MODELS if path.name.startswith(f"{name}-")))
    named = re.search(r'--passes "([^"]+)"', path.read_text(encoding="utf-8"))
    return model, load_plan(path, model), named[1] if named else strategy(DEFAULT_STRATEGY).passes


def bounds_of(model, plan, pipeline):
    setting = SearchSetting(model, load_machine(None), plan, pipeline)
    shape = Shape(plan.pp, plan.dp, plan.micro_batch_size, plan.micro_batches, plan.zero, plan.reduce, tp=plan.tp)
    columns = Columns.of(Profiles(setting), [shape], schedule=placed_by(pipeline) or "1f1b")
    return plan_bounds(columns, np.diff([[0, *plan.cuts, model.layers]]).astype(float))


def test_there_are_plans_for_every_model():
    assert {name for name in MODELS for path in FILES if path.name.startswith(f"{name}-")} == {*MODELS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_bounds_allow_it(path):
    model, plan, pipeline = of_file(path)
    assert parse_pipeline(pipeline)
    assert plan.clusters <= int(path.stem.rpartition("-")[2])
    assert np.isfinite(bounds_of(model, plan, pipeline).seconds[0])


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.name in QUICK else pytest.mark.full) for p in FILES],
    ids=lambda path: path.name,
)
def test_it_compiles_and_fits(path):
    model, plan, pipeline = of_file(path)
    folded = folded_micro_batches(plan, pipeline) < plan.micro_batches
    found = evaluate(Task(model, plan, pipeline, load_machine(None), folded))
    bounds = bounds_of(model, plan, pipeline)
    assert found.step_seconds is not None, found.refusal
    assert found.step_seconds * (1 + 1e-9 + 0.005 * folded) >= bounds.seconds[0]
    assert (np.array(found.peak_bytes) >= bounds.peak_bytes[0]).all()


@pytest.mark.parametrize(
    ("pipeline", "names_passes"),
    [
        (strategy(DEFAULT_STRATEGY).passes, False),
        (f"place-gpipe,{strategy(DEFAULT_STRATEGY).passes}", False),
        ("place-gpipe,recompute{policy=full},allocate-ddr", True),
    ],
)
def test_the_command_in_a_plan_file_compiles_what_was_planned(pipeline, names_passes, tmp_path, monkeypatch):
    """With `--passes` only where `compile` would take others."""
    monkeypatch.chdir(tmp_path)
    model, plan = api.resolved(str(example_path("tiny.json")), str(example_path("tiny.toml")))
    path = Path("P.toml")
    path.write_text(plan_text(plan, pipeline, model, str(example_path("tiny.json")), ["A plan."], path="P.toml"))
    command = re.search(r"^#   ratrainc (.*?)(?: \\\n#     (--passes .*))?$", path.read_text(), re.MULTILINE)
    assert (command[2] is not None) == names_passes
    assert main([*shlex.split(f"{command[1]} {command[2] or ''}"), "-o", "x.rtir"]) == 0
    planned = api.compile(model, plan, passes=pipeline)
    assert [list(map(repr, stage.ops)) for stage in load_schedule("x.rtir").stages] == [
        list(map(repr, stage.ops)) for stage in planned.stages
    ]
