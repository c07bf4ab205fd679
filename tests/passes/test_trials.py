"""Trials leave no mark: where a pass raises in the middle of one the module is as it was; what trials share goes when they are over."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakSet

import pytest
from attrs import define, evolve, field

from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import PassContext
from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.recovery import recompute
from ratrain.passes.recovery.layer_choice import CHOICES, NOTHING, same_for_all
from ratrain.passes.recovery.rewriting import Rewriting, rewritten
from ratrain.passes.trial.trial import Trials, at_own_addresses, step_seconds_at_own_addresses
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.compute import Recompute
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import for_plan
from ratrain.ratrain_ir.text.printer import print_module, stage_lines
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.target import WorkspaceRequest

LAYERS = evolve(MODEL, layers=4)
STOPS = 8
"""At how many of a pass's questions, evenly spread, the target fails."""


class OutOfOrderError(Exception):
    """What the target raises."""


@define
class FailingTarget:
    """A target that answers so many questions, and raises at the next."""

    answers: float
    target: FakeTarget = field(factory=FakeTarget)
    asked: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def ask(self) -> None:
        if self.asked >= self.answers:
            raise OutOfOrderError
        self.asked += 1

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        self.ask()
        return self.target.workspace(module, op)

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        self.ask()
        return self.target.op_seconds(module, stage, op)

    def step_seconds(self, module: Module) -> float:
        self.ask()
        assert all(tensor.offset is not None for stage in module.stages for tensor in stage.tensors.values())
        return self.target.step_seconds(module)


ASKING = (
    ("", "place-zb-h1", {}),
    ("place-1f1b", "recompute{policy=auto}", {}),
    ("place-1f1b", "recompute{policy=full placement=forward-side}", {}),
    ("place-1f1b", "bucket-grad-sync{bytes=auto}", {}),
    ("place-1f1b", "schedule-update", {}),
    ("place-1f1b", "joint-order", {}),
    ("place-1f1b", "joint-order{placement=inline}", {"zero": 3}),
    ("place-1f1b,insert-release", "legalise", {}),
    ("place-1f1b,insert-release,legalise", "allocate-ddr", {}),
)


def before(pipeline: str, keys: dict) -> Module:
    module = lower(LAYERS, make_plan(LAYERS, pp=3, dp=2, micro_batches=5, **keys))
    return PassManager(FakeTarget()).run(module, pipeline) if pipeline else module


