"""Checkpoints: the whole state of a training run on disk, independent of how it is spread over stages and replicas.

A checkpoint is a directory of these files:

- `state.safetensors`: the master weights `p/NAME` and Adam's moments `m1/NAME` and `m2/NAME` of every parameter, in
  f32, by Hugging Face name. A tied matrix is stored once (`state_file`).
- companions of the model's weights (`companions`): its tokenizer and generation settings, if they are known;
- `manifest.json`: format and version, the model, the steps done, the loss scale, the updates applied to each block,
  biases of routers that choose with one, size and SHA-256 of the other files, the caller's record of the run, and a
  SHA-256 of all this.

It is written in this order, so that a half-written directory is never taken for a checkpoint:

    DIR.tmp-XXXXXXXX/: state file, synced -> companions, synced -> manifest, synced -> directory synced
    exchanged with DIR in one step -> parent directory synced -> old checkpoint removed

The manifest comes last: a directory without a complete one is no checkpoint. A killed save leaves its directory next to
`DIR`, where the next save finds it (`checkpoint_places`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import evolve, fields

from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.plan_keys import table_of
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.model.blocks import Block, has_experts, trained_blocks
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Severity, fail
from ratrain.ratrain_ir.support.files import made_directory, opened_regular
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena.locks import Lock, hold, lock_path
from ratrain.targets.runtime.arena.tensor_file import StoredTensor, open_tensors, write_tensors
from ratrain.targets.runtime.checkpoint.checkpoint_places import (
    Leftovers,
    aside_of,
    leftovers,
    move_into_place,
    sync_folder,
    temporary_directory,
)
from ratrain.targets.runtime.checkpoint.state_file import (
    STATE_FILE,
    StoredMasters,
    StoredStates,
    check_tensors,
    state_shapes,
    state_tensors,
)
from ratrain.targets.runtime.checkpoint.training_state import TrainingState
from ratrain.targets.runtime.weights.companions import COMPANION_FILES
from ratrain.targets.runtime.weights.weights import named_parameters

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.tensor_file import Float32
    from ratrain.targets.runtime.weights.weight_source import WeightSource

FORMAT = "ratrain-checkpoint"
VERSION = 1
MANIFEST_FILE = "manifest.json"
TRAINING_KEYS = table_of(Training)
_FILES = {STATE_FILE, MANIFEST_FILE, *COMPANION_FILES}
_COMPANIONS = "tokenizer"  # the manifest's key for all companions: the format fixes the name
_TRAINING = "training"  # the manifest's key for what trains, where that is not everything
_BIASES = "biases"  # the manifest's key for the biases of routers, where they choose with one
_DIGEST = "manifest_sha256"
_MAX_MANIFEST = 1 << 26  # bytes
_HASHED = 1 << 22  # bytes of a file hashed at a time
_MOST_BIAS = float(np.finfo(np.float32).max)
_MOST_COUNTED = 1 << 53  # steps or updates; exact as a double


def save_checkpoint(
    directory: str,
    model: ModelConfig,
    state: TrainingState,
    manifest: Mapping[str, Any],
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint to `directory`, replacing an earlier one; it keeps `manifest` (JSON data) and `companions`.

    At every moment `directory` is the old checkpoint or the new one. Where the system cannot exchange directories, it
    is absent between two renames, and both are then whole next to it. Leftovers of interrupted saves are removed at the
    end. Raises RT002 (cannot be written) and RT092 (something else is at that place, another run writes there, or the
    two copies of a tied matrix differ).
    """
    with hold_checkpoint_place(directory) as lock:
        check_checkpoint_place(directory)
        try:
            target = Path(os.path.realpath(directory))
            temporary = temporary_directory(target)
            try:
                _write_files(temporary, model, state, manifest, companions or {})
                move_into_place(temporary, target, aside_of(temporary))
            # Ctrl-C too: leave no half-written directory if the process can still remove it.
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            cannot_write(directory, error)
        clear_leftovers(directory, lock)


