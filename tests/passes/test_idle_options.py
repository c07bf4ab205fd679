"""Every option of every pass, beside every value of the others, under plans of every kind: it changes the module or is refused.

Both ways are tried: what is not refused has a value that makes another module, and what is refused makes none. `REASONS` names the few
cases in which neither is so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import attrs
import pytest
from attrs import evolve, frozen

from ratrain.passes.idle_options import refuse_idle_options, without_idle_options
from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import option_text
from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.registry import PASSES, pass_class
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.choices.strategies import STRATEGIES, Strategy
from ratrain.ratrainc.compiling.building import run_passes
from tests.end_to_end.toys import TOY

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.support.diagnostics import Diagnostic

MODEL = evolve(TOY, layers=4)
"""Two layers a stage: with one, all that recovery could wait for is there already."""
TIED = evolve(MODEL, tied_embeddings=True)
TARGET = FakeTarget(stores=((Home.HOST, 1 << 30), (Home.FILE, 1 << 30)))
LEAST, MOST = 1, 999_999
FEW = 3
"""Values that are refused, of which it is seen that they change nothing."""


@frozen
class Context:
    """A plan that options are tried under."""

    name: str
    plan: Plan
    model: ModelConfig = MODEL
    before: str = ""
    """passes that come first"""

    @property
    def module(self) -> Module:
        """A module of its own."""
        return copy_module(_module(self))


@cache
def _module(context: Context) -> Module:
    return PassManager(TARGET).run(lower(context.model, context.plan), context.before)


def plan(pp: int, dp: int, *, model: ModelConfig = MODEL, **more: object) -> Plan:
    sizes = {"micro_batch_size": 1, "micro_batches": 3, "seq_len": 4} | more
    return Plan(pp, dp, balance_cuts(model, pp, 4, WHOLE), **sizes)  # type: ignore[arg-type]


CONTEXTS = (
    Context("one stage, one replica", plan(1, 1, zero=0)),
    Context("one replica", plan(2, 1, zero=0)),
    Context("one replica, tied", plan(2, 1, zero=0), TIED),
    Context("one stage", plan(1, 2, zero=1)),
    Context("zero 0", plan(2, 2, zero=0)),
    Context("zero 0, tied", plan(2, 2, zero=0), TIED),
    Context("zero 1", plan(2, 2, zero=1)),
    Context("zero 1, clipped", plan(2, 2, zero=1, optimizer=evolve(plan(1, 1).optimizer, clip="global"))),
    Context("zero 2", plan(2, 2, zero=2, reduce="each-micro-batch")),
    Context("zero 3", plan(2, 2, zero=3)),
    Context("zero 3, one stage", plan(1, 2, zero=3)),
    Context("zero 3, one replica", plan(2, 1, zero=3)),
    Context("peers", plan(2, 2, zero=1, tp=2), evolve(MODEL, kv_heads=2)),
    Context("peers with whole rows", plan(2, 1, zero=0, tp=2, sequence_sharding=False), evolve(MODEL, kv_heads=2)),
    Context("peers, zero 3", plan(2, 2, zero=3, tp=2), evolve(MODEL, kv_heads=2)),
    Context("peers, one piece", plan(2, 1, zero=0, tp=2, micro_batches=1), evolve(MODEL, kv_heads=2)),
    Context("one micro-batch", plan(2, 2, zero=1, micro_batches=1)),
    Context("all forwards first", plan(2, 2, zero=1), before="place-gpipe"),
    Context("halves", plan(2, 2, zero=1), before="place-zb-h1"),
)
IN_THE_GATE = {"one replica", "zero 1", "zero 3", "peers"}


def values(option: attrs.Attribute) -> list[object]:
    """Return the values to try for an option: all its choices, or numbers from the least to the largest in use."""
    if "choices" in option.metadata:
        return [
            choice == "true" if isinstance(option.default, bool) else choice for choice in option.metadata["choices"]
        ]
    numbers = [LEAST, 2, 3 << 10, 16 << 20, 1 << 40] if option.metadata["unit"] == "bytes" else [0, 1, 2, 3, MOST]
    return [*numbers, *option.metadata.get("words", ())]


BESIDE = {"depth_blocks": 0, "bytes": 1, "blocks": 1, "delay": 0}
"""Values of other options that are numbers.

