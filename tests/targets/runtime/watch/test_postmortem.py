"""Who waits for whom: the cause of a standstill is found wherever it is, and a circle of waits is told from a rank that is late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, fail
from ratrain.ratrain_ir.topology import Rank
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
from ratrain.ratrainc.commands.training.launch import command as launch_command
from ratrain.ratrainc.commands.training.postmortem import command as postmortem_command
from ratrain.ratrainc.running.supervisor import Supervisor, examine, mpi_command
from ratrain.ratrainc.running.training import run_training
from ratrain.targets.runtime.settings import RunSettings, Saving
from ratrain.targets.runtime.watch import watchdog
from ratrain.targets.runtime.watch.liveness import Liveness, liveness
from ratrain.targets.runtime.watch.positions import (
    EnginePosition,
    RankPhase,
    RankPosition,
    RunFolder,
    position_path,
    read_positions,
)
from ratrain.targets.runtime.watch.postmortem import Fault, diagnose
from tests.end_to_end.chunk_runs import program_of
from tests.end_to_end.tiny_runs import MODEL, hanging_program, make_program, start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.engine.local import LocalEngine

PROGRAMS = {
    "2x2": make_program(),
    "3x2-tied-each-micro-batch": make_program(
        evolve(MODEL, tied_embeddings=True), pp=3, zero=2, reduce="each-micro-batch"
    ),
    "1x3": make_program(pp=1, dp=3),
    "2x1x2": make_program(dp=1, tp=2),
    "1x2x2-each-micro-batch": make_program(pp=1, tp=2, zero=2, reduce="each-micro-batch"),
    "2x2-interleaved": program_of(evolve(MODEL, layers=4), "interleaved", PipelineShape(2, 3, 2)),
    "2x2-vee": program_of(evolve(MODEL, layers=4), "zb-v", PipelineShape(2, 3, 2, "vee")),
}
ROOT = Path(__file__).resolve().parents[4]


def alive(position: RankPosition) -> Liveness:
    return Liveness.ALIVE


def standstill(program: Program, place: Rank, computed: int) -> LocalEngine:
    """An engine that ran until one rank did not come back from a compute instruction, and all others wait."""
    engine = start(program, 2).engine
    held, original = engine.ranks[place.stage][program.topology.lane(place)], engine._try_run

    def try_run(head: Any, limit: int) -> bool:
        is_there = held.completed[Engine.COMPUTE] == computed and held.is_ready(*held.head(Engine.COMPUTE))
        return not (is_there and head.rank is held) and original(head, limit)

    engine._try_run = try_run  # type: ignore[method-assign]
    while engine._round(2)[0]:
        pass
    return engine


def seen(engine: LocalEngine, place: Rank, computed: int) -> list[RankPosition]:
    """The positions of a standstill, with that rank's compute engine running."""
    found = []
    for position in engine.positions():
        engines = dict(position.engines)
        if position.place == place:
            engines[Engine.COMPUTE] = EnginePosition(computed, running=True, since=time.time() - 100)
        found.append(evolve(position, engines=engines, longest_compute=0.01))
    return found


@settings(max_examples=40)
@given(st.sampled_from(sorted(PROGRAMS)), st.data())
@pytest.mark.full
def test_the_rank_that_everyone_waits_for_is_found(name: str, data: Any) -> None:
    program = PROGRAMS[name]
    place = data.draw(st.sampled_from(program.topology.ranks))
    stream = program.stages[place.stage].streams[Engine.COMPUTE]
    computed = data.draw(st.integers(0, 2 * len(stream) - 1))
    engine = standstill(program, place, computed)
    positions = seen(engine, place, computed)
    title = stream[computed % len(stream)].title

    stuck = diagnose(program, positions, time.time(), alive)
    assert [cause.fault for cause in stuck.causes] == [Fault.STUCK]
    assert stuck.causes[0].text.startswith(program.topology.name(place))
    assert stuck.causes[0].places == (place,)
    assert f"'{title}'" in stuck.causes[0].text
    assert "not a deadlock" in stuck.verdict

    late = [evolve(position, longest_compute=90.0) for position in positions]
    slow = diagnose(program, late, time.time(), alive)
    assert not slow.is_conclusive
    assert Fault.COMPUTING in {cause.fault for cause in slow.causes}

    number = next(found.number for found in positions if found.place == place)
    gone = diagnose(
        program, positions, time.time(), lambda found: Liveness.GONE if found.number == number else Liveness.ALIVE
    )
    assert [(cause.fault, cause.places) for cause in gone.causes] == [(Fault.GONE, (place,))]
    assert f"'{title}'" in gone.causes[0].text

    missing = diagnose(program, [found for found in positions if found.number != number], time.time(), alive)
    assert [(cause.fault, cause.places) for cause in missing.causes] == [(Fault.MISSING, (place,))]