def hold_checkpoint_place(directory: str, *, make_parents: bool = False) -> Lock:
    """Lock the place of a checkpoint or of a series; the lock file stands in the parent directory.

    `make_parents` creates the parents first. Raises RT002 (no such path) and RT092 (another process writes there).
    """
    _check_path(directory)
    if make_parents:
        made_directory(os.path.dirname(os.path.realpath(directory)))  # noqa: PTH120 - of the real path
    return hold(lock_path(directory), "RT092", directory)


def clear_leftovers(directory: str, lock: Lock) -> list[Diagnostic]:
    """Remove the leftovers of interrupted saves next to a checkpoint, and return a warning for each.

    They are removed only under a lock, which proves that nobody is writing there. While no checkpoint stands at the
    place itself, a leftover that may be a whole one is kept; the next save removes it.
    """
    leftovers = _leftovers(directory)
    try:
        read_manifest(directory)
        stands = True
    except DiagnosticError:
        stands = False
    said = []
    for path in leftovers.ours:
        if not stands and is_sealed(path):
            said.append(_left(path, "kept until a checkpoint stands in its place"))
            continue
        if lock.is_held:
            shutil.rmtree(path, ignore_errors=True)
        is_gone = not path.exists()
        said.append(_left(path, "removed" if is_gone else "remove it, if no run writes there"))
    return said + [_left(path, "remove it, if you do not want it" if stands else "kept") for path in leftovers.earlier]


def is_sealed(folder: Path) -> bool:
    """Return True if a directory may be a whole checkpoint of any version, or cannot be read.

    The manifest is written last, so a directory whose manifest ends as JSON does is complete.
    """
    try:
        data = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return data.rstrip().endswith(b"}")


def _left(path: Path, what: str) -> Diagnostic:
    return Diagnostic("RT092", f"an interrupted save left '{path}': {what}", severity=Severity.WARNING)


def _leftovers(directory: str) -> Leftovers:
    try:
        return leftovers(Path(os.path.realpath(directory)), _FILES)
    except (OSError, ValueError):
        return Leftovers((), ())


def left_checkpoints(directory: str) -> list[tuple[int, str]]:
    """List whole checkpoints left by interrupted saves next to an absent place: (steps done, directory), newest first.

    Empty if `directory` exists.
    """
    if os.path.exists(directory):  # noqa: PTH110 - False, not an error, for what is no path at all
        return []
    checkpoints = []
    for path in _leftovers(directory).paths:
        with suppress(DiagnosticError):
            step = read_manifest(str(path)).get("step")
            if isinstance(step, int):
                checkpoints.append((step, str(path)))
    return sorted(checkpoints, key=lambda each: each[0], reverse=True)


def left_over(directory: str) -> list[Path]:
    """Return the directories that interrupted saves left next to a checkpoint's place, whole or not."""
    return list(_leftovers(directory).ours)


def _check_path(directory: str) -> None:
    if "\0" in directory:
        fail("RT002", f"cannot write the checkpoint {shown(directory)}: no path has a zero byte")


def check_checkpoint_place(directory: str) -> None:
    """Refuse a directory that holds anything but a checkpoint, because saving replaces it as a whole.

    Call it before the first step, so that a wrong place costs no training. Raises RT092, and RT002 where nothing can be
    written.
    """
    _check_path(directory)
    place = Path(directory)
    try:
        foreign: list[str] | None = []
        if place.exists():
            is_folder = place.is_dir()
            foreign = [entry.name for entry in place.iterdir() if entry.name not in _FILES] if is_folder else None
    except OSError as error:
        cannot_write(directory, error)
    help_text = "a checkpoint replaces a directory as a whole: name a new one, or an earlier checkpoint"
    if foreign is None:
        fail("RT092", f"'{directory}' is a file, not the directory of a checkpoint", help=help_text)
    if foreign:
        fail("RT092", f"'{directory}' holds {shown(min(foreign))}, which is no part of a checkpoint", help=help_text)
    if os.path.ismount(place):
        fail("RT092", f"'{directory}' is the root of a file system, and cannot be replaced", help=help_text)
    try:
        target = Path(os.path.realpath(directory))
        # A trial: the save itself begins by making this directory.
        temporary_directory(target).rmdir()
    except OSError as error:
        cannot_write(directory, error)
    # `realpath` resolves every link but one in a circle.
    if target.is_symlink():
        cannot_write(directory, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))


