"""Launchers such as torchrun: their options, separated from the command that they start on many ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrainc.bridge.settings import Setting
from ratrain.ratrainc.bridge.shell.commands import name_of
from ratrain.ratrainc.bridge.shell.shell_text import Text, Unknown, literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.support.diagnostics import Diagnostics
    from ratrain.ratrainc.bridge.shell.path_state import Launch

WORLD = "WORLD_SIZE"
"""Variable of scripts for the number of ranks; also the name of the setting for the number of all ranks."""
RANKS = ("SLURM_NTASKS", WORLD)
"""Variables that give the number of ranks, Slurm's first."""

_TORCHRUN = {
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
}
_TORCHRUN_BARE = {"standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env"}
"""Options of torch/distributed/run.py and launch.py."""
LAUNCHER = _TORCHRUN | _TORCHRUN_BARE
_DEEPSPEED = {
    "num-gpus",
    "num-nodes",
    "hostfile",
    "include",
    "exclude",
    "master-port",
    "master-addr",
    "launcher",
    "launcher-args",
    "save-pid",
    "enable-each-rank-log",
    "autotuning",
    "max-elastic-nodes",
    "min-elastic-nodes",
    "ssh-port",
    "bind-core-list",
    "venv-script",
}
_DEEPSPEED_BARE = {
    "module",
    "no-python",
    "no-local-rank",
    "no-ssh",
    "force-multi",
    "elastic-training",
    "bind-cores-to-rank",
    "no-ssh-check",
}
"""Options of deepspeed/launcher/runner.py."""
_LETTERS = {"-m": "module", "-r": "redirects", "-t": "tee", "-H": "hostfile", "-i": "include", "-e": "exclude"}
_PYTHON_VALUES = {"-W", "-X", "-Q"}
_RANKS = {
    "-np": WORLD,
    "-n": WORLD,
    "--np": WORLD,
    "--ntasks": WORLD,
    "-N": "nodes",
    "--nodes": "nodes",
    "--ntasks-per-node": "each",
}


@frozen
class NotSaid:
    """A value that the script does not determine."""

    text: str
    """source text of the value"""
    unknown: Unknown

    def __repr__(self) -> str:
        return self.text

    def told(self) -> str:
        """Return what it is and why it is not known, behind "is" in a message, without saying a command twice."""
        again = " ".join(self.text.split())[:60] in self.unknown.why
        return f"{'not known' if again else self.text}: {self.unknown.why}"


def value_of(text: Text) -> str | NotSaid:
    """Return the characters of a word, or `NotSaid` if some are unknown."""
    unknown = text.unknown
    return text.shown if unknown is None else NotSaid(text.shown, unknown)


@frozen
class Started:
    """A program, with the options of the launcher that starts it."""

    settings: dict[str, Setting]
    """options of the launcher"""
    arguments: tuple[Text, ...]
    """arguments of the program"""


def started(launch: Launch, report: Diagnostics) -> Started:
    """Split a command into the launcher's options and the arguments of the program that it starts."""
    settings: dict[str, Setting] = {}
    words = launch.words
    while words:
        name = name_of(words[0])
        if name == "torchrun":
            words = _options(words[1:], _TORCHRUN, _TORCHRUN_BARE, "torchrun", settings, report)
            settings.setdefault("nproc-per-node", Setting("1", launch.words[0].place()))
            words = words[1:]
        elif name == "deepspeed":
            words = _options(words[1:], _DEEPSPEED, _DEEPSPEED_BARE, "deepspeed", settings, report)[1:]
            for theirs, ours in (("num-gpus", "nproc-per-node"), ("num-nodes", "nnodes")):
                if theirs in settings:
                    settings[ours] = settings.pop(theirs)
        elif name == "accelerate":
            at = next((n for n, each in enumerate(words) if each.shown.endswith(".py")), len(words))
            _accelerate(words[2:at], settings)
            words = words[at + 1 :]
        elif re.fullmatch(r"python[\d.]*", name):
            words, module = _python(words[1:])
            if module in ("torch.distributed.run", "torch.distributed.launch"):
                # `python -m torch.distributed.run` is torchrun under another name: take it apart as such.
                words = (literal("torchrun", launch.words[0]), *words[1:])
                continue
            words = words[1:]
        elif name.endswith(".py"):
            words = words[1:]
        break
    if "nproc-per-node" not in settings and WORLD not in settings:
        _ranks_of(launch, settings)
    return Started(settings, tuple(words))


