"""Tensor-parallel ranks as processes: the bits of the local engine, checkpoints that any tp reads, ranks by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.context_rows import earlier_runs, run_length, run_of
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.run_profile import write_profile
from ratrain.targets.runtime.checkpoint import checkpoint
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights, saved_steps
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.checkpoint.training_state import STATE_KINDS
from ratrain.targets.runtime.engine.local import LocalEngine
from ratrain.targets.runtime.engine.threaded import ThreadedEngine
from ratrain.targets.runtime.weights.weights import named_parameters
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, make_program, reports_of, same_bits, start, train
from tests.end_to_end.toys import EXPERTS, GEMMA3, GPT2, NEOX, OLMO2, SIX_EXPERTS, SOME_EXPERTS
from tests.targets.runtime.ranks.mpi_tools import needs_mpi
from tests.targets.runtime.ranks.rank_jobs import (
    CLIPPED,
    PEER_PLANS,
    STEPS,
    TIED,
    WINDOW,
    as_read,
    local_reports,
    trained_by_ranks,
)
from tests.targets.runtime.ranks.thread_ranks import ThreadCommunicator, trained_by_threads
from tests.targets.runtime.ranks.torch_tools import needs_torch

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun
    from ratrain.targets.runtime.weights.weight_source import WeightSource

F32: dict[str, Any] = {"view_dtype": "f32"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "1x1x2-clipped": {"pp": 1, "dp": 1, "tp": 2, "zero": 0, "optimizer": CLIPPED},
    "2x2x2-tied-clipped": {"model": TIED, "tp": 2, "optimizer": CLIPPED},
    "1x2x2-each-micro-batch": {"pp": 1, "tp": 2, "zero": 2, "reduce": "each-micro-batch"},
    "1x1x4-copied-heads": {"pp": 1, "dp": 1, "tp": 4, "zero": 0, "sequence_sharding": False},
    "1x1x2-rows-not-shared-evenly": {
        "model": evolve(MODEL, hidden_size=23),
        "pp": 1,
        "dp": 1,
        "tp": 2,
        "sequence_sharding": False,
        "micro_batch_size": 1,
        "slices": (3, 7),
    },
    "2x1x2-normed-branches": {"model": GEMMA3, "dp": 1, "tp": 2, "zero": 0},
    # its gradients are large: at the default scale one rank, too, skips blocks of the first steps
    "1x1x2-norms-over-heads": {"model": OLMO2, "pp": 1, "dp": 1, "tp": 2, "zero": 0, "loss_scale": 256.0},
    "1x1x4-norms-over-copied-heads": {
        "model": OLMO2,
        "pp": 1,
        "dp": 1,
        "tp": 4,
        "sequence_sharding": False,
        "loss_scale": 256.0,
    },
    "1x1x4-side-by-side": {"model": NEOX, "pp": 1, "dp": 1, "tp": 4, "zero": 0, "sequence_sharding": False},
    "1x2x2-learned-positions": {"model": GPT2, "pp": 1, "tp": 2},
    "1x2c2": {"pp": 1, "cp": 2, "seq_len": 12, "optimizer": CLIPPED},
    "2x1c3x2-tied": {"model": TIED, "dp": 1, "cp": 3, "tp": 2, "seq_len": 12, "zero": 3},
    "1x1c4-window": {"model": WINDOW, "pp": 1, "dp": 1, "cp": 4, "seq_len": 16, "loss_scale": 256.0},
    "1x2c4-window-of-some-layers": {"model": GEMMA3, "pp": 1, "cp": 4, "seq_len": 8, "context_layout": "contiguous"},
    "1x1c4-window-of-one-token": {"model": evolve(WINDOW, sliding_window=1), "pp": 1, "dp": 1, "cp": 4, "seq_len": 8},
    "1x2c2-groups": {"model": evolve(MODEL, kv_heads=4), "pp": 1, "cp": 2, "seq_len": 12, "context_groups": 4},
    "1x1c2x2-groups-of-documents": {
        "model": evolve(MODEL, kv_heads=4),
        "pp": 1,
        "dp": 1,
        "cp": 2,
        "tp": 2,
        "seq_len": 12,
        "attention_mask": "document",
        "context_groups": 2,
    },
    "1x1c4-groups-window": {"model": WINDOW, "pp": 1, "dp": 1, "cp": 4, "seq_len": 16, "context_groups": 2},
    "1x2c2-heads": {"pp": 1, "cp": 2, "seq_len": 12, "context_exchange": "heads"},
    "1x1c4-heads-of-documents": {
        "pp": 1,
        "dp": 1,
        "cp": 4,
        "seq_len": 8,
        "attention_mask": "document",
        "context_exchange": "heads",
    },
    "1x4e2": {"model": EXPERTS, "pp": 1, "dp": 4, "ep": 2, "optimizer": CLIPPED},
    "2x2e2-each-micro-batch": {"model": EXPERTS, "dp": 2, "ep": 2, "zero": 2, "reduce": "each-micro-batch"},
    "1x4e4-hot": {"model": EXPERTS, "pp": 1, "dp": 4, "ep": 4, "zero": 3},
    "1x4e2-gathered": {"model": SIX_EXPERTS, "pp": 1, "dp": 4, "ep": 2, "zero": 3, "router": RouterLosses(0.1, 0.01)},
    "3x2e2-some-layers": {"model": SOME_EXPERTS, "pp": 3, "dp": 2, "ep": 2, "zero": 2, "router": RouterLosses(0.1)},
    "1x4e4-capacity": {"model": EXPERTS, "pp": 1, "dp": 4, "ep": 4, "experts": ExpertDispatch("capacity", 0.75)},
    "1x4e2-room": {"model": SIX_EXPERTS, "pp": 1, "dp": 4, "ep": 2, "experts": ExpertDispatch("capacity", 1.5)},
    "1x2e2-overflow": {"model": EXPERTS, "pp": 1, "dp": 2, "ep": 2, "loss_scale": 2.0**19},
    "1x1x2-overflow": {"pp": 1, "dp": 1, "tp": 2, "loss_scale": 2.0**19},
}

IN_THE_GATE = (
    "1x1x2-clipped",
    "1x2c2",
    "1x4e4-hot",
    "1x4e2-gathered",
    "1x4e4-capacity",
    "1x1c4-heads-of-documents",
    "1x1c4-window",
    "1x1c4-groups-window",
    "1x2c2-groups",
    "1x2x2-each-micro-batch",
    "1x1x2-rows-not-shared-evenly",
)


def program_of(name: str) -> Program:
    keys = dict(PROGRAMS[name])
    return make_program(keys.pop("model", MODEL), **keys)


def states(run: TrainingRun, step: int) -> dict[str, bytes]:
    """The optimizer's state of whole blocks, whoever holds it."""
    blocks = training_state(run.engine, step).blocks
    found = {f"{kind}/{unit}": getattr(blocks[unit], kind).tobytes() for unit in blocks for kind in STATE_KINDS}
    return found | {f"t/{unit}": blocks[unit].t.to_bytes(8, "little") for unit in blocks}


