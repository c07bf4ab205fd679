"""Writes the generated pages.

`docs/diagnostics.md` from the table of codes, `docs/passes.md` from the passes, `docs/mistakes.md` from what the verifier says about
spoilt schedules, `docs/annotated-schedule.md` from a compiled one, `docs/keys.md` from the tables of keys and options, `docs/coming-from.md` from the rules of `import-plan`, `docs/commands.md` and
`docs/json.md` from the commands, the outputs in `docs/start-here.md` from its commands, `docs/notebook.md` from the notebook, the ops in `docs/rtir.md` from their classes and
from compiled schedules.

`python docs/generate.py` writes them; with `--check` it exits with 1 when one is stale.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from functools import cache
from pathlib import Path

import attrs

from ratrain.passes.pass_base import default_text, values_text
from ratrain.passes.registry import PASSES, pass_class
from ratrain.ratrain_ir.support.diagnostics import CODES
from ratrain.ratrain_ir.support.files import MIB, MOST_BYTES
from ratrain.ratrain_ir.support.text import MAX_BYTES
from ratrain.ratrainc.choices.strategies import STRATEGIES
from ratrain.ratrainc.console.markdown_text import wrapped

DOCS = Path(__file__).resolve().parent
OPS_BEGIN, OPS_END = "<!-- ops: written by docs/generate.py from docs/op_forms.py -->\n", "<!-- end of ops -->\n"


def diagnostics_page() -> str:
    """The table of codes, and of how much is read of a file before one of them refuses it."""
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in CODES.items())
    codes = f"# Diagnostics\n\nCodes are stable: scripts may look for them.\n\n<!-- written by docs/generate.py -->\n\n| code | what it says |\n|---|---|\n{rows}\n"
    most = {"model configuration": MAX_BYTES, "plan": MAX_BYTES} | MOST_BYTES
    sizes = "\n".join(f"| {kind} | {size // MIB} MiB |" for kind, size in most.items())
    head = "## Sizes\n\nAt most this much is read of a file of each kind. A larger one is refused, so that reading always ends, also from a device.\n"
    return f"{codes}\n{head}\n| kind | most |\n|---|---|\n{sizes}\n"


def passes_page() -> str:
    """Every pass with its options and its documentation, and the strategies."""
    parts = [
        (
            "# Passes\n\nA pipeline is a list of passes: `place-1f1b,recompute{policy=full}`.\n\n<!-- written by docs/generate.py -->\n\n"
            "An option that is written and changes nothing under the plan, or beside the pass's other options, is refused (RT073), and so are\n"
            "two passes that decide the same (RT071). The passes of a strategy, as they stand below, are for any plan, and taken for any.\n"
        )
    ]
    for name in PASSES.names():
        cls = pass_class(name)
        module = inspect.getmodule(cls)
        text = inspect.cleandoc((module.__doc__ or "") if module else "")
        parts.append(f"## {name}\n\n{text}\n")
        options = [_option(attribute) for attribute in attrs.fields(cls)]
        if options:
            parts.append("| option | values | default |\n|---|---|---|\n" + "\n".join(options) + "\n")
    parts.append("## Strategies\n")
    parts += [f"- **{item.name}**: {item.summary}. `{item.passes}`" for item in STRATEGIES]
    return "\n".join(parts) + "\n"


def _option(attribute: attrs.Attribute[object]) -> str:
    values = values_text(attribute).replace("|", ", ")
    return f"| `{attribute.name.replace('_', '-')}` | {values} | {default_text(attribute)} |"


def mistakes_page() -> str:
    """Typical mistakes, with the real output of the verifier: `docs/mistakes.py`."""
    text: str = runpy.run_path(str(DOCS / "mistakes.py"))["page"]()
    return text


def annotated_schedule_page() -> str:
    """A whole small schedule with remarks: `docs/annotated_schedule.py`."""
    text: str = runpy.run_path(str(DOCS / "annotated_schedule.py"))["page"]()
    return text


def language_page() -> str:
    """The page of the language, its part about the ops written anew: `docs/op_forms.py`."""
    page = (DOCS / "rtir.md").read_text()
    before, begin, rest = page.partition(OPS_BEGIN)
    _, end, after = rest.partition(OPS_END)
    ops: str = runpy.run_path(str(DOCS / "op_forms.py"))["section"]()
    return f"{before}{begin}\n{ops}{end}{after}"


def keys_page() -> str:
    """What every key and option changes: `docs/keys.py` and `docs/options/`."""
    text: str = runpy.run_path(str(DOCS / "keys.py"))["page"]()
    return text


def coming_from_page() -> str:
    """Settings of other frameworks and the keys of a plan: `docs/coming_from.py`."""
    text: str = runpy.run_path(str(DOCS / "coming_from.py"))["page"]()
    return text


def start_page() -> str:
    """The first hour, its commands run anew: `docs/sessions.py`."""
    text: str = runpy.run_path(str(DOCS / "sessions.py"))["run_page"]((DOCS / "start-here.md").read_text())
    return text


def commands_page() -> str:
    """What `--help` of every command says: `docs/commands.py`."""
    text: str = runpy.run_path(str(DOCS / "commands.py"))["page"]()
    return text


def json_page() -> str:
    """The keys of what `--json` prints: `docs/json_keys.py`."""
    text: str = runpy.run_path(str(DOCS / "json_keys.py"))["page"]()
    return text


@cache
def notebook() -> tuple[str, dict[str, str]]:
    """The page of the notebook with its cells run anew, and its pictures: `docs/notebook.py`."""
    found: tuple[str, dict[str, str]] = runpy.run_path(str(DOCS / "notebook.py"))["run_notebook"]()
    return found


PAGES = {
    "diagnostics.md": diagnostics_page,
    "passes.md": passes_page,
    "mistakes.md": mistakes_page,
    "annotated-schedule.md": annotated_schedule_page,
    "keys.md": keys_page,
    "coming-from.md": coming_from_page,
    "rtir.md": language_page,
    "commands.md": commands_page,
    "json.md": json_page,
    "start-here.md": start_page,
    "notebook.md": lambda: notebook()[0],
}


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    return {name: wrapped(page()) for name, page in PAGES.items()} | notebook()[1]


def stale_pages() -> dict[str, str]:
    """The pages that differ from what would be written now, and what would be."""
    return {
        name: page for name, page in pages().items() if not (DOCS / name).exists() or (DOCS / name).read_text() != page
    }


def main() -> int:
    """Write the pages, or check them."""
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for name in stale:
            sys.stderr.write(f"docs/{name} is stale: run python docs/generate.py\n")
        return 1 if stale else 0
    for name, page in stale.items():
        (DOCS / name).write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
