"""What travels block-quantised: the same bits on every replica, in every order and engine, and fewer bytes on the links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ratrain.ratrain_ir.config.quantised import BLOCK_ELEMENTS, FORMATS, LARGEST_CODE
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from tests.end_to_end.test_sharding import PASSES, program_of, trained
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, reports_of, same_state_of_blocks, train
from tests.end_to_end.toys import SHARED_EXPERT
from tests.targets.runtime.ranks.rank_jobs import STEPS, as_read, local_reports
from tests.targets.runtime.ranks.thread_ranks import trained_by_threads

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.runtime.training.training import TrainingRun

BOTH = {"gather_quantised": "int8-block", "reduce_quantised": "int8-block"}
PACKED: dict[str, dict[str, Any]] = {
    "gathered in 8 bits": {"gather_quantised": "int8-block"},
    "gathered in 4 bits": {"gather_quantised": "int4-block"},
    "reduced": {"reduce_quantised": "int8-block"},
    "both": BOTH,
    "both, in groups, some blocks": {
        **BOTH, "dp": 4, "shard_group": 2, "zero_blocks": ZeroLevels.parse("attention.* 3, mlp.1 0"), "micro_batches": 2,
    },
    "both, tied": {**BOTH, "tied": True},
    "gathered of peers": {"gather_quantised": "int4-block", "tp": 2},
    "both, experts": {**BOTH, "model": SHARED_EXPERT},
}  # fmt: skip


def words_of(name: str) -> dict[str, Any]:
    return {"dp": 2, "zero": 1, **PACKED[name]}


@pytest.mark.parametrize("given", PACKED)
@pytest.mark.sampled(2)
def test_no_schedule_and_no_level_changes_what_is_trained(given: str) -> None:
    """Views that stay, views that are gathered for each use, gathers at other times: one owner packs one shard."""
    expected = trained(words_of(given), PASSES[0])
    for zero, passes in ((1, PASSES[2]), (3, PASSES[1])):
        found = trained({**words_of(given), "zero": zero}, passes)
        assert losses(found) == losses(expected)
        same_state_of_blocks(found, expected)


def test_a_plan_that_packs_trains_other_bits() -> None:
    found = [losses(trained({"dp": 2, "zero": 1, **keys}, PASSES[0])) for keys in ({}, *list(PACKED.values())[:4])]
    assert len({tuple(each) for each in found}) == len(found)
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=0.02)


def views_of(run: TrainingRun) -> list[list[tuple[str, np.ndarray]]]:
    """Of each replica of a stage the views that it holds between steps, by block."""
    found = []
    for stage, ranks in enumerate(run.engine.ranks):
        names = [str(block) for block in run.program.topology.stage_blocks[stage]]
        found += [[(name, rank.carried("w", name)) for name in names] for rank in ranks]
    return found


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_all_replicas_have_the_view_that_its_owners_packed(name: str, steps: int) -> None:
    """At the start too, when nothing has been gathered yet: every block of a shard has few values, multiples of one scale."""
    program = make_program(MODEL, zero=1, pp=1, cuts=(), gather_quantised=name)
    run = train(program, steps)
    first, second = views_of(run)
    most = LARGEST_CODE[FORMATS[name]]
    (ranks,) = run.engine.ranks
    for (block, mine), (_, theirs) in zip(first, second, strict=True):
        master = np.concatenate([rank.carried("p", block) for rank in ranks])
        np.testing.assert_array_equal(mine.view(np.uint16), theirs.view(np.uint16), err_msg=block)
        for shard, exact in zip(mine.reshape(2, -1), master.reshape(2, -1), strict=True):
            for start in range(0, len(shard), BLOCK_ELEMENTS):
                values = shard[start : start + BLOCK_ELEMENTS].astype(np.float64)
                scale = np.abs(values).max() / most or 1
                np.testing.assert_allclose(values / scale, np.rint(values / scale), atol=most * 2.0**-9)
                off = np.abs(exact[start : start + BLOCK_ELEMENTS] - values)
                assert (off <= scale * (0.5 + most * 2.0**-9)).all(), "of its master, rounded to f16 before and after"


@pytest.mark.parametrize("given", ["both", "both, in groups, some blocks"])
def test_a_run_goes_on_with_the_views_that_were_gathered(given: str, tmp_path: Path) -> None:
    program = program_of(words_of(given), PASSES[1])
    expected = train(program, 4)
    train(program, 2, save=str(tmp_path))
    same_state_of_blocks(train(program, 2, resume=str(tmp_path)), expected)


@pytest.mark.parametrize("given", ["both", "both, in groups, some blocks", "gathered of peers", "both, experts"])
def test_ranks_have_the_bits_of_one_process(given: str) -> None:
    program = program_of(words_of(given), PASSES[1])
    expected = local_reports(program)
    for run in trained_by_threads(program, STEPS)[-1:]:
        assert as_read(reports_of(run)) == expected


def test_any_order_and_any_kernels_train_the_same_bits() -> None:
    program = program_of({**words_of("both"), "zero": 3, "reduce": "each-micro-batch"}, PASSES[1])
    expected = train(program, 3)
    for settings in ({"interleave_seed": 3}, {"threads": 2}):
        same_state_of_blocks(train(program, 3, **settings), expected)


def test_gradients_that_overflow_are_found_though_they_are_packed() -> None:
    exact, packed = (make_program(loss_scale=2.0**19, **keys) for keys in ({}, {"reduce_quantised": "int8-block"}))
    skipped = [[report["skipped_blocks"] for report in local_reports(program, 1)] for program in (exact, packed)]
    assert skipped[0] == skipped[1]
    assert skipped[1][0] > 0
