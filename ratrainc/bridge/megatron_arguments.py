"""Arguments that a script gives Megatron-LM, read as its argparse does, on every path that the script may take."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail, nearest
from ratrain.ratrain_ir.support.text import Place, Source, shown
from ratrain.ratrainc.bridge.launchers import LAUNCHER, RANKS, WORLD, NotSaid, started, value_of
from ratrain.ratrainc.bridge.megatron_flags import BARE, COUNTS, KNOWN, MANY, NONE_OR_MORE
from ratrain.ratrainc.bridge.settings import Asked, Setting
from ratrain.ratrainc.bridge.shell.commands import name_of
from ratrain.ratrainc.bridge.shell.following import Followed, follow

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ratrain.ratrainc.bridge.shell.path_state import Launch
    from ratrain.ratrainc.bridge.shell.shell_text import Text, Unknown

_TRAINING = ("train-iters", "train-samples", "train-tokens")
_SIZES = ("micro-batch-size", "global-batch-size", *_TRAINING)
_FLAG = re.compile(r"(?<!\S)--([a-z0-9]+(?:[-_][a-z0-9]+)+)\b")
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""Texts that argparse takes for a negative number, not for the name of an argument."""
_MOST_ERRORS = 50
"""Most errors that are reported: enough to see that a file is something else."""
_OF_LAUNCHERS = ("nproc-per-node", "nnodes", WORLD)


@frozen
class _Either:
    """The values of an argument that differ between paths through the script."""

    values: tuple[object, ...]

    def __repr__(self) -> str:
        return " or ".join(dict.fromkeys("nothing" if each is None else str(each) for each in self.values))


def named_flags(text: str) -> set[str]:
    """Return the arguments of two words or more that a text names, with dashes."""
    return {name.replace("_", "-") for name in _FLAG.findall(text)}


def arguments_of(file: str, text: str, asked: Asked, decide: Collection[str]) -> dict[str, Setting]:
    """Return the arguments of the training that a script starts, and its launcher's options, by names with dashes.

    An argument without a value is True. `$NAME` stands for a variable that the script is taken to lack: its value is
    the text that the script uses instead, or a `NotSaid`. `decide` names the arguments that determine the plan. Raises
    `DiagnosticError` RT063 if the file is no shell script, and RT064 for all that argparse refuses, and for each
    argument of `decide` whose value is unknown.
    """
    report = Diagnostics()
    if file.endswith((".yaml", ".yml", ".json", ".toml", ".py")):
        message = "this is no launch script: recipes in other files, such as Megatron-Bridge's and LoRA's, are not read"
        fail("RT063", message, Source(file, text).top().location)
    followed = follow(file, text, asked.given)
    top = Source(file, text).top()
    for name, value in followed.unused:
        _unused(name, value, report, top)
    launches = _trainings(list({_key(each): each for each in followed.launches}.values()))
    if not launches:
        _no_training(followed, report, top)
    found = [(launch, _settings(launch, report)) for launch in launches]
    settings = _together(found, decide, report)
    for launch in launches:
        for name, instead in launch.state.assumed.items():
            settings.setdefault(f"${name}", Setting(instead, top))
    for name, setting in settings.items():
        if isinstance(setting.value, NotSaid) and name in decide and not _asked(name, settings, asked):
            unknown = setting.value.unknown
            _error(report, setting.place, f"{_dashed(name)} is {setting.value.told()}", unknown.help())
    _once(report).check()
    return settings


def _error(report: Diagnostics, place: Place, message: str, way_out: str | None = None) -> None:
    report.error("RT064", message, place.location, source=place.source, help=way_out)


def _dashed(name: str) -> str:
    return name if name == WORLD else f"--{name}"


def _once(report: Diagnostics) -> Diagnostics:
    """Return the diagnostics without repetitions, which come from several paths through the script."""
    once = Diagnostics()
    seen = set()
    for each in report.items:
        key = (each.message, each.location)
        if key not in seen:
            seen.add(key)
            once.items.append(each)
    return once


def _unused(name: str, value: Text | None, report: Diagnostics, top: Place) -> None:
    if value is None:
        _error(
            report,
            top,
            f"--set {name}: nothing in the script reads {name}",
            "leave it out, or set a variable that it reads",
        )
    else:
        message = f"--set {name} changes nothing: the script sets {name} itself"
        _error(report, value.place() if value.pieces else top, message, "leave it out, or change the script")


