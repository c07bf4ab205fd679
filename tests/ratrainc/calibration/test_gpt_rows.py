"""Measured iterations of GPT models, with and without tensor-parallel ranks, and their times in closed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.calibration.calibration_report import calibrate_rows
from ratrain.ratrainc.calibration.fitting import OUTLIER, fitted, with_values
from ratrain.ratrainc.calibration.gpt_block import VOCAB, BlockShape, BlockWork, blocks_of
from ratrain.ratrainc.calibration.gpt_iteration import GptRun, GptTimes, placement_of_run
from ratrain.ratrainc.calibration.gpt_layers import measured_layers
from ratrain.ratrainc.calibration.gpt_rows import GptRow, predicted_gpt, read_gpt_rows
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.validation.errors import errors
from ratrain.targets.machine.cost import kernel_flops
from ratrain.targets.machine.machine import Machine, load_machine

ROOT = Path(__file__).parents[3]
VTRAIN = ROOT / "tests" / "data" / "vtrain" / "single_node.csv"
A100 = ROOT / "benchmarks" / "published" / "machines" / "a100-80gb-8-800gbps.toml"
ALL_ROWS = ROOT.parent / "shared" / "validation" / "vtrain_a100"
RUN = GptRun(
    hidden=1024,
    heads=16,
    layers=8,
    seq_len=512,
    tp=1,
    pp=2,
    dp=2,
    micro_batch=1,
    micro_batches=4,
    recompute=False,
)
HEADER = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iter_ms"
NAMES = ("gemm_efficiency", "gemm_half_extent", "head_efficiency", "launch", "dispatch", "node.bandwidth")


def machine_with(**changes: float) -> Machine:
    return with_values(load_machine(str(A100)), [*changes], [*changes.values()], "made for a test")


@pytest.mark.parametrize("peers", [1, 2, 4, 8])
def test_peers_share_out_the_products(peers: int) -> None:
    """Against Narayanan et al. (2021), equation 2: 24 b s h^2 + 4 b s^2 h of a layer forward, twice that backward."""
    shape = BlockShape(hidden=1024, heads=16, seq_len=512, micro_batch=2, peers=peers)
    rows, blocks = 2 * 512, blocks_of(shape)
    layer = (24 * rows * 1024**2 + 4 * rows * 512 * 1024) / peers

    def flops(work: BlockWork) -> float:
        return sum(kernel_flops(work.routine, step) for step in work.routine.steps)

    assert flops(blocks.forward) == layer
    assert flops(blocks.backward) == 2 * layer
    assert flops(blocks.head) == 3 * 2 * rows * 1024 * (VOCAB // peers)
    assert (blocks.forward.collectives, blocks.backward.collectives) == ((0, 0) if peers == 1 else (2, 2))


def kernels(peers: int, micro_batch: int, hidden: int = 1024) -> tuple[int, int]:
    """How many a layer has forward and backward; of 16 heads and 1024 tokens."""
    blocks = blocks_of(BlockShape(hidden, heads=16, seq_len=1024, micro_batch=micro_batch, peers=peers))
    return len(blocks.forward.routine.steps), len(blocks.backward.routine.steps)


def test_softmax_is_one_kernel_only_of_a_multiple_of_four_matrices() -> None:
    """Eight peers have two heads each: of one sequence two matrices, of two sequences four."""
    assert kernels(8, 1, 8192) == (14 + 4, 33 + 4)
    assert kernels(8, 2, 8192) == (14, 33)


def test_products_with_few_tiles_share_out_their_inner_extent() -> None:
    """A tile is 128 by 128: on eight peers 2048 rows by 384 columns have 48, a peer's four weights at most 32, and half of 108 is 54."""
    assert kernels(4, 4, 8192) == (14, 33)
    forward, backward = kernels(8, 2)
    assert (forward - 14, backward - 33) == (1, 1 + 4)


@pytest.mark.parametrize(("peers", "recompute"), [(2, False), (4, False), (4, True)])
def test_sums_over_peers_take_what_their_bytes_take(peers: int, recompute: bool) -> None:
    """All-reduces of 2 (T - 1) / T of their bytes: four of a layer and micro-batch, six with its forward twice, two outside, sums of the loss."""
    run = evolve(RUN, tp=peers, dp=1, pp=1, recompute=recompute)
    free = {"launch": 0.0, "dispatch": 0.0, "node.latency": 0.0, "ddr_bandwidth": 1e30}
    bandwidth = 1e9
    slow, fast = (
        GptTimes(machine_with(**free, **{"node.bandwidth": each})).iteration(run) for each in (bandwidth, 1e25)
    )
    nbytes = ((6 if recompute else 4) * run.layers + 2) * 2 * 512 * 1024 + 3 * 4 * 512
    wanted = run.micro_batches * nbytes * 2 * (peers - 1) / peers / bandwidth
    assert slow - fast == pytest.approx(wanted, rel=1e-6)


