"""Series of checkpoints of one run: a directory with one sharded checkpoint for every saved step.

    step-00000040               state after 40 steps
    .writing-00000060           being written; renamed once every rank's file and the manifest are on disk
    .replaced-step-00000040     the old one of the same step, while it is replaced

A checkpoint therefore exists as a whole or not at all. One of the same step is exchanged in one step. Where the system
cannot do that, the old one is `.replaced-...` for a moment; if a crash leaves only that, it counts as the checkpoint of
its step. The last few are kept. Loading takes the newest sound one and warns about newer ones that are damaged.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Severity, fail
from ratrain.ratrain_ir.support.files import help_for, is_directory, is_there, made_directory
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.runtime.checkpoint.checkpoint import (
    MANIFEST_FILE,
    VERSION,
    cannot_write,
    checkpoint_weights,
    kept_companions,
    left_checkpoints,
    load_checkpoint,
    read_biases,
    read_manifest,
    saved_model,
)
from ratrain.targets.runtime.checkpoint.checkpoint_places import move_into_place
from ratrain.targets.runtime.checkpoint.checkpoint_shards import (
    SHARDED_VERSION,
    holds_own_state,
    load_shards,
    seal_shards,
    shard_weights,
    write_shard,
)
from ratrain.targets.runtime.checkpoint.training_state import TrainingState
from ratrain.targets.runtime.data.data import BYTE, TEXT_VOCABULARY
from ratrain.targets.runtime.weights.companions import (
    TOKENIZER_FILE,
    byte_tokenizer_files,
    read_companion,
    replaced_companions,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.targets.runtime.arena.locks import Lock
    from ratrain.targets.runtime.arena.tensor_file import Float32
    from ratrain.targets.runtime.engine.engine import ProgramEngine
    from ratrain.targets.runtime.engine.processes import Processes
    from ratrain.targets.runtime.weights.weight_source import WeightSource

_NAME = re.compile(r"step-(\d{8,})")
_WRITING, _REPLACED = ".writing-", ".replaced-"
RUN_FOLDER = "run"
"""Subdirectory for the progress files of a run's processes."""


