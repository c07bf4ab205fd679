"""The plan of a fine-tuning: from its data and the memory there is.

One process on this processor or a device, sequences of whole documents, and the first of these forms whose program
fits:

    bf16 where PyTorch multiplies it by this processor, else f32       frozen matrices as views
    bf16                                                               frozen matrices as views
    bf16                                                               frozen matrices in 4 bits

Defaults are those of published recipes: LoRA at 2e-4 with 3 % of warm-up (Dettmers et al., "QLoRA", 2023), whole models
at 2e-5 (Taori et al., "Alpaca", 2023, also its 3 epochs and 3 %), gradients clipped at 1 and betas 0.9, 0.999 as in
transformers' `TrainingArguments`; alpha twice the rank as in LLaMA-Factory's `lora_alpha`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.optimizer import Optimizer
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.quantised import NF4
from ratrain.ratrain_ir.config.training import AS_VIEWS, LORA, Training
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, fail, misuse
from ratrain.ratrain_ir.support.quantities import MIB, number_of
from ratrain.ratrainc.choices.finetune_choice import AUTO, CONSTANT
from ratrain.ratrainc.choices.kernel_choice import host_choice, with_kernels
from ratrain.ratrainc.compiling.building import compile as compiled
from ratrain.ratrainc.compiling.building import emit
from ratrain.ratrainc.console.console import status
from ratrain.ratrainc.console.extras import is_installed
from ratrain.targets.program.rtx import program_bytes
from ratrain.targets.runtime.arena.process_memory import resident_bytes, room
from ratrain.targets.runtime.arena.processor import cpu_flags
from ratrain.targets.runtime.data.packing import in_pieces, sequences_of
from ratrain.targets.runtime.engine.certificate import certificate
from ratrain.targets.runtime.engine.engine import load_kernels
from ratrain.targets.runtime.engine.first_use import compiles, first_use
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import HOST_DEVICE, default_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.choices.finetune_choice import FinetuneChoice
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import TokenStream
    from ratrain.targets.runtime.data.documents import Documents
    from ratrain.targets.runtime.settings import RunSettings

LONGEST = 2048
"""Most tokens of a sequence, where nobody says how many: longer documents are cut."""
PACKED = NF4
"""Storage of frozen matrices where memory asks for 4 bits."""
MACHINE = "cpu"
_ROUND = 64
_OF_LORA, _OF_WHOLE = 2e-4, 2e-5
_WARM_UP = 0.03
_SHARE_OF_MEMORY = 0.9
"""Part of this machine's memory that a run takes at most, if nobody says how much: the rest is for others."""
_FOR_TORCH = 1 << 30
"""Memory from which PyTorch multiplies: its libraries take some 250 MiB."""
_PREPARING = {"fast": 4 << 20}
"""Bytes by kernel set that a run takes between its plan and its arenas. Seen: 2.8 to 3.4 MiB beside the program."""
_PREPARING_TORCH = 16 << 20
"""As `_PREPARING`, of kernel sets that load PyTorch. Seen: 2.7 to 12.9 MiB."""
_PROGRAM = 4
"""Bytes that a program takes for each byte of its file, as a run reads it again. Seen: 3."""
_NOISE = 2
"""MiB by which two processes that do the same differ. Seen: 0.2."""
_TRIES = 4
_ENGINES = 8
"""Threads of engines that one rank has at most: one an engine."""


@frozen
class Amounts:
    """Sequences and steps of a fine-tuning."""

    seq_len: int
    sequences: int
    batch: int
    steps: int
    eval_every: int | None


