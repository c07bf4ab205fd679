"""The comparison with peers: its table, its exit status, and what it says of a peer that is missing or fails."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers():
    return runpy.run_path(str(BENCHMARKS / "peers.py"))


class Command:
    """`peers.py` with comparisons of the test's own, whose processes are lines of Python."""

    def __init__(self, peers, monkeypatch, capsys, logs: Path) -> None:
        self.peers, self.capsys, self.logs = peers, capsys, logs
        self.comparisons = {}
        monkeypatch.setitem(peers["main"].__globals__, "COMPARISONS", self.comparisons)

    def add(self, name: str, code: str, *, package: str = "", limit: float = 60, absent: str = "") -> None:
        goal, rate = self.peers["Goal"](1.05, "a test"), self.peers["RATE"]

        def read(given):
            peer, theirs, ours = f"{name.title()} 1.0", given["theirs"], given["ours"]
            return [self.peers["Figure"](f"{name} rate", peer, goal, theirs, ours, rate)]

        job = self.peers["Job"](f"{name}-job", [sys.executable, "-c", code], limit, read, absent)
        self.comparisons[name] = self.peers["Comparison"](name.title(), package, "extra", lambda _options: [job])

    def figures(self, name: str, theirs: float, ours: float) -> None:
        self.add(name, f"print('{json.dumps({'theirs': theirs, 'ours': ours})}')")

    def run(self, *words: str) -> tuple[int, list[list[str]], str]:
        """Return the exit status, the cells of the table without its head, and all of stdout."""
        code = self.peers["main"](["--logs", str(self.logs), *words])
        out = self.capsys.readouterr().out
        lines = [line.strip("|").split("|") for line in out.splitlines() if line.startswith("| ")]
        return code, [[cell.strip() for cell in line] for line in lines[1:]], out


@pytest.fixture
def command(peers, monkeypatch, capsys, tmp_path):
    return Command(peers, monkeypatch, capsys, tmp_path / "logs")


class TestTable:
    def test_canned_figures_are_judged(self, command):
        command.figures("fast", 2000.0, 5000.0)
        command.figures("slow", 2000.0, 2000.0)
        code, rows, out = command.run()
        assert code == 0, "a goal that is not met is no failure: speed depends on the machine"
        assert rows == [
            ["fast rate: 1.05x", "Fast 1.0", "2,000 ops/s", "5,000 ops/s", "2.50x", "met"],
            ["slow rate: 1.05x", "Slow 1.0", "2,000 ops/s", "2,000 ops/s", "1.00x", "not met"],
        ]
        head = out.splitlines()
        assert head[0].startswith("machine: ")
        assert " cores" in head[0]
        assert head[1].startswith("load (1, 5, 15 minutes): ")
        assert head[1].endswith(" at the end")
        assert head[2].startswith("versions: Python ")
        assert "numpy " in head[2]
        assert command.run("--strict")[0] == 1
        assert command.run("--strict", "--only", "fast")[0] == 0

    def test_json_has_the_same_rows(self, command):
        command.figures("fast", 2000.0, 5000.0)
        _, _, out = command.run("--json", "--quick")
        given = json.loads(out)
        (row,) = given["rows"]
        assert (row["job"], row["peer"], row["outcome"], row["failed"]) == ("fast-job", "Fast 1.0", "met", False)
        assert row["figure"]["ratio"] == 2.5
        assert row["figure"]["goal"] == {"ratio": 1.05, "source": "a test"}
        assert "no figures to quote" in given["head"]["quick"]

    @pytest.mark.parametrize(
        ("unit", "theirs", "ours", "ratio"),
        [("RATE", 2.0, 3.0, 1.5), ("WALL_SECONDS", 3.0, 2.0, 1.5), ("ERROR", 0.3, 0.2, 1.5), ("FORMS", 4, 0, 0)],
    )
    def test_a_larger_ratio_is_better_in_every_unit(self, peers, unit, theirs, ours, ratio):
        figure = peers["Figure"]("a", "Peer", peers["Goal"](1.0, ""), theirs, ours, peers[unit])
        assert figure.ratio == pytest.approx(ratio)

    def test_a_peer_that_is_not_installed_is_a_row(self, command):
        command.add("missing", "raise SystemExit(9)", package="no_such_package_of_anybody")
        command.add("elsewhere", "raise SystemExit(9)", absent="not here: --data FOLDER")
        command.figures("fast", 2000.0, 5000.0)
        code, rows, _ = command.run()
        assert code == 0
        assert rows[0] == ["missing", "Missing", "", "", "", "not installed: pip install -e '.[extra]'"]
        assert rows[1] == ["elsewhere-job", "Elsewhere", "", "", "", "not here: --data FOLDER"]
        assert rows[2][-1] == "met"