def test_the_host_issues_kernels_and_sums() -> None:
    """Where it is slow, a layer takes as long on any number of peers, but for the sums that they need."""
    times = GptTimes(machine_with(dispatch=1.0))
    alone, shared = (times.blocks(evolve(RUN, tp=peers, hidden=8192)) for peers in (1, 4))
    assert shared.forward - alone.forward == pytest.approx(2)
    assert shared.backward - alone.backward == pytest.approx(2)


def test_iteration_grows_with_what_it_does() -> None:
    times = GptTimes(load_machine(str(A100)))

    def seconds(**changes: int) -> float:
        return times.iteration(evolve(RUN, **changes))

    more = ({"hidden": 2048}, {"layers": 12}, {"micro_batches": 5}, {"dp": 4}, {"recompute": True})
    assert seconds() < min(seconds(**each) for each in more)
    blocks = times.blocks(RUN)
    layers = 4 * (blocks.forward + blocks.backward)
    assert seconds(micro_batches=5) - seconds() == pytest.approx(layers + max(blocks.head, blocks.embedding))
    assert seconds(recompute=True) - seconds() == pytest.approx((2 + 3) * 4 * blocks.forward)


@pytest.mark.parametrize(
    ("ranks", "tensor", "replicas", "level"),
    [
        ((2, 2, 2), (2, 2), (2, 2), 0),  # eight ranks: one node
        ((8, 4, 2), (8, 8), (1, 4), 1),  # peers fill a node: replicas and stages are on others
        ((4, 2, 4), (4, 4), (2, 2), 1),
        ((16, 2, 2), (8, 16), (1, 2), 1),
    ],
)
def test_peers_are_neighbours(
    ranks: tuple[int, int, int], tensor: tuple[int, ...], replicas: tuple[int, ...], level: int
) -> None:
    placement = placement_of_run(*ranks, load_machine(str(A100)).link_groups)
    assert placement.members("tensor").within == tensor
    assert placement.members("replicas").within == replicas
    assert placement.level_between(0, 1) == level


def test_rows_with_peers_are_timed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "calibrate",
        "--rows",
        str(VTRAIN),
        "--machine",
        str(A100),
        "--fit",
        "gemm_half_extent,dispatch",
        "--hold-out",
        "4",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == len(VTRAIN.read_text().splitlines()) - 1
    assert found["errors"]["held_out"]["mean"] < 0.15
    by_peers = found["held_out_by_tp"]
    assert {*by_peers} == {"1", "4"}
    assert sum(each["rows"] for each in by_peers.values()) == found["errors"]["held_out"]["rows"]