# Ranks


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS]
)
def test_ranks_train_the_bits_of_the_local_engine(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    alone = train(program, 2)
    ranks = trained_by_threads(program, 2, order=("pp-first", "dp-first")[len(name) % 2], poison=True)
    for run in ranks:
        assert reports_of(run) == reports_of(alone)
    held = {rank.name: rank for ranks_of_stage in alone.engine.ranks for rank in ranks_of_stage}
    for run in ranks:
        (mine,) = (rank for ranks_of_stage in run.engine.ranks for rank in ranks_of_stage)
        for number, tensor in enumerate(mine.stage.tensors):
            if tensor.carried:
                assert mine.views[number].tobytes() == held[mine.name].views[number].tobytes(), (mine.name, tensor.name)
    assert any(step.report.skipped_blocks for step in alone.done) == ("overflow" in name)


@pytest.mark.full
def test_the_library_sums_replicas_and_never_peers() -> None:
    """Under `fast` two replicas give the bits of any order, and so do four peers: they sum in rank order all the same."""
    program = make_program(evolve(MODEL, kv_heads=4), pp=1, dp=1, tp=4, view_dtype="bf16")
    alone = losses(train(program, 2))
    assert losses(trained_by_threads(program, 2, reduction="fast")[0]) == alone


def test_what_arrives_from_peers_has_bytes_of_its_own_that_are_said() -> None:
    program = make_program(pp=1, dp=1, tp=2)
    (run, _) = trained_by_threads(program, 1)
    engine = run.engine
    exchanges = engine.exchanges.staging  # type: ignore[attr-defined]
    assert exchanges.high_water == exchanges.capacity > 0
    gradients = engine.collectives.staging.capacity + engine.collectives.squares.nbytes  # type: ignore[attr-defined]
    assert engine.peak_transport_bytes == exchanges.capacity + gradients


@pytest.mark.parametrize(("layout", "groups"), [("zigzag", 1), ("contiguous", 1), ("zigzag", 2)])
def test_context_ranks_receive_the_bytes_of_the_formula(
    layout: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each layer and micro-batch: keys and values forward and back, parts of their gradients in f32."""
    received: Counter[tuple[int, str]] = Counter()

    def count(call: str) -> None:
        send = getattr(ThreadCommunicator, call)

        def counted(self: ThreadCommunicator, whole: Any, part: Any = None) -> Any:
            received[id(self), call] += whole.nbytes * (self.size - 1) // self.size
            return send(self, whole, part)

        monkeypatch.setattr(ThreadCommunicator, call, counted)

    count("iallgather")
    count("ialltoall")
    plan = make_plan(pp=1, dp=1, cp=3, context_layout=layout, seq_len=12, context_groups=groups)
    module = api.compile(MODEL, plan, passes="place-1f1b,recompute{policy=full},allocate-ddr")
    steps = 2
    for run in trained_by_threads(api.emit(module), steps):
        contexts = id(run.engine.exchanges.contexts)  # type: ignore[attr-defined]
        elements = 2 * plan.micro_batch_size * plan.seq_len * MODEL.kv_heads * MODEL.head_dim * (plan.cp - 1) // plan.cp
        times = steps * plan.micro_batches * MODEL.layers
        assert received[contexts, "iallgather"] == times * 2 * elements * 2  # forward and back, of f16
        assert received[contexts, "ialltoall"] == times * elements * 4


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_exchange_heads_receive_the_bytes_of_the_formula(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer and micro-batch: queries, keys, values and the output, forward and back, all in f16.

    Where ranks are more than heads of keys, several have the same.
    """
    received: Counter[int] = Counter()
    send = ThreadCommunicator.ialltoall

    def counted(self: ThreadCommunicator, gathered: Any, parts: Any) -> Any:
        received[id(self)] += gathered.nbytes * (self.size - 1) // self.size
        return send(self, gathered, parts)

    monkeypatch.setattr(ThreadCommunicator, "ialltoall", counted)
    plan = make_plan(pp=1, dp=1, cp=cp, context_exchange="heads", seq_len=8, zero=0)
    module = api.compile(MODEL, plan, passes="place-1f1b,recompute{policy=full},allocate-ddr")
    for run in trained_by_threads(api.emit(module), 1):
        contexts = id(run.engine.exchanges.contexts)  # type: ignore[attr-defined]
        widths = 2 * (MODEL.heads + max(MODEL.kv_heads, cp)) * MODEL.head_dim
        elements = plan.micro_batch_size * plan.seq_len // cp * widths * (cp - 1) // cp
        assert received[contexts] == plan.micro_batches * MODEL.layers * 2 * elements * 2


@pytest.mark.parametrize(("layout", "window"), [("contiguous", 3), ("contiguous", 6), ("zigzag", 3)])
def test_context_ranks_receive_what_a_window_lets_them_see(
    layout: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 4 or 2 tokens: one run before each of a rank's own, or two, unless it is the first."""
    received: Counter[tuple[int, int]] = Counter()
    send = ThreadCommunicator.ialltoallv

    def counted(self: ThreadCommunicator, gathered: Any, *rest: Any) -> Any:
        received[self.rank, gathered.itemsize] += gathered.nbytes
        return send(self, gathered, *rest)

    monkeypatch.setattr(ThreadCommunicator, "ialltoallv", counted)
    model = evolve(WINDOW, sliding_window=window)
    plan = make_plan(model, pp=1, dp=1, cp=4, context_layout=layout, seq_len=16, micro_batches=1)
    module = api.compile(model, plan, passes="place-1f1b,recompute{policy=full},allocate-ddr")
    trained_by_threads(api.emit(module), 1)
    reach = earlier_runs(plan, window)
    assert reach is not None
    numbers = range(plan.context_runs)
    row = plan.micro_batch_size * 2 * model.kv_heads * model.head_dim * run_length(plan) * model.layers
    for rank in range(plan.cp):
        own = [run_of(plan, rank, number) for number in numbers]
        asked = [run for last in own for run in range(max(0, last - reach), last) if run not in own]
        shown = [run for last in own for run in range(last + 1, last + 1 + reach) if run < 4 * len(numbers)]
        assert received[rank, 2] == 2 * len(asked) * row * 2  # forward and back, of f16
        assert received[rank, 4] == sum(run not in own for run in shown) * row * 4


@pytest.mark.full
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("engine", [pytest.param("mpi", marks=needs_mpi), pytest.param("torch", marks=needs_torch)])
def test_four_processes_train_and_save_the_bits_of_the_local_engine(engine: str, quarter: int, tmp_path: Path) -> None:
    programs = {name: make_program(**PEER_PLANS[name]) for name in list(PEER_PLANS)[quarter::4]}
    tasks = [
        {
            "made": program,
            "order": ("pp-first", "dp-first")[number % 2],
            "reduction": "ordered",
            "steps": STEPS,
            "settings": {"poison": number % 2 == 0, "save": str(tmp_path / name), "save_every": STEPS},
        }
        for number, (name, program) in enumerate(programs.items())
    ]
    for (name, program), found in zip(programs.items(), trained_by_ranks(engine, tmp_path, tasks), strict=True):
        assert found["reports"] == local_reports(program), name
        place = str(tmp_path / f"{name}-alone")
        train(program, STEPS, save=place, save_every=STEPS).close()
        assert files(str(tmp_path / name)) == files(place), name


def files(place: str) -> dict[str, bytes]:
    """The files of the newest checkpoint that hold state; the manifest tells of the run."""
    newest = Path(saved_steps(place)[0][1])
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.name != MANIFEST_FILE}


# Checkpoints


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp": 2}, {"tp": 1}),
        ({"tp": 1}, {"tp": 2, "dp": 1, "micro_batches": 6}),
        ({"tp": 2, "zero": 0}, {"tp": 4, "pp": 1, "sequence_sharding": False}),
        ({"tp": 4, "pp": 1, "sequence_sharding": False}, {"tp": 2, "pp": 3, "zero": 3, "model": TIED}),
    ],
)
@pytest.mark.parametrize("save_every", [1, None], ids=["sharded", "whole"])
@pytest.mark.sampled(4)
def test_any_number_of_peers_reads_the_same_state(
    before: dict[str, Any], after: dict[str, Any], save_every: int | None, tmp_path: Path
) -> None:
    place, model = str(tmp_path / "run"), after.get("model", MODEL)
    written = train(make_program(model, **before), 1, save=place, save_every=save_every)
    rest = start(make_program(**{"model": model, **after}), 1, resume=place)
    assert states(rest, 1) == states(written, 1)


