"""Variables that Slurm sets for a batch script, derived from its `#SBATCH` lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, TextRun, literal

_LINE = re.compile(r"#SBATCH[ \t]+(.*)")
_OPTION = re.compile(r"(?<!\S)(--[\w-]+|-[A-Za-z])(?:=|[ \t]*(?!-))([^\s#]*)")
_LETTERS = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-J": "--job-name", "-G": "--gpus"}
_SETS = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "--gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "--gpus": ("SLURM_GPUS",),
    "--job-name": ("SLURM_JOB_NAME",),
}
_ALWAYS = frozenset(
    [
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_SUBMIT_DIR",
        "SLURM_JOB_NAME",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_USER",
        "SLURM_CLUSTER_NAME",
        "SLURMD_NODENAME",
        "SLURM_CPUS_ON_NODE",
        "SLURM_GPUS_ON_NODE",
        "SLURM_TASKS_PER_NODE",
    ]
)


def of_slurm(script: Script, submitted: Sequence[Text] = ()) -> tuple[dict[str, Text], frozenset[str]]:
    """Return Slurm's variables with their values, and the names of those whose values are unknown.

    `submitted` has the words of `sbatch` before the script; they override the script's lines. Both results are empty if
    the script has no such lines and is not submitted.
    """
    found = [*_options(script), *_of_words(submitted)]
    options = {name: text for name, text in found if text.shown}
    if not found and not submitted:
        return {}, frozenset()
    known: dict[str, Text] = {}
    for name, variables in _SETS.items():
        text = options.get(name)
        if text is not None and (re.fullmatch(r"\d+", text.shown) or name == "--job-name"):
            known |= dict.fromkeys(variables, text)
        elif text is not None and name == "--gpus-per-node" and (match := re.fullmatch(r"\w+:(\d+)", text.shown)):
            # `--gpus-per-node=a100:8`: the kind is left out.
            known |= dict.fromkeys(variables, text.part(*match.span(1)))
    gpus = known.get("SLURM_GPUS_PER_NODE")
    resource = options.get("--gres")
    if gpus is None and resource is not None and (match := re.fullmatch(r"gpu:(?:[\w.-]+:)?(\d+)", resource.shown)):
        gpus = resource.part(*match.span(1))
    if gpus is not None:
        known["SLURM_GPUS_ON_NODE"] = gpus
    each, nodes = known.get("SLURM_NTASKS_PER_NODE"), known.get("SLURM_NNODES")
    # Slurm derives the number of tasks from the nodes. The length bounds the product.
    if "SLURM_NTASKS" not in known and each is not None and nodes is not None and len(each.shown + nodes.shown) < 12:
        known |= dict.fromkeys(_SETS["--ntasks"], literal(str(int(each.shown) * int(nodes.shown)), each))
    return known, _ALWAYS - {*known}


def _of_words(words: Sequence[Text]) -> Iterator[tuple[str, Text]]:
    for number, word in enumerate(words):
        match = re.fullmatch(r"(--[\w-]+|-[A-Za-z])(?:=?(.+))?", word.shown)
        if match is not None:
            attached = match[2] is not None
            value = (
                word.part(match.start(2), match.end(2)) if attached else (*words[number + 1 : number + 2], Text())[0]
            )
            yield _LETTERS.get(match[1], match[1]), value


def _options(script: Script) -> Iterator[tuple[str, Text]]:
    at = 0
    for line in script.text.split("\n"):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return
        if match := _LINE.match(line):
            for option in _OPTION.finditer(line, match.start(1)):
                start, end = option.span(2)
                value = Text((TextRun(option[2], script.place, at + start, at + end),)) if start < end else Text()
                yield _LETTERS.get(option[1], option[1]), value
        at += len(line) + 1