def test_micro_batch_step_and_who_waits_are_named() -> None:
    program = PROGRAMS["2x2"]
    stream = program.stages[1].streams[Engine.COMPUTE]
    index = next(i for i, found in enumerate(stream) if found.keyword == "backward" and found.micro_batch == 1)
    positions = seen(standstill(program, Rank(1, 0), index), Rank(1, 0), index)
    found = diagnose(program, positions, time.time(), alive)
    assert f"'{stream[index].title}' (step 0, micro-batch 1)" in found.causes[0].text
    assert "stage @1 replica 0 in" in found.causes[0].text
    waiting = next(line for line in found.ranks if line.startswith("stage @0 replica 0"))
    assert "waits for stage @1 replica 0" in waiting


def test_a_peer_that_is_late_to_an_exchange_is_named() -> None:
    """Its peer waits for it in the exchange, and the other stage's for theirs."""
    program, late = PROGRAMS["2x1x2"], Rank(0, 0, 1)
    stream = program.stages[0].streams[Engine.COMPUTE]
    index = next(i for i, found in enumerate(stream) if found.keyword == "backward" and found.micro_batch == 1)
    found = diagnose(program, seen(standstill(program, late, index), late, index), time.time(), alive)
    assert found.causes[0].text.startswith("stage @0 replica 0 tensor rank 1 in")
    waiting = next(line for line in found.ranks if line.startswith("stage @0 replica 0 tensor rank 0"))
    assert "waits for stage @0 replica 0 tensor rank 1" in waiting


def test_a_rank_of_another_machine_is_judged_by_its_heartbeat() -> None:
    program = PROGRAMS["2x2"]
    positions = seen(standstill(program, Rank(1, 0), 3), Rank(1, 0), 3)
    now = time.time()
    silent = [evolve(found, heartbeat=now - 20 * (found.stage == 1 and found.replica == 0)) for found in positions]
    found = diagnose(program, silent, now, lambda _: Liveness.UNKNOWN)
    assert [(cause.fault, cause.places) for cause in found.causes] == [(Fault.GONE, (Rank(1, 0),))]
    assert "has given no sign for 20 s" in found.causes[0].text
    heard = [evolve(position, heartbeat=now) for position in positions]
    assert Fault.GONE not in {cause.fault for cause in diagnose(program, heard, now, lambda _: Liveness.UNKNOWN).causes}


def test_a_circle_of_waits_is_the_programs_fault() -> None:
    with pytest.raises(DiagnosticError) as caught:
        list(start(hanging_program(), 1, verified=False).steps())
    (problem,) = caught.value.diagnostics
    assert "the program hangs" in problem.message
    assert "send 'send activation m0 @1' waits for" in problem.message
    notes = [note.message for note in problem.notes]
    assert any("deadlock of the program" in note for note in notes)
    assert any("stage @1 replica 1" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "title", "micro_batch"),
    [
        ("2x2", "recv activation m0 @0", 0),
        ("2x2-interleaved", "recv activation m1 c3 @0", 1),
        ("2x2-vee", "recv gradient m0 c3 @0", 0),
    ],
)
def test_a_message_that_was_sent_and_did_not_arrive_is_named(name: str, title: str, micro_batch: int) -> None:
    """Of several chunks it is the one of its chunk that was sent, not the first of its number."""
    program = PROGRAMS[name]
    engine = start(program, 1).engine
    original = engine.execute

    def execute(members: Any, step: int) -> None:
        rank, instruction = members[0]
        if instruction.title == title and (rank.stage_index, rank.replica) == (1, 1):
            raise TimeoutError  # the message stays on its way for ever
        original(members, step)

    engine.execute = execute  # type: ignore[method-assign]
    original_round = engine._try_run

    def try_run(head: Any, limit: int) -> bool:
        try:
            return original_round(head, limit)
        except TimeoutError:
            return False

    engine._try_run = try_run  # type: ignore[method-assign]
    while engine._round(1)[0]:
        pass
    positions = [evolve(position, pid=1000 + position.number) for position in engine.positions()]
    found = diagnose(program, positions, time.time(), alive)
    assert [cause.fault for cause in found.causes] == [Fault.LOST_MESSAGE]
    assert "stage @1 replica 1" in found.causes[0].text
    assert f"'{title}' (step 0, micro-batch {micro_batch})" in found.causes[0].text
    assert "stage @0 replica 1 has sent the message" in found.causes[0].text
    assert not diagnose(program, engine.positions(), time.time(), alive).is_conclusive  # it lies in the process of both


