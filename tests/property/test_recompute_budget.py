"""Recomputation under a byte budget: it stays within it, spends no more than a smaller one, and its ends are full and none.

M8: peak live bytes <= budget, and recovered seconds never fall when the budget falls. M9: under place-1f1b with policy none or full,
peak live bytes are equal for all M >= P + 2: only the first micro-batch finds gradients that are not there yet, and only the last frees the
views it reads last. The choice itself is compared with brute force on small stages.
"""

from __future__ import annotations

import random
from itertools import chain, combinations_with_replacement, pairwise, product
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.passes.recovery import recompute_choice
from ratrain.passes.recovery.layer_choice import LayerChoice
from ratrain.passes.recovery.recompute_choice import Option, _front, _front_of_kinds, _pareto
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.compute import Backward, Recompute
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.mt3000.mt3000_target import Mt3000Target
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

MACHINE = load_machine(None)
SMALL_CHUNKS = {"collective_chunk": evolve(MACHINE.constants["collective_chunk"], value=1024.0)}
TARGET = Mt3000Target(evolve(MACHINE, constants=MACHINE.constants | SMALL_CHUNKS))
"""The MT-3000 with small staging chunks, whose megabytes would hide a tiny model's activations."""
LAYERS = evolve(MODEL, layers=4)
PLAN = make_plan(LAYERS, pp=2, cuts=(2,), dp=1, micro_batches=4, seq_len=48)


def compiled(passes: str, plan=PLAN, model=LAYERS) -> Module:
    module = lower(model, plan)
    PassManager(TARGET, verify_each=True).run(module, passes)
    return module


def peaks(module: Module) -> list[int]:
    return [lifetimes(stage).peak_bytes for stage in module.stages]


def recovered_seconds(module: Module) -> list[float]:
    return [
        sum(TARGET.op_seconds(module, stage, op) for op in stage.ops if type(op) is Recompute)
        for stage in module.stages
    ]


