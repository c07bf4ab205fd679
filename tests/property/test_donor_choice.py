"""Who keeps how much with whom: within a hundredth of the best of all numbers that each stage may keep with each other, by the stages' own steps."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.pass_base import PassContext
from ratrain.passes.recovery.donor_choice import choose_donors
from ratrain.passes.recovery.layer_choice import Donor
from ratrain.passes.recovery.peer_offload import UnitTimes, add_remote_buffers
from ratrain.passes.recovery.recompute_choice import Chosen, StageShape, as_chosen, kept_in_ddr
from ratrain.passes.recovery.rewriting import Rewriting
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.module import Module, Stage

MACHINE = load_machine("mt3000")


class Case:
    """A module, and what it is to fit in."""

    def __init__(
        self,
        pp: int,
        cuts: tuple[int, ...],
        micro_batches: int,
        room: float,
        link: float,
        layers: int = 4,
        schedule: str = "1f1b",
    ) -> None:
        constants = MACHINE.constants
        machine = evolve(
            MACHINE,
            constants={
                **constants,
                "link_bandwidth": evolve(constants["link_bandwidth"], value=link),
                "link_latency": evolve(constants["link_latency"], value=1e-9),
            },
        )
        self.model = evolve(MODEL, layers=layers, hidden_size=256, ffn_size=512, heads=4, kv_heads=4, head_dim=64)
        plan = make_plan(
            self.model, pp=pp, dp=1, zero=0, cuts=cuts, micro_batches=micro_batches, seq_len=256, schedule=schedule
        )
        arenas = [
            max(
                s.arena_bytes
                for s in api.compile(
                    self.model, plan, passes=f"recompute{{policy={policy}}},allocate-ddr", machine=machine
                ).stages
            )
            for policy in ("full", "none")
        ]
        self.capacity = int(arenas[0] + room * max(0, arenas[1] - arenas[0]))
        self.module: Module = api.compile(self.model, plan, passes="place-schedule", machine=machine)
        self.context = PassContext(target_of(machine), Diagnostics())
        self.times = UnitTimes(self.module)
        self.trials = [Trials(self.module, self.context) for _ in self.module.stages]
        self.alone = [self.kept(stage.index, stage) for stage in self.module.stages]

    def kept(self, index: int, stage: Stage) -> Chosen:
        shape = StageShape.of(self.module.stages[index], self.trials[index])
        return kept_in_ddr(Rewriting(stage), self.trials[index], self.capacity, shape, shape.none_stored)

    def step(self, borrowers: dict[int, Chosen]) -> float:
        """Return the seconds of a step whose donors also hold remote buffers; infinite if anything does not fit."""
        drafts = {
            index: as_chosen(Rewriting(self.module.stages[index]), self.trials[index], chosen)
            for index, chosen in borrowers.items()
        }
        for index, stage in enumerate(self.module.stages):
            if index not in drafts:
                draft = stage.draft()
                came = add_remote_buffers(draft, list(drafts.values()), self.times)
                chosen = self.kept(index, draft) if came else self.alone[index]
                drafts[index] = as_chosen(Rewriting(draft), self.trials[index], chosen)
        for index, draft in drafts.items():
            if self.trials[index].occupancy(draft).peak_bytes(0) > self.capacity:
                return inf
        periods = [self.trials[index].period(draft) for index, draft in drafts.items()]
        return max(periods) + sum(periods) / self.module.plan.micro_batches

    def chosen(self) -> float:
        every = choose_donors(self.module, self.context, self.capacity, self.times)
        return self.step({index: chosen for index, chosen in enumerate(every) if chosen.stores})

    def all_choices(self) -> Iterator[dict[int, Chosen]]:
        """Every number of items of every stage kept with one other, of one choice of what is kept of them."""
        stages = range(len(self.module.stages))
        shapes = [StageShape.of(stage, trials) for stage, trials in zip(self.module.stages, self.trials, strict=True)]
        yield {}
        for donors in product(*([None, *(other for other in stages if other != each)] for each in stages)):
            borrowers = [index for index, donor in enumerate(donors) if donor is not None]
            if not borrowers or any(donors[index] in borrowers for index in borrowers):
                continue
            for counts in product(*(range(1, shapes[index].items + 1) for index in borrowers)):
                for option in shapes[0].options[0][1:]:
                    yield {
                        index: kept_in_ddr(
                            Rewriting(self.module.stages[index]),
                            self.trials[index],
                            self.capacity,
                            shapes[index],
                            shapes[index].stored(count, evolve(option.choice, home=Donor(donors[index]))),  # type: ignore[arg-type]
                        )
                        for index, count in zip(borrowers, counts, strict=True)
                    }


def check(case: Case) -> None:
    assert case.chosen() <= 1.01 * min(map(case.step, case.all_choices()))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (2, 3)])
@settings(max_examples=8, deadline=None)
@given(st.integers(2, 4), st.floats(0, 1), st.floats(8, 10))
def test_no_other_choice_is_a_hundredth_better(
    cuts: tuple[int, ...], schedule: str, micro_batches: int, room: float, link: float
) -> None:
    """Of three stages under GPipe, which has all micro-batches in flight, there would be thousands of choices."""
    few = 2 if schedule == "gpipe" and len(cuts) > 1 else micro_batches
    check(Case(len(cuts) + 1, cuts, few, room, 10**link, schedule=schedule))


@pytest.mark.parametrize(
    ("cut", "micro_batches", "room", "link"),
    [
        (1, 3, 0.032, 9.89),  # by whole layers alone this was 11 % longer
        (2, 2, 0.54, 9.72),  # and here nothing moved, which is 2 % longer
    ],
)
def test_few_items_are_counted_one_by_one(cut: int, micro_batches: int, room: float, link: float) -> None:
    case = Case(2, (cut,), micro_batches, room, 10**link)
    check(case)
    assert case.chosen() < 0.99 * case.step({})


def test_the_choice_is_good_in_one_case() -> None:
    case = Case(2, (2,), 4, 0.3, 1e10, layers=3)
    check(case)
    assert case.chosen() < 0.99 * case.step({})