def load_checkpoint(directory: str, model: ModelConfig) -> tuple[TrainingState, dict[str, Any]]:
    """Open a checkpoint; return its state and what the caller of `save_checkpoint` recorded.

    Tensors are read from the file when they are used. Raises RT002 (cannot be read) and RT092: not a checkpoint, of
    another version, changed or damaged, of another model.
    """
    manifest = read_manifest(directory)
    step, scale, updates, run = read_counts(directory, manifest, model)
    stored, biases = _open_state(directory, manifest, model), read_biases(directory, manifest, model)
    return TrainingState(step, StoredStates(model, stored, updates), scale, biases), run


def checkpoint_weights(directory: str) -> tuple[ModelConfig, WeightSource]:
    """Open a checkpoint; return its model and its master weights.

    Raises RT002 (cannot be read) and RT092 as `load_checkpoint` does.
    """
    manifest = read_manifest(directory)
    model = saved_model(directory, manifest)
    stored = _open_state(directory, manifest, model)
    return model, StoredMasters(named_parameters(model), stored)


# Writing


def cannot_write(directory: str, error: OSError) -> NoReturn:
    """Refuse with RT002: the checkpoint cannot be written."""
    fail("RT002", f"cannot write the checkpoint '{directory}': {error.strerror or error}")


class HashingStream:
    """File that keeps the size and SHA-256 of the bytes written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Write one-dimensional `data`; add it to size and hash."""
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        self._stream.write(data)


def _write_files(
    folder: Path, model: ModelConfig, state: TrainingState, run: Mapping[str, Any], companions: Mapping[str, bytes]
) -> None:
    """Write the files of a checkpoint; all are on disk when this returns."""
    with (folder / STATE_FILE).open("xb") as stream:
        hashing = HashingStream(stream)
        updates: dict[str, int] = {}
        write_tensors(hashing, state_shapes(model), state_tensors(model, state, updates), {"format": FORMAT})
        sync_file(stream)
    # `updates` is filled as a side effect of `state_tensors`, so it is complete only here.
    files = {STATE_FILE: {"bytes": hashing.size, "sha256": hashing.sha256.hexdigest()}}
    biases = {str(owner): bias.tolist() for owner, bias in state.biases.items()}
    rest = {"updates": updates, **biases_entry(biases), "files": files, "run": dict(run)}
    write_manifest(folder, VERSION, model, state.step, state.scale, rest, companions)


def biases_entry(biases: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the manifest's entry of the biases of routers, by block; nothing where they choose without."""
    return {_BIASES: {owner: list(bias) for owner, bias in biases.items()}} if biases else {}


def write_manifest(
    folder: Path,
    version: int,
    model: ModelConfig,
    step: int,
    scale: tuple[float, float],
    rest: Mapping[str, Any],
    companions: Mapping[str, bytes],
) -> None:
    """Write the companions, then the manifest, and sync all to disk: from then on the folder is a checkpoint.

    `rest` has the entries that differ between formats (updates, files, run). Raises OSError.
    """
    for name, content in companions.items():
        with (folder / name).open("xb") as stream:
            stream.write(content)
            sync_file(stream)
    entries = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in companions.items()
    }
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "model": model.to_fields(),
        **({_TRAINING: TRAINING_KEYS.header(model.training)} if model.training else {}),
        "step": int(step),
        "scale": [float(value) for value in scale],
        **({_COMPANIONS: entries} if entries else {}),
        **rest,
    }
    # The digest must be of the manifest as it will be read: through JSON, keys that are not text become text.
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
    manifest[_DIGEST] = manifest_digest(manifest)
    with (folder / MANIFEST_FILE).open("xb") as stream:
        stream.write(json.dumps(manifest, indent=1).encode() + b"\n")
        sync_file(stream)
    # The umask can only be read by setting it.
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)  # a temporary directory lets only its owner in
    sync_folder(folder)