def _asked(name: str, settings: dict[str, Setting], asked: Asked) -> bool:
    """Tell whether the command line gives an argument that the script does not, or no key needs it."""
    if name in _OF_LAUNCHERS:
        return asked.clusters is not None
    if name == "num-layers":
        return not any(each in settings for each in settings if "virtual" in each or each.startswith("decoder-"))
    return name == "seq-length" and asked.seq_len is not None


def _trainings(launches: Sequence[Launch]) -> list[Launch]:
    """Return the commands that train: those with a length, else those with a batch, else those with any argument."""
    for wanted in (_TRAINING, _SIZES, KNOWN):
        found = [each for each in launches if _says(each, wanted)]
        if found:
            return found
    return []


def _key(launch: Launch) -> object:
    """Return a key that is equal for commands with the same arguments and ranks."""
    held = [getattr(launch.state.variables.get(name), "key", None) for name in (*RANKS, "SLURM_NNODES")]
    return launch.words, launch.outer, tuple(held), launch.state.strict


def _says(launch: Launch, names: Collection[str]) -> bool:
    words = [each.shown for each in launch.words]
    flags = {each.partition("=")[0].lstrip("-").replace("_", "-") for each in words if each.startswith("--")}
    hidden = names is KNOWN and any(each.endswith(".py") for each in words) and any(each.bare for each in launch.words)
    return hidden or not flags.isdisjoint(names)


def _no_training(followed: Followed, report: Diagnostics, top: Place) -> None:
    """Report that no training is found, and why: nothing starts, something else does, or a variable is missing."""
    programs = dict.fromkeys(
        name_of(each) for launch in followed.launches for each in launch.words if each.shown.endswith(".py")
    )
    unread = dict.fromkeys(name for state in followed.states for name in state.unread)
    needed = dict.fromkeys(name for state in followed.states if state.ended == "exit" for name in state.assumed)
    why, help_ = "", "give the script that starts it"
    if programs:
        why = f": {', '.join(programs)} has none of its arguments"
        help_ = "recipes and YAML files, such as Megatron-Bridge's and LoRA's, are not read"
    elif unread:
        why = f": it runs {', '.join(unread)}, which is not read"
    elif needed:
        why = ": it ends before"
        help_ = f"say what it needs: {' '.join(f'--set {name}=VALUE' for name in needed)}"
    _error(report, top, f"nothing in the script starts a training of Megatron-LM{why}", help_)


# argparse


def _settings(launch: Launch, report: Diagnostics) -> dict[str, Setting]:
    """Read the arguments of one command as argparse does; the last value of a repeated one counts."""
    begun = started(launch, report)
    settings = dict(begun.settings)
    words = begun.arguments
    at = 0
    while at < len(words) and len(report.errors) < _MOST_ERRORS:
        word = words[at]
        at += 1
        if word.bare and word.sole is not None:
            _hidden(word, launch, settings, report)
            continue
        if (unknown := _unknown_name(word)) is not None:
            _error(report, word.place(), f"{word.shown} may be any argument: {unknown.why}", unknown.help())
            while at < len(words) and not _is_argument(words[at]):
                at += 1
            continue
        spelled, sign, _ = word.shown.partition("=")
        name = spelled.removeprefix("--").replace("_", "-")
        if not _is_argument(word) or " " in spelled:
            shown_ = f"the word {shown(word.shown)}" if word.shown else "an empty word"
            _error(report, word.place(), f"{shown_} is no argument, and no value of one: argparse stops there")
            continue
        values: list[Text] = []
        if sign:
            values = [word.part(len(spelled) + 1, len(word.shown))]
        # As in argparse, an argument takes the words after it up to its number of values or the next argument. An
        # unknown one takes all, so that it is reported once.
        most = 0 if name in BARE or sign else COUNTS.get(name, len(words) if name in MANY or name not in KNOWN else 1)
        while len(values) < most and at < len(words) and not _is_argument(words[at]):
            values.append(words[at])
            at += 1
        if name in LAUNCHER and words[0].shown.startswith("--"):  # a file of arguments of both
            settings[name] = Setting(_value(values), word.place())
        elif name not in KNOWN:
            _unknown(name, word, report)
        elif name in BARE and sign:
            _error(report, word.place(), f"--{name} takes no value")
        elif len(values) < _fewest(name, sign):
            _error(report, word.place(), f"--{name} has no value: argparse stops there")
        else:
            settings[name] = Setting(_value(values), word.place())
    return settings


