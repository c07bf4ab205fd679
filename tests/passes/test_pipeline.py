"""Pipelines: their text, the errors in it, what the manager inserts and refuses, and what a chain of passes makes of a toy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import Fact, Pass, PassContext, facts_of
from ratrain.passes.pipeline_text import parse_pipeline, pass_text, pipeline_text, size_in_bytes
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.registry import PASSES, PROVIDERS, pass_class
from ratrain.passes.state.bucket_grad_sync import BucketGradSyncPass
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import Release, Update
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from tests.end_to_end.toys import TOY as MODEL

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

PLAN = Plan(2, 2, (1,), 1, 2, 4)


def toy() -> Module:
    return lower(MODEL, PLAN)


def refusal(action, *arguments) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments)
    (item,) = caught.value.diagnostics
    return item


# -- text ----------------------------------------------------------------------------------------------------------------


def option_values(attribute: attrs.Attribute) -> st.SearchStrategy:
    if isinstance(attribute.default, bool):
        return st.booleans()
    if "choices" in attribute.metadata:
        return st.sampled_from(attribute.metadata["choices"])
    counts = dict.fromkeys(("blocks", "layers", "micro-batches"), st.integers(0, 999))
    paths = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
    return ({"bytes": st.integers(0, 10**15 - 1), "path": paths} | counts)[attribute.metadata["unit"]]


@st.composite
def passes(draw) -> Pass:
    cls = pass_class(draw(st.sampled_from(sorted(PASSES.names()))))
    given_options = [a for a in attrs.fields(cls) if a.default is attrs.NOTHING or draw(st.booleans())]
    return cls(**{attribute.name: draw(option_values(attribute)) for attribute in given_options})


@settings(max_examples=30)
@given(st.lists(passes(), max_size=6))
def test_a_pipeline_reads_back_equal(items):
    text = pipeline_text(items)
    again = parse_pipeline(text)
    assert again == items
    assert pipeline_text(again) == text


def test_spaces_and_commas_between_options_do_not_matter():
    spaced = "  place-1f1b ,recompute { policy=mlp } , bucket-grad-sync{ , bytes=2KiB , }"
    assert pipeline_text(parse_pipeline(spaced)) == "place-1f1b,recompute{policy=mlp},bucket-grad-sync{bytes=2048}"


def test_an_option_with_its_default_is_left_out():
    assert pass_text(RecomputePass(policy="full")) == "recompute"
    assert pass_text(BucketGradSyncPass(bytes=64 << 20)) == "bucket-grad-sync"
    assert parse_pipeline("") == parse_pipeline("  ") == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        ("20GiB", 21474836480),
        ("20GB", 20_000_000_000),
        ("7KB", 7000),
        ("7B", 7),
        ("-1", None),
        ("1.5GiB", 3 << 29),
        ("1.5 PB", 1_500_000_000_000_000),
        ("0.5B", None),
        ("64Mib", None),
        ("20GB/s", None),
        ("1e9", 10**9),
        ("9e30", None),
        ("64mib", None),
        ("MiB", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "underlined", "code", "message", "help_text"),
    [
        ("place-1f1b,recompte", "recompte", "RT004", "'recompte' is not a pass", "did you mean 'recompute'?"),
        ("place-1f1b,", "", "RT070", "expected the name of a pass", None),
        (",place-1f1b", ",", "RT070", "expected the name of a pass", None),
        ("place-1f1b recompute", "r", "RT070", "expected ',' between passes, got 'r'", None),
        ("recompute{policy=full", "{", "RT070", "expected ',' between passes, got '{'", None),
        ("recompute}", "}", "RT070", "expected ',' between passes, got '}'", None),
        ("recompute{policy}", "policy", "RT070", "options of 'recompute' are written key=value", None),
        ("recompute{policy=}", "policy=", "RT070", "options of 'recompute' are written key=value", None),
        ("recompute{polcy=full}", "polcy", "RT070", "'recompute' has no option 'polcy'", "did you mean 'policy'?"),
        ("recompute{policy=ful}", "ful", "RT070", "policy of 'recompute': expected one of", "did you mean 'full'?"),
        ("recompute{policy=full policy=none}", "policy=none", "RT070", "'policy' of 'recompute' is given twice", None),
        (
            "lifetime,place-from-file",
            "place-from-file",
            "RT070",
            "needs the option 'path'",
            "write place-from-file{path=PATH}",
        ),
        ("place-1f1b{x=1}", "x", "RT070", "'place-1f1b' has no option 'x'; its options: none", None),
        ("bucket-grad-sync{bytes=64mib}", "64mib", "RT070", "expected bytes like 64MiB or auto, got '64mib'", None),
        ("bucket-grad-sync{bytes=-1}", "-1", "RT070", "expected bytes like 64MiB or auto, got '-1'", None),
    ],
)
def test_an_error_in_the_text_has_its_place(text, underlined, code, message, help_text):
    item = refusal(parse_pipeline, text)
    assert item.code == code
    assert message in item.message
    assert item.help == help_text or help_text is None
    assert item.location is not None
    assert item.source == text
    start = item.location.column - 1
    assert text[start : start + item.location.length] == underlined
    _, source, carets, *_ = item.render().splitlines()
    assert source[carets.index("^") :].startswith(underlined)


@settings(max_examples=40)
@given(st.text(alphabet="recompute{}=,place-1f1b \t\n0MiB", max_size=40))
def test_any_text_is_a_pipeline_or_a_diagnostic(text):
    try:
        items = parse_pipeline(text)
    except DiagnosticError as error:
        error.diagnostics[0].render()
    else:
        assert parse_pipeline(pipeline_text(items)) == items


# -- order ---------------------------------------------------------------------------------------------------------------


WITH_HOST = FakeTarget(stores=((Home.HOST, 1 << 30),))


def ran(module: Module, pipeline: str, target: FakeTarget | None = None) -> list[tuple[str, str | None]]:
    manager = PassManager(target or FakeTarget(), verify_each=True)
    manager.run(module, pipeline)
    assert module.pipeline == ",".join(run.text for run in manager.runs)
    assert all(run.seconds >= 0 for run in manager.runs)
    return [(run.text, run.inserted_for) for run in manager.runs]


def test_what_a_pass_needs_and_is_missing_is_inserted_and_reported():
    assert ran(toy(), "recompute,allocate-ddr") == [
        ("place-1f1b", "recompute"),
        ("recompute", None),
        ("insert-release", "allocate-ddr"),
        ("legalise", "allocate-ddr"),
        ("allocate-ddr", None),
    ]


def test_what_is_there_is_not_inserted_again():
    module = toy()
    assert ran(module, "place-1f1b,insert-release") == [("place-1f1b", None), ("insert-release", None)]
    manager = PassManager(FakeTarget())
    manager.run(module, "allocate-ddr")
    assert [run.text for run in manager.runs] == ["legalise", "allocate-ddr"]


def test_a_file_enters_a_pipeline_where_it_stands():
    """A module read from text after some passes goes on as if they had run in one go."""
    at_once, in_parts = toy(), toy()
    ran(at_once, "recompute,allocate-ddr")
    ran(in_parts, "recompute,insert-release")
    read = parse_module(print_module(in_parts))
    PassManager(FakeTarget()).run(read, "allocate-ddr")
    assert print_module(read) == print_module(at_once)


@pytest.mark.parametrize(
    ("pipeline", "message", "help_text"),
    [
        ("insert-release,recompute", "'recompute' cannot run after 'insert-release'", "put 'recompute' before"),
        ("insert-release,place-1f1b", "'place-1f1b' cannot run after 'insert-release'", "put 'place-1f1b' before"),
        ("insert-release,insert-release", "'insert-release' cannot run twice", "leave 'insert-release' out"),
        ("legalise,legalise", "'legalise' cannot run twice", "leave 'legalise' out"),
        ("allocate-ddr,legalise", "'legalise' cannot run twice", "leave 'legalise' out"),
        ("allocate-ddr,bucket-grad-sync", "'bucket-grad-sync' cannot run after", "put 'bucket-grad-sync' before"),
        ("allocate-ddr,allocate-ddr", "'allocate-ddr' cannot run twice", "leave 'allocate-ddr' out"),
        ("recompute,recompute{policy=none}", "'recompute' cannot run twice", "give one 'recompute'"),
    ],
)
def test_an_illegal_order_is_refused_and_changes_nothing(pipeline, message, help_text):
    module = toy()
    first, _, second = pipeline.partition(",")
    PassManager(FakeTarget()).run(module, first)
    before = print_module(module)
    item = refusal(PassManager(FakeTarget()).run, module, second)
    assert item.code == "RT071"
    assert message in item.message
    assert item.help is not None
    assert help_text in item.help
    assert print_module(module) == before


@pytest.mark.parametrize("name", sorted(PASSES.names()))
def test_every_pass_runs_on_a_dataflow_module(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    text = {"place-from-file": "place-from-file{path=t.csv}"}.get(name, name)
    texts = [text for text, _ in ran(toy(), text, WITH_HOST)]
    assert texts[-1] == text
    assert pass_class(name).__doc__


@pytest.mark.parametrize(("fact", "provider"), PROVIDERS.items(), ids=lambda value: getattr(value, "value", value))
def test_what_provides_a_fact_makes_it_true(fact, provider):
    module = toy()
    assert fact not in facts_of(module)
    PassManager(FakeTarget()).run(module, provider)
    assert fact in facts_of(module)
    assert fact in facts_of(parse_module(print_module(module)))


def test_the_analysis_changes_nothing_and_runs_anywhere():
    module = toy()
    for pipeline in ("lifetime", "place-1f1b", "lifetime", "allocate-ddr", "lifetime"):
        ops = [list(stage.ops) for stage in module.stages]
        manager = PassManager(FakeTarget())
        manager.run(module, pipeline)
        if pipeline == "lifetime":
            assert [list(stage.ops) for stage in module.stages] == ops
            assert set(manager.runs[-1].statistics) == {"stage 0", "stage 1"}
            assert "bytes live at" in str(manager.runs[-1].statistics["stage 0"])


def test_updates_run_where_the_machine_says():
    for engine in (Engine.COMPUTE, Engine.HOST):
        module = PassManager(FakeTarget(update_engine=engine)).run(toy(), "legalise")
        assert {op.engine for stage in module.stages for op in stage.ops if type(op) is Update} == {engine}


@pytest.mark.parametrize("home", ["ratrain.passes.ours", "theirs"])
def test_the_pass_that_broke_the_module_is_named(home: str):
    class DropsReleases(Pass):
        name = "drops-releases"
        forbids = frozenset()
        requires = frozenset({Fact.RELEASED})

        def run(self, module: Module, context: PassContext) -> None:
            del context
            for stage in module.stages:
                stage.ops.remove(next(op for op in stage.ops if type(op) is Release))

    DropsReleases.__module__ = home
    with pytest.raises(DiagnosticError) as caught:
        PassManager(FakeTarget(), verify_each=True).run(toy(), [DropsReleases()])
    first = caught.value.diagnostics[0]
    if home == "theirs":
        code = DropsReleases.run.__code__
        assert first.code == "RT072"
        assert f"'drops-releases' broke the schedule ({code.co_filename}:{code.co_firstlineno})" in first.message
        assert caught.value.diagnostics[1].code == "RT023"
    else:
        assert first.code == "RT023"
        assert any("broken by the pass 'drops-releases'" in note.message for note in first.notes)


def test_each_pass_is_shown_after_it_ran():
    seen: list[tuple[str, str]] = []
    manager = PassManager(FakeTarget(), after_pass=lambda module, run: seen.append((run.text, module.level.value)))
    manager.run(toy(), "allocate-ddr")
    assert seen == [
        ("place-1f1b", "placed"),
        ("insert-release", "placed"),
        ("legalise", "placed"),
        ("allocate-ddr", "allocated"),
    ]


# -- refusals for want of space ------------------------------------------------------------------------------------------


def test_a_peak_above_the_capacity_says_who_holds_it_and_what_would_help():
    with pytest.raises(DiagnosticError) as caught:
        PassManager(FakeTarget(capacity_bytes=6000)).run(toy(), "allocate-ddr")
    assert {item.code for item in caught.value.diagnostics} == {"RT053"}
    assert len(caught.value.diagnostics) == 2, "every stage that does not fit is reported"
    for item in caught.value.diagnostics:
        assert "more than the capacity of 6000" in item.message
        assert item.help is not None


def test_recomputation_is_not_advised_where_it_is_done():
    def advice(pipeline: str) -> str:
        with pytest.raises(DiagnosticError) as caught:
            PassManager(FakeTarget(capacity_bytes=6000)).run(toy(), pipeline)
        return f"{caught.value.diagnostics[0].help}"

    assert "recompute" in advice("allocate-ddr")
    assert "recompute" not in advice("recompute,allocate-ddr")


# -- what all passes make of a toy, for people to read (what each makes: tests/passes/<pass>/*.rtir) ----------------------

CHAIN = (
    "place-1f1b",
    "recompute",
    "bucket-grad-sync{bytes=1KiB}",
    "schedule-update",
    "insert-prefetch",
    "insert-release",
    "legalise",
    "allocate-ddr",
)


def test_the_text_after_a_chain_of_passes(golden):
    module = PassManager(FakeTarget(), verify_each=True).run(toy(), ",".join(CHAIN))
    golden("allocated.rtir", print_module(module))