class TestFailures:
    @pytest.mark.parametrize(
        ("code", "why"),
        [
            (
                "import sys; print('lost', file=sys.stderr); raise ImportError('no such loop')",
                "ImportError: no such loop",
            ),
            ("raise SystemExit(3)", "it ended with 3: nothing was printed"),
            ("print('not JSON')", "it handed back no figures (JSONDecodeError"),
            ("print('[]')", "it handed back no figures (TypeError"),
            ("""print('{"theirs": 1}')""", "it handed back no figures (KeyError: 'ours')"),
            ("""print('{"theirs": 1, "ours": NaN}')""", "1 and nan are no figures"),
            ("""print('{"theirs": 0, "ours": 1}')""", "0 and 1 are no figures"),
            ("""print('{"theirs": "1", "ours": 1}')""", "'1' and 1 are no figures"),
        ],
    )
    def test_a_comparison_without_figures_fails_and_the_next_one_goes_on(self, command, code, why):
        command.add("broken", code)
        command.figures("fast", 2000.0, 5000.0)
        status, rows, _ = command.run()
        assert status == 1
        assert rows[0][:2] == ["broken-job", "Broken"]
        assert rows[0][-1].startswith("failed: ")
        assert why in rows[0][-1]
        assert str(command.logs) in rows[0][-1]
        assert rows[1][-1] == "met"

    def test_a_process_over_its_limit_ends_with_all_that_it_started(self, command, tmp_path):
        place = tmp_path / "pid"
        child = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); "
        command.add("slow", child + f"open({str(place)!r}, 'w').write(str(c.pid)); time.sleep(60)", limit=2)
        status, rows, _ = command.run()
        assert status == 1
        assert rows[0][-1].startswith("failed: it took longer than its 2 s")
        deadline = time.monotonic() + 10
        while _runs(int(place.read_text())):
            assert time.monotonic() < deadline, "what the process started still runs"
            time.sleep(0.05)

    def test_an_interrupt_leaves_the_table_so_far(self, command):
        command.figures("fast", 2000.0, 5000.0)
        command.add("slow", f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)")
        command.figures("later", 2000.0, 5000.0)
        status, rows, out = command.run()
        assert status == 128 + signal.SIGINT
        assert [row[0] for row in rows] == ["fast rate: 1.05x"]
        assert out.endswith("interrupted: the table has what had ended\n")

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["--only", "xdls"], "invalid choice: 'xdls'"),
            (["--vtrain", "/nowhere"], "it has no calibration_single_node.csv"),
            (["--logs", "/dev/null/logs"], "name a folder that can be made"),
        ],
    )
    def test_bad_options_are_refused(self, peers, capsys, words, why):
        with pytest.raises(SystemExit, match="2"):
            peers["main"](words)
        assert why in capsys.readouterr().err


