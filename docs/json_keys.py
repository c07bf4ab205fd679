"""The page of what `--json` prints: every key of every command's object, with the type of its value, from running them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratrain.ratrainc.cli import main

_HEAD = """# JSON

One object on stdout, of these keys; where an input is at fault, `{"diagnostics": [...]}`. `[]` is each item of a list, `*` each key of a table whose keys are names or numbers of the input's own. Times are in
seconds and sizes in bytes.

<!-- written by docs/generate.py, which runs the commands -->
"""

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAN = "[parallel]\npp = 2\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 4\nseq_len = 8\n"
_MODEL = "--model m.json"
COMMANDS = (
    f"compile {_MODEL} --plan p.toml -o x.rtir",
    "diff x.rtir other.rtir",
    "verify x.rtir",
    "lint s.csv",
    "explain x.rtir --seconds 0",
    "explain x.rtir --time",
    "simulate x.rtx",
    "report x.rtx -o x.html",
    "report x.rtir --against other.rtir -o both.html",
    "model m.json",
    f"plan {_MODEL} --machine h100-node --clusters 16 --global-batch 16 --seq-len 8 --quick",
    "fit --model m.json --devices 4 --memory 4GB",
    "import-plan --from deepspeed ds.json --clusters 4 --seq-len 8",
    f"scale {_MODEL} --clusters 2,4 --plan p.toml",
    f"compare {_MODEL} --plan p.toml --strategies baseline-1f1b,ratrain",
    "run x.rtx --data book.txt --steps 1 --save run1 --run-dir ranks",
    "postmortem ranks",
    "generate run1 --prompt a --tokens 1 --threads 1",
    "export-weights run1 -o weights",
    "calibrate --rows measured.csv --fit launch --hold-out 3",
    "validate published.csv",
    "doctor x.rtx",
    "precompile",
    "alloc problem.csv --capacity 1MiB",
    "machines mt3000",
    "strategies",
    "passes",
)
"""One of each command that has `--json` and needs no more than a moment."""
_BEFORE = (
    f"compile {_MODEL} --plan p.toml -o x.rtir",
    f"compile {_MODEL} --plan p.toml -o x.rtx",
    f"compile {_MODEL} --plan p.toml -o other.rtir --strategy full-save",
    "schedule --kind 1f1b --stages 2 --micro-batches 4 -o s.csv",
)
_TABLES = {
    "by_kind",
    "by_owner",
    "idle_seconds",
    "waited_for_stage",
    "overhead_bytes",
    "stored_bytes",
    "saved_bytes_per_layer",
    "collectives",
    "declared_bytes",
    "first_use",
    "idle_by_cause",
    "settings",
    "facts",
    "constants",
    "ratio_errors",
    "left_out",
    "held_out_by_tp",
    "job",
}
"""Keys whose values are tables with keys of the input's own."""


def page() -> str:
    """The whole page."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _write_inputs()
            for words in _BEFORE:
                _call(words)
            sections = [_section(words) for words in COMMANDS]
        finally:
            os.chdir(before)
    return "\n".join([_HEAD, *sections])


def _write_inputs() -> None:
    Path("m.json").write_text(json.dumps(CONFIG))
    Path("p.toml").write_text(PLAN)
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    Path("ds.json").write_text(json.dumps(sizes | {"optimizer": {"type": "AdamW"}, "steps_per_print": 1}))
    Path("book.txt").write_text("a book of few words and many letters. " * 20)
    rows = "".join(f"m.json,p.toml,{dp},{seconds}\n" for dp, seconds in ((1, 0.006), (2, 0.0062), (4, 0.0064)))
    Path("measured.csv").write_text(f"model,plan,dp,step_seconds\n{rows}")
    published = "".join(f"{dp},step-time,held-out,m.json,p.toml,{dp},0.006\n" for dp in range(1, 11))
    Path("published.csv").write_text(f"id,class,split,model,plan,dp,step_seconds\n{published}")
    Path("problem.csv").write_text("id,lower,upper,size\na,0,2,64\nb,1,3,64\n")


def _call(words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main(shlex.split(words))
    if code != 0:
        raise ValueError(f"ratrainc {words} ended with {code}: {out.getvalue()}")
    return out.getvalue()


def _section(words: str) -> str:
    found: dict[str, set[str]] = {}
    for path, kind in _keys(json.loads(_call(f"{words} --json")), ""):
        found.setdefault(path, set()).add(kind)
    rows = "\n".join(f"| `{path}` | {' or '.join(sorted(kinds))} |" for path, kinds in found.items())
    return f"## {words.split(maxsplit=1)[0]}{' --time' * ('--time' in words)}{' --against' * ('--against' in words)}\n\n    ratrainc {words} --json\n\n| key | value |\n|---|---|\n{rows}\n"


def _keys(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every key below a value, with what its value is."""
    if isinstance(value, dict):
        for key, inner in value.items():
            is_own = path.rpartition(".")[2] in _TABLES
            yield from _keys(inner, f"{path}.*" if is_own else f"{path}.{key}".lstrip("."))
        if not value:
            yield path, "table"
    elif isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            yield path, "list" if not value else f"list of {_kind(value[0])}"
        for item in value:
            if isinstance(item, dict | list):
                yield from _keys(item, f"{path}[]")
    else:
        yield path, _kind(value)


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
    return names[type(value)]
