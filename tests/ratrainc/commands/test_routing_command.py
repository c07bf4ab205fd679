"""`ratrainc simulate --routing`: what is said of it, and what files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch
from tests.end_to_end.tiny_runs import make_program
from tests.end_to_end.toys import SIX_EXPERTS, UNEVEN
from tests.ratrainc.commands.tiny_llama import facts, printed

EVEN = [1 / 6] * 6
FEW = [1 / 3, 1 / 3, 1 / 3, 0, 0, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs: of ranks that share out experts, sending all rows or dropping some, and of others."""
    folder = tmp_path_factory.mktemp("routing")
    shape: dict[str, Any] = {"pp": 1, "cuts": (), "dp": 2, "micro_batches": 2}
    for name, program in (
        ("shared", make_program(SIX_EXPERTS, **shape, ep=2, zero=3)),
        ("whole", make_program(SIX_EXPERTS, **shape)),
        ("dropping", make_program(SIX_EXPERTS, **shape, ep=2, experts=ExpertDispatch("capacity", 1.0))),
        ("dense", make_program(UNEVEN, **shape)),
    ):
        api.save(program, str(folder / f"{name}.rtx"))
    return folder


def test_the_routing_is_told_in_both_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", folder / "shared.rtx")
    usual = facts(capsys, *words, "--json")
    assert usual["routing"] == "balanced"
    assert facts(capsys, *words, "--routing", "balanced", "--json") == usual
    hot = facts(capsys, *words, "--routing", "one-hot", "--json")
    assert hot["routing"] == "one-hot"
    assert hot["step_seconds"] >= usual["step_seconds"]
    assert [stage["peak_bytes"] for stage in hot["stages"]] == [stage["peak_bytes"] for stage in usual["stages"]]
    assert "if all get as many, as times assume" in printed(capsys, *words)
    assert "times assume the routing 'one-hot', not a balanced one" in printed(capsys, *words, "--routing", "one-hot")
    assert facts(capsys, "simulate", folder / "dense.rtx", "--json")["routing"] is None


def test_the_part_of_rows_that_a_routing_drops_is_told_in_both_outputs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of six experts get all rows, so that half of them are above a capacity of the mean."""
    words = ("simulate", folder / "dropping.rtx")
    for routing, share in (((), 0.0), (("--routing", "one-hot"), 0.5)):
        assert facts(capsys, *words, *routing, "--json")["dropped_rows"] == share
        assert f"dropped_rows: {100 * share:.2f} % of all rows" in printed(capsys, *words, *routing)
    for name in ("shared", "whole", "dense"):
        assert facts(capsys, "simulate", folder / f"{name}.rtx", "--json")["dropped_rows"] is None
        assert "dropped_rows" not in printed(capsys, "simulate", folder / f"{name}.rtx")


@pytest.mark.parametrize("layers", [EVEN, [EVEN] * SIX_EXPERTS.layers], ids=["for-all", "each"])
def test_a_file_of_equal_shares_takes_the_usual_time(
    layers: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "even.json").write_text(json.dumps({"layers": layers}))
    words = ("simulate", folder / "shared.rtx", "--json")
    assert facts(capsys, *words, "--routing", folder / "even.json") == facts(capsys, *words) | {"routing": "even.json"}


def test_a_file_may_say_what_a_name_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "few.json").write_text(json.dumps({"layers": FEW}))
    words = ("simulate", folder / "shared.rtx", "--json", "--routing")
    assert facts(capsys, *words, folder / "few.json") == facts(capsys, *words, "one-hot") | {"routing": "few.json"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "routing is not JSON"),
        ("[1]", "this is not a routing"),
        ('{"layers": 1}', "this is not a routing"),
        ('{"layers": [1.0]}', "a share of each of 6 experts is expected, not 1 share"),
        (json.dumps({"layers": [EVEN]}), "has lists for 1 layer, and"),
        (
            json.dumps({"layers": [EVEN, EVEN, 1]}),
            "list 2 of 'layers': a share of each of 6 experts is expected, not 1",
        ),
        (
            json.dumps({"layers": [1, 0, 0, 0, 0, 0]}),
            "expert 0 has the share 1, and a token goes to 3 distinct experts",
        ),
        (json.dumps({"layers": [*FEW[:2], 0.2, 0, 0, 0]}), "the shares add up to 0.866666667, not 1"),
        (json.dumps({"layers": [*FEW[:3], -0.1, 0.1, 0]}), "the share of expert 3 is -0.1, not a number from 0 to 1"),
        (json.dumps({"layers": [*FEW[:3], "x", 0, 0]}), "the share of expert 3 is"),
        ('{"layers": [NaN, 0, 0, 0, 0, 0]}', "the share of expert 0 is"),
        pytest.param("[" * 100_000, "routing is not", id="deep"),
    ],
)
def test_a_wrong_file_is_refused_at_its_place(
    text: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.json").write_text(text)
    words = ("simulate", folder / "shared.rtx", "--routing", folder / "wrong.json")
    shown = " ".join(printed(capsys, *words, code=1).split())
    assert said in shown
    assert "wrong.json:1:" in shown


def test_what_has_no_such_routing_is_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str, routing: object, *words: object, code: int = 1) -> str:
        return " ".join(printed(capsys, "simulate", folder / name, "--routing", routing, *words, code=code).split())

    assert "the routing 'one-hot' is of experts, which" in refused("dense.rtx", "one-hot")
    assert "no replicas share them out (ep = 1)" in refused("whole.rtx", "hot-rank")
    assert "did you mean 'hot-rank'?" in refused("shared.rtx", "hot-rnk")
    assert "cannot read the routing" in refused("shared.rtx", folder / "missing.json")
    for words in (("--one-core",), ("--cores", 2), ("--times", "1,1,1,0")):
        assert "--routing" in refused("shared.rtx", "one-hot", *words, code=2)