@pytest.mark.parametrize(("first", "tried", "keys"), ASKING)
@pytest.mark.sampled(2)
def test_a_pass_that_raises_leaves_the_module_as_it_was(first: str, tried: str, keys: dict) -> None:
    unbroken = FailingTarget(float("inf"))
    PassManager(unbroken).run(before(first, keys), tried)
    assert unbroken.asked > STOPS
    module = before(first, keys)
    text, stages = print_module(module), list(module.stages)
    for answers in {unbroken.asked * at // STOPS for at in range(STOPS)} | {unbroken.asked - 1}:
        with pytest.raises(OutOfOrderError):
            PassManager(FailingTarget(answers)).run(module, tried)
        assert print_module(module) == text
    PassManager(FakeTarget()).run(module, tried)
    assert print_module(module) != text
    assert module.stages == stages, "whoever holds a stage sees what was made of it"


@pytest.mark.parametrize(("first", "tried", "keys"), ASKING)
def test_ops_and_tensors_that_others_share_are_as_they_were(first: str, tried: str, keys: dict) -> None:
    """Also without a manager: then a pass may have rewritten the lists of some stages, in their own copies of what changed."""
    unbroken = FailingTarget(float("inf"))
    PassManager(unbroken).run(before(first, keys), tried)
    module = before(first, keys)
    text = print_module(module)
    for at in range(STOPS):
        draft = module.draft()
        (item,) = parse_pipeline(tried)
        with pytest.raises(OutOfOrderError):
            item.run(draft, PassContext(FailingTarget(unbroken.asked * at // STOPS)))
        assert print_module(module) == text


def test_what_trials_share_goes_with_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen trials a stage, each with its own ops, are more than memory should hold for all stages at once."""
    alive: WeakSet[Trials] = WeakSet()
    held = []

    class Watched(Trials):
        def __init__(self, module: Module, context: PassContext) -> None:
            super().__init__(module, context)
            held.append(len(alive))
            alive.add(self)

    monkeypatch.setattr(recompute, "Trials", Watched)
    module = before("place-1f1b", {})
    context = PassContext(FakeTarget())
    recompute.RecomputePass("auto", placement="forward-side").run(module, context)
    assert held == [0, 0, 0], "one goes before the next is there"
    assert not alive


@pytest.mark.parametrize("keys", [{}, {"zero": 3}, {"tp": 2}, {"slices": (4, 6)}])
def test_what_a_stage_is_under_a_choice_does_not_depend_on_choices_before(keys: dict) -> None:
    plan = make_plan(LAYERS, pp=3, dp=2, micro_batches=5, **keys)
    module = PassManager(FakeTarget()).run(lower(LAYERS, plan), for_plan("place-1f1b,insert-prefetch", plan))
    choices = [*CHOICES["auto"], NOTHING, *CHOICES["auto"][::-1]]
    for stage in module.stages:
        rewriting = Rewriting(stage)
        for choice in choices:
            drafts = rewriting.under(same_for_all(choice))[0], rewritten(stage, same_for_all(choice))
            assert len({"\n".join(stage_lines(draft)) for draft in drafts}) == 1
            assert drafts[0].tensors.keys() <= {tensor.name for op in drafts[0].ops for tensor in op.operands}


def test_a_draft_is_of_who_asks_for_it() -> None:
    rewriting = Rewriting(before("place-1f1b", {}).stages[0])
    (changed, _), (other, _) = (rewriting.under(same_for_all(NOTHING)) for _ in range(2))
    lines = list(stage_lines(other))
    changed.ops.clear()
    changed.tensors.clear()
    assert list(stage_lines(other)) == list(stage_lines(rewriting.under(same_for_all(NOTHING))[0])) == lines


def test_the_occupancy_of_a_list_is_made_once_and_follows_its_order() -> None:
    module = before("place-1f1b", {})
    stage, trials = module.stages[0], Trials(module, PassContext(FakeTarget()))
    known = trials.occupancy(stage)
    assert trials.occupancy(stage.draft()) is known
    turned = trials.occupancy(stage.draft(stage.ops[::-1]))
    anew = Trials(module, PassContext(FakeTarget())).occupancy(stage.draft(stage.ops[::-1]))
    assert turned.lives.digest == anew.lives.digest != known.lives.digest


@pytest.mark.parametrize("passes", ["recompute{policy=full},allocate-ddr", "joint-order,allocate-ddr"])
def test_allocation_says_the_peaks_of_what_it_leaves(passes: str) -> None:
    manager = PassManager(FakeTarget())
    module = manager.run(before("place-1f1b", {}), passes)
    assert manager.runs[-1].peaks == [lifetimes(stage).peak_bytes for stage in module.stages]
    assert all(run.peaks is None for run in manager.runs[:-1])


def test_an_op_is_the_same_in_every_trial() -> None:
    module = before("place-1f1b", {})
    stage, trials = module.stages[0], Trials(module, PassContext(FakeTarget()))
    whole, recovered = stage.draft(), rewritten(stage, same_for_all(NOTHING))
    one, other = trials.with_workspace(whole), trials.with_workspace(recovered)
    kept = [op for op, drafted in zip(one.ops, whole.ops, strict=True) if drafted in recovered.ops]
    assert kept
    assert set(kept) <= set(other.ops)
    assert any(type(op) is Recompute and op.scratch for op in other.ops)
    assert not any(op.scratch for op in stage.ops)


def test_own_addresses_are_given_to_a_copy() -> None:
    module = before("place-1f1b", {})
    assert step_seconds_at_own_addresses(module, PassContext(FakeTarget())) > 0
    for stage in at_own_addresses(module).stages:
        spans = sorted((tensor.offset, tensor.type.nbytes) for tensor in stage.tensors.values())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert all(tensor.offset is None for stage in module.stages for tensor in stage.tensors.values())


def test_a_trial_makes_no_checkpoints() -> None:
    module = before("place-1f1b", {})
    tensors = [tensor for stage in module.stages for tensor in stage.tensors.values()]
    kinds = [tensor.kind for tensor in tensors]
    for stage in module.stages:
        rewritten(stage, same_for_all(NOTHING))
    assert [tensor.kind for tensor in tensors] == kinds
    PassManager(FakeTarget()).run(module, "recompute{policy=full}")
    assert any(tensor.kind is StateKind.CHECKPOINT for tensor in tensors)
