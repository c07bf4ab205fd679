"""Requests as commands make them: names and files become what the search works with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.ratrain_ir.frontend.plan_text import load_plan, place_in_plan
from ratrain.ratrainc.planner.answer import Request
from ratrain.ratrainc.planner.variants import schedule_of
from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, strategy
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig


def planning_request(
    model: ModelConfig,
    clusters: int,
    global_batch: int,
    seq_len: int,
    *,
    machine: str | Machine | None = None,
    strategy_name: str | None = None,
    like: str | None = None,
    seconds: float = 25.0,
    jobs: int = 1,
    exhaustive: bool = False,
    robust: bool = False,
    zero_levels: tuple[int, ...] = (0, 1, 2, 3),
) -> Request:
    """A request; `like` names a plan file whose dtypes, chunks and optimizer all plans take.

    Raises `DiagnosticError` for an unknown strategy or machine, a file that is no plan for the model, or one that says another
    schedule than the one plans are made for.
    """
    chosen = strategy(strategy_name or DEFAULT_STRATEGY)
    template = None
    if like is not None:
        template = evolve(load_plan(like, model), seq_len=seq_len)
        wanted = schedule_of(chosen.passes)
        refuse_contradiction(
            template,
            wanted,
            f"the planner, for the strategy '{chosen.name}',",
            partial(place_in_plan, like, "schedule"),
        )
        template = evolve(template, schedule=None)  # what a plan says of it, it says by its strategy
    return Request(
        model,
        machine if isinstance(machine, Machine) else load_machine(machine),
        clusters,
        global_batch,
        seq_len,
        chosen,
        seconds=seconds,
        jobs=jobs,
        exhaustive=exhaustive,
        robust=robust,
        zero_levels=zero_levels,
        plan_template=template,
    )
