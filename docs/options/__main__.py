"""What each option of each command changes; the last part of `docs/keys.md`.

`tests/ratrainc/commands/test_options.py` calls every command as its entry says, without and with each option, and looks for a difference in what is
printed and written, or, for options that may not change what is computed, in what is called. An option without an entry fails it.
"""
# This folder is run by its path (`runpy.run_path`), which lets the files in it import each other by their names.

from __future__ import annotations

from typing import TYPE_CHECKING

from compiling_options import COMPILING
from planning_options import PLANNING
from training_options import TRAINING

if TYPE_CHECKING:
    from option import Option

OPTIONS = {**COMPILING, **PLANNING, **TRAINING}


def text() -> str:
    """The options as a part of the page."""
    parts = []
    for name, command in OPTIONS.items():
        if command.options:
            rows = "\n".join(_row(flag, option) for flag, option in command.options.items())
            parts.append(f"## ratrainc {name}\n\n| option | changes | refused beside |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(flag: str, option: Option) -> str:
    idle = ", ".join(f"`{words or 'nothing'}`" for words in option.idle)
    return f"| `{flag}` | {option.changes} | {idle} |"