# Positions


def test_a_position_is_what_the_engine_did(tmp_path: Path) -> None:
    program = PROGRAMS["2x2"]
    run = start(program, 2, run_folder=str(tmp_path / "run"))
    list(run.steps())
    found = read_positions(str(tmp_path / "run"))
    assert [position.place for position in found] == list(program.topology.ranks)
    for position in found:
        stage = program.stages[position.stage]
        assert position.pid == os.getpid()
        assert position.phase is RankPhase.BETWEEN_STEPS
        assert position.step == 1
        assert position.longest_compute > 0
        for engine in ENGINES:
            assert position.engines[engine].completed == 2 * len(stage.streams[engine])
            assert not position.engines[engine].running
        assert liveness(position) is Liveness.ALIVE


def test_what_is_no_position_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match=r"RT002.*no positions"):
        examine(RunFolder(str(tmp_path)))
    position_path(tmp_path, 0).write_bytes(b"RTPOS and something else")
    with pytest.raises(DiagnosticError, match="RT092"):
        read_positions(str(tmp_path))


def test_a_process_that_was_killed_is_gone_even_if_nobody_has_asked_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    position = evolve(start(PROGRAMS["1x3"], 1).engine.positions()[0], pid=child.pid)
    try:
        assert liveness(position) is Liveness.ALIVE
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert liveness(position) is Liveness.STOPPED
        child.kill()
        deadline = time.monotonic() + 10
        while liveness(position) is not Liveness.GONE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert liveness(position) is Liveness.GONE  # a zombie: it has not been waited for
    finally:
        child.kill()
        child.wait()
    assert liveness(position) is Liveness.GONE
    assert liveness(evolve(position, host="elsewhere")) is Liveness.UNKNOWN


def test_a_link_in_place_of_the_program_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "mine").write_text("keep me")
    for name in ("program.rtx", "rank-00000.position", "lost.json", "postmortem.txt"):
        (folder / name).symlink_to(tmp_path / "mine")
    run = start(PROGRAMS["1x3"], 1, run_folder=str(folder))
    assert run.folder is not None
    run.folder.note_lost([0])
    assert run.folder.claim_report()
    run.folder.keep_report("what happened")
    assert (tmp_path / "mine").read_text() == "keep me"
    assert not [path for path in folder.iterdir() if path.is_symlink()]


# Watching


def test_a_signal_asks_where_the_run_is(tmp_path: Path) -> None:
    run = start(PROGRAMS["2x2"], 1, run_folder=str(tmp_path / "run"))
    told: list[Diagnostic] = []
    heard = threading.Event()

    def tell(diagnostic: Diagnostic) -> None:
        told.append(diagnostic)
        heard.set()

    watching = run.watchdog(tell)
    before = signal.getsignal(signal.SIGUSR1)
    watching.start()
    try:
        list(run.steps())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(10)
    finally:
        watching.stop()
    assert "where the run is" in told[0].message
    assert len([note for note in told[0].notes if "between steps, after step 0" in note.message]) == 4
    assert signal.getsignal(signal.SIGUSR1) is before


