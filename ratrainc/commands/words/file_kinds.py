"""Files of the wrong kind: a message with their kind, and the command that takes them."""

from __future__ import annotations

import os
import shlex

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail

_COMPILE = "ratrainc compile --model {model} --plan {plan} -o {output}"


@frozen
class _Wanted:
    """A kind of file that commands read: its name, its endings, and advice for files with other endings."""

    words: str
    endings: tuple[str, ...]
    ways: dict[str, str]
    """advice by the ending of the given file; `{file}` stands for its path"""


_IS = {
    ".rtir": "a schedule (.rtir)",
    ".rtx": "a program (.rtx)",
    ".toml": "a plan or a machine (TOML)",
    ".json": "a model configuration or another JSON file",
    ".jsonl": "a file of JSON lines",
    ".csv": "a table (CSV)",
    ".html": "a page",
    ".svg": "a picture",
    ".png": "a picture",
    ".safetensors": "weights",
    ".md": "a text",
}
"""Kind of file by ending; other endings say nothing."""


def _made(output: str) -> dict[str, str]:
    """Return advice on files that a schedule or a program can be made from."""
    file_output = {"output": output, "model": "M", "plan": "P.toml"}
    table = _COMPILE.format(**file_output) + " --schedule-file {file}"
    return {
        ".json": f"'{_COMPILE.format(**file_output | {'model': '{file}'})}' compiles a model",
        ".toml": f"'{_COMPILE.format(**file_output | {'plan': '{file}'})}' compiles a plan",
        ".csv": f"'{table}' compiles a schedule table, 'ratrainc lint {{file}}' checks it",
        "": f"'{_COMPILE.format(**file_output)}' makes one",
    }


_OF_SCHEDULES = "'ratrainc verify {file}' checks it, 'ratrainc export X.rtir' makes a table of a schedule"
_WANTED = {
    "schedule": _Wanted(
        "a schedule (.rtir)",
        (".rtir",),
        _made("X.rtir")
        | {
            ".rtx": f"give the .rtir that it was compiled from, or '{_COMPILE}' makes one".format(
                model="M", plan="P.toml", output="X.rtir"
            )
        },
    ),
    "program": _Wanted("a schedule (.rtir) or program (.rtx)", (".rtx", ".rtir"), _made("X.rtx")),
    "table": _Wanted(
        "a schedule table (CSV)", (".csv",), {".rtir": _OF_SCHEDULES, ".rtx": "'ratrainc verify {file}' checks it"}
    ),
    "allocation problem": _Wanted(
        "an allocation problem (CSV)",
        (".csv",),
        {".rtir": "'ratrainc opt {file} --passes allocate-ddr' gives its tensors addresses"},
    ),
    "checkpoint": _Wanted(
        "the directory of a checkpoint",
        (".safetensors",),
        dict.fromkeys((".rtx", ".rtir"), "'ratrainc run {file} --save DIR' trains it and writes one")
        | {"": "'ratrainc run X.rtx --save DIR' writes one"},
    ),
    "model": _Wanted(
        "a model configuration (JSON) or a preset",
        (".json",),
        {
            ".rtir": "it has its model already, and is given alone",
            ".rtx": "it has its model already, and is given alone",
            ".toml": "a plan is given with --plan {file}, a machine with --machine {file}",
            ".safetensors": "give the config.json next to it",
        },
    ),
    "plan": _Wanted(
        "a plan (TOML)",
        (".toml",),
        {
            ".rtir": "it has its plan already, and is given alone",
            ".rtx": "it has its plan already, and is given alone",
            ".json": "a model is given with --model {file}",
            ".csv": "a schedule table is given with --schedule-file {file}",
        },
    ),
    "machine": _Wanted(
        "a machine (TOML) or the name of one",
        (".toml",),
        {"": "'ratrainc machines' lists those that are built in"},
    ),
}
"""Checked kinds of `InputFile`; for other kinds the reader reports errors."""


def refuse_wrong_kind(kind: str, path: str) -> None:
    """Raise `DiagnosticError` RT002, with advice, if a file's ending shows that it is of another kind than is read."""
    wanted = _WANTED.get(kind)
    ending = os.path.splitext(path)[1].lower()  # noqa: PTH122 - the path may be anything
    if wanted is None or ending in wanted.endings or ending not in _IS:
        return
    way = wanted.ways.get(ending, wanted.ways.get("", "")).replace("{file}", shlex.quote(path))
    fail("RT002", f"'{path}' is {_IS[ending]}, not {wanted.words}", help=way or None)
