"""The site: every page is in it, what its pages say can be typed, and it asks the network for nothing."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrainc.cli import commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_OF_A_SHELL = re.compile(r"\s(\|\||&&|\||>|2>)\s")


def lines_of_commands(text: str) -> list[str]:
    """The lines of a page's code, indented or fenced, that begin with `ratrainc`."""
    joined = re.sub(r"\\\n\s*", "", text)
    code = re.findall(r"^(?:    |\$ )?(ratrainc .+)$", "".join(_code(joined)), re.MULTILINE)
    return [_OF_A_SHELL.split(re.sub(r"\s+#.*$", "", line))[0].strip() for line in code]


def _code(text: str) -> list[str]:
    fenced, lines = False, []
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        if lines and lines[-1].count('"') % 2:  # goes on in the next line, inside quotes
            lines[-1] = f"{lines[-1].rstrip()} {line.strip()}\n"
        elif fenced or line.startswith("    ratrainc"):
            lines.append(line + "\n")
    return lines


def refusal(line: str) -> str | None:
    """Why the words of a command cannot be meant; None where they can. Files need not be there."""
    context = click.Context(commands, info_name="ratrainc")
    name, *words = shlex.split(re.sub(r" --plugin \S+", "", line))[1:]
    command = commands.get_command(context, name)
    if command is None:
        return f"there is no command '{name}'"
    known = {
        flag
        for option in command.params
        if isinstance(option, click.Option)
        for flag in (*option.opts, *option.secondary_opts)
    }
    if name == "launch":  # what follows its file is for `run`
        run = commands.get_command(context, "run")
        assert run is not None
        known |= {flag for option in run.params for flag in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h", "--plugin"}
    unknown = [word for word in words if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]
    if unknown:
        return f"'{name}' has no option {unknown[0]}"
    parser = command.make_parser(click.Context(command, **command.context_settings))
    try:
        _, others, _ = parser.parse_args([word for word in words if word != "..."])
    except click.UsageError as error:
        return f"'{name}': {error.format_message()}"
    return f"'{name}' does not take '{others[0]}'" if others and name != "launch" else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_have_the_options_they_are_given(page: Path) -> None:
    if page.name != "commands.md":
        text = page.read_text()
        assert [f"{line}: {why}" for line in lines_of_commands(text) if (why := refusal(line))] == []


def test_a_wrong_command_of_a_page_is_found() -> None:
    page = "    ratrainc verify a.rtir --jsn\n    ratrainc opt a.rtir  a note\n\n```console\n$ ratrainc simulat x.rtx | head\n```\n"
    assert [refusal(line) for line in lines_of_commands(page)] == [
        "'verify' has no option --jsn",
        "'opt' does not take 'a'",
        "there is no command 'simulat'",
    ]


def test_pages_say_enough_commands_for_that_to_mean_something() -> None:
    assert sum(len(lines_of_commands(page.read_text())) for page in PAGES if page.name != "commands.md") > 100


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert named == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_page_of_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    exec("".join(blocks), {})
    said = capsys.readouterr().out
    assert "tokens/s (simulated)" in said
    assert "step 0" in said
    assert "2 stages, " in said
    assert "RT004" in said or "RT070" in said
    assert "did you mean 'allocate-ddr'?" in said


def test_a_notebook_shows_diagnostics_without_a_traceback() -> None:
    with pytest.raises(DiagnosticError) as caught:
        fail("RT002", "it is not there", help="name another")
    assert caught.value._render_traceback_() == ["error[RT002]: it is not there", "  help: name another"]


def test_figures_of_a_clock_do_not_make_a_page_stale() -> None:
    is_same = runpy.run_path(str(DOCS / "sessions.py"))["_is_same"]
    before = "4 steps in 3.1 s: 2,000 tokens/s\nloss 5.5 -> 4.9\n"
    assert is_same("ratrainc run x.rtx", before, "4 steps in 12.0 s: 517 tokens/s\nloss 5.5 -> 4.9\n")
    assert not is_same("ratrainc run x.rtx", before, "4 steps in 3.1 s: no tokens\nloss 5.5 -> 4.9\n")
    assert is_same(
        "ratrainc run x.rtx", "memory: +4 %\n", "memory: +39 %; both include the one-time compilation of\n  31 loops\n"
    )
    assert not is_same("ratrainc simulate x.rtx", before, before.replace("3.1", "3.2"))


@pytest.mark.full
def test_the_site_builds_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    if find_spec("material") is None or find_spec("mkdocs") is None:
        pytest.skip("the extra 'docs' is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(
        r"""(?:<script[^>]*\ssrc|<img[^>]*\ssrc|<link[^>]*rel="?stylesheet"?[^>]*href)=["']?(?:https?:)?//"""
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    assert [page.name for page in pages if loaded.search(page.read_text())] == []
    assert "parallel.<wbr>pp" in (tmp_path / "site" / "keys.html").read_text()
