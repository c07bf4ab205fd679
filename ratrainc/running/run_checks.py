"""Checks of a run's settings before any of its work, and defaults that depend on the program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.targets.runtime.settings import HOST_DEVICE, TENSOR_KERNELS, RunSettings, available_threads

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.run_choices import DataChoice, Outputs, Ranks
    from ratrain.targets.program.program import Program


LEAST_OPERATIONS = 2.5e8
"""Mean operations of a block from which parallel engines gain more than they cost.

An assumption: twice those of `examples/tiny.json`, for which they do not pay (docs/runtime.md). That is a few
milliseconds, compared with about one millisecond of the interpreter's work.
"""


def default_threads(program: Program) -> int:
    """Return the threads of a run that names no number: one a core, or one if blocks are small (`LEAST_OPERATIONS`)."""
    plan = program.plan
    blocks = sum(
        instruction.routine is not None for stage in program.stages for instruction in stage.streams[Engine.COMPUTE]
    )
    operations = trained_flops_per_token(program.model, plan) * plan.tokens_per_step
    small = operations < LEAST_OPERATIONS * blocks * plan.replicas * plan.tp
    return 1 if small else available_threads()


def for_program(program: Program, settings: RunSettings, ranks: Ranks, threads: int | None) -> RunSettings:
    """Fill in the settings that depend on the program: threads, if none are given, and the order of sums.

    Raises `DiagnosticError` if a folder for stored tensors is given but the program stores none in files.
    """
    start = settings.start
    if start.weights is not None and start.checkpoint is not None and not program.plan.training:
        misuse("--init and --resume exclude each other: a checkpoint holds its weights")
    if start.adapter is not None and not program.plan.training.adapts:
        misuse('--init-adapter is for a program that trains adapters: its plan says method = "lora"')
    if settings.execution.store_folder and not any(stage.bytes_in(Home.FILE) for stage in program.stages):
        misuse("--scratch says where files of stored tensors are: this program stores nothing in a file")
    sums = "rank order" if ranks.reduction == "ordered" else ranks.engine
    most = default_threads(program) if settings.execution.device == HOST_DEVICE else 1
    return evolve(settings, execution=evolve(settings.execution, threads=threads or most, sums=sums))


def refuse_contradictions(
    settings: RunSettings, data: DataChoice, ranks: Ranks, threads: int | None, outputs: Outputs
) -> None:
    """Raise `DiagnosticError` for settings that contradict each other, or that would change nothing."""
    start, saving, evaluation = settings.start, settings.saving, settings.evaluation
    if start.adapter is not None and start.checkpoint is not None:
        misuse("--init-adapter and --resume exclude each other: a checkpoint holds its adapters")
    if start.new_data and start.checkpoint is None:
        misuse("--new-data is for going on from a checkpoint: --resume is missing")
    if settings.seed is not None and start.weights is not None and settings.order == "sequential":
        misuse(
            "--seed changes nothing: weights come from --init, and data in its order (--order sequential); leave it out"
        )
    interleaved = settings.execution.interleave_seed is not None
    if ranks.engine != "local" and interleaved:
        misuse("--interleave is for the local engine: over processes the order is that of the machine")
    if saving.directory is None and saving.every is not None:
        misuse("--save-every needs a place: add --save DIR")
    if data.pack == "whole" and settings.order == "documents":
        misuse("--order documents cuts documents where sequences end, and --pack whole does not: leave one of them out")
    if evaluation.every is None and evaluation.patience is not None:
        misuse("--patience counts evaluations: add --eval-every N")
    if saving.best is not None and evaluation.every is None:
        misuse("--save-best saves after the best evaluation: add --eval-every N")
    if saving.best is not None and ranks.engine != "local":
        misuse("--save-best is for ranks in one process: it does not go with --engine mpi or torch")
    if saving.best is not None and saving.directory is not None and _same(saving.best, saving.directory):
        misuse("--save-best and --save are one directory: the last state would replace the best")
    if evaluation.every is None and (evaluation.paths or evaluation.batches is not None):
        misuse("--eval-data and --eval-batches need --eval-every N: it says after how many steps to evaluate")
    if ranks.engine == "mpi" and (
        settings.execution.device != HOST_DEVICE or settings.execution.kernels in TENSOR_KERNELS
    ):
        misuse("ranks over MPI send from arrays of this processor: arenas of tensors are for --engine local and torch")
    if ranks.engine == "torch" and settings.execution.device not in (HOST_DEVICE, "cuda"):
        misuse(
            f"--engine torch gives each process the GPU of its LOCAL_RANK: say --device cuda, not "
            f"{settings.execution.device}"
        )
    if settings.execution.device != HOST_DEVICE:
        if threads is not None and threads > 1:
            misuse("--threads are of this processor: on a device, engines run side by side as its streams")
        if settings.execution.check_memory or settings.execution.poison:
            misuse("--check-memory and --poison watch instructions end one by one: they go with --device cpu")
    if interleaved and threads is not None and threads > 1:
        misuse("--interleave takes instructions one by one: it does not go with --threads above 1")
    _refuse_trackers_in_the_way(settings, outputs, ranks)
    if settings.execution.graph:
        _refuse_with_graph(settings, outputs)


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _refuse_with_graph(settings: RunSettings, outputs: Outputs) -> None:
    """Raise `DiagnosticError` for settings that a recorded and repeated step (`--graph`) cannot have."""
    if settings.execution.device == HOST_DEVICE:
        misuse("--graph records what a device does: it goes with --device cuda")
    if settings.execution.interleave_seed is not None:
        misuse("--interleave draws another order in every step, and --graph repeats that of one: leave one of them out")
    if outputs.profile is not None:
        misuse("--profile times single instructions, and --graph replays a whole step: leave one of them out")


def _refuse_trackers_in_the_way(settings: RunSettings, outputs: Outputs, ranks: Ranks) -> None:
    """Raise `DiagnosticError` for a tracker that is named twice, or whose folder a checkpoint would replace."""
    kinds = [choice.kind for choice in outputs.trackers]
    for kind in kinds:
        if kinds.count(kind) > 1:
            misuse(f"--log-to {kind} is given {kinds.count(kind)} times: a run has one of each")
    saved = settings.saving.directory
    for choice in outputs.trackers:
        if saved is None or choice.kind != "tensorboard" or choice.place is None:
            continue
        folder, checkpoint = Path(os.path.realpath(choice.place)), Path(os.path.realpath(saved))
        is_series = settings.saving.every is not None or ranks.engine != "local"
        if folder == checkpoint or (checkpoint in folder.parents and not is_series):
            misuse(
                f"--log-to {choice} is in the place of the checkpoint, --save {saved}, and would be replaced with it"
            )
