"""Preparation of a training run: lock the checkpoint's place; fill the engine from checkpoint, weights or at random."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity, fail
from ratrain.ratrain_ir.support.files import is_directory
from ratrain.ratrain_ir.support.quantities import MIB, mib_text
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint.checkpoint import (
    check_checkpoint_place,
    clear_leftovers,
    hold_checkpoint_place,
)
from ratrain.targets.runtime.checkpoint.checkpoint_room import check_room
from ratrain.targets.runtime.checkpoint.checkpoint_series import (
    RUN_FOLDER,
    CheckpointSeries,
    check_no_series,
    load_latest,
)
from ratrain.targets.runtime.checkpoint.manifest import (
    check_base,
    data_differences,
    differences,
    run_manifest,
    scale_that_starts_anew,
)
from ratrain.targets.runtime.checkpoint.overrides import overridden, overrides_of, resumed_overrides
from ratrain.targets.runtime.checkpoint.state import fill_frozen, start_from_state, start_from_weights
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.settings import AUTO_KERNELS, Saving
from ratrain.targets.runtime.training.best import Best
from ratrain.targets.runtime.training.training import TrainingRun
from ratrain.targets.runtime.watch.positions import RunFolder
from ratrain.targets.runtime.weights.adapter_files import read_adapter
from ratrain.targets.runtime.weights.adapters import with_adapters
from ratrain.targets.runtime.weights.companions import replaced_companions
from ratrain.targets.runtime.weights.weights import check_weights_config, other_padding, random_weights, read_weights

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.arena.locks import Lock
    from ratrain.targets.runtime.arena.process_memory import MemoryUse
    from ratrain.targets.runtime.engine.engine import ProgramEngine
    from ratrain.targets.runtime.engine.evaluation import HeldOut
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.settings import RunSettings, Start
    from ratrain.targets.runtime.training.utilisation import Utilisation
    from ratrain.targets.runtime.weights.weight_source import WeightSource


def prepare(
    program: Program,
    stream: TokenStream,
    settings: RunSettings,
    kernels: KernelSet,
    processes: Processes | None = None,
    *,
    held_out: HeldOut | None = None,
    utilisation: Utilisation | None = None,
    companions: Mapping[str, bytes] | None = None,
) -> TrainingRun:
    """Return a run whose engine is filled with its first state: from a checkpoint, from weights, or at random.

    `processes` are the run's processes; None: this one alone. `companions` are the files that accompany the weights, if
    known; they replace a checkpoint's. Places to be written are locked until the run is closed. Raises
    `DiagnosticError` when data, weights or checkpoint do not fit the program, or another run writes to the same place.
    """
    if settings.execution.kernels == AUTO_KERNELS:  # the caller has chosen
        settings = evolve(settings, execution=evolve(settings.execution, kernels=kernels.name))
    # The locks move to the run only at the end: if anything below fails, this context releases them.
    with ExitStack() as places:
        run = _begun(program, stream, settings, kernels, processes or Processes(), places)
        run.held_out, run.utilisation = held_out, utilisation
        if held_out is not None:
            run.engine.expect_evaluation()
            run.best = Best.noted(run.notes, held_out.batches.stream.digest)
        run.companions = replaced_companions(run.companions, companions or {})
        run.places.push(places.pop_all())
    return run


def _begun(
    program: Program,
    stream: TokenStream,
    settings: RunSettings,
    kernels: KernelSet,
    processes: Processes,
    places: ExitStack,
) -> TrainingRun:
    """Return the run with its engine filled and its ranks recording their positions."""
    series, lock, said = _open_place(settings.saving, processes, places)
    if series is None and settings.saving.directory is not None:
        said += _replaced(settings.saving.directory, settings.start.checkpoint)
    seed = program.plan.seed if settings.seed is None else settings.seed
    batches = Batches(stream, program.plan, settings.order, seed)
    start, execution = settings.start, settings.execution
    loaded = load_latest(start.checkpoint, program.trained_model, processes) if start.checkpoint is not None else None
    first_step = loaded.state.step if loaded is not None else 0
    # Refuse a run without labels before the engine allocates its arenas.
    batches.check_labels(first_step, first_step + settings.steps)
    if series is not None:
        series.check_start(processes, first_step, loaded.damaged if loaded else ())
        said += series.clear_leftovers(processes, lock)
    processes.first_only(lambda: check_room(program, settings, first_step, is_series=series is not None))
    if settings.saving.best is not None:
        of_best = Saving(settings.saving.best)
        said += _open_place(of_best, processes, places)[2]
        if settings.start.checkpoint is None:  # a run that goes on has made that one itself
            said += _replaced(settings.saving.best, None)
        check_room(program, evolve(settings, saving=of_best), first_step, is_series=False)
    optimizer = program.plan.optimizer
    if loaded is not None:
        overrides = resumed_overrides(optimizer, settings.optimizer, loaded.run, loaded.directory)
        program = overridden(program, overrides)
        now = run_manifest(program, stream, settings, seed, overrides)
        new_scale = scale_that_starts_anew(loaded.run.get("plan"), program.plan)
        check_base(start, loaded.run, now)
        changed = data_differences(start, loaded.run, now) + differences(loaded.run, now)
        warnings = said + loaded.warnings + changed + new_scale
        warnings += other_padding(f"the checkpoint '{loaded.directory}'", loaded.model, program.model, "RT092")
        program = _with_inert(program, loaded.model.inert)
        engine = _made_engine(processes, program, kernels, batches, settings)
        start_from_state(engine, loaded.state, keep_scale=not new_scale)
        if program.plan.training:
            fill_frozen(engine, first_weights(program, start, seed))
    else:
        overrides = overrides_of(optimizer, settings.optimizer)
        program = overridden(program, overrides)
        warnings = said
        if start.weights:
            inert, missing = check_weights_config(start.weights, program.model)
            warnings = said + missing
            program = _with_inert(program, inert)
        source = first_weights(program, start, seed)
        engine = _made_engine(processes, program, kernels, batches, settings)
        start_from_weights(engine, source)
    if execution.check_memory or execution.poison:
        engine.watch_memory(poison=execution.poison)
    if execution.graph:
        engine.capture_steps()
    run = TrainingRun(program, settings, engine, stream, first_step, warnings, processes, series)
    run.overrides = overrides
    if loaded is not None:
        run.companions = loaded.companions
        notes = loaded.run.get("notes")
        run.notes = dict(notes) if isinstance(notes, dict) else {}
    place = settings.watch.folder or (str(Path(series.directory) / RUN_FOLDER) if series else None)
    if place is None and processes.count > 1:
        place = processes.exchange(tempfile.mkdtemp(prefix="ratrain-") if processes.number == 0 else "")[0]
        run.folder_is_temporary = True
    if place is not None:
        run.folder = RunFolder(place)
    _leave_positions(run, run.folder, places)
    return run


def first_weights(program: Program, start: Start, seed: int) -> WeightSource:
    """Return the weights that a run begins with: of files, or drawn; and its adapters, of files or new ones."""
    source = read_weights(start.weights, program.model) if start.weights else random_weights(program.model, seed)
    given = None if start.adapter is None else read_adapter(start.adapter, program.trained_model)
    return with_adapters(source, program.trained_model, seed, given)


def _open_place(
    saving: Saving, processes: Processes, places: ExitStack
) -> tuple[CheckpointSeries | None, Lock | None, list[Diagnostic]]:
    """Lock the place of checkpoints and check that it can be written.

    Return the series (None for a single checkpoint), the lock (on process 0 only) and warnings. Raises
    `DiagnosticError` RT002 or RT092 on all processes.
    """
    directory = saving.directory
    if directory is None:
        return None, None, []
    is_series = saving.is_series(processes.count)
    locks: list[Lock] = []
    processes.first_only(
        lambda: locks.append(places.enter_context(hold_checkpoint_place(directory, make_parents=is_series)))
    )
    said = [lock.warning for lock in locks if lock.warning is not None]
    lock = locks[0] if locks else None
    if is_series:
        series = CheckpointSeries(directory, saving.keep_last)
        series.open(processes)
        return series, lock, said
    check_no_series(directory)
    check_checkpoint_place(directory)
    return None, lock, said + clear_leftovers(directory, locks[0])


def _replaced(directory: str, resumed: str | None) -> list[Diagnostic]:
    """Return a warning that a checkpoint which the run does not go on from will be replaced; none where there is none.

    Call it for the place of a single checkpoint, where only a checkpoint can be (`check_checkpoint_place`).
    """
    if not is_directory(directory) or not any(Path(directory).iterdir()):
        return []
    if resumed is not None and os.path.realpath(resumed) == os.path.realpath(directory):
        return []
    text = f"'{directory}' holds a checkpoint that this run does not go on from, and will replace when it saves"
    way_out = f"--resume {quote(directory)} goes on from it; another directory keeps it"
    return [Diagnostic("RT092", text, help=way_out, severity=Severity.WARNING)]


def _leave_positions(run: TrainingRun, folder: RunFolder | None, places: ExitStack) -> None:
    """Make the ranks of this process record their positions: in a folder, or in memory if `folder` is None.

    Raises `DiagnosticError` RT002 where they cannot, RT093 if another run uses the folder.
    """
    ranks = [rank for ranks in run.engine.ranks for rank in ranks]
    if folder is None:
        for number, rank in enumerate(ranks):
            rank.position = rank.new_position(None, number)
        return

    def begin() -> None:
        lock = places.enter_context(folder.hold())
        if lock.warning is not None:
            run.warnings.append(lock.warning)
        folder.clear()
        write_program(run.program, folder.program_path)

    run.processes.first_only(begin)
    try:
        for number, rank in enumerate(ranks, run.processes.started_as):
            folder.path.mkdir(exist_ok=True)  # on another machine it may not be there
            rank.position = rank.new_position(folder.path, number)
    except OSError as error:
        fail("RT002", f"cannot write '{folder.directory}': {error.strerror or error}")
    run.processes.exchange(None)  # a barrier: all files exist before any process reads the others'


def _made_engine(
    processes: Processes, program: Program, kernels: KernelSet, batches: Batches, settings: RunSettings
) -> ProgramEngine:
    """Create the engine and the stores of its other memories; check its memory against the limit."""
    execution = settings.execution
    engine = processes.make_engine(program, kernels, batches, execution.interleave_seed, execution.threads)
    engine.open_stores(Path(execution.store_folder) if execution.store_folder else None)
    engine.expect_steps(settings.steps)
    if execution.ram_bytes is not None:
        _check_ram(engine.memory_use(), execution.ram_bytes)
    return engine


def _check_ram(memory: MemoryUse, most: int) -> None:
    """Raise RT093 if a process is going to hold more bytes than it may."""
    planned = memory.planned_bytes or memory.certified_bytes
    if planned <= most:
        return
    others = planned - memory.certified_bytes
    text = (
        f"this run holds {mib_text(planned)} in memory, {mib_text(memory.arena_bytes)} of them arenas and "
        f"{mib_text(others)} what interpreter and libraries take: {mib_text(planned - most)} more than the "
        f"{mib_text(most)} of --ram"
    )
    enough = f"--ram {ceil(planned / MIB)}MiB"
    if most <= others:
        way_out = f"{enough} takes this program; what interpreter and libraries take alone, no plan makes less"
    else:
        way_out = (
            f"{enough}; or compile with zero = 3 and --passes '{_SMALLEST}' for a machine with a file_capacity "
            "(docs/memories.md)"
        )
    fail("RT093", text, help=way_out)


_SMALLEST = (
    "place-1f1b,offload-state{home=file},recompute{policy=full},bucket-grad-sync{bytes=1},schedule-update,"
    "insert-prefetch,allocate-ddr"
)
"""Pipeline whose programs hold least in memory."""


def _with_inert(program: Program, inert: Mapping[str, object]) -> Program:
    """Return the program with the inert keys of its model's `config.json`, completed from another config's."""
    if inert.keys() <= program.model.inert.keys():
        return program
    return evolve(program, model=evolve(program.model, inert={**inert, **program.model.inert}))