class Watching:
    """A watchdog whose looks and clock the test makes; it ends nothing."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.told: list[Diagnostic] = []
        self.ended: list[str] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=lambda _: None)
        monkeypatch.setattr(watchdog, "time", clock)
        watched = watchdog.Watched(PROGRAMS["2x2"], RunFolder(str(tmp_path)), [], 0, 8.0, self.told.append)
        self.dog = watchdog.Watchdog(watched)
        monkeypatch.setattr(self.dog, "_end", lambda found, title, folder: self.ended.append(title))

    def look(self, positions: list[RankPosition], *, seconds: float, every: float = 0.2) -> None:
        """Look at the same positions for some time, until the run is ended."""
        until = self.now + seconds
        while self.now < until and not self.ended:
            self.now += every
            self.dog._look(positions, self.dog.watched.folder)


def stuck_since(now: float) -> list[RankPosition]:
    """All ranks wait for an instruction that has begun at a moment."""
    found = []
    for position in seen(standstill(PROGRAMS["2x2"], Rank(1, 0), 3), Rank(1, 0), 3):
        engines = {engine: evolve(at, since=now) for engine, at in position.engines.items()}
        found.append(evolve(position, engines=engines, heartbeat=now, since=now))
    return found


def test_an_instruction_that_does_not_come_back_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching(tmp_path, monkeypatch)
    watching.look(stuck_since(watching.now), seconds=7.5)
    assert not watching.ended
    watching.look(stuck_since(watching.now), seconds=2)
    assert watching.ended


def test_a_run_that_was_suspended_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may stop a whole job for hours; nobody looked meanwhile, and nothing could get on."""
    watching = Watching(tmp_path, monkeypatch)
    positions = stuck_since(watching.now)
    watching.look(positions, seconds=1)
    watching.look(positions, seconds=3600, every=3600)
    watching.look(positions, seconds=5)
    assert not watching.ended


def test_saving_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be slow: a run that is ended while it saves would never get past that step."""
    watching = Watching(tmp_path, monkeypatch)
    saving = [evolve(position, phase=RankPhase.SAVING) for position in stuck_since(watching.now)]
    watching.look(saving, seconds=600)
    assert not watching.ended
    (warning,) = watching.told
    assert "saving" in warning.message


def test_what_is_slow_ends_the_run_in_the_end_and_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = Watching(tmp_path, monkeypatch)
    slow = [evolve(position, longest_compute=0.0) for position in stuck_since(watching.now)]
    watching.look(slow, seconds=79)
    assert not watching.ended
    watching.look(slow, seconds=2)
    assert "--hang-timeout" in watching.ended[0]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.watch.positions import RankPhase
from ratrain.targets.runtime.engine.rank import RankExecutor
from tests.end_to_end.tiny_runs import make_program
folder = Path(sys.argv[2])
program = make_program(pp=1, dp=1)
write_program(program, str(folder / "program.rtx"))
rank = RankExecutor(program, 0, 0)
position = rank.new_position(folder, 0)
position.enter(RankPhase.RUNNING, 7)
rank.completed[Engine.COMPUTE] = 3
position.begin(Engine.COMPUTE)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_is_spoken_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    supervisor = Supervisor(RunFolder(str(folder)), lambda done: f"{done} steps were done")
    started = time.monotonic()
    code = supervisor.run([sys.executable, "-c", KILLED, str(ROOT), str(folder)], {})
    assert code == 1
    assert time.monotonic() - started < 10
    said = capfd.readouterr().err
    title = make_program(pp=1, dp=1).stages[0].streams[Engine.COMPUTE][3].title
    assert "stage @0 replica 0" in said
    assert "is gone" in said
    assert f"'{title}' (step 7" in said
    assert "7 steps were done" in said
    afterwards = CliRunner().invoke(postmortem_command, [str(tmp_path)], standalone_mode=False)
    assert afterwards.return_value == 1
    assert f"'{title}' (step 7" in afterwards.output


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (75, 75), (130, 130), (1, 1), (9, 1)])
def test_exit_codes_of_ranks_are_kept_and_those_of_launchers_are_not(tmp_path: Path, code: int, expected: int) -> None:
    supervisor = Supervisor(RunFolder(str(tmp_path / "run")), None)
    assert supervisor.run([sys.executable, "-c", f"raise SystemExit({code})"], {}) == expected


def test_ranks_that_end_with_one_that_failed_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one had been lost before: then those that saw it have failed for that."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.clear()
    monkeypatch.setattr("ratrain.targets.runtime.watch.watchdog.liveness", lambda position: Liveness.GONE)
    first, *others = stuck_since(time.time())
    failed = evolve(first, phase=RankPhase.FAILED)
    assert watchdog.lost_ranks([first, *others], (), folder) == [first, *others]
    assert watchdog.lost_ranks([failed, *others], (), folder) == []
    folder.note_lost([others[0].number])
    assert watchdog.lost_ranks([failed, *others], (), folder) == others


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_run_that_said_why_it_failed_was_not_killed(
    disk_is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_step(engine: object, step: int) -> None:
        fail("RT093", "the reason")

    def no_space(folder: RunFolder, text: str) -> None:
        fail("RT002", "No space left on device")

    monkeypatch.setattr("ratrain.targets.runtime.engine.local.LocalEngine.run_step", fail_to_step)
    if disk_is_full:
        monkeypatch.setattr(RunFolder, "keep_report", no_space)
    program = make_program(evolve(MODEL, vocab_size=256))
    chosen = RunSettings(steps=2, saving=Saving(str(tmp_path / "run1"), every=1))
    with pytest.raises(DiagnosticError, match="the reason"):
        run_training(program, DataChoice(), chosen, Outputs(), Display(quiet=True))
    monkeypatch.setattr("ratrain.ratrainc.running.supervisor.liveness", lambda position: Liveness.GONE)
    afterwards = CliRunner().invoke(postmortem_command, [str(tmp_path / "run1")], standalone_mode=False)
    assert afterwards.return_value == 1
    assert "killed" not in afterwards.output
    assert ("ended with an error" if disk_is_full else "the reason") in afterwards.output


def test_ranks_do_not_outlive_their_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail_to_watch(self: Supervisor, process: subprocess.Popen[bytes]) -> bool:
        started.append(process)
        raise RuntimeError

    monkeypatch.setattr(Supervisor, "_watch", fail_to_watch)
    with pytest.raises(RuntimeError):
        Supervisor(RunFolder(str(tmp_path / "run")), None).run(
            [sys.executable, "-c", "import time; time.sleep(60)"], {}
        )
    assert started[0].wait(10) == -signal.SIGKILL


def test_a_signal_that_comes_before_the_ranks_are_there_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it leave ranks behind that nobody watches."""
    original = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    supervisor = Supervisor(RunFolder(str(tmp_path / "run")), None)
    sleeping = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(60)"
    started = time.monotonic()
    assert supervisor.run([sys.executable, "-c", sleeping], {}) == 1
    assert time.monotonic() - started < 30