With less of a budget or a capacity nothing fits, and no option changes anything.
"""
ALWAYS: dict[tuple[str, str], dict[str, object]] = {("bucket-grad-sync", "unit"): {"bytes": 1}}
"""DonorChoice which other options one is tried: all of a toy is in one bucket of 64 MiB, whatever it ends with."""
SLOW = {"store", "offload"}
"""Options of `joint-order` under which the whole step is decided and simulated many times."""


def beside(name: str, option: attrs.Attribute, *, alone: bool) -> Iterator[dict[str, object]]:
    """Yield settings of the other options: one option at a time, set to each of its choices or to one number.

    What is always set comes first, and by itself; with `alone` nothing follows it.
    """
    always = ALWAYS.get((name, option.name), {})
    yield always
    for each in () if alone else attrs.fields(pass_class(name)):
        if each.name in (option.name, *always) or (name == "joint-order" and each.name in SLOW):
            continue
        for value in values(each) if "choices" in each.metadata else [BESIDE.get(each.name, each.default)]:
            if value != each.default:
                yield always | {each.name: value}


def said(name: str, options: dict[str, object]) -> str:
    words = [f"{key.replace('_', '-')}={option_text(value)}" for key, value in options.items()]
    return name + (f"{{{' '.join(words)}}}" if words else "")


@cache
def tight(context: Context) -> FakeTarget:
    """A target with room for half of what recovery may free."""
    peaks = []
    for policy in ("full", "none"):
        module = context.module
        PassManager(TARGET).run(module, f"recompute{{policy={policy}}},legalise")
        peaks.append(max(lifetimes(stage).peak_bytes for stage in module.stages))
    return evolve(TARGET, capacity_bytes=sum(peaks) // 2)


@cache
def made(context: Context, text: str) -> tuple[str | None, ...]:
    """The schedules that a pass makes where there is room and where there is little, options that change nothing or not; None where it refuses."""
    schedules = []
    for target in (TARGET, tight(context)):
        module = context.module
        try:
            PassManager(target).run(module, text)
        except DiagnosticError:
            schedules.append(None)
        else:
            lines = print_module(module).splitlines()
            schedules.append("\n".join(line for line in lines if not line.startswith("  pipeline ")))
    return tuple(schedules)


def idle_in(context: Context, text: str) -> list[Diagnostic]:
    """Return the diagnostics that refuse options as changing nothing."""
    try:
        refuse_idle_options(text, context.plan, context.model)
    except DiagnosticError as error:
        return error.diagnostics
    return []


def is_refused(context: Context, text: str, option: str) -> bool:
    """Tell whether a written option is refused as one that changes nothing."""
    problems = idle_in(context, text)
    assert all(problem.code == "RT073" and problem.help for problem in problems)
    return any(f"'{option.replace('_', '-')}' of" in problem.message for problem in problems)


def tried_options() -> Iterator[tuple[str, attrs.Attribute]]:
    for name in PASSES.names():
        for option in attrs.fields(pass_class(name)):
            if option.default is not attrs.NOTHING and name != "place-from-file":
                yield name, option


def in_the_gate(context: Context, name: str, option: attrs.Attribute, *, alone: bool) -> bool:
    """Tell whether a case is quick, or one of the few slow ones that stand for the others."""
    if name == "joint-order":
        return alone and context.name == "zero 1" and option.name not in SLOW
    return alone and context.name in IN_THE_GATE


CASES = [
    pytest.param(
        *(context, name, option, alone),
        id=f"{name}-{option.name}-{context.name}-{'alone' if alone else 'beside others'}",
        marks=() if in_the_gate(context, name, option, alone=alone) else pytest.mark.full,
    )
    for context, (name, option), alone in product(CONTEXTS, list(tried_options()), (True, False))
    if name != "joint-order" or context.name in IN_THE_GATE or (alone and option.name not in SLOW)
]
"""`joint-order`, which takes longest, with two options at once only under four of the plans."""

ANYWHERE = tuple(each.name for each in CONTEXTS)
REASONS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("joint-order", "placement"): ("inline is said, and all recovery is: what is asked for holds", ANYWHERE),
    ("joint-order", "store"): ("something is stored where that makes the step shorter, and here it does not", ANYWHERE),
    ("joint-order", "budget"): (
        "views are gathered as far ahead as pays, and that takes the least bytes too",
        ("zero 3",),
    ),
    ("recompute", "placement"): (
        "what policy=auto recovers stands in no window",
        ("zero 1, clipped", "one micro-batch"),
    ),
    ("place-zb-h1", "delay"): ("0 is said, and the default splits too", ("one micro-batch", "peers, one piece")),
    ("overlap-tensor", "pieces"): ("apart is said, and no two passes could be merged", ("peers, one piece",)),
}
"""Options that may change nothing, by what they ask for or choose, and under which plans."""


@pytest.mark.parametrize(("context", "name", "option", "alone"), CASES)
def test_an_option_changes_the_module_or_is_refused(
    context: Context, name: str, option: attrs.Attribute, alone: bool
) -> None:
    for others in beside(name, option, alone=alone):
        without = made(context, said(name, others))
        texts = {said(name, others | {option.name: value}): value for value in values(option)}
        refused = [text for text in texts if is_refused(context, text, option.name)]
        taken = [text for text in texts if text not in refused and any(made(context, text))]
        compared = without if any(without) else made(context, next(iter(taken), said(name, others)))
        changes = any(not same(made(context, text), compared) for text in taken)
        states_the_default = all(texts[text] == option.default for text in taken)
        if not changes and not states_the_default:
            _, where = REASONS.get((name, option.name), ("", ()))
            assert context.name in where, f"none of {taken} changes anything"
        for text in refused[:FEW]:
            others_made = [without, *(made(context, each) for each in taken)]
            assert any(same(made(context, text), each) for each in others_made), f"{text} would make another module"


def same(one: tuple[str | None, ...], other: tuple[str | None, ...]) -> bool:
    """Tell whether schedules are the same, as far as both are made."""
    return all(a == b for a, b in zip(one, other, strict=True) if a is not None and b is not None)


# -- numbers beyond what they can mean ---------------------------------------------------------------------------------


COUNTS = [each for each in tried_options() if each[1].metadata.get("unit") in ("blocks", "layers", "micro-batches")]


@pytest.mark.parametrize(
    "context", [each for each in CONTEXTS if each.name in ("zero 1", "zero 3")], ids=lambda c: c.name
)
@pytest.mark.parametrize(("name", "option"), COUNTS, ids=str)
def test_a_count_that_is_larger_than_anything_it_can_mean_is_refused(
    context: Context, name: str, option: attrs.Attribute
) -> None:
    """And the advice, which names the largest, is taken."""
    with pytest.raises(DiagnosticError) as caught:
        run_passes(context.module, said(name, {option.name: MOST}))
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT073"
    assert option.name.replace("_", "-") in problem.message
    if found := re.search(r"write (?:at most |delay=)([0-9]+)", problem.help or ""):
        run_passes(context.module, said(name, {option.name: int(found[1])}))


@pytest.mark.parametrize("blocks", [0, 99])
def test_state_of_no_block_or_of_more_than_there_are_is_refused(blocks: int) -> None:
    with pytest.raises(DiagnosticError, match="is not of 1 to 7, as many blocks as a stage has"):
        PassManager(TARGET).run(CONTEXTS[4].module, f"offload-state{{blocks={blocks}}}")


# -- what is said -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "underlined"),
    [
        ("place-1f1b,bucket-grad-sync{unit=stage bytes=1}", ["bytes=1"]),
        ("bucket-grad-sync{bytes=64MiB unit=stage}", ["bytes=64MiB"]),  # the default, and not what is done
        ("recompute{policy=full budget=1}", ["budget=1"]),
        ("recompute{policy=none placement=inline}", ["placement=inline"]),
        ("recompute{policy=none gathered=again placement=forward-side}", ["placement=forward-side", "gathered=again"]),
        ("recompute{gathered=auto}", ["gathered=auto"]),
        ("insert-prefetch{depth-blocks=3 depth-bytes=1}", ["depth-blocks=3", "depth-bytes=1"]),
        ("place-zb-h1{delay=2}", ["delay=2"]),
        ("overlap-tensor{halves=split pieces=auto}", ["pieces=auto", "halves=split"]),
        ("joint-order{reduction=bulk bucket-bytes=1}", ["bucket-bytes=1"]),
        ("joint-order{bucket-bytes=2GiB}", ["bucket-bytes=2GiB"]),
        ("joint-order{policy=full placement=inline budget=1}", ["budget=1"]),
        ("recompute{policy=auto budget=1KiB},joint-order{policy=none placement=inline}", ["placement=inline"]),
    ],
)
def test_what_is_said_and_changes_nothing_is_refused_where_it_stands(pipeline: str, underlined: list[str]) -> None:
    context = CONTEXTS[6]
    with pytest.raises(DiagnosticError) as caught:
        run_passes(context.module, pipeline)
    problems = caught.value.diagnostics
    places = [problem.location for problem in problems]
    assert [pipeline[at.column - 1 :][: at.length] for at in places if at is not None] == underlined
    assert {problem.code for problem in problems} == {"RT073"}


@pytest.mark.parametrize("chosen", STRATEGIES, ids=lambda chosen: chosen.name)
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ("zero 1", "one replica") else pytest.mark.full)
        for each in CONTEXTS
    ],
)
def test_a_strategy_is_told_for_a_plan_in_words_that_are_taken(context: Context, chosen: Strategy) -> None:
    """Check the passes that `plan -o` says to compile with: no idle option is left, and the schedule is the same."""
    told = without_idle_options(chosen.passes, context.plan, context.model)
    refuse_idle_options(told, context.plan, context.model)
    assert [each.name for each in parse_pipeline(told)] == [each.name for each in parse_pipeline(chosen.passes)]
    first = next(iter(parse_pipeline(chosen.passes)))
    if first.name.startswith("place-") or context.before or "joint" in chosen.passes:
        return  # the slow ones are compiled by the tests of strategies
    assert same(made(context, told), made(context, chosen.passes))


# -- one decision, one pass ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (
            "place-1f1b,place-gpipe",
            "'place-1f1b' and 'place-gpipe' in one pipeline: both decide the order of the schedule",
        ),
        ("place-zb-h1,lifetime,place-schedule{kind=gpipe}", "both decide the order of the schedule"),
        ("place-1f1b,place-1f1b", "two 'place-1f1b' in one pipeline"),
        ("bucket-grad-sync,bucket-grad-sync{bytes=1}", "two 'bucket-grad-sync'"),
        ("insert-prefetch{blocking=true},insert-prefetch", "when views are gathered"),
        ("recompute{policy=none},recompute", "what is recovered"),
        ("bucket-grad-sync{bytes=1},joint-order", "which gradients are reduced together"),
        ("joint-order{policy=none},recompute", "what is recovered"),
    ],
)
def test_what_a_later_pass_would_overrule_is_refused_before_any_runs(pipeline: str, words: str) -> None:
    module = CONTEXTS[6].module
    before = print_module(module)
    with pytest.raises(DiagnosticError, match="RT071") as caught:
        run_passes(module, pipeline)
    assert words in caught.value.diagnostics[0].message
    assert print_module(module) == before


def test_a_schedule_that_is_read_may_be_placed_anew() -> None:
    module = CONTEXTS[6].module
    PassManager(TARGET).run(module, "place-1f1b")
    PassManager(TARGET).run(module, "place-gpipe")
    assert module.plan.schedule == "gpipe"


@pytest.mark.parametrize("policy", ["full", "attention", "none"])
def test_storing_where_nothing_is_kept_is_refused(policy: str) -> None:
    """Check tensor-parallel ranks with full recovery: it starts from tensors gathered again, so nothing is stored."""
    peers = next(each for each in CONTEXTS if each.name == "peers")
    text = f"recompute{{policy={policy} store=host}}"
    if policy != "full":
        PassManager(TARGET).run(peers.module, text)
        return
    with pytest.raises(DiagnosticError, match="'store=host' of 'recompute' changes nothing"):
        PassManager(TARGET).run(peers.module, text)


# -- exchanges of tensor-parallel ranks ---------------------------------------------------------------------------------


def test_merging_that_cannot_be_had_is_refused() -> None:
    one_piece = next(each for each in CONTEXTS if each.name == "peers, one piece")
    with pytest.raises(DiagnosticError, match="'pieces=merged' of 'overlap-tensor' is not possible"):
        PassManager(TARGET).run(one_piece.module, "overlap-tensor{pieces=merged}")


@pytest.mark.parametrize("halves", ["whole", "split"])
def test_halves_of_an_order_that_has_them_are_not_decided_again(halves: str) -> None:
    context = next(each for each in CONTEXTS if each.name == "peers")
    vee = evolve(context.plan, chunks=2, layout="vee", cuts=(1, 2, 3))
    module = PassManager(TARGET).run(lower(context.model, vee), "place-schedule{kind=zb-v}")
    with pytest.raises(DiagnosticError, match="the order of the schedule has all backwards in halves already"):
        PassManager(TARGET).run(module, f"overlap-tensor{{halves={halves}}}")
