"""Benchmarks run: a small one from beginning to end. What they measure is for people to read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

from ratrain.targets.machine.machine import load_machine, parse_machine
from tests.end_to_end.tiny_runs import instructions
from tests.targets.runtime.ranks.mpi_tools import needs_mpi, run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXAMPLES = BENCHMARKS.parent / "examples"
UNPLACED = re.findall(
    r"^\| (\S+) \| held-out \| [^|]* \| does not fit \| - \|",
    (BENCHMARKS.parent / "docs" / "validation.md").read_text("utf-8"),
    re.MULTILINE,
)
"""Timed rows whose simulated plan does not fit, and so has no time."""


def test_language(capsys):
    runpy.run_path(str(BENCHMARKS / "language.py"))["main"](["--ops", "1000", "--xdsl-ops", "0", "--repeat", "1"])
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert " ops, " in head
    assert titles.split() == ["ops/s", "RATrain"]
    assert [row.rsplit(maxsplit=1)[0].strip() for row in rows] == [
        *("parse", "print", "verify: structure", "verify: dataflow", "verify: memory", "verify: communication"),
        *("lifetimes", "dependence graph"),
    ]
    assert all(int(row.rsplit(maxsplit=1)[1].replace(",", "")) > 0 for row in rows)


@pytest.mark.full
def test_language_beside_its_peer(capsys):
    pytest.importorskip("xdsl", reason="compares with xDSL (extra `benchmark`)")
    runpy.run_path(str(BENCHMARKS / "language.py"))["main"](["--ops", "1000", "--xdsl-ops", "1000", "--repeat", "1"])
    _, titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.count("xDSL") == 2
    assert sum(row.count("x") for row in rows) == 6, "parse, print and structure, in both forms"


def test_collectives(capsys):
    main = runpy.run_path(str(BENCHMARKS / "collectives.py"))["main"]
    main(["--members", "8", "--bytes", "1MiB"], standalone_mode=False)
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {row[0] for row in cells} == {"mt3000", "mt3000-shared-port", "mt3000-nodes"}
    assert sum("(taken)" in row[4] for row in cells) == 6
    assert {row[6].lstrip("+-") for row in cells} == {"0.0 %"}


def test_accumulate(capsys):
    benchmark = runpy.run_path(str(BENCHMARKS / "accumulate.py"))
    tiny = benchmark["Case"](str(EXAMPLES / "tiny.json"), "tiny.toml", "ratrain")
    benchmark["main"].__globals__["CASES"] = {"tiny": (tiny,)}
    benchmark["main"](["tiny"])
    titles, _, row = capsys.readouterr().out.splitlines()
    assert "mt3000-two-peaks, f16-runs" in titles
    assert all(float(cell) >= 0 for cell in row.split("|")[3:-1])


def test_constants_are_fitted_to_the_rows_of_split_fit_alone(monkeypatch):
    constants = runpy.run_path(str(BENCHMARKS / "constants.py"))
    fit, seen = constants["fit"], []

    class Step:
        def __init__(self, task):
            self.task = task

        def seconds(self, machine):
            seen.append(self.task)
            return machine["gemm_efficiency"] + machine.dispatch  # no other constant changes a row

    def fitted(start, names, predict, measured, **_told):
        seen.clear()
        assert len(predict(start)) == len(measured)
        assert [evolve(task, folded=False) for task in seen] == [row.task for row in constants["fitted_rows"](rows)]
        assert {*names} <= {"gemm_efficiency", "dispatch"}, "the others change no row"
        return start

    monkeypatch.setitem(fit.__globals__, "FoldedStep", SimpleNamespace(of=Step))
    monkeypatch.setitem(fit.__globals__, "fitted", fitted)
    for device, name in constants["DEVICES"].items():
        rows = constants["rows_of"](device)
        seen.clear()
        _, steps, times = fit(device)
        kept, held_out = constants["fitted_rows"](rows), [row for row in rows if row.split == "held-out"]
        assert len(steps) == len(times) == len(kept) + len(held_out)
        assert {row.split for row in kept} == {"fit"}
        machine = load_machine(name)
        fitted_here = [name for name in constants["FITTED"] if machine.constants[name].certainty == "fitted"]
        assert 1 <= len(fitted_here) <= len(kept) // constants["ROWS_OF_A_CONSTANT"]
        for constant in fitted_here:
            assert f": {len(kept)} rows of split fit" in machine.constants[constant].source, f"{device}: make constants"
        timed = [row for row in held_out if row.id not in UNPLACED]
        assert f"{len(timed)} held-out rows" in machine.constants["step_error"].source


def test_constants_are_written_in_place(monkeypatch, tmp_path):
    constants = runpy.run_path(str(BENCHMARKS / "constants.py"))
    write = constants["write"]
    machine = load_machine("a100-node")
    before = (constants["MACHINES"] / "a100-node.toml").read_text()
    bare = re.sub(r"\[step_error\]\n(?:.+\n)+\n", "", before)
    (tmp_path / "a100-node.toml").write_text(bare)
    monkeypatch.setitem(write.__globals__, "MACHINES", tmp_path)
    changed = evolve(machine.constants["launch"], value=3e-6, unit="s", source="a test")
    error = evolve(machine.constants["step_error"], value=0.25)
    write(evolve(machine, constants={**machine.constants, "launch": changed}), error)
    written = parse_machine((tmp_path / "a100-node.toml").read_text(), file="a100-node.toml")
    assert written["launch"] == 3e-6
    assert written["step_error"] == 0.25
    same = [name for name in machine.constants if name not in (*constants["FITTED"], "step_error")]
    assert {name: written.constants[name] for name in same} == {name: machine.constants[name] for name in same}


def test_figures_are_handed_back_as_json(capsys):
    runpy.run_path(str(BENCHMARKS / "minimalloc.py"))["main"](["C", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["placed"] == 4
    assert "4 of 4 placed" in err
    size = ["--vocab", "64", "--layers", "1", "--seq-len", "32", "--threads", "1", "--repeat", "1"]
    main = runpy.run_path(str(BENCHMARKS / "training_step.py"))["main"]
    main([*size, "--only", "RATrain f16", "RATrain f32", "--no-profile", "--json"])
    out, err = capsys.readouterr()
    (step,) = json.loads(out)["steps"]
    assert {*step["seconds"]} == {"RATrain f16", "RATrain f32"}
    assert "inside sgemm" not in err


def test_minimalloc(capsys):
    runpy.run_path(str(BENCHMARKS / "minimalloc.py"))["main"](["C"])
    titles, *rows, last = capsys.readouterr().out.splitlines()
    assert titles.split()[:2] == ["problem", "form"]
    assert [row.split()[1] for row in rows] == ["published", "reversed", "relabelled", "glued"]
    assert last.startswith("4 of 4 placed")


def run(name, capsys, *arguments):
    runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"]([*arguments, "--repeat", "1", "--no-torch"])
    return capsys.readouterr().out


@pytest.mark.parametrize("clock", ["wall", "cpu"])
@pytest.mark.sampled(2)
def test_training_step(capsys, clock):
    size = ["--vocab", "64", "--layers", "1", "--seq-len", "32"]
    threads = "2" if clock == "wall" else "1"
    out = run("training_step", capsys, *size, "--threads", threads, "--clock", clock)
    assert f"a team of {threads}" in out
    inside = re.search(r"inside sgemm ([0-9.]+)% of a step", out)
    assert inside
    assert 0 < float(inside[1]) < 100
    assert re.findall(r"^  RATrain (\w+) .* [0-9]+ tokens/s ", out, re.MULTILINE) == ["f16", "bf16", "f32"]
    shares = re.findall(r"^  (\w+) +([0-9.]+)% +-?[0-9.]+%$", out, re.MULTILINE)
    assert {"gemm", "attention_forward", "attention_backward", "adamw", "engine"} <= {name for name, _ in shares}
    assert abs(sum(float(share) for _, share in shares) - 100) < 2


def test_attention(capsys):
    out = run("attention", capsys, "--threads", "1", "--only", "S=1024 H=16")
    errors = re.search(r"errors in half ulps: o ([0-9.]+), dq ([0-9.]+), dk ([0-9.]+), dv ([0-9.]+)", out)
    assert errors
    assert all(0 < float(error) < 2 for error in errors.groups())


def test_a_layer_recomputed_in_five_ways_takes_about_what_was_published(capsys):
    runpy.run_path(str(BENCHMARKS / "layer_recomputation.py"))["main"]([], standalone_mode=False)
    _, _, *rows = capsys.readouterr().out.splitlines()
    errors = {cells[1]: float(cells[4].removesuffix(" %")) for row in rows if (cells := re.split(r" *\| *", row))}
    assert {"baseline", "sequence sharding", "full", "selective", "selective, sequence sharding"} < {*errors}
    assert all(abs(error) < 6 for name, error in errors.items() if "checkpoint=" not in name)
    assert errors["full, checkpoint=block"] < errors["full, checkpoint=layer"] < errors["full"]


@pytest.mark.parametrize("name", ["training_step", "attention"])
def test_cpu_time_is_for_one_thread(capsys, name):
    with pytest.raises(SystemExit):
        run(name, capsys, "--threads", "2", "--clock", "cpu")
    assert "one thread only" in capsys.readouterr().err


@pytest.mark.full
def test_ranks(capsys):
    size = ["--vocab", "64", "--layers", "2", "--seq-len", "16", "--threads", "2", "--repeat", "1"]
    runpy.run_path(str(BENCHMARKS / "ranks.py"))["main"](size)
    rates = re.findall(r"^  (\d \w+), \d threads? +(\d+) tokens/s", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in rates] == ["1 rank"] * 2 + ["2 replicas"] * 2 + ["2 stages"] * 2
    assert all(int(rate) > 0 for _, rate in rates)


class TestCorrectnessRun:
    """A smaller model than the benchmark's, a few steps."""

    @pytest.fixture
    def benchmark(self, monkeypatch: pytest.MonkeyPatch):
        spec = importlib.util.spec_from_file_location("correctness_run", BENCHMARKS / "correctness_run.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        module.MODEL = evolve(module.MODEL, hidden_size=32, head_dim=8, ffn_size=40)
        module.PLAN = evolve(module.PLAN, seq_len=16)
        return module

    def steps(self, benchmark, count: int) -> list[str]:
        return ["--tokens", str(count * benchmark.PLAN.tokens_per_step)]

    @pytest.mark.full
    def test_both_runs_are_equal_and_go_on(self, benchmark, tmp_path, capsys):
        folder = ["--folder", str(tmp_path)]
        assert benchmark.main([*self.steps(benchmark, 5), *folder]) == 0
        whole = capsys.readouterr().out
        assert "5 steps, 640 tokens in each run" in whole
        assert "largest |loss - baseline| / baseline: 0 % " in whole
        assert benchmark.main([*self.steps(benchmark, 7), *folder]) == 0
        assert "7 steps" in capsys.readouterr().out
        assert [place.name for place in tmp_path.iterdir()] == ["after-step-7"]
        lines = (tmp_path / "after-step-7" / "losses.jsonl").read_text().splitlines()
        assert [json.loads(line)[0] for line in lines] == list(range(7))
        assert benchmark.main(self.steps(benchmark, 7)) == 0
        assert capsys.readouterr().out.splitlines()[4] == "7 steps, 896 tokens in each run; " + loss_words(lines)

    @needs_mpi
    @pytest.mark.full
    @pytest.mark.parametrize("words", [[], ["--replicas", "4", "--reduction", "fast"]], ids=["ordered", "fast"])
    def test_ranks_over_mpi_stay_within_what_is_allowed(self, words):
        tokens = ["--tokens", "4096", "--engine", "mpi"]
        result = run_ranks(4, BENCHMARKS / "correctness_run.py", *tokens, *words)
        assert result.returncode == 0, result.stderr
        (deviation,) = re.findall(r"largest \|loss - baseline\| / baseline: (\S+) %", result.stdout)
        assert float(deviation) <= (0.081 if words else 0)
        assert "2 steps, 4,096 tokens in each run" in result.stdout

    def test_recomputation_is_part_of_it(self, benchmark):
        counts = [len(list(instructions(program, "recompute"))) for program in benchmark.programs(benchmark.PLAN)]
        assert 0 < counts[0] < counts[1]

    def test_a_difference_is_found(self, benchmark, monkeypatch, capsys):
        started = benchmark.started

        def spoilt(*arguments):
            runs, lines = started(*arguments)
            runs[0].engine.ranks[1][0].carried("m1", "head")[3] = 1e-3
            return runs, lines

        monkeypatch.setattr(benchmark, "started", spoilt)
        assert benchmark.main(self.steps(benchmark, 1)) == 1
        assert "differ in any bit: head" in capsys.readouterr().out


def loss_words(lines: list[str]) -> str:
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    return f"loss {first[1]:.4f} -> {last[1]:.4f}"


def test_vtrain_reports_the_error_of_rows_held_out(capsys, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = (Path(__file__).parents[1] / "data" / "vtrain" / "single_node.csv").read_text()
    (folder / "calibration_single_node.csv").write_text(rows)
    out_file = tmp_path / "a100.toml"
    main = runpy.run_path(str(BENCHMARKS / "vtrain.py"))["main"]
    main([str(folder), "-o", str(out_file)], standalone_mode=False)
    out = capsys.readouterr().out
    assert re.search(r"^    tp 2: 1 rows, error mean", out, re.MULTILINE)
    coarse, fine = (float(error) for error in re.findall(r"held out: \d+ rows, error mean ([0-9.]+) %", out))
    assert fine < coarse
    assert out_file.exists()


@pytest.mark.full
def test_speed(capsys):
    words = ["--model", str(EXAMPLES / "tiny.json"), "--plan", str(EXAMPLES / "tiny.toml"), "--micro-batches", "2"]
    words += ["--jobs", "1"]
    benchmark = runpy.run_path(str(BENCHMARKS / "speed.py"))
    benchmark["main"](words)
    processes, titles, *rows = capsys.readouterr().out.splitlines()
    assert processes == "1 process at most"
    assert titles.split() == ["command", "CPU", "s", "wall", "s", "target"]
    assert [row.split()[0] for row in rows] == list(benchmark["TARGETS"])
    assert all(float(seconds) > 0 for row in rows for seconds in row.split()[1:3])


@pytest.mark.full
def test_growth(capsys, tmp_path):
    """Every series runs, its exponents are numbers, and its picture and figures are written."""
    pytest.importorskip("matplotlib")
    small = {"ops": (2, 8, 40), "stages": (2, 4), "ranks": (8, 64), "clusters": (8, 16)}
    picture = tmp_path / "growth.png"
    benchmark = runpy.run_path(str(BENCHMARKS / "growth.py"))
    benchmark["SERIES"].update(small)
    benchmark["main"](["-o", str(picture)])
    rows, exponents = capsys.readouterr().out.split("exponents of CPU seconds and of memory")
    assert len(rows.splitlines()) == 1 + 5 * (3 + 2 + 2) + 2 + 1
    assert re.search(r"^ops +compile +-?\d", exponents, re.MULTILINE)
    figures = [line.split() for line in rows.splitlines()[1:-2]]
    assert {series for series, *_ in figures} == {*small}
    assert all(float(cpu) > 0 and float(memory) > 0 for *_, cpu, _, memory in figures)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_exponent_is_told_between_the_two_largest_sizes():
    exponent = runpy.run_path(str(BENCHMARKS / "growth.py"))["exponent"]
    sizes = [1e3, 1e5, 1e6]
    for power in (0.0, 1.0, 2.0):
        assert exponent(sizes, [99.0, *(1e-6 * size**power for size in sizes[1:])]) == pytest.approx(power)
    assert exponent(sizes[:1], [1.0]) is None


@pytest.mark.full
def test_predicted_run(capsys):
    runpy.run_path(str(BENCHMARKS / "predicted_run.py"))["main"](["--steps", "6"], standalone_mode=False)
    out = capsys.readouterr().out
    row = r"^\| [^|]+ \| [0-9.]+ s \| [0-9.]+ s \([0-9.]+ to [0-9.]+\) \| [+-][0-9.]+% \| [+-][0-9.]+% \|$"
    assert len(re.findall(row, out, re.MULTILINE)) >= 3


def test_quantised(capsys, monkeypatch):
    benchmark = runpy.run_path(str(BENCHMARKS / "quantised.py"))
    runs = {name: benchmark["RUNS"][name] for name in (benchmark["EXACT"], "gather int4, reduce int8")}
    monkeypatch.setitem(benchmark["main"].__globals__, "RUNS", runs)
    benchmark["main"](["--steps", "2"])
    titles, _, exact, packed = capsys.readouterr().out.splitlines()
    assert titles == "| collectives | largest | last 1 steps |"
    assert re.fullmatch(r"\| exact \| - \| \d\.\d{4} \|", exact)
    assert re.fullmatch(r"\| gather int4, reduce int8 \| [+-]\d\.\d{3} % \(step [12]\) \| [+-]\d\.\d{3} % \|", packed)


def test_deviations_from_the_exact_run_are_shown():
    row = runpy.run_path(str(BENCHMARKS / "quantised.py"))["row"]
    exact = [2.0] * 100
    found = [2.0] * 49 + [2.02] + [1.9] * 50
    assert row("gather int8", found, exact) == ["gather int8", "+1.000 %", "-5.000 %", "-5.000 % (step 51)", "-5.000 %"]


SMALL_PLAN = """
[parallel]
pp = 1
dp = 1
[batch]
micro_batch_size = 1
micro_batches = 2
seq_len = 16
[state]
zero = 3
loss_scale = 64.0
"""


class TestSmallMemory:
    @pytest.fixture
    def benchmark(self):
        return runpy.run_path(str(BENCHMARKS / "small_memory.py"))

    @pytest.mark.full
    def test_a_killed_run_and_one_with_state_in_a_file_train_as_one_in_memory(self, benchmark, tmp_path, capsys):
        plan = tmp_path / "plan.toml"
        plan.write_text(SMALL_PLAN)
        model = str(BENCHMARKS.parent / "examples" / "tiny.json")
        words = ["--model", model, "--plan", str(plan), "--steps", "60", "--scratch", str(tmp_path), "--json"]
        assert benchmark["main"](words) == 0
        said = json.loads(capsys.readouterr().out)
        whole, filed, resumed = said["runs"].values()
        assert said["faults"] == []
        assert len(whole["losses"]) == 60
        assert whole["losses"] == filed["losses"]
        assert 1 <= len(resumed["losses"]) <= 30
        assert whole["moved"] == [0, 0]
        assert min(filed["moved"]) > 0

    def test_each_fault_is_found(self, benchmark):
        good = benchmark["Trained"]((3.0, 2.0, 1.0), 0, 1.0, 100, (6, 3), (6, 3))
        resumed = evolve(good, losses=(2.0, 1.0))
        faults = benchmark["faults"]
        assert faults(good, good, resumed, 100) == []
        assert faults(good, evolve(good, losses=(3.0, 2.0, 0.5)), resumed, 100)
        assert faults(good, good, evolve(resumed, losses=(2.0, 1.5)), 100)
        assert faults(good, good, evolve(resumed, losses=()), 100)
        assert len(faults(good, good, resumed, 99)) == 2
        assert faults(good, evolve(good, moved=(5, 3)), resumed, 100)
        assert faults(good, evolve(good, moved=(5, 3), overflows=1), resumed, 100) == []


@pytest.mark.parity
class TestDrill:
    """The drill for a GPU, rehearsed on the processor."""

    PARTS = (
        *("machine", "correctness", "graph", "ranks", "bytes", "ballast", "tiles", "calibrate", "speed", "experts"),
        "finetune",
    )

    def drill(self, out: Path, **variables: str) -> tuple[int, dict[str, list[str]], str]:
        """Run it; return the exit status, the cells of each part in the table, and all that it printed."""
        pytest.importorskip("torch")
        command = ["bash", str(BENCHMARKS / "gpu_drill.sh"), "--device", "cpu"]
        environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        _, _, table = done.stdout.partition("|---|---|---|---|")
        rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| (.*) \|$", table, re.MULTILINE)
        assert tuple(row[0] for row in rows) == self.PARTS, done.stdout + done.stderr
        for name, status, *_, why in rows:
            left = json.loads((out / f"{name}.json").read_text())
            assert (left["part"], left["status"], left["why"]) == (name, status, why)
        assert (out / "drill.log").read_text() == done.stdout
        return done.returncode, {name: cells for name, *cells in rows}, done.stdout

    @pytest.mark.full
    def test_a_rehearsal_passes_all_that_needs_no_gpu(self, tmp_path):
        code, table, out = self.drill(tmp_path, DRILL_SECONDS="2000")
        assert code == 0, out
        assert [name for name, cells in table.items() if cells[0] == "skipped"] == ["graph", "tiles", "experts"]
        assert table["graph"][2].startswith("--graph needs a GPU")
        assert {cells[0] for cells in table.values()} == {"passed", "skipped"}
        assert len(list(tmp_path.iterdir())) == len(self.PARTS) + 3, (
            "a JSON for each part, the log, the machine file and the folder of the fine-tuning"
        )

    def test_a_part_over_its_limit_fails_and_the_next_one_goes_on(self, tmp_path):
        code, table, _ = self.drill(tmp_path, DRILL_SECONDS="1")
        assert code == 1
        del table["tiles"], table["experts"]  # which need a GPU, and say so at once
        assert all(cells[0] == "failed" and "it took longer than its" in cells[2] for cells in table.values())


def test_fit_cases_are_predicted_or_refused_by_name(capsys):
    main = runpy.run_path(str(BENCHMARKS / "fit_cases.py"))["main"]
    main(["--owners", "fit-tt3b-ac"])
    *rows, _, _, _, _, _, _ = capsys.readouterr().out.splitlines()
    lines = [row for row in rows if row.startswith("fit-")]
    assert len(lines) == 67
    assert sum("refused: adapter" in row for row in lines) == 8
    assert any(row.strip().endswith(" weights") for row in rows)
    main(["tables"])
    *_, vocabulary = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"vocabulary-memory: 24 peaks, median error [01]\.\d %, largest \d\.\d %", vocabulary.replace("%", " %")
    )