@frozen
class CheckpointSeries:
    """Directory of a run's checkpoints and the number of them to keep."""

    directory: str
    keep_last: int

    def open(self, processes: Processes) -> None:
        """Create the directory, or check that it is one of a series and writable.

        Raises `DiagnosticError` RT002 or RT092 on all processes.
        """
        processes.first_only(self._open)

    def _open(self) -> None:
        place = made_directory(self.directory)
        try:
            if os.path.lexists(place / MANIFEST_FILE):
                text = f"'{self.directory}' is a single checkpoint, not a directory of several"
                fail("RT092", text, help="save to a new directory; --resume takes the one that is there")
            Path(tempfile.mkdtemp(dir=place, prefix=_WRITING)).rmdir()
        except OSError as error:
            cannot_write(self.directory, error)

    def clear_leftovers(self, processes: Processes, lock: Lock | None) -> list[Diagnostic]:
        """Remove the leftovers of an interrupted save and return a warning for each.

        The lock, held by process 0, proves that nobody else writes there; without it nothing is removed. Raises
        `DiagnosticError` RT002 on all processes.
        """
        said: list[Diagnostic] = []
        processes.first_only(lambda: said.extend(self._clear(is_locked=lock is not None and lock.is_held)))
        return said

    def _clear(self, *, is_locked: bool) -> list[Diagnostic]:
        """Do the work of `clear_leftovers` on process 0."""
        place = Path(self.directory)
        said = []
        try:
            entries = [entry.name for entry in place.iterdir()]
            for name in entries:
                if name.startswith(_WRITING) or (
                    # Alone, it is the only copy of its step.
                    name.startswith(_REPLACED) and name.removeprefix(_REPLACED) in entries
                ):
                    if is_locked:
                        shutil.rmtree(place / name)
                    what = "removed" if is_locked else "remove it, if no run writes there"
                    text = f"an interrupted save left '{place / name}': {what}"
                    said.append(Diagnostic("RT092", text, severity=Severity.WARNING))
        except OSError as error:
            cannot_write(self.directory, error)
        return said

    def place_of(self, step: int) -> str:
        """Return the directory of the state after `step` steps."""
        return str(Path(self.directory) / f"step-{step:08d}")

    def left_over(self) -> list[Path]:
        """Return the directories that an interrupted save left."""
        return sorted(Path(self.directory).glob(f"{_WRITING}*"))

    def check_start(self, processes: Processes, step: int, damaged: Collection[str]) -> None:
        """Refuse, with RT092 on all processes, a run that starts after `step` steps in a series that has gone further.

        Later checkpoints that are `damaged` may be there: the run will replace them.
        """
        processes.first_only(lambda: self._check_start(step, {os.path.realpath(path) for path in damaged}))

    def _check_start(self, step: int, damaged: Collection[str]) -> None:
        later = [
            (saved, path)
            for saved, path in saved_steps(self.directory)
            if saved > step and os.path.realpath(path) not in damaged
        ]
        if later:
            fail(
                "RT092",
                f"'{self.directory}' holds {Path(later[0][1]).name}, but this run starts after step {step}: "
                "to go on later, that one would be taken",
                help=f"go on from it with --resume {self.directory}, save to another directory, or remove it",
            )

    def save(
        self,
        processes: Processes,
        engine: ProgramEngine,
        step: int,
        run: dict[str, Any],
        companions: Mapping[str, bytes] | None = None,
    ) -> str:
        """Write the state after `step` steps, remove checkpoints that are no longer kept, and return the new directory.

        Every process writes its own ranks' files; process 0 then seals the directory and moves it into place. Raises
        `DiagnosticError` RT002 on all processes if any of them cannot write; earlier checkpoints stand.
        """
        folder = Path(self.directory) / f"{_WRITING}{step:08d}"
        target = Path(self.place_of(step))
        try:
            processes.first_only(lambda: self._begin(folder))
            ranks = [rank for ranks in engine.ranks for rank in ranks if holds_own_state(rank)]
            # `together` returns only if all processes have written, or raises on all: no manifest names a missing file.
            written = processes.together(lambda: [write_shard(folder, rank) for rank in ranks])
            files = [file for theirs in processes.exchange(written) for file in theirs]
            model, scale = engine.program.trained_model, engine.loss_scale

            def commit() -> None:
                try:
                    seal_shards(folder, model, step, scale, files, run, companions)
                    # One of the same step may be there: it was damaged, or the run resumed from it.
                    aside = target.with_name(f"{_REPLACED}{target.name}")
                    move_into_place(folder, target, aside)
                    shutil.rmtree(aside, ignore_errors=True)  # a crash may have left only this one
                    self._prune(step)
                except OSError as error:
                    cannot_write(str(target), error)

            processes.first_only(commit)
        except BaseException as error:
            if processes.number == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, DiagnosticError):  # Ctrl-C
                raise
            raise DiagnosticError([self._in_save(problem, step) for problem in error.diagnostics]) from None
        return str(target)

    def _in_save(self, problem: Diagnostic, step: int) -> Diagnostic:
        """Add to a save's problem the step and the checkpoint to resume from."""
        try:
            left = [saved for saved, _ in saved_steps(self.directory) if saved < step]
        except DiagnosticError:  # on another machine's disk, or gone
            left = []
        rest = "nothing was saved before"
        if left:
            rest = f"the state after {number_of(left[0], 'step')} is whole: go on with --resume {self.directory}"
        way_out = f"free some space, or save elsewhere; {rest}"
        return evolve(problem, message=f"saving after step {step - 1}: {problem.message}", help=way_out)

    def _begin(self, folder: Path) -> None:
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(0o700)  # for its owner alone until it is whole
        except OSError as error:
            cannot_write(str(folder), error)

    def _prune(self, step: int) -> None:
        """Remove all but the last few up to `step`; later ones were damaged when the run started, and do not count."""
        old = [directory for saved, directory in saved_steps(self.directory) if saved <= step]
        for directory in old[self.keep_last :]:
            shutil.rmtree(directory, ignore_errors=True)