def sync_file(stream: IO[bytes]) -> None:
    """Flush a file's bytes to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


# Reading


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest in one canonical form, without the entry that holds it."""
    rest = {key: value for key, value in manifest.items() if key != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def contradicts(directory: str, key: str) -> NoReturn:
    """Refuse with RT092 a manifest whose entry `key` is impossible."""
    fail("RT092", f"the manifest of the checkpoint '{directory}' has no sound entry '{key}'")


def read_manifest(directory: str, versions: Sequence[int] = (VERSION,)) -> dict[str, Any]:
    """Read the manifest of a checkpoint of one of these format versions.

    Raises RT002 (cannot be read) and RT092: not a manifest, of another version, changed or damaged.
    """
    path = Path(directory) / MANIFEST_FILE
    try:
        with opened_regular(path) as stream:
            data = stream.read(_MAX_MANIFEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fail("RT002", f"cannot read the checkpoint '{directory}': {path.name}: {reason}", help=_left_behind(directory))
    try:
        manifest = json.loads(data) if len(data) <= _MAX_MANIFEST else None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            fail("RT092", f"'{path}' is not the manifest of a checkpoint")
        if manifest.get("version") not in versions:
            version, known = shown(manifest.get("version")), " and ".join(map(str, versions))
            fail("RT092", f"the checkpoint '{directory}' has format version {version}; this program reads {known}")
        if manifest.get(_DIGEST) != manifest_digest(manifest):
            fail("RT092", f"'{path}' was changed or damaged after it was written: its SHA-256 does not match")
    except (ValueError, RecursionError):
        fail("RT092", f"'{path}' is no JSON: it is damaged, or not the manifest of a checkpoint")
    return manifest


def _left_behind(directory: str) -> str | None:
    """Return advice if an interrupted save left a checkpoint next to its place, or if no save was made; else None."""
    whole = left_checkpoints(directory)
    if whole:
        return f"an interrupted save left a whole checkpoint as '{whole[0][1]}': rename that one"
    nothing = Path(directory).is_dir() and not Path(directory, MANIFEST_FILE).exists()
    return "a run that ends before its first save leaves no checkpoint: begin without --resume" if nothing else None


def saved_model(directory: str, manifest: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a manifest describes, with what trains of it. Raises RT092 where it describes none."""
    saved = manifest.get("model")
    try:
        model = model_from_fields(saved) if isinstance(saved, dict) else None
    except DiagnosticError:
        model = None
    if model is None:
        contradicts(directory, "model")
    return evolve(model, training=_saved_training(directory, manifest.get(_TRAINING, {})))


def _saved_training(directory: str, saved: object) -> Training:
    """Return what trains, from a manifest's entry; raise RT092 where that does not say it."""
    report = Report()
    if isinstance(saved, dict):
        reader = FieldReader(saved, report, "RT092")
        reader.refuse_unknown(TRAINING_KEYS.keys)
        training = TRAINING_KEYS.read(reader)
        if not report.diagnostics.errors:
            return training
    contradicts(directory, _TRAINING)


def kept_companions(directory: str, manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the companions in a checkpoint, after checking size and SHA-256 of each.

    Raises RT002 (cannot be read) and RT092.
    """
    entries = manifest.get(_COMPANIONS, {})
    if not isinstance(entries, dict) or not entries.keys() <= set(COMPANION_FILES):
        contradicts(directory, _COMPANIONS)
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            contradicts(directory, _COMPANIONS)
        check_content(str(Path(directory) / name), entry)
    return list(entries)


def _check_model(directory: str, manifest: Mapping[str, Any], model: ModelConfig) -> None:
    """Refuse, with RT092, a checkpoint of another model.

    Name, initializer range, padding token and inert keys may differ: the weights do not depend on them any more.
    """
    kept = saved_model(directory, manifest)
    report = Diagnostics()
    apart = {"name", "initializer_range", "padding_token", "inert", "training"}
    if kept.training != model.training:
        then, now = (each.training.words for each in (kept, model))
        report.error(
            "RT092", f"the checkpoint '{directory}' was of a run that trains {then}; this program trains {now}"
        )
    for name in (attribute.name for attribute in fields(ModelConfig) if attribute.name not in apart):
        have, want = getattr(kept, name), getattr(model, name)
        if have != want:
            report.error("RT092", f"the checkpoint '{directory}' has {name} = {shown(have)}, the model {shown(want)}")
    report.check()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_COUNTED


def read_counts(
    directory: str, manifest: Mapping[str, Any], model: ModelConfig
) -> tuple[int, tuple[float, float], dict[str, int], dict[str, Any]]:
    """Return steps done, loss scale [factor, steps since it changed], updates by block, and the caller's record.

    Raises RT092, also for a checkpoint of another model.
    """
    _check_model(directory, manifest, model)
    step, scale, updates, run = map(manifest.get, ("step", "scale", "updates", "run"))
    if not isinstance(step, int) or not _is_count(step):
        contradicts(directory, "step")
    if not isinstance(scale, list) or len(scale) != 2 or not all(type(value) is float for value in scale):
        contradicts(directory, "scale")
    blocks = [str(owner) for owner in trained_blocks(model)]
    if not isinstance(updates, dict) or sorted(updates) != sorted(blocks) or not all(map(_is_count, updates.values())):
        contradicts(directory, "updates")
    if not isinstance(run, dict):
        contradicts(directory, "run")
    return step, (scale[0], scale[1]), updates, run


def read_biases(directory: str, manifest: Mapping[str, Any], model: ModelConfig) -> dict[Block, Float32]:
    """Return the biases with which a checkpoint's routers choose, by block; empty where they choose without.

    Raises RT092 where the entry is not sound.
    """
    entry = manifest.get(_BIASES, {})
    mlps = {str(owner): owner for owner in trained_blocks(model) if has_experts(model, owner)}
    if not isinstance(entry, dict) or (entry and entry.keys() != mlps.keys()):
        contradicts(directory, _BIASES)
    for values in entry.values():
        numbers = isinstance(values, list) and all(type(each) is float and abs(each) <= _MOST_BIAS for each in values)
        if not numbers or len(values) != model.experts:
            contradicts(directory, _BIASES)
    return {mlps[name]: np.array(values, np.float32) for name, values in entry.items()}


def _open_state(directory: str, manifest: Mapping[str, Any], model: ModelConfig) -> dict[str, StoredTensor]:
    """Open the state file, after checking that it is the one written and has the model's tensors."""
    state_file = str(Path(directory) / STATE_FILE)
    _check_file(directory, state_file, manifest.get("files"))
    stored = open_tensors(state_file, "RT092")
    check_tensors(state_file, model, stored)
    return stored


def _check_file(directory: str, path: str, files: object) -> None:
    """Check the state file's size and SHA-256 against the manifest."""
    entry = files.get(STATE_FILE) if isinstance(files, dict) else None
    if not isinstance(entry, dict):
        contradicts(directory, "files")
    check_content(path, entry)


def check_content(path: str, entry: Mapping[str, Any]) -> None:
    """Check a file's size and SHA-256 against its entry in a manifest.

    Raises RT002 (cannot be read) and RT092.
    """
    sha256 = hashlib.sha256()
    size = 0
    try:
        with opened_regular(path) as stream:
            while piece := stream.read(_HASHED):
                size += len(piece)
                sha256.update(piece)
    except OSError as error:
        fail("RT002", f"cannot read '{path}': {error.strerror or error}")
    if size != entry.get("bytes"):
        fail("RT092", f"'{path}' has {size} bytes, but {shown(entry.get('bytes'))} were written")
    if sha256.hexdigest() != entry.get("sha256"):
        fail("RT092", f"'{path}' was changed or damaged after it was written: its SHA-256 does not match")