FULL = peaks(compiled("recompute{policy=full},legalise"))
NONE = peaks(compiled("recompute{policy=none},legalise"))
BUDGETS = [max(FULL) + (max(NONE) - max(FULL)) * step // 8 for step in range(10)]


@pytest.mark.parametrize("placement", ["inline", "forward-side"])
@pytest.mark.sampled(2)
def test_recovered_seconds_never_fall_when_the_budget_falls(placement: str) -> None:
    found = []
    for budget in BUDGETS:
        pipeline = f"recompute{{policy=auto budget={budget} placement={placement}}},allocate-ddr{{capacity={budget}}}"
        module = compiled(pipeline)
        assert all(peak <= budget for peak in peaks(module))
        assert all(stage.arena_bytes <= budget for stage in module.stages)
        found.append(recovered_seconds(module))
    for smaller, larger in pairwise(found):
        assert all(less >= more - 1e-12 for less, more in zip(smaller, larger, strict=True))
    assert found[-1] == [0.0, 0.0], "with room for everything nothing is recovered"
    assert found[0][0] > 0.0


def test_the_forward_side_moves_work_but_adds_none() -> None:
    inline = compiled("recompute{policy=full}")
    moved = compiled("recompute{policy=full placement=forward-side}")
    for one, other in zip(inline.stages, moved.stages, strict=True):
        assert sorted(map(repr, one.ops)) == sorted(map(repr, other.ops))
    assert _early_recoveries(inline) == []
    assert _early_recoveries(moved) == [0, 0, 3, 3], "the first backward, and the cool-down of the first of two stages"


def _early_recoveries(module: Module) -> list[int]:
    """Micro-batches of the first stage's recoveries that stand before the backward of a later layer."""
    ops = module.stages[0].ops
    last_of_later = {}
    for position, op in enumerate(ops):
        if type(op) is Backward and op.block.layer == 1:
            last_of_later[op.micro_batch] = position
    early = [op for p, op in enumerate(ops) if type(op) is Recompute and p < last_of_later[op.micro_batch]]
    return sorted(op.micro_batch for op in early if op.block.layer == 0)


@pytest.mark.parametrize("policy", ["none", "full"])
@settings(max_examples=6)
@given(pp=st.integers(1, 3), extra=st.integers(1, 4))
def test_peaks_do_not_depend_on_how_many_micro_batches_follow(policy: str, pp: int, extra: int) -> None:
    """M9: once there is a micro-batch that is neither first nor last beside those in flight, more need no more bytes."""

    def peak(micro_batches: int) -> list[int]:
        plan = make_plan(LAYERS, pp=pp, dp=1, micro_batches=micro_batches)
        return peaks(compiled(f"recompute{{policy={policy}}},legalise", plan))

    assert peak(pp + 2) == peak(pp + 2 + extra)


OPTIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(OPTIONS, st.integers(1, 5))
def test_the_choice_is_the_best_there_is(shapes: list[tuple[int, int]], units: int) -> None:
    """Every point of the front is optimal for its bytes, by brute force over all assignments."""
    options = [Option(LayerChoice(str(i), ""), nbytes, float(seconds)) for i, (nbytes, seconds) in enumerate(shapes)]
    front = _front(tuple(_pareto(options)), units)
    ways = [
        (sum(o.nbytes for o in way), sum(o.seconds for o in way))
        for way in combinations_with_replacement(options, units)
    ]
    for budget in {nbytes for nbytes, _ in ways}:
        best = min(seconds for nbytes, seconds in ways if nbytes <= budget)
        fitting = [seconds for nbytes, seconds, _ in front if nbytes <= budget]
        assert min(fitting) == pytest.approx(best, abs=1e-9)


@settings(max_examples=60)
@given(st.lists(st.tuples(OPTIONS, st.integers(1, 3)), min_size=1, max_size=3))
def test_the_choice_for_layers_of_several_kinds_is_the_best_there_is(kinds: list[tuple[Any, int]]) -> None:
    """Every point is optimal for its bytes, by brute force over all assignments, and its counts are those of what it costs."""
    shaped = [
        ([Option(LayerChoice(str(i), ""), nbytes, float(seconds)) for i, (nbytes, seconds) in enumerate(shapes)], items)
        for shapes, items in kinds
    ]
    kept = [(_pareto(options), items) for options, items in shaped]
    front = _front_of_kinds(kept)
    ways = [
        (sum(o.nbytes for o in way), sum(o.seconds for o in way))
        for one_of_each in product(*(combinations_with_replacement(options, items) for options, items in shaped))
        for way in [tuple(chain.from_iterable(one_of_each))]
    ]
    for budget in {nbytes for nbytes, _ in ways}:
        best = min(seconds for nbytes, seconds in ways if nbytes <= budget)
        assert min(seconds for nbytes, seconds, _ in front if nbytes <= budget) == pytest.approx(best, abs=1e-9)
    for nbytes, seconds, counts in front:
        left = iter(counts)
        taken = [[(option, next(left)) for option in options] for options, _ in kept]
        assert [sum(count for _, count in own) for own in taken] == [items for _, items in kept]
        assert sum(count * option.nbytes for own in taken for option, count in own) == nbytes
        assert sum(count * option.seconds for own in taken for option, count in own) == pytest.approx(seconds)


@pytest.mark.parametrize("seed", range(8))
def test_long_fronts_lose_little_where_they_are_thinned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as few points as nobody has, of what no choice beats a choice of no more bytes is at most a twentieth of the range slower."""
    chance = random.Random(seed)
    bytes_and_seconds = zip(
        sorted(chance.sample(range(1000), 4)), sorted(chance.sample(range(1000), 4))[::-1], strict=True
    )
    options = tuple(Option(LayerChoice(str(i), ""), n, float(s)) for i, (n, s) in enumerate(bytes_and_seconds))
    exact = _front.__wrapped__(options, 48)
    monkeypatch.setattr(recompute_choice, "_MOST_POINTS", 32)
    thinned = _front.__wrapped__(options, 48)
    assert thinned != exact
    allowed = (exact[0][1] - exact[-1][1]) / 20
    for nbytes, seconds, _ in exact:
        assert min(s for n, s, _ in thinned if n <= nbytes) <= seconds + allowed


WINDOWS = evolve(MODEL, family="qwen2", qkv_bias=True, layers=6, sliding_window=16, layer_kinds="fwwfww")
LONG = make_plan(WINDOWS, pp=1, dp=1, micro_batches=1, seq_len=1024)


def test_layers_that_are_recovered_in_less_time_are_recovered_first() -> None:
    """The first layer sees all tokens, and is no measure of those that see a window."""
    full, none = (peaks(compiled(f"recompute{{policy={p}}},legalise", LONG, WINDOWS))[0] for p in ("full", "none"))
    recovered = []
    for share in range(1, 8):
        budget = full + (none - full) * share // 8
        module = compiled(f"recompute{{policy=auto budget={budget}}}", LONG, WINDOWS)
        costs = {
            op.block.layer: TARGET.op_seconds(module, module.stages[0], op)
            for op in module.stages[0].ops
            if type(op) is Recompute and any(t.slot == "lse" for t in op.writes)
        }
        dear, cheap = ({layer for layer in costs if WINDOWS.layer_kinds[layer] == kind} for kind in "fw")
        if dear and cheap:
            assert min(costs[layer] for layer in dear) > max(costs[layer] for layer in cheap)
        recovered.append((dear, cheap))
    for dear, cheap in recovered:
        assert not dear or len(cheap) == 4, "attention over all tokens is made again only where that in windows is too"
    assert any(cheap and not dear for dear, cheap in recovered)
