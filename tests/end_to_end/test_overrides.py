"""Keys of the optimizer that a run is told in place of its plan's: as if they were compiled, kept by a resumed run, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.plan import Optimizer
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.run_display import say_start
from ratrain.targets.runtime.checkpoint.checkpoint import manifest_digest
from tests.end_to_end.tiny_runs import OPTIMIZER, losses, make_program, same_bits, train

KEYS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"betas": (0.5, 0.6)},
    {"eps": 0.01},
    {"weight_decay": 0.7},
    {"warmup_steps": 9},
    {"total_steps": 3, "min_lr": 1e-3},
]
KERNELS = {"kernels": "reference"}


def of(**keys: Any) -> Any:
    return make_program(optimizer=evolve(OPTIMIZER, **keys))


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: next(iter(keys)))
@pytest.mark.sampled(4)
def test_a_run_trains_as_if_its_plan_said_it(keys: dict[str, Any]) -> None:
    told = train(make_program(), 5, **keys, **KERNELS)
    same_bits(told, train(of(**keys), 5, **KERNELS))
    assert losses(told) != losses(train(make_program(), 5, **KERNELS))
    assert [step.learning_rate for step in told.done] == [
        told.program.plan.optimizer.learning_rate(i) for i in range(5)
    ]


def test_the_largest_norm_of_a_plan_that_clips() -> None:
    clipping = Optimizer(lr=5e-3, clip="global")
    told = train(make_program(optimizer=clipping), 3, max_norm=0.01, **KERNELS)
    same_bits(told, train(make_program(optimizer=evolve(clipping, max_norm=0.01)), 3, **KERNELS))
    with pytest.raises(DiagnosticError, match=r"RT064.*max_norm 0.01 would change nothing"):
        train(make_program(), 1, max_norm=0.01, **KERNELS)


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"min_lr": 1e-4}, "never reached"), ({"total_steps": 2}, "warm-up steps do not fit"), ({"lr": -1.0}, "'lr' is")],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(DiagnosticError, match=said):
        train(make_program(), 1, **keys, **KERNELS)


def test_a_resumed_run_keeps_what_the_first_was_told(tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    keys = {"lr": 0.02, "betas": (0.5, 0.6)}
    whole = train(make_program(), 4, **keys, **KERNELS)
    train(make_program(), 2, save=place, **keys, **KERNELS)
    record = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())["run"]
    assert record["optimizer"] == {
        "lr": {"plan": OPTIMIZER.lr, "run": 0.02},
        "betas": {"plan": list(OPTIMIZER.betas), "run": [0.5, 0.6]},
    }
    assert record["plan"]["lr"] == 0.02
    rest = train(make_program(), 1, resume=place, save=place, **KERNELS)
    assert not rest.warnings
    again = train(make_program(), 1, resume=place, **keys, **KERNELS)
    assert not again.warnings
    same_bits(whole, again)


def test_a_resumed_run_is_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "ckpt")
    train(make_program(), 2, save=place, lr=0.02, **KERNELS)
    other = train(make_program(), 1, resume=place, lr=0.03, **KERNELS)
    (warning,) = other.warnings
    assert warning.message == "lr 0.03 from now on (0.02 in the checkpoint): steps differ from the first run's"
    assert not warning.notes
    say_start(other)
    assert "optimizer: lr" not in capsys.readouterr().out
    assert other.done[0].learning_rate == 0.03
    back = train(make_program(), 1, resume=place, lr=OPTIMIZER.lr, **KERNELS)
    assert back.overrides == {}
    assert "lr 0.005 from now on (0.02 in the checkpoint)" in back.warnings[0].message
    both = train(of(betas=(0.5, 0.6), eps=1e-6), 1, resume=place, lr=0.02, seed=7, **KERNELS)
    assert [warning.message.partition(" from")[0] for warning in both.warnings if warning.key] == [
        "betas 0.5 0.6",
        "eps 1e-06",
    ]
    assert not any("another plan" in warning.message for warning in both.warnings)
    assert any("seed" in warning.message for warning in both.warnings)


def test_a_plan_that_has_changed_since_is_no_silent_choice(tmp_path: Path) -> None:
    place = str(tmp_path / "ckpt")
    train(make_program(), 2, save=place, lr=0.02, **KERNELS)
    with pytest.raises(DiagnosticError, match=r"RT092.*told lr = 0.02[\s\S]*--lr 0.02 or --lr 0.5"):
        train(of(lr=0.5), 1, resume=place, **KERNELS)
    same = train(of(lr=0.02), 1, resume=place, **KERNELS)
    assert same.overrides == {}
    assert not same.warnings


@pytest.mark.parametrize("odd", [3, [1], {"lr": 3}, {"lr": {"plan": 1}}, {"x": {"plan": 1, "run": 2}}])
def test_a_record_that_is_none_is_refused(tmp_path: Path, odd: object) -> None:
    train(make_program(), 1, save=str(tmp_path / "ckpt"), lr=0.02, **KERNELS)
    path = tmp_path / "ckpt" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["run"]["optimizer"] = odd
    manifest["manifest_sha256"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DiagnosticError, match=r"RT092.*'optimizer'"):
        train(make_program(), 1, resume=str(tmp_path / "ckpt"), **KERNELS)