def _fewest(name: str, sign: str) -> int:
    """Return the least number of values of an argument; `sign` is "=" if one is joined to it."""
    if name in BARE or name in NONE_OR_MORE:
        return 0
    return 1 if sign else COUNTS.get(name, 1)


def _unknown_name(word: Text) -> Unknown | None:
    """Return the unknown part in an argument's name; None if the name is known."""
    if not word.shown.startswith("--"):
        return None
    for piece in word.pieces:
        if piece.unknown is not None:
            return piece.unknown
        # Unknown parts after `=` are in the value.
        if "=" in piece.text:
            break
    return None


def _is_argument(word: Text) -> bool:
    text = word.shown
    first = word.pieces[0].unknown is None if word.pieces else False
    return first and text.startswith("-") and len(text) > 1 and not _NEGATIVE.fullmatch(text)


def _value(values: list[Text]) -> object:
    if not values:
        return True
    hidden = next((each for each in values if each.unknown is not None), None)
    if hidden is not None and hidden.unknown is not None:
        return NotSaid(" ".join(each.shown for each in values), hidden.unknown)
    return " ".join(str(value_of(each)) for each in values)


def _hidden(word: Text, launch: Launch, settings: dict[str, Setting], report: Diagnostics) -> None:
    """Handle a word that is wholly unknown: no word at all if its variable is never set, else an error."""
    unknown = word.sole
    if unknown is None:
        return
    if unknown.unset and not launch.state.strict:
        settings[f"${unknown.name}"] = Setting(NotSaid("", unknown), word.place())
        return
    why = f"{unknown.why}, and 'set -u' ends the script there" if unknown.unset else unknown.why
    way_out = unknown.help() or "write into the script the words that it stands for"
    _error(report, word.place(), f"{word.shown} may be arguments: {why}", way_out)


def _unknown(name: str, word: Text, report: Diagnostics) -> None:
    spelled = word.shown.partition("=")[0]
    _error(report, word.place(), f"Megatron-LM has no argument {spelled}", _meant(name))


@cache
def _meant(name: str) -> str:
    """Return advice for an unknown argument."""
    longer = [each for each in KNOWN if each.startswith(name)]
    if len(longer) == 1:
        return f"Megatron-LM takes no shortened names (allow_abbrev=False): write --{longer[0]}"
    return nearest(name, sorted(KNOWN)) or "leave it out where it is an argument of your own that changes no size"


# ways of the script


def _together(
    found: list[tuple[Launch, dict[str, Setting]]], decide: Collection[str], report: Diagnostics
) -> dict[str, Setting]:
    """Combine the arguments of all paths through a script; those in `decide` must be the same on each."""
    if len(found) <= 1:
        return dict(found[0][1]) if found else {}
    together: dict[str, Setting] = {}
    for name in dict.fromkeys(name for _, settings in found for name in settings):
        each = [settings.get(name) for _, settings in found]
        values = [None if one is None else one.value for one in each]
        last = next(one for one in reversed(each) if one is not None)
        if all(value == values[0] for value in values):
            together[name] = last
        # A decisive argument differs: report the decision that separates the two paths. Others keep all their values.
        elif name in decide:
            other = next(n for n, value in enumerate(values) if value != values[0])
            _differs(name, (found[0][0], found[other][0]), (values[0], values[other]), last.place, report)
        else:
            together[name] = Setting(_Either(tuple(values)), last.place)
    return together


def _differs(
    name: str, launches: tuple[Launch, Launch], values: tuple[object, object], place: Place, report: Diagnostics
) -> None:
    """Report an argument that differs between two paths, with the decision that separates them."""
    says = " or ".join("left out" if each is None else "said" if each is True else shown(each) for each in values)
    here, there = ({each.answer.key: each for each in launch.state.decisions} for launch in launches)
    for key, decision in here.items():
        if key in there and there[key].value != decision.value:
            because = decision.answer.because
            why = f"'{decision.answer.shown}' decides" + (f", and {because.why}" if because is not None else "")
            _error(
                report,
                decision.answer.place or place,
                f"{_dashed(name)} is {says}: {why}",
                (because.help() if because else None) or "leave in the script the way that is meant",
            )
            return
    names = dict.fromkeys(name_of(each) for launch in launches for each in launch.words if each.shown.endswith(".py"))
    what = f" ({', '.join(names)})" if names else ""
    _error(
        report,
        place,
        f"the script starts more than one training{what}: --{name} is {says}",
        "leave one of them in the script",
    )
