"""The planner's bounds of plans that may use a memory beside DDR are never above what the compiler and the simulator find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.other_memory import granted
from ratrain.ratrainc.planner.space.plan_families import families
from ratrain.ratrainc.planner.space.variants import storing
from tests.property.test_planner_bounds import (
    check_columns,
    columns_of,
    evaluated,
    planned,
    with_budget,
)

RATES = st.sampled_from([1e7, 1e8, 3.7e9])
STORING = (
    "joint-order{store=host}",
    "offload-state{home=host},joint-order",
    "offload-state{home=host},joint-order{store=host}",
    "offload-state{home=host},recompute{policy=full store=host},bucket-grad-sync,schedule-update,insert-prefetch",
    "offload-state{home=host blocks=2},recompute{policy=none store=host},bucket-grad-sync{unit=stage},insert-prefetch",
    "offload-state{home=host what=moments},recompute{policy=auto store=host},schedule-update",
)
"""Ways to use a memory that no family's pipeline has, too."""
OF_PEERS = ("joint-order{store=peer}", "recompute{policy=none store=peer},bucket-grad-sync,insert-prefetch")


@st.composite
def using_memories(draw, memory):
    """A case of `planned` under the pipeline of a family, or under one of its own, on a machine with a host's memory."""
    model, shape, layers, named, machine, room = draw(planned(st.sampled_from([1, 1, 1, 2])))
    assume(memory == "host" or shape.pp > 1)
    (family,) = families(strategy("ratrain"), [f"{named.schedule or '1f1b'}+{memory}"])
    passes = family.strategy.passes
    if draw(st.booleans()):
        own = [*storing(passes), *(_behind(passes, each) for each in (STORING if memory == "host" else OF_PEERS))]
        passes = draw(st.sampled_from(own))
    # an update of state that streams needs chunks for its pieces, whatever their size
    stores = {
        "host_capacity": draw(st.sampled_from([1e9, 1e9, 4e5])),
        "host_store": draw(RATES),
        "host_fetch": draw(RATES),
    }
    stores |= {"host_update": 1e9} if draw(st.integers(0, 4)) == 0 else {}
    return model, shape, layers, family, passes, with_constants(machine, stores), room


def _behind(passes, others):
    placed = [item for item in parse_pipeline(passes) if item.name.startswith("place-")]
    return pipeline_text([*placed, *parse_pipeline(f"{others},allocate-ddr")])


@pytest.mark.parametrize("memory", ["host", "peer"])
@settings(max_examples=5)
@given(st.data())
def test_bounds_of_families_with_memories_are_never_above_what_is_found(memory, data):
    model, shape, layers, family, passes, machine, room = data.draw(using_memories(memory))
    named = family.strategy
    found = evaluated(model, shape, layers, passes, named, machine)
    assume(found.step_seconds is not None)  # what is to be moved is more than there is room for
    check(model, shape, layers, family, machine, found)
    columns = granted_columns(model, shape, family, machine)
    least = float(plan_bounds(columns, np.array([layers], float)).peak_bytes.max())
    budget = int(least + room * max(0.0, max(found.peak_bytes) - least))
    found = evaluated(model, shape, layers, with_budget(passes, budget), named, machine)
    if found.step_seconds is not None and max(found.peak_bytes) <= budget:
        check(model, shape, layers, family, with_constants(machine, {"ddr_capacity": float(budget)}), found)


def granted_columns(model, shape, family, machine):
    return granted(columns_of(model, shape, family.strategy, machine), machine, family.memory)


def check(model, shape, layers, family, machine, found):
    columns = granted_columns(model, shape, family, machine)
    check_columns(columns, layers, found, f"{shape} {layers} {family.name}")