def test_a_launcher_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_bytes(b"\x00\x01")
    launcher.chmod(0o755)
    with pytest.raises(DiagnosticError, match=r"RT093.*mpirun' cannot be started"):
        mpi_command(2, str(launcher))


def test_what_all_ranks_lack_is_said_before_any_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\necho HYDRA\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("ratrain.ratrainc.console.extras.is_installed", lambda package: package != "mpi4py")
    with pytest.raises(DiagnosticError, match=r"RT002.*--engine mpi needs mpi4py"):
        mpi_command(2, str(launcher))


@pytest.mark.parametrize(
    ("ranks", "words", "beside"),
    [("2", (), True), ("1", ("--save-every", "5"), True), ("1", (), False)],
)
def test_positions_are_beside_checkpoints_where_these_are_several(
    ranks: str, words: tuple[str, ...], beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single checkpoint is a directory as a whole: nothing else may be in it. What is kept elsewhere is removed after a good end."""
    commands: list[Sequence[str]] = []

    def run(self: Supervisor, command: Sequence[str], variables: object) -> int:
        commands.append(command)
        self.folder.clear()
        return 0

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr("ratrain.ratrainc.running.supervisor.mpi_command", lambda ranks, launcher: (["mpirun"], {}))
    save = str(tmp_path / "run1")
    CliRunner().invoke(
        launch_command, ["-n", ranks, "a.rtx", "--save", save, *words], standalone_mode=False, catch_exceptions=False
    )
    place = Path(commands[0][commands[0].index("--run-dir") + 1])
    assert (place.parent == Path(save)) is beside
    assert place.exists() is beside


def test_a_position_file_is_small_and_made_new(tmp_path: Path) -> None:
    rank = start(PROGRAMS["1x3"], 1).engine.ranks[0][1]
    position_path(tmp_path, 4).write_bytes(b"old" * 1000)
    rank.new_position(tmp_path, 4)
    assert position_path(tmp_path, 4).stat().st_size < 4096
    (found,) = read_positions(str(tmp_path))
    assert (found.number, found.place, found.phase) == (4, Rank(0, 1), RankPhase.STARTING)


def test_a_position_or_report_that_never_ends_is_not_read(tmp_path: Path) -> None:
    position_path(tmp_path, 0).symlink_to("/dev/zero")
    with pytest.raises(DiagnosticError, match=r"RT002.*not a regular file"):
        read_positions(str(tmp_path))
    for name in ("lost.json", "postmortem.txt"):
        (tmp_path / name).symlink_to("/dev/zero")
    assert RunFolder(str(tmp_path)).lost() is None
    assert RunFolder(str(tmp_path)).report() == ""
