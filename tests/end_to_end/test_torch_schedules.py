"""Schedules that PyTorch wrote: each becomes a verified, allocated program that trains like GPipe, bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.placement.foreign_table import orders_of_table, read_foreign_table, shape_of_table
from ratrain.ratrain_ir.analysis.actions import COMPUTES, MESSAGES, actions_of_module, read_torch_csv
from ratrain.ratrain_ir.analysis.chunk_actions import most_in_flight_on
from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.schedules.action import most_in_flight
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import losses, make_plan, state, train
from tests.end_to_end.toys import TOY

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.runtime.training.training import TrainingRun

FOLDER = Path(__file__).parents[1] / "data/torch_schedules"
TABLES = sorted(FOLDER.glob("*.csv"))
NAMES = {
    "dual-pipe-v": "dualpipe-v",
    "interleaved-1f1b": "interleaved",
    "interleaved-zero-bubble": None,
    "looped-bfs": "breadth-first",
    "zbv": "zb-v",
}
"""What the schedules of PyTorch are called here."""
STEPS = 2
KEPT = ("p", "m1", "m2", "t")
"""Master weights and the state of the optimizer: what no cut and no order may change."""


def title(path: Path) -> str:
    return path.stem


def quick(path: Path) -> bool:
    """Whether a table is small enough for every run of the tests."""
    return "-2x" in path.stem or path.stem == "dual-pipe-v-3x2"


def placement(path: Path) -> str:
    """The pass that places a table; LoopedBFS takes the last micro-batch first in its backwards."""
    return f"place-from-file{{path={path}{' renumber=true' if 'looped-bfs' in path.stem else ''}}}"


def lowered(shape: PipelineShape, **keys: Any) -> Module:
    """A model of three layers a stage, cut for a shape."""
    model = evolve(TOY, layers=3 * shape.stages)
    cuts = balance_cuts(model, shape.stages * shape.chunks, 4, WHOLE)
    sizes = {"pp": shape.stages, "micro_batches": shape.micro_batches, "micro_batch_size": 1, "seq_len": 4}
    plan = make_plan(model, **sizes, cuts=cuts, chunks=shape.chunks, layout=shape.layout, **keys)
    return api.lowered(model, plan)


def placed(path: Path, **keys: Any) -> Module:
    module = lowered(shape_of_table(read_foreign_table(str(path))), **keys)
    api.run_passes(module, placement(path))
    return module


def words(rows, kinds) -> list[list[str]]:
    return [[str(action) for action in row if action.kind in kinds] for row in rows]


def schedule_name(path: Path) -> str:
    return next(name for name in NAMES if path.stem.startswith(name))


@pytest.mark.parametrize("path", TABLES, ids=title)
@pytest.mark.sampled(4)
def test_a_table_is_placed_as_it_stands(path: Path) -> None:
    """What a rank computes, and every message of a lowered table, is in the module where the table has it."""
    table = read_torch_csv(str(path))
    module = placed(path, dp=1)
    assert module.plan.schedule == NAMES[schedule_name(path)]
    kinds = COMPUTES | MESSAGES if table.is_lowered else COMPUTES
    if "looped-bfs" not in path.stem:
        assert words(actions_of_module(module).rows, kinds) == words(table.rows, kinds)
    else:  # its backwards are numbered anew: what is done, but for the micro-batch, stays
        mine, theirs = (
            [[(a.stage, a.kind) for a in row if a.kind in kinds] for row in rows]
            for rows in (actions_of_module(module).rows, table.rows)
        )
        assert mine == theirs
    in_flight = [most_in_flight_on(module, stage) for stage in module.stages]
    assert in_flight == [most_in_flight((a.kind, a.chunk) for a in order) for order in orders_of_table(table)]
    text = print_module(module)
    assert print_module(parse_module(text)) == text


def trained(module: Module, passes: str) -> TrainingRun:
    api.run_passes(module, passes)
    program = api.emit(module)
    check_program(program)
    assert api.simulate(program).step_seconds > 0
    return train(program, STEPS)


def result(run: TrainingRun) -> tuple[list[float], dict[str, bytes]]:
    """Losses, and the state of all blocks, whichever stage holds them."""
    kept = {}
    for name, array in state(run).items():
        _, replica, tensor = name.split(".", 2)
        if tensor.split(".")[0] in KEPT:
            kept[f"{replica}.{tensor}"] = array.tobytes()
    return losses(run), kept


@cache
def gpipe(stages: int, **keys: Any) -> tuple[list[float], dict[str, bytes]]:
    """A run in GPipe order, of one chunk a stage and as many micro-batches as the tables of so many ranks have."""
    module = lowered(PipelineShape(stages, 2 * stages), **keys)
    return result(trained(module, "place-gpipe,allocate-ddr"))


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if quick(path) else pytest.mark.full) for path in TABLES], ids=title
)
@pytest.mark.sampled(4)
def test_a_table_trains_like_gpipe_bit_for_bit(path: Path) -> None:
    module = placed(path, dp=1)
    assert result(trained(module, "allocate-ddr")) == gpipe(module.plan.pp, dp=1)


PIPELINES = ("joint-order,allocate-ddr", "bucket-grad-sync,insert-prefetch,recompute{policy=full},allocate-ddr")


@pytest.mark.parametrize(
    ("stem", "passes", "zero"),
    [
        ("zbv-2x2-lowered", PIPELINES[0], 3),
        ("dual-pipe-v-2x2-lowered", PIPELINES[1], 3),
        ("interleaved-1f1b-2x2-lowered", PIPELINES[0], 1),
        *(
            pytest.param(f"{name}-{size}{form}", passes, zero, marks=pytest.mark.full)
            for name in NAMES
            for size in ("2x2", "3x2")
            for form in ("", "-lowered")
            for passes in PIPELINES
            for zero in (0, 1, 3)
        ),
    ],
)
@pytest.mark.sampled(2)
def test_with_replicas_and_the_passes_that_follow(stem: str, passes: str, zero: int) -> None:
    """Reductions and, of ZeRO 3, gathers of views where the table has them; messages stay there whatever follows."""
    module = placed(FOLDER / f"{stem}.csv", dp=2, zero=zero)
    before = words(actions_of_module(module).rows, COMPUTES | MESSAGES)
    assert result(trained(module, passes)) == gpipe(module.plan.pp, dp=2, zero=zero)
    assert words(actions_of_module(module).rows, COMPUTES | MESSAGES) == before