def amounts(choice: FinetuneChoice, stream: TokenStream, held: TokenStream | None) -> Amounts:
    """Return lengths and counts from the documents of the data. Raises `DiagnosticError` RT090 if there are none."""
    schedule = choice.schedule
    longest = max(int(_lengths_of(_documents(each)).max()) for each in (stream, held) if each is not None)
    seq_len = schedule.seq_len or min(LONGEST, _ROUND * ceil(longest / _ROUND))
    pieces = _lengths_of(in_pieces(_documents(stream), seq_len))
    sequences = len(sequences_of(np.minimum(pieces, seq_len), seq_len))
    batch = min(schedule.batch, sequences)
    an_epoch = ceil(sequences / batch)
    steps = schedule.steps or max(1, ceil(schedule.epochs * an_epoch))
    every = choice.judging.every or max(1, an_epoch // 2)
    return Amounts(seq_len, sequences, batch, steps, min(every, steps) if held is not None else None)


def _documents(stream: TokenStream) -> Documents:
    if not len(stream.tokens):
        fail("RT090", f"'{stream.name}' has no token", help="name data that have some with --data or --eval-data")
    if stream.documents is None:
        text = f"'{stream.name}' does not say where its documents end"
        fail("RT090", text, help="fine-tune on JSONL, a document a line, or on texts, a document a file")
    return stream.documents


def _lengths_of(documents: Documents) -> NDArray[np.int64]:
    lengths = np.diff(documents.bounds)
    return lengths[lengths > 0]


def planned(model: ModelConfig, choice: FinetuneChoice, counts: Amounts, settings: RunSettings) -> Program:
    """Return the program of the first form that fits. Raises `DiagnosticError` with the reason of the last one."""
    problem: DiagnosticError | None = None
    most = choice.ram_bytes or int(_SHARE_OF_MEMORY * _room_of(choice.device))
    for plan in _plans(choice, counts):
        check_plan(plan, model)
        base = plan.training.base
        packed = "" if base == AS_VIEWS else f", its frozen matrices packed as {base}"
        with status(f"compiling it in {plan.view_dtype}{packed}"):
            try:
                return _fitting(model, plan, most, settings)
            except DiagnosticError as error:
                if any(each.code not in _FOR_MEMORY for each in error.diagnostics):
                    raise
                problem = error
    assert problem is not None
    (first, *_) = problem.diagnostics
    ways = [f"{first.help or '--ram with more'}, if this machine has it", "a shorter --seq-len"]
    if choice.adapting.whole:
        ways.append("--lora 16, which trains adapters alone")
    elif choice.adapting.base not in (AUTO, PACKED):
        ways.append(f"--base {PACKED}")
    text = f"{model.name} does not fit: {first.message}"
    raise DiagnosticError([Diagnostic("RT093", text, help=", or ".join(ways))])


_FOR_MEMORY = frozenset({"RT052", "RT053", "RT093"})
"""Codes of what does not fit a memory."""


def _plans(choice: FinetuneChoice, counts: Amounts) -> Iterator[Plan]:
    adapting = choice.adapting
    fast_bf16 = host_choice(Dtype.BF16, cpu_flags(), has_torch=is_installed("torch"))
    fast = choice.device != HOST_DEVICE or fast_bf16 is None or fast_bf16.name == "torch"
    fast = fast and not is_small(choice)
    usual = "bf16" if fast else "f32"
    dtypes = dict.fromkeys((usual, "bf16")) if choice.dtype == AUTO else (choice.dtype,)
    base = AS_VIEWS if adapting.whole or adapting.base == AUTO else adapting.base
    for dtype in dtypes:
        yield _plan(choice, counts, dtype, base)
    if adapting.base == AUTO and not adapting.whole:
        yield _plan(choice, counts, list(dtypes)[-1], PACKED)


def is_small(choice: FinetuneChoice) -> bool:
    """Tell whether the memory is so little that PyTorch's libraries are better left out of the process."""
    return choice.device == HOST_DEVICE and choice.ram_bytes is not None and choice.ram_bytes < _FOR_TORCH


def _plan(choice: FinetuneChoice, counts: Amounts, dtype: str, base: str) -> Plan:
    adapting, schedule = choice.adapting, choice.schedule
    training = Training()
    if not adapting.whole:
        rank, targets = adapting.rank, adapting.targets
        training = Training(LORA, rank=rank, alpha=adapting.scale, targets=targets, base=base)
    steps = counts.steps
    warm = ceil(_WARM_UP * steps) if schedule.warmup_steps is None else schedule.warmup_steps
    falls = schedule.decay_steps or 0
    if warm + falls > max(steps, 1 if schedule.warmup_steps is None and not falls else 0):
        parts = f"{warm} of warm-up" + (f" and {falls} of decay" if falls else "")
        misuse(
            f"{parts} do not fit into {number_of(steps, 'step')}: name fewer --warmup-steps or "
            f"--decay-steps, or more --steps"
        )
    optimizer = Optimizer(
        lr=schedule.lr or (_OF_WHOLE if adapting.whole else _OF_LORA),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        warmup_steps=warm,
        clip="global",
    )
    if schedule.decay != CONSTANT:
        total = max(steps, warm + 1)
        optimizer = evolve(optimizer, total_steps=total, decay=schedule.decay, decay_steps=schedule.decay_steps)
    elif schedule.decay_steps is not None:
        misuse("--decay-steps is for a rate that comes down: it does not go with --schedule constant")
    return Plan(
        pp=1,
        dp=1,
        cuts=(),
        micro_batch_size=1,
        micro_batches=counts.batch,
        seq_len=counts.seq_len,
        zero=0,
        view_dtype=dtype,
        grad_dtype="f32",
        grad_shard_dtype="f32",
        loss_scale=None if dtype == "f16" else 1.0,
        attention_mask="document",
        optimizer=optimizer,
        training=training,
        seed=choice.seed or 0,
    )


def _fitting(model: ModelConfig, plan: Plan, most: int, settings: RunSettings) -> Program:
    """Compile for what memory is left beside interpreter and libraries; with less, while a run would hold too much."""
    taken = _taken(settings.execution.device)
    capacity = most - taken
    held = 0
    for _ in range(_TRIES):
        if capacity <= 0:
            break
        program = emit(compiled(model, plan, machine=MACHINE, capacity=capacity), machine=MACHINE)
        held = held_bytes(program, settings)
        if held <= most:
            return program
        capacity = min(capacity, program.stages[0].arena_bytes) - (held - most)
    text = f"it holds {ceil(held / MIB)} MiB" if held else f"interpreter and libraries take {taken // MIB} MiB"
    enough = f"--ram {ceil(held / MIB) + _NOISE}MiB" if held and settings.execution.device == HOST_DEVICE else None
    raise DiagnosticError([Diagnostic("RT093", f"{text}, and may hold {most // MIB} MiB", help=enough)])


def _room_of(device: str) -> int:
    """Return the bytes of this machine's memory, or those that are free on a device."""
    return room()[0] if device == HOST_DEVICE else kernel_set(default_kernels(device), 1, device).memory.room()[0]


def _taken(device: str) -> int:
    """Return the bytes that interpreter and libraries hold in the memory that a run is planned for."""
    return (resident_bytes() or 0) if device == HOST_DEVICE else 0


def held_bytes(program: Program, settings: RunSettings) -> int:
    """Return the most bytes that a run of a program, with evaluations, holds in this process, or on its device.

    That is no less than what the run itself counts before its first step, and compares with --ram.
    """
    execution = with_kernels(program, settings, several=False).execution
    threads = execution.kernel_threads(1)
    kernels = kernel_set(execution.kernels, threads, execution.device)
    load_kernels(program, kernels)  # as an engine does before its constant is measured: it may compile a loop
    bound = certificate(program, kernels, evaluates=True, process_pool=execution.threads > 1)
    loading = first_use(
        program,
        kernels,
        scratch_bytes=bound.scratch_bytes,
        multiplying=threads,
        engines=_ENGINES,
        compiles=compiles(program, kernels),
        steps=settings.steps,
    )
    total = bound.total_bytes + _taken(execution.device) + sum(loading.values())
    if execution.device != HOST_DEVICE:
        return total
    return total + _PREPARING.get(kernels.name, _PREPARING_TORCH) + _PROGRAM * len(program_bytes(program))
