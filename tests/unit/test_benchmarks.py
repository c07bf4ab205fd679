"""Benchmarks run: a small one from beginning to end. What they measure is for people to read."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
from attrs import evolve

from tests.unit.tiny_runs import instructions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
        assert capsys.readouterr().out.splitlines()[3] == "7 steps, 896 tokens in each run; " + loss_words(lines)

    def test_recomputation_is_part_of_it(self, benchmark):
        counts = [len(list(instructions(program, "recompute"))) for program in benchmark.programs()]
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
