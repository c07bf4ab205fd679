"""Sequences shared out over context ranks: the training of whole ones, whatever the model, plan, layout and passes.

Weight gradients are sums over ranks, so losses agree closely with one rank's, and not bit for bit. They have the bits of
slices with the same cuts, which one rank computes one after the other, where both sum in one order.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve, frozen

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.ratrain_ir.config.training import Training as TrainingKeys
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.test_slices import MODELS as OF_SLICES
from tests.end_to_end.test_slices import POLICIES, STATES
from tests.end_to_end.tiny_runs import losses, make_plan, make_stream, same_bits, start, train
from tests.end_to_end.toys import EXPERTS, GEMMA3, GRANITE, OLMO2

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program
    from ratrain.targets.program.routine import Step

STEPS = 10
F32_LOSS = 1e-5  # of the loss
WHOLE = "place-gpipe,recompute{policy=none},allocate-ddr"
MODELS = {**OF_SLICES, "post-norms": OLMO2, "two-kinds": GEMMA3, "scaled": GRANITE, "router": EXPERTS}
LAYOUTS = [(2, "zigzag"), (2, "contiguous"), (3, "zigzag"), (3, "contiguous"), (6, "zigzag"), (4, "contiguous")]


@frozen
class Training:
    """Name a model, a state and other keys of a plan."""

    model: str = "grouped-queries"
    state: str = "zero-1"
    pp: int = 1
    micro_batch_size: int = 2
    more: tuple[tuple[str, Any], ...] = ()

    def program(self, passes: str, **keys: Any) -> Program:
        """Compile it."""
        state = {**STATES[self.state], "zero": STATES[self.state].get("zero", 0)}
        own = {"pp": self.pp, "micro_batch_size": self.micro_batch_size, "micro_batches": 2, "dp": 1, "seq_len": 12}
        own |= {"view_dtype": "f32", **state, **dict(self.more), **keys}
        model = MODELS[self.model]
        module = api.lowered(model, make_plan(model, **own))
        api.run_passes(module, without_idle_options(passes, module.plan, module.model), verify_each=True)
        return api.emit(module)


def without_slices(training: Training) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in training.more if name != "slices")


@cache
def losses_of_one_rank(training: Training) -> list[float]:
    """The losses without context ranks."""
    run = train(evolve(training, more=without_slices(training)).program(WHOLE), STEPS)
    seen = losses(run)
    assert max(seen) - min(seen) > 0.02, "training changes no loss: equal ones would say little"
    return seen


def check_against_one_rank(training: Training, program: Program, **settings: Any) -> None:
    """Fail unless a program trains like one context rank."""
    found = losses(train(program, STEPS, **settings))
    assert found == pytest.approx(losses_of_one_rank(training), rel=F32_LOSS)


COVERING = [
    (Training(), (2, "zigzag"), "joint"),
    (Training("alibi", micro_batch_size=3), (3, "zigzag"), "full"),
    (Training("window-below-a-slice", "zero-2-each"), (3, "contiguous"), "full"),
    (Training("window-above-a-slice", "zero-3", pp=2), (2, "contiguous"), "attention"),
    (Training("learned-positions", "zero-3-each"), (6, "zigzag"), "auto"),
    (Training("tied", "clipped", pp=2), (2, "zigzag"), "mlp"),
    (Training("grouped-queries", "zero-1", pp=3, micro_batch_size=1), (4, "contiguous"), "forward-side"),
    (Training("side-by-side", "zero-2"), (3, "zigzag"), "full"),
    (Training("post-norms", "zero-1"), (3, "zigzag"), "auto"),
    (Training("two-kinds", "zero-2", pp=2), (2, "zigzag"), "full"),
    (Training("scaled", "zero-0"), (2, "contiguous"), "attention"),
    (Training("router", "zero-1"), (2, "zigzag"), "full"),
    (Training("experts", "zero-2"), (3, "contiguous"), "none"),
    (Training("four-layers", "zero-1", pp=2, more=(("tp", 2),)), (2, "zigzag"), "full"),
    (Training("alibi", "zero-1", more=(("tp", 2), ("sequence_sharding", False))), (2, "zigzag"), "auto"),
    (Training("side-by-side", "zero-2", more=(("tp", 2),)), (2, "contiguous"), "mlp"),
    (Training("two-kinds", "zero-3", more=(("tp", 2),)), (3, "zigzag"), "full"),
    (Training("tied", "zero-1", more=(("attention_mask", "document"),)), (3, "zigzag"), "full"),
    (Training("learned-positions", "zero-1", more=(("attention_mask", "document"),)), (2, "zigzag"), "none"),
    (Training("alibi", "zero-2", more=(("attention_mask", "document"),)), (6, "zigzag"), "joint"),
    (Training("grouped-queries", "zero-1", more=(("slices", (4, 8)),)), (2, "zigzag"), "joint"),
    (Training("window-below-a-slice", "zero-2-each", pp=2, more=(("slices", (6, 3, 3)),)), (3, "contiguous"), "full"),
    (Training("alibi", "zero-3-each", more=(("slices", (4, 4, 4)),)), (2, "zigzag"), "attention"),
    (Training("two-kinds", "zero-1", more=(("slices", (2, 2, 8)), ("tp", 2))), (2, "contiguous"), "auto"),
    (Training("side-by-side", "zero-2", pp=2, more=(("slices", (8, 4)),)), (4, "contiguous"), "mlp"),
    (
        Training("learned-positions", "zero-1", more=(("slices", (6, 6)), ("attention_mask", "document"))),
        (3, "zigzag"),
        "full",
    ),
]


@pytest.mark.parametrize(("training", "layout", "policy"), COVERING, ids=str)
@pytest.mark.sampled(8)
def test_context_ranks_train_like_one_rank(training: Training, layout: tuple[int, str], policy: str) -> None:
    cp, name = layout
    check_against_one_rank(training, training.program(POLICIES[policy], cp=cp, context_layout=name), poison=True)


SCHEDULES: dict[str, dict[str, Any]] = {
    "zb-h1": {"pp": 2},
    "interleaved": {"pp": 2, "chunks": 2, "cuts": (1, 2, 3)},
    "zb-v": {"pp": 2, "chunks": 2, "cuts": (1, 2, 3), "layout": "vee"},
    "seq1f1b": {"pp": 2, "chunks": 2, "cuts": (1, 2, 3), "slices": (4, 8)},
}


HEADS = "heads"
EXCHANGING_HEADS = [
    (Training(), (2, "zigzag"), "joint"),
    (Training("four-layers", "zero-1", micro_batch_size=3), (2, "contiguous"), "full"),
    (Training("window-below-a-slice", "zero-2-each"), (2, "contiguous"), "full"),
    (Training("window-above-a-slice", "zero-3", pp=2), (2, "contiguous"), "attention"),
    (Training("learned-positions", "zero-3-each"), (2, "zigzag"), "auto"),
    (Training("tied", "clipped", pp=2), (2, "zigzag"), "mlp"),
    (Training("grouped-queries", "zero-1", pp=3, micro_batch_size=1), (4, "contiguous"), "forward-side"),
    (Training("side-by-side", "zero-2"), (4, "contiguous"), "full"),
    (Training("post-norms", "zero-1"), (2, "zigzag"), "auto"),
    (Training("two-kinds", "zero-2", pp=2), (2, "zigzag"), "full"),
    (Training("scaled", "zero-0"), (2, "contiguous"), "attention"),
    (Training("router", "zero-1"), (2, "zigzag"), "full"),
    (Training("experts", "zero-2"), (2, "contiguous"), "none"),
    (Training("four-layers", "zero-1", pp=2, more=(("tp", 2),)), (2, "zigzag"), "full"),
    (Training("side-by-side", "zero-2", more=(("tp", 2), ("sequence_sharding", False))), (2, "contiguous"), "mlp"),
    (Training("two-kinds", "zero-3", more=(("tp", 2),)), (2, "zigzag"), "full"),
    (Training("tied", "zero-1", more=(("attention_mask", "document"),)), (2, "zigzag"), "full"),
    (Training("learned-positions", "zero-1", more=(("attention_mask", "document"),)), (2, "contiguous"), "auto"),
]


@pytest.mark.parametrize(("training", "layout", "policy"), EXCHANGING_HEADS, ids=str)
@pytest.mark.sampled(6)
def test_ranks_that_exchange_heads_train_like_one_rank(
    training: Training, layout: tuple[int, str], policy: str
) -> None:
    cp, name = layout
    program = training.program(POLICIES[policy], cp=cp, context_layout=name, context_exchange=HEADS)
    check_against_one_rank(training, program, poison=True)


@pytest.mark.parametrize(("model", "schedule"), [("four-layers", name) for name in ("zb-h1", "interleaved", "zb-v")])
def test_ranks_that_exchange_heads_train_alike_in_any_schedule(model: str, schedule: str) -> None:
    training = Training(model, "zero-1")
    passes, keys = "place-schedule,recompute{policy=attention},allocate-ddr", SCHEDULES[schedule]
    program = training.program(passes, cp=2, schedule=schedule, context_exchange=HEADS, **keys)
    check_against_one_rank(training, program, poison=True)


@pytest.mark.parametrize("model", ["grouped-queries", "window-above-a-slice", "two-kinds", "side-by-side"])
def test_heads_over_all_tokens_have_the_outputs_of_one_rank(model: str) -> None:
    """Under the reference kernels the first loss differs by the order of its sum alone."""
    training = Training(model, "zero-1")
    keys = {"context_layout": "contiguous", "context_exchange": HEADS}
    found = train(training.program(POLICIES["none"], cp=2, **keys), 1, kernels="reference")
    expected = train(training.program(WHOLE), 1, kernels="reference")
    assert losses(found) == pytest.approx(losses(expected), rel=1e-14)


def test_an_exchange_of_heads_trains_the_same_bits_whatever_the_passes_and_the_interleaving() -> None:
    training, keys = Training("window-above-a-slice", "zero-2"), {"cp": 2, "context_exchange": HEADS}
    expected = train(training.program(POLICIES["joint"], **keys), 3)
    for policy in ("full", "attention", "auto"):
        same_bits(expected, train(training.program(POLICIES[policy], **keys), 3))
    program = training.program(POLICIES["attention"], **keys)
    for seed in (1, 2, 3):
        same_bits(expected, train(program, 3, interleave_seed=seed, poison=True))
    same_bits(expected, train(program, 3, poison=True, check_memory=True))


MEETING = [
    (model, state, layout, policy)
    for (m, model), (s, state), (c, layout), (p, policy) in product(
        *map(enumerate, (MODELS, STATES, LAYOUTS, POLICIES))
    )
    if (m + s + c + p) % len(POLICIES) == 0 and (m + 2 * s + 3 * c) % 3 == 0
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "state", "layout", "policy"), MEETING, ids=str)
def test_context_ranks_train_like_one_rank_in_all_meetings(
    model: str, state: str, layout: tuple[int, str], policy: str
) -> None:
    training = Training(model, state)
    cp, name = layout
    check_against_one_rank(training, training.program(POLICIES[policy], cp=cp, context_layout=name))


# the other has fewer layers than chunks
@pytest.mark.parametrize(
    ("model", "schedule"), [*(("four-layers", name) for name in SCHEDULES), ("two-kinds", "zb-h1")]
)
def test_context_ranks_train_alike_in_any_schedule(model: str, schedule: str) -> None:
    keys = SCHEDULES[schedule]
    training = Training(model, "zero-1")
    passes = "place-schedule,recompute{policy=attention},allocate-ddr"
    check_against_one_rank(training, training.program(passes, cp=2, schedule=schedule, **keys), poison=True)


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("model", ["grouped-queries", "window-above-a-slice", "alibi"])
def test_contiguous_ranks_have_the_bits_of_slices_with_the_same_cuts(model: str, cp: int) -> None:
    training = Training(model, "zero-0", more=(("micro_batches", 1), ("grad_dtype", "f32")))
    found = train(
        training.program(POLICIES["none"], cp=cp, context_layout="contiguous", zero=1), 4, kernels="reference"
    )
    expected = train(training.program(POLICIES["none"], slices=(12 // cp,) * cp), 4, kernels="reference")
    assert losses(found) == pytest.approx(losses(expected), rel=1e-14)  # sums of rows in another order
    for what, block in found.engine.program.stages[0].carried:
        if what != "p":
            continue
        parts = np.concatenate([rank.all_carried(what, block)[0] for lane in found.engine.ranks for rank in lane])
        whole = expected.engine.ranks[0][0].all_carried(what, block)[0]
        # with more replicas the padding at the end is longer
        length = min(len(parts), len(whole))
        np.testing.assert_array_equal(parts[:length], whole[:length], err_msg=block)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_the_first_loss_is_that_of_one_rank_to_five_digits_with_packed_documents(layout: tuple[int, str]) -> None:
    training = Training("tied", "zero-1", more=(("attention_mask", "document"), ("micro_batch_size", 3)))
    cp, name = layout
    (found,) = losses(train(training.program(WHOLE, cp=cp, context_layout=name), 1))
    assert found == pytest.approx(losses_of_one_rank(training)[0], rel=1e-6)


@pytest.mark.parametrize("slices", [(), (6, 6)], ids=str)
def test_one_layout_trains_the_same_bits_whatever_the_passes_and_the_interleaving(slices: tuple[int, ...]) -> None:
    training, keys = Training("window-above-a-slice", "zero-2"), {"cp": 3, "slices": slices}
    expected = train(training.program(POLICIES["joint"], **keys), 3)
    for policy in ("full", "attention", "auto"):
        same_bits(expected, train(training.program(POLICIES[policy], **keys), 3))
    program = training.program(POLICIES["attention"], **keys)
    for seed in (1, 2, 3):
        same_bits(expected, train(program, 3, interleave_seed=seed, poison=True))
    same_bits(expected, train(program, 3, poison=True, check_memory=True))


@pytest.mark.parametrize(("state", "exchange"), [("zero-2-each", "keys"), ("zero-3", "keys"), ("zero-3", HEADS)])
def test_a_program_is_the_same_from_its_file(state: str, exchange: str) -> None:
    program = Training(state=state).program(POLICIES["full"], cp=2, context_exchange=exchange)
    data = program_bytes(program)
    again = parse_program(data, "context.rtx")
    check_program(again)
    assert program_bytes(again) == data
    same_bits(train(program, 2), train(again, 2))


@pytest.mark.parametrize(
    "keys",
    [
        {"cp": 2},
        {"cp": 3, "context_layout": "contiguous"},
        {},
        {"cp": 4, "context_layout": "contiguous", "context_exchange": HEADS},
    ],
    ids=str,
)
def test_a_run_goes_on_under_other_context_ranks(keys: dict[str, Any], tmp_path: Path) -> None:
    training, before = Training("learned-positions", "zero-1"), STEPS // 2
    train(training.program(POLICIES["joint"], cp=2), before, save=str(tmp_path / "checkpoint"))
    rest = train(training.program(WHOLE, **keys), STEPS - before, resume=str(tmp_path / "checkpoint"))
    assert losses(rest) == pytest.approx(losses_of_one_rank(training)[before:], rel=F32_LOSS)


@pytest.mark.parametrize("exchange", ["keys", HEADS])
def test_an_evaluation_gives_the_loss_of_one_rank_and_changes_no_bit(exchange: str) -> None:
    training = Training("window-above-a-slice", "zero-2")
    shared = training.program(POLICIES["full"], cp=2, context_exchange=exchange)
    found = []
    for program in (shared, training.program(POLICIES["full"])):
        run = start(program, 3, poison=True)
        held = held_out(make_stream(program.model, 900), program.plan)
        found.append([held.loss(run.engine) for _ in run.steps()])
        if program is shared:
            same_bits(run, train(program, 3))
    assert found[0] == pytest.approx(found[1], rel=F32_LOSS)


@pytest.mark.parametrize("exchange", ["keys", HEADS])
def test_the_reference_kernels_agree(exchange: str) -> None:
    program = Training("window-above-a-slice").program(POLICIES["full"], cp=2, context_exchange=exchange)
    fast, reference = (losses(train(program, 3, kernels=name)) for name in ("fast", "reference"))
    assert reference == pytest.approx(fast, rel=1e-6)


def test_a_plan_in_half_precision_trains() -> None:
    model = MODELS["grouped-queries"]
    plan = make_plan(model, cp=2, seq_len=12, dp=2, pp=2)
    assert plan.replicas == 4
    module = api.lowered(model, evolve(plan, zero=1))
    api.run_passes(module, without_idle_options(POLICIES["joint"], module.plan, module.model), verify_each=True)
    run = train(api.emit(module), 6)
    assert losses(run)[-1] < losses(run)[0]


TRAININGS = {
    "adapters": TrainingKeys(method="lora", rank=3, alpha=6.0),
    "adapters-of-values": TrainingKeys(method="lora", rank=2, alpha=4.0, targets="v_proj, o_proj"),
    "adapters-above-an-attention": TrainingKeys(method="lora", rank=2, alpha=4.0, targets="down_proj"),
    "packed-base": TrainingKeys(method="lora", rank=3, alpha=6.0, base="int8-block"),
    "upper-layers": TrainingKeys(freeze="model.embed_tokens.*, model.layers.0.*, model.layers.1.self_attn.*"),
}


@pytest.mark.parametrize(
    ("policy", "keys"),
    [("full", {}), ("auto", {}), ("full", {"slices": (4, 8)}), ("full", {"context_exchange": HEADS})],
    ids=str,
)
@pytest.mark.parametrize("name", TRAININGS)
def test_context_ranks_train_less_than_everything_alike(name: str, policy: str, keys: dict[str, Any]) -> None:
    training = Training(state="zero-1", more=(("training", TRAININGS[name]),))
    found = losses(train(training.program(POLICIES[policy], cp=2, **keys), 4, poison=True))
    assert found == pytest.approx(losses(train(training.program(WHOLE), 4)), rel=F32_LOSS)


@pytest.mark.parametrize("change", ["shorter", "another rank's", "left out"])
def test_a_program_whose_steps_are_of_other_context_ranks_is_refused(change: str) -> None:
    program = Training().program(POLICIES["full"], cp=2)

    def changed(step: Step) -> Step:
        by_rank = {"shorter": step.by_rank[:1], "another rank's": step.by_rank[::-1], "left out": ()}[change]
        return evolve(step, by_rank=by_rank) if step.by_rank else step

    routines = [evolve(routine, steps=tuple(map(changed, routine.steps))) for routine in program.routines]
    with pytest.raises(DiagnosticError, match="RT080"):
        check_program(parse_program(program_bytes(evolve(program, routines=routines)), "changed.rtx"))
