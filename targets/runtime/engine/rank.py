"""One rank: a stage of one replica (or one tensor-parallel rank's part), its arena, and its instructions bound to it.

The arena is allocated once, exactly as large as the program says. Every tensor is a view at its offset, so a wrong
offset becomes a wrong loss. Block ops are bound to kernels once, before the first step:

    instruction -> routine -> steps -> (kernel, {operand: view of the arena or workspace, option: value})

A tensor-parallel rank runs the same routines with two differences. Tables and logits are cut to the rows of its part of
the vocabulary, because the last rank's part is padded. Terms that must enter a sum over ranks once are added by rank 0
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.tensor_ranks import ADDED_ONCE, gradients_made_whole
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.topology import Rank
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import parse_reference
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.kernel_memory import HOST, Memory
from ratrain.targets.runtime.arena.process_memory import Traffic
from ratrain.targets.runtime.arena.stores import FileBytes, HostBytes, StoredArray, StoredBytes
from ratrain.targets.runtime.arena.streams import Issue
from ratrain.targets.runtime.kernels import KernelSet, OnChipKernels, Scratch
from ratrain.targets.runtime.watch.positions import PositionFile

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.types import Dtype
    from ratrain.targets.program.instruction import Instruction, ProgramTensor
    from ratrain.targets.program.program import Program, ProgramStage
    from ratrain.targets.program.routine import Reference, Routine, Step

DENOMINATOR = "denominator"
"""Option of kernels whose gradients belong to a mean over labels: the number of labels to divide by."""


_NOWHERE: NDArray[Any] = np.empty(0, np.uint8)
"""Stand-in for the view of a tensor that is in a file."""


class RankExecutor:
    """Rank that is ready to execute block ops."""

    def __init__(self, program: Program, stage: int, replica: int, memory: Memory = HOST, peer: int = 0) -> None:
        self.program = program
        self.memory = memory
        self.stage_index = stage
        self.replica = replica
        self.peer = peer
        """Number among the tensor-parallel ranks of its stage and replica."""
        self.stage: ProgramStage = program.stages[stage]
        self.arena: Any = memory.allocate(self.stage.arena_bytes)
        self.store_folder: Path | None = None
        """Folder of the files in which it stores; None: the system's folder for temporary files."""
        self.host = HostBytes(self.stage.bytes_in(Home.HOST), memory)
        """Tensors in host memory, which this process reaches as well."""
        self.views: list[NDArray[Any]] = [self._view(tensor) for tensor in self.stage.tensors]
        """View of every tensor, by number; empty for tensors in a file."""
        self.completed = dict.fromkeys(ENGINES, 0)
        """Instructions each engine has completed, over all steps."""
        self.position: PositionFile | None = None
        """Record of its progress, for readers outside the process."""

    def _view(self, tensor: ProgramTensor) -> NDArray[Any]:
        if tensor.home is Home.FILE:
            return _NOWHERE
        if tensor.home is Home.HOST:
            data = self.host.at(tensor.offset, tensor.type.nbytes)
        else:
            data = self.arena[tensor.offset : tensor.offset + tensor.type.nbytes]
        view: NDArray[Any] = self.memory.typed(data, tensor.type.dtype, tensor.type.shape)
        return view

    @property
    def vocabulary(self) -> range | None:
        """Range of words that this tensor-parallel rank has rows of tables for; None if it has all."""
        plan, words = self.program.plan, self.program.model.vocab_size
        if plan.tp == 1:
            return None
        length = -(-words // plan.tp)
        return range(min(self.peer * length, words), min((self.peer + 1) * length, words))

    def new_position(self, folder: Path | None, number: int) -> PositionFile:
        """Create the position file of this rank, number `number` of all; without a folder, in this process's memory.

        Raises OSError where it cannot be made.
        """
        ranks = self.program.topology.size
        return PositionFile(folder, self.place, number, ranks=ranks, completed=self.completed)

    @property
    def context(self) -> int:
        """Number among the context ranks that share its sequences."""
        return self.program.topology.in_context(self.replica)[1]

    @property
    def place(self) -> Rank:
        """Point in the mesh: stage, replica, tensor-parallel rank."""
        return Rank(self.stage_index, self.replica, self.peer)

    @property
    def lane(self) -> int:
        """Number among the ranks of its stage, in rank order."""
        return self.program.topology.lane(self.place)

    @property
    def name(self) -> str:
        """Name of the rank in messages."""
        return self.program.topology.name(self.place)

    def by_role(self, instruction: Instruction) -> dict[str, NDArray[Any]]:
        """Return views of an instruction's operands by role."""
        return {operand.role: self.views[operand.tensor] for operand in instruction.operands}

    def carried_by(self, instruction: Instruction) -> list[NDArray[Any]]:
        """Return views of a message's tensors, in the order in which they are sent."""
        return [self.views[operand.tensor] for operand in instruction.carried]

    def in_files(self, instruction: Instruction) -> dict[str, StoredArray]:
        """Return an instruction's operands that are in a file, by role."""
        tensors = self.stage.tensors
        return {o.role: self.in_file(o.tensor) for o in instruction.operands if tensors[o.tensor].home is Home.FILE}

    def in_file(self, number: int) -> StoredArray:
        """Return a tensor in a file, by its number."""
        held = self.stage.tensors[number]
        store = self.stores[Home.FILE]
        assert isinstance(store, FileBytes)
        return StoredArray(store, held.offset, held.type.dtype, held.type.elements)

    @cached_property
    def stores(self) -> dict[Home, StoredBytes]:
        """Other memories that it uses. Raises `DiagnosticError` RT093 where there is no room for them."""
        in_files = self.stage.bytes_in(Home.FILE)
        found: dict[Home, StoredBytes] = {Home.HOST: self.host}
        return {**found, Home.FILE: FileBytes(in_files, self.store_folder, self.memory)} if in_files else found

    @property
    def file_traffic(self) -> Traffic:
        """Bytes read from its files and written to them so far."""
        held = self.stores.get(Home.FILE)
        return held.traffic if isinstance(held, FileBytes) else Traffic()

    def copies(self, instruction: Instruction) -> list[tuple[int, int]]:
        """Return the copies of a store or fetch: (number of a tensor, number of its copy)."""
        sides = (
            [operand.tensor for operand in instruction.operands if operand.access is access]
            for access in (Access.READ, Access.WRITE)
        )
        return list(zip(*sides, strict=True))

    def poison(self, tensor: int, value: int) -> None:
        """Set all bytes of a tensor, in any memory, to a value."""
        held = self.stage.tensors[tensor]
        if held.home is Home.DDR:
            self.arena[held.offset : held.end] = value
        else:
            self.stores[held.home].fill(held.offset, held.end - held.offset, value)

    def carried(self, what: str, block: str = "") -> NDArray[Any]:
        """Return the view of a carried tensor by content and block: p, m1, m2, t or w of a block, `scale` of none.

        Empty if it is in a file. Raises KeyError if the stage carries no such tensor.
        """
        return self.views[self.stage.carried[what, block][0]]

    @property
    def loss_scale(self) -> tuple[float, float]:
        """Loss scale and steps since it last changed, the same on every rank between steps.

        A fixed one is the plan's: a stage that only goes forward has no tensor of it.
        """
        fixed = self.program.plan.loss_scale
        if fixed is not None:
            return fixed, 0.0
        values = self.carried("scale")
        return float(values[0]), float(values[1])

    def carried_pieces(self, what: str, block: str, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield elements [start, stop) of a carried tensor on the host, each piece with its first index.

        Pieces are read-only and valid until the next one is asked for.
        """
        number = self.stage.carried[what, block][0]
        if self.stage.tensors[number].home is Home.FILE:
            yield from self.in_file(number).pieces(start, stop)
        else:
            yield start, self.memory.to_host(self.views[number][start:stop])

    def write_carried(self, what: str, block: str, start: int, values: NDArray[Any]) -> None:
        """Write elements into a carried tensor from `start` on, and into all other tensors of the same content."""
        for number in self.stage.carried.get((what, block), ()):
            if self.stage.tensors[number].home is Home.FILE:
                self.in_file(number).write(start, self.memory.to_host(values))
            else:
                self.memory.copy(self.views[number][start : start + len(values)], values)

    def all_carried(self, what: str, block: str) -> list[NDArray[Any]]:
        """Return views of all carried tensors with this content (see `carried`); none if the stage carries none."""
        return [self.views[number] for number in self.stage.carried.get((what, block), ())]

    def computes_with(self, what: str, block: str) -> bool:
        """Tell whether the carried tensors with this content are in DDR, where kernels read and write them."""
        return all(self.stage.tensors[number].home is Home.DDR for number in self.stage.carried[what, block])

    def fill(self, what: str, block: str, values: Any) -> None:
        """Fill a carried tensor, and all others of the same content: with one number, or in DDR one per element."""
        for number in self.stage.carried[what, block]:
            if self.stage.tensors[number].home is Home.FILE:
                self.in_file(number).fill(values)
            else:
                self.memory.write(self.views[number], values)

    def head(self, engine: Engine) -> tuple[Instruction, int] | None:
        """Return the next instruction of an engine and its step; None if the engine's stream is empty."""
        stream = self.stage.streams[engine]
        if not stream:
            return None
        step, position = divmod(self.completed[engine], len(stream))
        return stream[position], step

    def is_ready(self, instruction: Instruction, step: int) -> bool:
        """Return True if everything that an instruction of a step waits for on this rank is complete."""
        return all(self.completed[engine] >= count for engine, count in self.awaited(instruction, step))

    def awaited(self, instruction: Instruction, step: int) -> Iterator[tuple[Engine, int]]:
        """Yield the waits of an instruction of a step: (engine, number of its instructions over all steps)."""
        for wait in instruction.waits:
            # Counts run over all steps: add those of earlier steps. A wait for the step before has no object in step 0.
            at = step - 1 if wait.previous_step else step
            if at >= 0:
                yield wait.engine, at * len(self.stage.streams[wait.engine]) + wait.count

    def issue(self, engine: Engine, instruction: Instruction) -> Issue:
        """Return the next instruction of an engine in the form that is handed to an `Order`."""
        number = self.completed[engine]
        step = number // len(self.stage.streams[engine])
        return Issue(self.place, engine, number, tuple(self.awaited(instruction, step)))


class BoundRoutine:
    """Kernel calls of a routine, bound to its operands."""

    def __init__(
        self, calls: list[tuple[Callable[..., None], dict[str, Any]]], scratch: Scratch, memory: Memory
    ) -> None:
        self._calls = calls
        self._scratch = scratch
        self._memory = memory
        self._denominators = [(arguments, arguments[DENOMINATOR]) for _, arguments in calls if DENOMINATOR in arguments]
        """Arguments of kernels that divide by a replica's labels in a step, with their number if all count."""
        self._left: dict[str, Any] | None = None
        """Arguments of the kernel that another routine runs too."""
        for arguments, whole in self._denominators:
            arguments[DENOMINATOR] = memory.number(whole)

    def __call__(self, *, alone: bool = False) -> None:
        """Run the kernels in their order; with `alone` also one that another routine runs after this one."""
        for kernel, arguments in self._calls:
            if arguments is self._left and not alone:
                continue
            # Nothing in scratch outlives a kernel: intermediates between kernels are in the workspace.
            self._scratch.reset()
            kernel(**arguments)

    def begin_at(self, position: int) -> None:
        """Let the first row of a later slice be the token at a position, in all steps that say where rows begin."""
        for _, arguments in self._calls:
            if "first_position" in arguments:
                arguments["first_position"] = position

    def arguments(self, kernel: str) -> dict[str, Any]:
        """Return the arguments of the first call of a kernel; none if the routine has no such call."""
        return next((arguments for call, arguments in self._calls if call.__name__ == kernel), {})

    def argument(self, kernel: str, name: str) -> Any:
        """Return an argument of the first call of a kernel; None if the routine has none."""
        arguments = self.arguments(kernel)
        return arguments[name] if arguments else None

    def leave(self, kernel: str) -> None:
        """Leave a kernel to another routine, except where this one is called alone."""
        self._left = self.arguments(kernel)

    def replace(self, kernel: str, call: Callable[..., None], **more: Any) -> None:
        """Call another kernel in place of one, with its arguments and more."""
        arguments = self.arguments(kernel)
        at = next(at for at, (_, found) in enumerate(self._calls) if found is arguments)
        arguments |= more  # in place: the number of labels is set in this very dictionary
        self._calls[at] = call, arguments

    def then(self, call: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Add a call behind the routine's kernels."""
        self._calls.append((call, arguments))

    def count_labels(self, counted: int, labels: int) -> None:
        """Divide gradients by the labels that count: `counted` of all `labels` of a step."""
        for arguments, whole in self._denominators:
            # `whole` labels is a replica's count if all count. Its own counted labels do not matter: the mean is over
            # the global batch.
            arguments[DENOMINATOR] = self._memory.number(whole * counted / labels, arguments[DENOMINATOR])


def bind_routine(rank: RankExecutor, instruction: Instruction, kernels: KernelSet, scratch: Scratch) -> BoundRoutine:
    """Bind the kernel calls of a block op to the rank's arena."""
    assert instruction.routine is not None
    routine = rank.program.routines[instruction.routine].on_rank(rank.context)
    return bind_steps(routine, rank.by_role(instruction), kernels, scratch, rank if rank.program.plan.tp > 1 else None)


def bind_steps(
    routine: Routine,
    operands: dict[str, NDArray[Any]],
    kernels: KernelSet,
    scratch: Scratch,
    peer: RankExecutor | None = None,
) -> BoundRoutine:
    """Bind the kernel calls of a routine to its operands by role; `workspace` has the bytes of its intermediates.

    For a tensor-parallel rank `peer`: tables have the rows of its vocabulary, and padding after them, of which only the
    gradient is cleared; head numbers are offset where all heads are numbered; and terms of a sum over ranks that must
    be added once are left out on all ranks but the first.
    """
    calls: list[_Call] = []
    for step in routine.steps:
        calls += _bind_step(routine, step, operands, kernels, scratch, peer)
    return BoundRoutine(calls, scratch, kernels.memory)


_Call: TypeAlias = tuple[Callable[..., None], dict[str, Any]]


def _bind_step(
    routine: Routine,
    step: Step,
    operands: dict[str, NDArray[Any]],
    kernels: KernelSet,
    scratch: Scratch,
    peer: RankExecutor | None,
) -> list[_Call]:
    """Return the kernel calls of one step with their arguments: usually one; see `bind_steps` for exceptions."""
    arguments: dict[str, Any] = {
        name: resolve(routine, reference, operands, kernels.memory) for name, reference in step.operands.items()
    }
    chosen = _set_for(step, kernels)
    # On ranks other than the first, operands that are added once are dropped where the kernel can do without them.
    # Otherwise the whole step is dropped; gradients that it would have set become zero.
    once = _added_once(step, peer) if peer is not None and peer.peer else {}
    if once:
        kernel = KERNELS[step.kernel]
        cleared = [arguments[name] for name in once.keys() & {*kernel.outputs} if not _adds_to(step, name)]
        if cleared or not all(once.values()):
            return [(chosen.zero, {"a": gradient, "scratch": scratch}) for gradient in cleared]
        arguments = {name: array for name, array in arguments.items() if name not in once}
    options = KERNELS[step.kernel].arguments({**step.options, **(_numbered_within(step, peer) if peer else {})})
    calls: list[_Call] = []
    if peer is not None and peer.vocabulary is not None and arguments.keys() & {"table", "dtable"}:
        # The cut rows of a table's gradient would otherwise keep old bytes, which the optimizer reads.
        padding = _without_padding(arguments, len(peer.vocabulary))
        if padding is not None and not options.get("accumulate"):
            calls.append((chosen.zero, {"a": padding, "scratch": scratch}))
    return [*calls, (getattr(chosen, step.kernel), {**arguments, **options, "scratch": scratch})]


def _numbered_within(step: Step, peer: RankExecutor) -> dict[str, int]:
    """Return the options of a step that count within this rank's heads or vocabulary.

    A padding token of another rank becomes a number outside the range of rows.
    """
    numbered = {}
    if "all_heads" in step.options:
        numbered["first_head"] = peer.peer * step.options["heads"]
    if "padding_token" in step.options and peer.vocabulary is not None:
        numbered["padding_token"] = step.options["padding_token"] - peer.vocabulary.start
    return numbered


def _added_once(step: Step, peer: RankExecutor) -> dict[str, bool]:
    """Return the operands of a step that only the first tensor-parallel rank adds, or has the gradient of.

    By name: True if the kernel works without the operand.
    """
    whole = gradients_made_whole(peer.program.plan)
    found = {}
    for operand in KERNELS[step.kernel].operands:
        if operand.name in step.operands:
            named = parse_reference(step.operands[operand.name])
            if named.part in ADDED_ONCE or (named.base == "g" and named.part in whole):
                found[operand.name] = operand.optional
    return found


def _adds_to(step: Step, output: str) -> bool:
    """Return True if a step adds to its output: by option, or because the output is also an operand."""
    return bool(step.options.get("accumulate")) or list(step.operands.values()).count(step.operands[output]) > 1


def _without_padding(arguments: dict[str, NDArray[Any]], rows: int) -> NDArray[Any] | None:
    """Cut tables and logits to `rows` words of the vocabulary, in place.

    Return the cut rows of a table's gradient; None if there are none.
    """
    padding = arguments["dtable"][rows:] if "dtable" in arguments else None
    for name in arguments.keys() & {"table", "dtable"}:
        arguments[name] = arguments[name][:rows]
    for name in arguments.keys() & {"logits", "dlogits"}:
        lines = len(arguments[name])
        # Logits are scratch: they are laid out anew with shorter lines, so that kernels see contiguous rows.
        arguments[name] = arguments[name].reshape(-1)[: lines * rows].reshape(lines, rows)
    return padding if padding is not None and len(padding) else None


def _set_for(step: Step, kernels: KernelSet) -> KernelSet:
    """Return the kernel set that runs a step: one that executes on-chip schedules is bound to the step's schedule."""
    return kernels.bound_to(step.on_chip) if isinstance(kernels, OnChipKernels) else kernels


def resolve(routine: Routine, reference: str, operands: dict[str, NDArray[Any]], memory: Memory = HOST) -> NDArray[Any]:
    """Return the array that a step's reference names, in the routine's operands or workspace."""
    named = parse_reference(reference)
    whole = _resolve_whole(routine, named, operands, memory)
    return whole if named.rows is None else whole[slice(*named.rows)]


def _resolve_whole(
    routine: Routine, named: Reference, operands: dict[str, NDArray[Any]], memory: Memory
) -> NDArray[Any]:
    if named.part:
        parameter = next(p for p in routine.parameters if p.name == named.part)
        elements = int(np.prod(parameter.shape))
        return operands[named.base][parameter.offset : parameter.offset + elements].reshape(parameter.shape)
    if named.base in operands:
        return operands[named.base]
    intermediate = next(i for i in routine.intermediates if i.name == named.base)
    nbytes = int(np.prod(intermediate.shape)) * intermediate.dtype.itemsize
    workspace = memory.bytes_of(operands["workspace"])  # bytes, whatever type the schedule gave it
    data = workspace[intermediate.offset : intermediate.offset + nbytes]
    whole: NDArray[Any] = memory.typed(data, intermediate.dtype, intermediate.shape)
    return whole


def routine_scratch_bytes(routine: Routine, kernels: KernelSet) -> int:
    """Return the scratch that the kernel set needs for the largest step of a routine, from shapes only."""
    return max((_step_scratch_bytes(routine, step, kernels) for step in routine.steps), default=0)


def _step_scratch_bytes(routine: Routine, step: Step, kernels: KernelSet) -> int:
    shapes = {name: shape_only(*routine.operand(reference)) for name, reference in step.operands.items()}
    return _set_for(step, kernels).scratch_bytes(step.kernel, **shapes, **KERNELS[step.kernel].arguments(step.options))


def shape_only(dtype: Dtype, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of this shape and dtype that takes no memory (all elements share one)."""
    return np.broadcast_to(np.zeros((), NUMPY_DTYPES[dtype]), shape)


def rope_tables(program: Program) -> set[tuple[int, int, float, str]]:
    """Return the rotary tables that a program needs: (length, rotated elements of a head, theta, scaling)."""
    model: ModelConfig = program.model
    kinds = {model.layer_kind(layer) for layer in range(model.layers)}
    width = model.rotary_dim or model.head_dim
    return {(program.plan.seq_len, width, kind.rope_theta, kind.rope_scaling) for kind in kinds if kind.rope_theta}


def prepare_tables(program: Program, kernels: KernelSet) -> None:
    """Build the constant tables of the kernel set, before the first step."""
    for table in sorted(rope_tables(program)):
        kernels.prepare_rope(*table)