def test_going_on_with_as_many_peers_is_never_having_stopped(tmp_path: Path) -> None:
    program, place = make_program(tp=2, optimizer=CLIPPED), str(tmp_path / "run")
    whole = train(program, 3, save=place, save_every=1, keep_last=3)
    rest = train(program, 2, resume=saved_steps(place)[-1][1])
    assert losses(rest) == losses(whole)[1:]
    same_bits(rest, whole)


def test_ranks_and_the_local_engine_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    """Two peers save as ranks; one rank goes on and saves; four peers go on as ranks. Nothing is lost on the way."""
    two, one = make_program(**F32, pp=1, dp=1, tp=2), make_program(**F32, pp=1, dp=1)
    four = make_program(**F32, pp=1, dp=1, tp=4, sequence_sharding=False)
    place, moved, back = (str(tmp_path / name) for name in ("run", "moved", "back"))
    for run in trained_by_threads(two, 2, save=place, save_every=1):
        run.close()  # it keeps its place as long as it lives
    alone = train(one, 1, resume=place, save=moved, save_every=1)
    alone.close()
    for run in trained_by_threads(four, 0, resume=moved, save=back, save_every=1):
        run.close()
    assert states(start(one, 1, resume=back), 3) == states(alone, 3)
    reference = train(one, 3)
    np.testing.assert_allclose(losses(alone), losses(reference)[2:], rtol=1e-6)