def test_peers_are_in_the_table_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "--rows", str(VTRAIN), "--machine", str(A100), "--fit", "dispatch", "--hold-out", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "held out, tp = 1" in out
    assert "held out, tp = 4" in out


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=3, unique=True),
    st.data(),
)
def test_a_layer_of_its_own_time_is_found_in_any_plan(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Iterations whose layers take factors of their own: each factor is found, and iterations of other plans are met."""
    machine = load_machine(str(A100))
    runs = [
        evolve(RUN, tp=tp, micro_batch=size, pp=pp, dp=dp, layers=layers, micro_batches=count, recompute=recompute)
        for tp, size in shapes
        for pp, dp, layers, count, recompute in [(1, 1, 8, 3, False), (2, 2, 16, 1, True), (4, 1, 8, 9, False)]
    ]
    factors = {run.shape: data.draw(st.floats(0.3, 3)) for run in runs}
    times = GptTimes(machine, factors)
    rows = [GptRow(run, times.iteration(run), number) for number, run in enumerate(runs)]
    found = measured_layers(rows, machine)
    assert {each.shape: each.factor for each in found} == pytest.approx(factors)
    assert [each.rows for each in found] == [3] * len(shapes)
    others = [GptRow(evolve(run, layers=24, micro_batches=5, dp=2), 1.0, 0) for run in runs]
    wanted = [times.iteration(row.run) for row in others]
    assert predicted_gpt(others, machine, {each.shape: each.factor for each in found}) == pytest.approx(wanted)
    unknown = GptRow(evolve(RUN, hidden=512), 1.0, 0)
    assert predicted_gpt([unknown], machine, factors) == predicted_gpt([unknown], machine)


def test_a_strategy_of_gpt_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "--rows", str(VTRAIN), "--machine", str(A100), "--fit", "dispatch", "--strategy", "zero3"]
    assert main(words) == 1
    assert "a strategy changes nothing of them" in capsys.readouterr().err


def test_layers_of_fitted_rows_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """They are of rows that were fitted alone, and the machine file is the same as without them."""
    words = ["calibrate", "--rows", str(VTRAIN), "--machine", str(A100), "--fit", "gemm_efficiency", "--hold-out", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = read_gpt_rows(str(VTRAIN))[::2]
    assert sum(each["rows"] for each in found["layers"]) == len(kept)
    assert {(each["tp"], each["hidden"], each["micro_batch"]) for each in found["layers"]} == {
        (row.run.tp, row.run.hidden, row.run.micro_batch) for row in kept
    }
    assert found["errors_with_own_layers"]["fitted"]["mean"] < found["errors"]["fitted"]["mean"]
    assert found["errors_with_own_layers"]["held_out"]["rows"] == found["errors"]["held_out"]["rows"]
    assert main(words) == 0
    assert "held out, with layers' own times" in " ".join(capsys.readouterr().out.split())


def test_two_fits_of_the_same_rows_are_equal() -> None:
    kept = read_gpt_rows(str(VTRAIN))[:6]
    measured = np.array([row.seconds for row in kept])
    start, names = load_machine(str(A100)), ["gemm_efficiency", "dispatch"]
    found = [fitted(start, names, lambda m: predicted_gpt(kept, m), measured, source="test") for _ in range(2)]
    assert found[0] == found[1]


def test_layers_are_recomputed_where_the_table_does_not_say(tmp_path: Path) -> None:
    cells = "4,16,4,2048,16,24,1024,1,2,2,410.5"
    for header, line, recomputed in ((HEADER, cells, True), (f"{HEADER},recompute", f"{cells},0", False)):
        path = tmp_path / "rows.csv"
        path.write_text(f"{header}\n{line}\n")
        assert read_gpt_rows(str(path))[0].run.recompute is recomputed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": "wide"}, "hidden is a whole number"),
        ({"iter_ms": "0"}, "iter_ms is a positive number"),
        ({"recompute": "2"}, "recompute is 0 or 1"),
        ({"gpus": "3"}, "tp * dp * pp"),
        ({"layers": "13"}, "evenly"),
        ({"tp": "3", "gpus": "12"}, "3 tensor-parallel ranks do not share out 16 heads"),
    ],
)
def test_bad_gpt_rows_are_diagnosed(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    good = ["4", "16", "4", "2048", "16", "24", "1024", "1", "2", "2", "410.5", "1"]
    cells: dict[str, Any] = dict(zip(f"{HEADER},recompute".split(","), good, strict=True)) | changes
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n")
    with pytest.raises(DiagnosticError) as raised:
        calibrate_rows(str(path), load_machine(str(A100)), ["launch"], every=0)
    found = raised.value.diagnostics[0]
    assert words in found.message
    assert found.location is not None
    assert found.location.line == 2
    assert found.source is not None
    underlined = found.source[found.location.column - 1 :][: found.location.length]
    assert underlined == (next(iter(changes.values())) if " is " in words else found.source)


@pytest.mark.full
@pytest.mark.skipif(not ALL_ROWS.exists(), reason="the rows are not here")
@pytest.mark.parametrize(
    ("name", "recompute", "names", "most"),
    [
        ("calibration_single_node.csv", False, (*NAMES, "node.latency", "ddr_bandwidth"), 0.055),
        ("calibration_multi_node.csv", True, ("gemm_efficiency", "gemm_half_extent", "node.latency"), 0.08),
    ],
)
def test_half_of_all_rows_predicts_the_others(name: str, recompute: bool, names: tuple[str, ...], most: float) -> None:
    rows = [evolve(row, run=evolve(row.run, recompute=recompute)) for row in read_gpt_rows(str(ALL_ROWS / name))]
    measured, held = np.array([row.seconds for row in rows]), np.arange(len(rows)) % 2 == 1
    kept = rows[::2]
    start = load_machine(str(A100))
    machine = fitted(start, names, lambda m: predicted_gpt(kept, m), measured[~held], source="test", outlier=OUTLIER)
    found = errors(predicted_gpt(rows, machine)[held], measured[held])
    assert found is not None
    assert found.mean < most
    assert machine["gemm_efficiency"] < 1
    assert {row.run.tp for row in rows} >= {1, 2, 4, 8}
