"""Files of the wrong kind: a message with their kind, and the command that takes them."""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import suppress

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import opened, without_mark
from ratrain.ratrain_ir.support.toml_text import parse_toml

_COMPILE = "ratrainc compile --model {model} --plan {plan} -o {output}"


@frozen
class _Wanted:
    """A kind of file that commands read: its name, its endings, and advice for files with other endings."""

    words: str
    endings: tuple[str, ...]
    ways: dict[str, str]
    """advice by the ending of the given file, or its kind by content; `{file}` stands for its path"""
    contents: tuple[str, ...] = ()
    """kinds by content that are accepted; empty: its own"""


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
_MACHINE, _PLAN, _JOB, _SETTINGS, _LOG = "machine", "plan", "job", "settings", "log"
_CONTAINS = {
    _MACHINE: "a machine (TOML)",
    _PLAN: "a plan (TOML)",
    _JOB: "a job of torchtitan (TOML)",
    _SETTINGS: "settings of DeepSpeed (JSON)",
    _LOG: "the log of a run (JSON lines)",
}
"""Kind of file by its content, where an ending leaves it open."""
_AS_MACHINE, _AS_PLAN = "a machine is given with --machine {file}", "a plan is given with --plan {file}"
_OF_CONTENTS = {
    _JOB: "'ratrainc import-plan --from torchtitan {file} -o P.toml' makes a plan of it",
    _SETTINGS: "'ratrainc import-plan --from deepspeed {file} -o P.toml' makes a plan of it",
    _LOG: "'ratrainc watch {file}' draws it",
}
"""Advice on files that no other command takes, whatever is wanted."""
_OF_JOBS = {"parallelism", "training", "job", "model", "lr_scheduler", "activation_checkpoint", "metrics", "checkpoint"}
"""Tables of torchtitan's jobs that neither plans nor machines have."""
_MOST_SNIFFED = 1 << 20
"""Bytes up to which a file is looked into; plans and machines are far smaller."""


def _made(output: str) -> dict[str, str]:
    """Return advice on files that a schedule or a program can be made from."""
    file_output = {"output": output, "model": "M", "plan": "P.toml"}
    table = _COMPILE.format(**file_output) + " --schedule-file {file}"
    return {
        ".json": f"'{_COMPILE.format(**file_output | {'model': '{file}'})}' compiles a model",
        ".toml": f"'{_COMPILE.format(**file_output | {'plan': '{file}'})}' compiles a plan",
        _MACHINE: f"'{_COMPILE.format(**file_output)} --machine {{file}}' compiles for it",
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
            _PLAN: _AS_PLAN,
            _MACHINE: _AS_MACHINE,
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
            _MACHINE: _AS_MACHINE,
        },
    ),
    "machine": _Wanted(
        "a machine (TOML) or the name of one",
        (".toml",),
        {"": "'ratrainc machines' lists those that are built in", _PLAN: _AS_PLAN},
    ),
    "settings": _Wanted(
        "settings of another framework",
        (".toml", ".json", ".jsonl"),
        {
            **dict.fromkeys((".rtir", ".rtx"), "'ratrainc explain {file}' says what it needs"),
            **{
                kind: way.format(**{"model": "M", "plan": "P.toml", "output": "X.rtx"} | {key: "{file}"})
                for kind, key, way in (
                    (_PLAN, "plan", f"'{_COMPILE}' compiles it, and says what it needs"),
                    (_MACHINE, "machine", f"'{_COMPILE} --machine {{machine}}' compiles for it"),
                )
            },
        },
        (_JOB, _SETTINGS),
    ),
}
"""Checked kinds of `InputFile`; for other kinds the reader reports errors."""


def endings_of(kind: str) -> tuple[str, ...]:
    """Return the endings of the files of a checked kind; none for another one."""
    return _WANTED[kind].endings if kind in _WANTED else ()


def refuse_wrong_kind(kind: str, path: str) -> None:
    """Raise `DiagnosticError` RT002, with advice, if a file is of another kind than is read.

    Its ending shows that, or, where files of several kinds have that ending, its content.
    """
    wanted = _WANTED.get(kind)
    ending = os.path.splitext(path)[1].lower()  # noqa: PTH122 - the path may be anything
    if wanted is None or ending not in _IS:
        return
    content = _content(path, ending)
    if ending in wanted.endings if content is None else content in (wanted.contents or (kind,)):
        return
    words, ways = _IS[ending], wanted.ways | _OF_CONTENTS
    if content is not None:
        words, ending = _CONTAINS[content], content if content in ways else ending
    way = ways.get(ending, ways.get("", ""))
    fail("RT002", f"'{path}' is {words}, not {wanted.words}", help=way.replace("{file}", shlex.quote(path)) or None)


def _content(path: str, ending: str) -> str | None:
    """Return the kind that a file's content shows, a key of `_CONTAINS`; None where it shows none."""
    recognised = {".toml": _in_toml, ".json": _in_json, ".jsonl": _in_json_lines}.get(ending)
    if recognised is None:
        return None
    with suppress(OSError, ValueError, RecursionError):  # the reader says what is wrong with it
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - the path may be anything
            with opened(path) as stream:
                text = without_mark(stream.read(_MOST_SNIFFED)).decode()
            return recognised(text)
    return None


def _in_toml(text: str) -> str | None:
    from ratrain.ratrain_ir.config.plan import KEYS
    from ratrain.targets.machine.constants import is_machine_key

    keys = parse_toml(text).keys()
    if {"parallelism", "training"} & keys or (_OF_JOBS & keys and not (KEYS.sections.keys() - {"optimizer"}) & keys):
        return _JOB
    of_plans = sum(key in KEYS.sections or key in KEYS.keys for key in keys)
    of_machines = sum(is_machine_key(key) for key in keys)
    if of_plans == of_machines:
        return None
    return _PLAN if of_plans > of_machines else _MACHINE


def _in_json(text: str) -> str | None:
    data = json.loads(text)
    of_deepspeed = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
    return _SETTINGS if isinstance(data, dict) and of_deepspeed & data.keys() else None


def _in_json_lines(text: str) -> str | None:
    data = json.loads(text.partition("\n")[0])
    return _LOG if isinstance(data, dict) and {"step", "loss"} <= data.keys() else None