@needs_mpi
@pytest.mark.full
def test_peers_over_mpi_go_on_alone_and_back(tmp_path: Path) -> None:
    """2 x 1 x 2 over MPI saves; one rank of one process loads the same state; four peers over MPI load what that saves."""
    two, one = make_program(**F32, dp=1, tp=2), make_program(**F32, pp=1, dp=1)
    four = make_program(**F32, pp=1, dp=1, tp=4, sequence_sharding=False)
    place, moved, back = (str(tmp_path / name) for name in ("run", "moved", "back"))
    task = {"order": "pp-first", "reduction": "ordered"}
    saved = {"save": place, "save_every": 1}
    (first,) = trained_by_ranks("mpi", tmp_path, [{"made": two, "steps": 2, "settings": saved, **task}])
    local = train(two, 2)
    assert first["reports"] == as_read(reports_of(local))
    alone = start(one, 1, resume=place, save=moved, save_every=1)
    assert states(alone, 2) == states(local, 2)
    list(alone.steps())
    alone.save()
    alone.close()
    saved = {"resume": moved, "save": back, "save_every": 1}
    (third,) = trained_by_ranks("mpi", tmp_path, [{"made": four, "steps": 1, "settings": saved, **task}])
    expected = train(four, 1, resume=moved)
    assert third["reports"] == as_read(reports_of(expected))
    assert states(start(one, 1, resume=back), 4) == states(expected, 4)


