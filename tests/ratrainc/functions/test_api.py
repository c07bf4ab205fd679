"""The Python API does what the command line does, and what it returns shows itself."""

from __future__ import annotations

import inspect
import json
import re
import typing
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from ratrain import api
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.console.parts import TextTable, html_of, text_of

if typing.TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program

ROOT = Path(__file__).resolve().parents[3]
MODEL, PLAN = str(ROOT / "examples" / "tiny.json"), str(ROOT / "examples" / "tiny.toml")
_ROW = re.compile(r"^\| `([\w-]+)` \| (.*) \|$", re.MULTILINE)
_FUNCTION = re.compile(r"`api\.(\w+)`")


def table_of_commands() -> dict[str, str]:
    """What docs/python.md says of each command."""
    return dict(_ROW.findall((ROOT / "docs" / "python.md").read_text().partition("| command |")[2]))


def test_every_command_has_a_function_or_a_reason() -> None:
    told = table_of_commands()
    assert set(told) == set(commands.list_commands(click.Context(commands)))
    for name, text in told.items():
        functions = _FUNCTION.findall(text)
        assert functions or text.startswith("none: "), f"{name} has no function and no reason"
        assert set(functions) <= set(api.__all__), f"{name}: {functions}"


def test_every_function_is_typed_and_told_of() -> None:
    told = set(_FUNCTION.findall((ROOT / "docs" / "python.md").read_text()))
    for name in api.__all__:
        function = getattr(api, name)
        if inspect.isfunction(function):
            assert set(function.__annotations__) == {*inspect.signature(function).parameters, "return"}, name
            assert function.__doc__, name
            assert name in told, f"docs/python.md does not name api.{name}"


@pytest.fixture(scope="module")
def module() -> Module:
    return api.compile(MODEL, PLAN)


@pytest.fixture(scope="module")
def program(module: Module) -> Program:
    return api.emit(module)


class _Balance(HTMLParser):
    """Counts what is opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_startendtag(self, tag: str, _attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawn(shown: object) -> set[str]:
    """The tags of what a notebook shows, all of which are closed."""
    text = getattr(shown, "_repr_html_", getattr(shown, "_repr_svg_", None))
    assert text is not None
    balance = _Balance(text())
    assert balance.open == []
    return balance.seen


def test_objects_show_themselves(module: Module, program: Program) -> None:
    simulation = api.simulate(program)
    assert "table" in drawn(module)
    assert "table" in drawn(program)
    assert {"table", "svg"} <= drawn(simulation)
    assert "rect" in drawn(api.address_map(module))
    assert "table" in drawn(api.explain_time(simulation))
    assert "table" in drawn(api.explain(module, levers=False))
    assert "table" in drawn(api.plan(MODEL, 4, 32, seq_len=128, quick=True))
    assert "table" in drawn(api.compare(MODEL, PLAN, strategies=["ratrain", "full-save"]))
    assert len(repr(program)) < 200
    assert repr(simulation) == text_of(simulation.parts())


def test_an_address_map_has_every_life_at_its_address(module: Module) -> None:
    stage = module.stages[0]
    svg = api.address_map(module, 0).svg
    named = {tensor.name for tensor in stage.tensors.values() if tensor.offset is not None}
    assert set(re.findall(r"<title>%([^,]+),", svg)) == named
    with pytest.raises(api.DiagnosticError, match="there is no stage 7"):
        api.address_map(module, 7)
    with pytest.raises(api.DiagnosticError, match="RT071"):
        api.address_map(api.lowered(MODEL, PLAN))


def test_functions_say_what_commands_say(
    module: Module, program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, container = str(tmp_path / "x.rtir"), str(tmp_path / "x.rtx")
    api.save(module, schedule)
    api.save(program, container)

    def said(*words: str) -> object:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert said("simulate", container) == json.loads(json.dumps(api.simulate(container).to_json()))
    assert said("explain", schedule, "--no-levers") == api.explain(schedule, levers=False).to_json()
    assert said("diff", schedule, schedule) == json.loads(json.dumps(api.diff(schedule, module).to_json()))
    assert said("passes") == api.passes().to_json()
    assert said("model", MODEL) == json.loads(json.dumps(api.model_facts(MODEL).to_json()))
    main(["verify", schedule])
    assert capsys.readouterr().out == f"{schedule}: {api.verify(schedule)}\n"
    main(["disasm", container, "--stage", "1"])
    assert capsys.readouterr().out.splitlines() == list(api.disassemble(program, stage=1))


def test_progress_is_told(program: Program) -> None:
    told: list[api.Progress] = []
    api.run_passes(api.lowered(MODEL, PLAN), "place-1f1b,allocate-ddr", progress=told.append)
    assert told[0].text.partition(",")[0] == "place-1f1b"
    assert told[-1].total == len(told)
    del told[:]
    steps = []
    result = api.run(program, 2, progress=told.append, each_step=steps.append)
    assert [each.done for each in told] == [1, 2]
    assert tuple(steps) == result.steps
    assert "svg" in drawn(result)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: api.compile(MODEL, PLAN, strategy="ratrain", passes="place-1f1b"),
        lambda: api.schedule("zb-v", 2, 4, chunks=1),
        lambda: api.schedule("no-such", 2, 4),
        lambda: api.disassemble(api.emit(api.compile(MODEL, PLAN)), engine="gpu"),
        lambda: api.scale(MODEL, [4, 4]),
        lambda: api.simulate_on_cores(api.emit(api.compile(MODEL, PLAN)), 0),
    ],
)
def test_what_contradicts_itself_is_refused(wrong: typing.Callable[[], object]) -> None:
    with pytest.raises(api.DiagnosticError) as caught:
        wrong()
    assert caught.value.diagnostics[0].code == "usage"
    assert "<pre>error[usage]" in caught.value.diagnostics[0]._repr_html_()


def test_html_takes_texts_as_they_are() -> None:
    shown = html_of(["a < b", TextTable("<t>", ("c&d",), [["<script>"]] * 100, most=4)])
    assert "<script>" not in shown
    assert shown.count("<td") == 5