def _options(
    words: tuple[Text, ...],
    valued: set[str],
    bare: set[str],
    who: str,
    settings: dict[str, Setting],
    report: Diagnostics,
) -> tuple[Text, ...]:
    """Take options before the program as settings; return the words from the program on."""
    at = 0
    while at < len(words):
        word = words[at]
        text = word.shown
        at += 1
        if word.bare and word.sole is not None:
            _unknown_words(word, who, report)
            continue
        if not text.startswith("-") or text == "-":
            return words[at - 1 :]
        spelled, sign, _ = text.partition("=")
        name = _LETTERS.get(spelled, spelled.lstrip("-").replace("_", "-"))
        # argparse accepts any prefix that only one option has.
        meant = [name] if name in valued | bare else [each for each in sorted(valued | bare) if each.startswith(name)]
        place = word.place()
        if len(meant) != 1:
            reason = f"may be {' or '.join(meant)}" if meant else f"is no option of {who}"
            report.error("RT064", f"{spelled} {reason}", place.location, source=place.source)
        elif meant[0] in bare:
            if meant[0] == "module" and not sign:
                continue
            settings[meant[0]] = Setting(value=True, place=place)
        elif sign:
            settings[meant[0]] = Setting(value_of(word.part(len(spelled) + 1, len(text))), place)
        elif at < len(words):
            settings[meant[0]] = Setting(value_of(words[at]), place)
            at += 1
        else:
            report.error("RT064", f"{spelled} has no value", place.location, source=place.source)
    return ()


def _unknown_words(word: Text, who: str, report: Diagnostics) -> None:
    unknown = word.sole
    if unknown is not None and not unknown.unset:
        place = word.place()
        message = f"{word.shown} may be options of {who}: {unknown.why}"
        report.error("RT064", message, place.location, source=place.source, help=unknown.help())


def _python(words: tuple[Text, ...]) -> tuple[tuple[Text, ...], str]:
    """Skip the interpreter's options; return the words from the script or module on, and the module or ""."""
    at = 0
    while at < len(words) and words[at].shown.startswith("-"):
        text = words[at].shown
        if text == "-c":
            return (), ""
        if text.endswith("m") and not text.startswith("--"):
            return words[at + 1 :], words[at + 1].shown if at + 1 < len(words) else ""
        at += 2 if text in _PYTHON_VALUES else 1
    return words[at:], ""


def _accelerate(words: Iterable[Text], settings: dict[str, Setting]) -> None:
    words = list(words)
    for word, after in pairwise(words):
        if word.shown.replace("_", "-") == "--num-processes":
            settings[WORLD] = Setting(value_of(after), word.place())


def _ranks_of(launch: Launch, settings: dict[str, Setting]) -> None:
    """Put the number of ranks that `mpirun` or `srun` starts, or that a variable of the script gives."""
    found: dict[str, tuple[Text, Text]] = {}
    outer = list(launch.outer)
    for number, word in enumerate(outer):
        spelled, sign, _ = word.shown.partition("=")
        if spelled in _RANKS:
            value = (
                word.part(len(spelled) + 1, len(word.shown))
                if sign
                else (outer[number + 1 : number + 2] or [Text()])[0]
            )
            found[_RANKS[spelled]] = (word, value)
    names = [name_of(each) for each in outer]
    slurm = "srun" in names
    variables = launch.state.variables
    if WORLD in found:
        word, value = found[WORLD]
        settings[WORLD] = Setting(value_of(value), word.place())
    elif slurm and "each" in found:
        word, value = found["each"]
        settings["nproc-per-node"] = Setting(value_of(value), word.place())
        nodes = found.get("nodes", (word, variables.get("SLURM_NNODES", literal("1"))))[1]
        if isinstance(nodes, Text):
            settings["nnodes"] = Setting(value_of(nodes), nodes.place())
    else:
        for name in RANKS if slurm else (WORLD,):
            held = variables.get(name)
            if isinstance(held, Text) and held.shown:
                held = held.replaced(launch.state.known)
                settings[WORLD] = Setting(value_of(held), held.place())
                return
