"""Options of `ratrainc run` with which a resumed run would have the data of the first one, from the facts of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from attrs import frozen

from ratrain.targets.runtime.data.data import BUILTIN, BYTE, WITHOUT_ITS_LAST

_MOST_NAMED = 4
_ANY_EVERY = 100
"""Steps between evaluations, for checkpoints that do not record them: any number holds out the same data."""
_NUMBERS = re.compile(r"a (uint\d+) number")
_KEYS = {"text_key": "text", "prompt_key": "prompt", "completion_key": "completion"}
"""Keys of JSONL lines, with what they are where nobody names them."""
_HELD_OUT = re.compile(f"{WITHOUT_ITS_LAST} ([0-9.e+-]+) %")


@frozen
class Said:
    """Options to give again, each with its value, and options to leave out."""

    again: tuple[str, ...]
    without: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"give again {' '.join(self.again)}"] if self.again else []
        words += [f"leave out {' and '.join(self.without)}"] if self.without else []
        return ", and ".join(words)


def options_of_data(then: Mapping[str, Any], now: Mapping[str, Any], every: object = None) -> Said:
    """Return the options that give a run (`now`) the data of an earlier run (`then`).

    `every` is the number of steps between evaluations of the earlier run, if known. Files whose content has changed
    are nothing that options could mend: then there may be no option at all.
    """
    found = [
        *_files(then, now),
        *_tokens(then, now),
        *_ends(then, now),
        *_fields(then, now),
        *_held_out(then, now, every),
    ]
    again = tuple(dict.fromkeys(word for word, is_given in found if is_given))
    return Said(again, tuple(dict.fromkeys(word for word, is_given in found if not is_given)))


_Words = Iterator[tuple[str, bool]]
"""Options, with True if they are to be given and False if they are to be left out."""


def _files(then: Mapping[str, Any], now: Mapping[str, Any]) -> _Words:
    files, present = _names(then), _names(now)
    if files == present:
        return
    if files == [BUILTIN]:
        yield "--data", False
    elif len(files) > _MOST_NAMED:
        yield f"--data for its {len(files)} files, from {quote(files[0])} to {quote(files[-1])}", True
    else:
        yield " ".join(f"--data {quote(name)}" for name in files), True


def _names(facts: Mapping[str, Any]) -> list[str]:
    files = facts.get("files")
    listed = isinstance(files, list) and all(isinstance(each, list) and each for each in files)
    return [str(each[0]) for each in files] if listed and files else [str(facts["name"])]


def _tokens(then: Mapping[str, Any], now: Mapping[str, Any]) -> _Words:
    if then["token"] == now["token"]:
        return
    numbers = _NUMBERS.fullmatch(then["token"])
    if numbers is not None:
        yield f"--data-dtype {numbers[1]}", True
    elif then["token"] == BYTE:
        yield "--tokenizer bytes", True
    elif isinstance(then.get("tokenizer"), str):
        yield f"--tokenizer {quote(then['tokenizer'])}", True


def _ends(then: Mapping[str, Any], now: Mapping[str, Any]) -> _Words:
    if then.get("eos") != now.get("eos"):
        yield ("--eos", False) if then.get("eos") is None else (f"--eos {then['eos']}", True)


def _fields(then: Mapping[str, Any], now: Mapping[str, Any]) -> _Words:
    if all(then.get(key) == now.get(key) for key in _KEYS):
        return
    if ("completion_key" in then) != ("completion_key" in now):
        yield "--train-on completion", "completion_key" in then
    for key, default in _KEYS.items():
        option = f"--{key.replace('_', '-')}"
        if then.get(key, default) != now.get(key, default):
            yield (f"{option} {quote(str(then[key]))}", True) if key in then else (option, False)


def _held_out(then: Mapping[str, Any], now: Mapping[str, Any], every: object) -> _Words:
    if then["part"] == now["part"]:
        return
    share = _HELD_OUT.fullmatch(then["part"])
    if share is not None:
        yield f"--eval-every {every if isinstance(every, int) else _ANY_EVERY}", True
        yield f"--eval-fraction {float(share[1]) / 100:g}", True
    elif not then["part"]:
        yield "--eval-every", False