def _runs(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (OSError, ProcessLookupError):
        return False


class TestReaders:
    """Figures of each comparison, read from what its benchmark hands back."""

    def read(self, peers, name, given, **options):
        job, *_ = peers["COMPARISONS"][name].jobs(peers["Options"](**options))
        return job.read(given)

    def test_the_faster_step_of_pytorch_counts(self, peers):
        seconds = {"RATrain f16": 4.0, "torch kernels": 2.0, "float32": 5.0, "float32 compiled": 4.5}
        seconds |= {"bfloat16": 3.0, "bfloat16 compiled": 3.5}
        given = {"steps": [{"vocab": 4096, "threads": 1, "seconds": seconds}]}
        float32, bf16 = self.read(peers, "pytorch", given)
        assert (float32.theirs, float32.ours, float32.goal.ratio) == (4.5, 4.0, 1.05)
        assert float32.peer.endswith(", compiled")
        assert float32.unit.name == "CPU s"
        assert (bf16.theirs, bf16.ours) == (3.0, 2.0)
        assert bf16.peer.endswith(", eager")
        two_threads, _ = self.read(peers, "pytorch", {"steps": [{**given["steps"][0], "threads": 2}]})
        assert two_threads.unit.name == "s"

    def test_pytorch_is_compared_at_both_vocabularies_on_one_thread_and_two(self, peers):
        jobs = peers["COMPARISONS"]["pytorch"].jobs(peers["Options"]())
        assert [job.name for job in jobs] == [
            *("pytorch-4096-1", "pytorch-32000-1"),
            *("pytorch-4096-2", "pytorch-32000-2"),
        ]

    def test_only_the_verifier_of_defined_ops_is_held_against_ours(self, peers):
        rates = {"parse": 2.0, "print": 3.0, "verify: structure": 4.0}
        others = {"xDSL, unregistered": rates, "xDSL, defined": {name: rate / 2 for name, rate in rates.items()}}
        figures = self.read(peers, "xdsl", {"ours": rates, "others": others})
        assert [(figure.name, figure.ratio) for figure in figures] == [
            *(("parse", 1.0), ("print", 1.0), ("verify: structure", 2.0))
        ]

    def test_all_forms_of_minimalloc_have_to_fit(self, peers):
        (figure,) = self.read(peers, "minimalloc", {"placed": 43, "forms": [{}] * 44})
        assert peers["Row"].of("minimalloc", figure).outcome == "not met"
        (figure,) = self.read(peers, "minimalloc", {"placed": 44, "forms": [{}] * 44})
        assert peers["Row"].of("minimalloc", figure).outcome == "met"

    def test_errors_of_vtrain_are_of_held_out_rows(self, peers, tmp_path):
        rows = [("fit", "one node", 0.9), ("held-out", "one node", -0.1), ("held-out", "one node", 0.2)]
        rows += [("held-out", "many nodes", 0.1)]
        given = {"rows": [dict(zip(("split", "group", "error"), row, strict=True)) for row in rows]}
        one, many = self.read(peers, "vtrain", given)
        assert (one.ours, many.ours) == (pytest.approx(0.15), pytest.approx(0.1))
        assert "2 rows, one node" in one.name
        _, whole = peers["COMPARISONS"]["vtrain"].jobs(peers["Options"](vtrain=tmp_path))
        assert not whole.absent
        (figure,) = whole.read({"one node": {"held_out": {"rows": 344, "mean": 0.05}}})
        assert (figure.theirs, figure.ours) == (0.0837, 0.05)


@pytest.mark.full
def test_two_comparisons_run(tmp_path):
    words = [sys.executable, str(BENCHMARKS / "peers.py"), "--quick", "--only", "xdsl", "minimalloc", "--json"]
    done = subprocess.run([*words, "--logs", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    xdsl = [row for row in rows if row["job"].startswith("xdsl")]
    if xdsl[0]["figure"] is None:
        assert xdsl[0]["outcome"].startswith("not installed: pip install")
    else:
        assert [row["figure"]["name"] for row in xdsl] == ["parse", "print", "verify: structure"]
    placed = rows[-1]["figure"]
    assert (placed["name"], placed["theirs"], placed["ours"]) == ("forms placed", 4, 4)