def saved_steps(directory: str) -> list[tuple[int, str]]:
    """List the checkpoints of a series, newest first: (steps done, directory).

    Raises `DiagnosticError` RT002 where the directory cannot be read.
    """
    try:
        names = [entry.name for entry in Path(directory).iterdir()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fail("RT002", f"cannot read the checkpoint '{directory}': {reason}", help=help_for(error))
    # `.replaced-step-N` sorts before `step-N`, which therefore overwrites it where both exist.
    place_of = {name.removeprefix(_REPLACED): name for name in sorted(names)}
    steps = [
        (int(match[1]), str(Path(directory) / place))
        for name, place in place_of.items()
        if (match := _NAME.fullmatch(name))
    ]
    return sorted(steps, reverse=True)


def what_is_left(directory: str, done: int) -> str:
    """Say which state a run that was lost after `done` steps has saved, how many steps are lost, and how to go on."""
    saved: list[tuple[int, str]] = []
    with suppress(DiagnosticError):
        saved = saved_steps(directory)
    if not saved:
        return f"nothing was saved: {done} steps are lost; --save-every N saves after every N steps"
    kept = saved[0][0]
    lost, again = max(0, done - kept), f"--resume {quote(directory)}"
    return f"the state after {number_of(kept, 'step')} is saved, steps since and lost: {lost}; {again} goes on"


def check_no_series(directory: str) -> None:
    """Refuse, with RT092, a directory with a series of checkpoints as the place of a single one."""
    if is_directory(directory) and saved_steps(directory):
        text = f"'{directory}' holds a series of checkpoints, and a single one would replace it as a whole"
        fail("RT092", text, help="add --save-every N to go on with the series, or save to another directory")


@frozen(eq=False)
class Loaded:
    """Loaded checkpoint, the record of its run, and the problems of newer ones in its series."""

    directory: str
    state: TrainingState
    run: dict[str, Any]
    warnings: list[Diagnostic]
    model: ModelConfig
    damaged: tuple[str, ...] = ()
    """directories of newer checkpoints that are not sound"""
    companions: Mapping[str, bytes] = field(factory=dict)
    """files that accompany its model's weights"""


def load_latest(directory: str, model: ModelConfig, processes: Processes) -> Loaded:
    """Load the checkpoint in a directory, of either format, or the newest sound one of a series there.

    Raises `DiagnosticError` RT002 or RT092 on all processes: no checkpoint is there, or none that is sound.
    """
    steps: list[tuple[int, str]] = []
    warnings: list[Diagnostic] = []
    if not is_there(Path(directory) / MANIFEST_FILE):
        # All processes take the list of process 0: they must try the same candidates in the same order.
        steps, warnings = processes.exchange(processes.together(lambda: _candidates(directory)))[0]
    if not steps:
        return _load(directory, model, processes)
    for index, (_, candidate) in enumerate(steps):
        try:
            loaded = _load(candidate, model, processes)
        except DiagnosticError as error:
            if index + 1 == len(steps):
                raise
            following = Path(steps[index + 1][1]).name
            warnings += [
                evolve(problem, severity=Severity.WARNING, help=f"using the one before it, {following}")
                for problem in error.diagnostics
            ]
            continue
        return evolve(loaded, warnings=list(warnings), damaged=tuple(path for _, path in steps[:index]))
    raise AssertionError  # the last candidate is loaded or raises


def _candidates(directory: str) -> tuple[list[tuple[int, str]], list[Diagnostic]]:
    """List the checkpoints of a series, newest first; or those an interrupted save left, with a warning."""
    left = left_checkpoints(directory)
    if not left:
        return saved_steps(directory), []
    text = f"'{directory}' is not there: an interrupted save left a whole checkpoint as '{left[0][1]}', which is used"
    return left, [Diagnostic("RT092", text, severity=Severity.WARNING)]


def _load(directory: str, model: ModelConfig, processes: Processes) -> Loaded:
    """Load one checkpoint of either format on all processes; each checks a share of the files."""
    share = (processes.number, processes.count)

    def load() -> tuple[TrainingState, dict[str, Any]]:
        version = read_manifest(directory, (VERSION, SHARDED_VERSION)).get("version")
        return load_checkpoint(directory, model) if version == VERSION else load_shards(directory, model, share=share)

    state, run = processes.together(load)
    manifest = read_manifest(directory, (VERSION, SHARDED_VERSION))
    companions = processes.together(lambda: _companions_of(directory, manifest))
    return Loaded(directory, state, run, [], saved_model(directory, manifest), companions=companions)


def latest_weights(directory: str) -> tuple[ModelConfig, WeightSource]:
    """Return model and master weights of the checkpoint in a directory, of either format, or of a series' newest.

    Raises RT002 (cannot be read) and RT092 as loading does.
    """
    place, manifest = _latest(directory)
    return checkpoint_weights(place) if manifest["version"] == VERSION else shard_weights(place)


def latest_run(directory: str) -> Mapping[str, Any]:
    """Return the record of the run whose weights `latest_weights` returns; empty where it has none.

    Raises RT002 (cannot be read) and RT092.
    """
    run = _latest(directory)[1].get("run")
    return run if isinstance(run, dict) else {}


def latest_biases(directory: str) -> dict[Block, Float32]:
    """Return the biases with which the routers of these weights choose, by block; empty where they choose without.

    Raises RT002 (cannot be read) and RT092.
    """
    place, manifest = _latest(directory)
    return read_biases(place, manifest, saved_model(place, manifest))


def latest_step(directory: str) -> int:
    """Return the steps done of the checkpoint that `latest_weights` reads. Raises RT002 (cannot be read) and RT092."""
    step = _latest(directory)[1].get("step")
    return step if isinstance(step, int) else 0


def latest_companions(directory: str) -> dict[str, bytes]:
    """Return the companions of the weights that `latest_weights` returns, by file name.

    A run whose tokens were bytes gets a tokenizer of bytes. Raises RT002 (cannot be read) and RT092.
    """
    place, manifest = _latest(directory)
    companions = _companions_of(place, manifest)
    reads_bytes = facts_of(manifest.get("run")).get("token") == BYTE
    if reads_bytes and TOKENIZER_FILE not in companions:
        holds_bytes = saved_model(place, manifest).vocab_size >= TEXT_VOCABULARY
        return replaced_companions(companions, byte_tokenizer_files()) if holds_bytes else companions
    return companions


def _companions_of(place: str, manifest: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: read_companion(Path(place), name) for name in kept_companions(place, manifest)}


def kept_tokenizer(directory: str) -> tuple[str, str] | None:
    """Return the tokenizer that made a run's tokens: the file in its checkpoint, and the name the run called it by.

    None if tokens were not made by a tokenizer, or if the checkpoint is not sound (loading it says why).
    """
    try:
        place, manifest = _latest(directory)
        name = facts_of(manifest.get("run")).get("tokenizer")
        kept = kept_companions(place, manifest)
    except DiagnosticError:
        return None
    return (str(Path(place) / TOKENIZER_FILE), name) if isinstance(name, str) and TOKENIZER_FILE in kept else None


def facts_of(run: object) -> Mapping[str, Any]:
    """Return a run's record of its data; empty where it is absent or incomplete, as in older checkpoints."""
    facts = run.get("stream") if isinstance(run, dict) else None
    texts = ("name", "part", "token")
    if not isinstance(facts, dict) or not isinstance(facts.get("tokens"), int):
        return {}
    return facts if all(isinstance(facts.get(name), str) for name in texts) else {}


def _latest(directory: str) -> tuple[str, dict[str, Any]]:
    """Return the directory and the manifest of the newest checkpoint."""
    place = directory
    if not is_there(Path(directory) / MANIFEST_FILE):
        place = next((newest for _, newest in _candidates(directory)[0]), directory)
    return place, read_manifest(place, (VERSION, SHARDED_VERSION))