def test_weights_of_a_checkpoint_of_peers_are_those_of_the_model(tmp_path: Path) -> None:
    place, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    written = train(make_program(tp=2), 1, save=place, save_every=1)
    written.close()
    train(make_program(tp=2), 1, save=whole).close()
    sources: list[WeightSource] = [latest_weights(each)[1] for each in (place, whole)]
    for name, parameter in named_parameters(MODEL).items():
        one, other = (np.concatenate(list(source.pieces(name, 0, parameter.elements))) for source in sources)
        assert one.tobytes() == other.tobytes(), name


FILE = "stage-0-replica-0-peer-1.safetensors"


def edited(folder: Path, change: Any) -> None:
    """Change a manifest as a program would that writes the format, sealing it again."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest["files"])
    manifest["manifest_sha256"] = checkpoint.manifest_digest(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.pop(FILE), "do not hold each element of embed of peer 1 once"),
        (lambda files: files[FILE]["pieces"].pop(0), "do not hold each element of embed of peer 1 once"),
        (lambda files: files[FILE].__setitem__("peer", [0, 2]), "do not hold each element of embed of peer 0 once"),
        (lambda files: files[FILE].pop("peer"), "no sound entry 'files'"),
        (lambda files: files[FILE].__setitem__("peer", [2, 2]), "no sound entry 'files'"),
        (lambda files: files[FILE].__setitem__("peer", [1, 4]), "no sound entry 'files'"),
        (lambda files: files[FILE].__setitem__("peer", "1 of 2"), "no sound entry 'files'"),
        (lambda files: files[FILE].__setitem__("peer", [True, 2]), "no sound entry 'files'"),
        (lambda files: [file.__setitem__("peer", [0, 3]) for file in files.values()], "no sound entry 'files'"),
        (lambda files: [files.pop(name) for name in list(files)], "no sound entry 'files'"),
    ],
)
@pytest.mark.sampled(4)
def test_pieces_of_peers_that_are_not_whole_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    train(make_program(pp=1, dp=1, tp=2), 1, save=place, save_every=1).close()
    edited(Path(saved_steps(place)[0][1]), change)
    with pytest.raises(DiagnosticError, match="RT092") as refused:
        start(make_program(pp=1), 1, resume=place)
    assert said in str(refused.value)


def test_a_damaged_file_of_a_peer_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    train(make_program(pp=1, dp=1, tp=2), 1, save=place, save_every=1).close()
    path = Path(saved_steps(place)[0][1]) / FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DiagnosticError, match=r"RT092.*SHA-256"):
        start(make_program(pp=1), 1, resume=place)


# One process


def test_threads_and_any_order_of_peers_give_the_same_bits() -> None:
    program = make_program(tp=2, optimizer=CLIPPED)
    ordered = train(program, 2)
    for settings in ({"threads": 2, "poison": True}, {"interleave_seed": 3, "poison": True}, {"check_memory": True}):
        other = train(program, 2, **settings)
        assert isinstance(other.engine, ThreadedEngine if "threads" in settings else LocalEngine)
        assert other.engine.scratch_bytes == other.engine.certificate.scratch_bytes
        assert losses(other) == losses(ordered)
        same_bits(other, ordered)


def test_sums_of_rows_that_are_larger_than_any_shard_have_scratch() -> None:
    """Long sequences of a narrow model over replicas that share out its optimizer state."""
    keys: dict[str, Any] = {"micro_batch_size": 8, "micro_batches": 1, "seq_len": 40, "sequence_sharding": False}
    program = make_program(pp=1, tp=2, dp=2, **keys)
    ordered, threaded = train(program, 1), train(program, 1, threads=2)
    assert losses(threaded) == losses(ordered) == losses(trained_by_threads(program, 1)[0])
    same_bits(threaded, ordered)
    most = max(tensor.type.elements for tensor in program.stages[0].tensors if tensor.kind is StateKind.MASTER)
    assert most < 8 * 40 * MODEL.hidden_size


def test_a_profile_names_peers_and_who_meets_whom(tmp_path: Path) -> None:
    program = make_program(tp=2)
    run = start(program, 1)
    run.engine.profile = run.processes.begin_profile()
    list(run.steps())
    path = tmp_path / "profile.json"
    write_profile(program, run.engine.profile, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [f"{program.topology.name(rank)} (measured)" for rank in program.topology.ranks]
    assert names[5] == "stage @1 replica 0 tensor rank 1 (measured)"
    met: dict[str, list[int]] = {}
    for event in events:
        if event["ph"] == "X" and event["args"]["meeting"] is not None:
            met.setdefault(event["args"]["meeting"], []).append(event["pid"])
    rows = next(
        pids
        for meeting, pids in met.items()
        if meeting.startswith("all_gather rows") or ("gather" in meeting and meeting.endswith("of stage @1 replica 0"))
    )
    assert set(rows) == {4, 5}
    assert set(met["activation from stage @0 to @1 of replica 1 tensor rank 0"]) == {2, 6}


@pytest.mark.parametrize(
    ("name", "keyword", "group"),
    [("1x1c4-heads-of-documents", "gather_heads", Group.CONTEXT), ("1x4e2", "dispatch", Group.EXPERTS)],
)
def test_a_profile_has_those_together_who_meet(name: str, keyword: str, group: Group, tmp_path: Path) -> None:
    program = program_of(name)
    run = start(program, 1)
    run.engine.profile = run.processes.begin_profile()
    list(run.steps())
    write_profile(program, run.engine.profile, str(tmp_path / "profile.json"))
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    met: dict[str, set[int]] = {}
    for event in events:
        if event["ph"] == "X" and (event["args"]["meeting"] or "").startswith(keyword):
            met.setdefault(event["args"]["meeting"], set()).add(event["pid"])
    topology = program.topology
    wanted = {frozenset(map(topology.ranks.index, topology.members(group, rank))) for rank in topology.ranks}
    assert {frozenset(pids) for pids in met.values()} == wanted


def test_a_job_of_another_size_is_told_how_many_peers_there_are() -> None:
    assert make_program(tp=2).topology.words == "2 stages x 2 replicas x 2 tensor-parallel ranks"
    assert [str(unit) for unit in block_chain(MODEL)][:1] == ["embed"]
