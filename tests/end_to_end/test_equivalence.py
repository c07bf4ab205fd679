"""Every strategy trains exactly the same: losses, master weights and moments are equal bit for bit.

Configurations are a pairwise covering array: every pair of values of any two factors occurs in some row. What may differ is
only what the semantics says differs: the plan (P, D, M, reduce, clip, dtypes), never the order of work.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.ratrain_ir.config.accumulation import HALF_RUNS
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, WHOLE_STRATEGIES, losses, make_plan, start
from tests.end_to_end.toys import EXPERTS, GEMMA3, GPT2, GRANITE, NEOX, OLMO2, SHARED_EXPERT

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

STEPS = 4
MODELS = {
    "llama": MODEL,
    "gpt2": GPT2,
    "gemma3": GEMMA3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "neox": NEOX,
    "experts": EXPERTS,
    "shared-expert": SHARED_EXPERT,
}

FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": ((1, 3, 2), (2, 1, 5), (2, 2, 3), (3, 2, 1), (3, 1, 4)),
    "state": ((0, "last"), (1, "last"), (2, "each-micro-batch"), (3, "last"), (3, "each-micro-batch")),
    "dtype": ("f16", "bf16", "f32", "f16-runs"),
    "gradients": (None, ("f16", "f32"), ("f32", "f16"), ("bf16", "f32")),
    "family": tuple(MODELS),
    "tied": (False, True),
    "clip": ("none", "global"),
    "mlp_chunk": (None, 7),
    "strategy": (
        *(item.name for item in WHOLE_STRATEGIES if item.name != "tuned-1f1b"),
        "place-zb-h1{delay=0},recompute{policy=full},bucket-grad-sync{bytes=1KiB},allocate-ddr",
        "place-gpipe,recompute{policy=attention},bucket-grad-sync{bytes=1KiB},allocate-ddr",
        "place-1f1b,bucket-grad-sync,insert-prefetch{depth-blocks=4},recompute{policy=auto budget=700KB},allocate-ddr",
    ),
}
BASELINE = "place-1f1b,recompute{policy=full},allocate-ddr"


def covering_rows(factors: dict[str, tuple[Any, ...]] = FACTORS) -> list[dict[str, Any]]:
    """Rows such that each pair of values of two factors is in one, greedily and without chance."""
    names = list(factors)
    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    rows: list[dict[str, int]] = []
    while missing:
        first = min(missing)
        row = {first[0]: first[1], first[2]: first[3]}
        for name in names:
            if name not in row:
                row[name] = max(range(len(factors[name])), key=lambda value: (_gain(row, name, value, missing), -value))
        rows.append(row)
        missing -= {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}
    return [{name: factors[name][value] for name, value in row.items()} for row in rows]


def _gain(row: dict[str, int], name: str, value: int, missing: set[tuple[str, int, str, int]]) -> int:
    pairs = ((other, known) for other, known in row.items())
    return sum((o, k, name, value) in missing or (name, value, o, k) in missing for o, k in pairs)


def _plan(row: dict[str, Any], model: ModelConfig) -> Plan:
    """The plan of a row; one whose shards have a type of their own, but which has no shards, is refused."""
    pp, dp, micro_batches = row["layout"]
    zero, reduce = row["state"]
    keys: dict[str, Any] = {"zero": zero, "reduce": reduce, "view_dtype": row["dtype"], "head_chunk": 8}
    if row["dtype"] == HALF_RUNS:
        keys |= {"view_dtype": "f16", "accumulate": HALF_RUNS}
    keys["mlp_chunk"] = row["mlp_chunk"]
    if model.experts is not None:  # experts take all rows, and sum in f32: these keys are refused
        keys |= {"mlp_chunk": None, "accumulate": "f32", "router": RouterLosses(0.1, 0.01)}
    keys |= {"pp": pp, "dp": dp, "micro_batches": micro_batches}
    keys["optimizer"] = evolve(OPTIMIZER, clip=row["clip"], max_norm=0.3)
    if row["gradients"] is not None:
        keys["grad_dtype"], keys["grad_shard_dtype"] = row["gradients"]
        if zero == 0 or dp == 1:
            with pytest.raises(DiagnosticError, match=r"RT064.*there are no shards"):
                make_plan(model, **keys)
            keys["grad_shard_dtype"] = keys["grad_dtype"]
    return make_plan(model, **keys)


def _outcome(row: dict[str, Any], how: str) -> tuple[list[float], dict[str, bytes]]:
    """Losses and state of a row under a strategy, which may set the plan's ZeRO level, or under passes."""
    model = evolve(MODELS[row["family"]], tied_embeddings=row["tied"])
    plan = _plan(row, model)
    known = {item.name: item for item in WHOLE_STRATEGIES}
    if how in known:
        plan, how = known[how].adapted(plan, model, load_machine(None)), known[how].passes
    run = start(api.emit(api.compile(model, plan, passes=without_idle_options(how, plan, model))), STEPS)
    list(run.steps())
    state = training_state(run.engine, STEPS)
    arrays = {
        f"{unit} {name}": getattr(state.blocks[unit], name) for unit in state.blocks for name in ("p", "m1", "m2")
    }
    return losses(run), {name: np.asarray(array).tobytes() for name, array in arrays.items()}


ROWS = covering_rows()


def test_the_array_covers_every_pair() -> None:
    assert len(ROWS) <= 112
    for a, b in combinations(FACTORS, 2):
        assert {(str(row[a]), str(row[b])) for row in ROWS} == {
            (str(x), str(y)) for x, y in product(FACTORS[a], FACTORS[b])
        }


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.full) if number % 2 else row for number, row in enumerate(ROWS)],
    ids=lambda row: "-".join(str(v)[:24] for v in row.values()),
)
@pytest.mark.sampled(6)
def test_training_is_the_same_bit_for_bit(row: dict[str, Any]) -> None:
    expected_losses, expected_state = _outcome(row, BASELINE)
    found_losses, found_state = _outcome(row, row["strategy"])
    assert found_losses == expected_losses
    different = [name for name, data in found_state.items() if data != expected_state[name]]
    assert not different
    assert len(set(expected_losses)) == STEPS, "nothing was trained: equal bits would say little"


def test_the_two_ways_to_reduce_agree_closely() -> None:
    row = {"layout": (2, 2, 3), "dtype": "f16", "family": "llama", "tied": False}
    row |= {"clip": "none", "mlp_chunk": None, "gradients": None}
    last, _ = _outcome(row | {"state": (2, "last")}, BASELINE)
    each, _ = _outcome(row | {"state": (2, "each-micro-batch")}, BASELINE)
    assert last != each, "two orders of rounding should differ somewhere"
    assert max(abs(a - b) / a for a, b in zip(last, each, strict=True)) < 1e-3


PARTS = (
    "recompute{policy=ops}",
    "recompute{policy=norms}",
    "recompute{policy=full every=2}",
    "recompute{policy=ops every=3}",
)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.sampled(3)
def test_layers_recovered_in_part_train_the_same_bits(family: str) -> None:
    row = {"layout": (2, 1, 3), "state": (0, "last"), "dtype": "f16", "gradients": None, "family": family}
    row |= {"tied": False, "clip": "none", "mlp_chunk": None}
    expected = _outcome(row, BASELINE)
    for part in PARTS:
        assert _outcome(row, f"place-1f1b,{part},allocate-ddr") == expected, part
