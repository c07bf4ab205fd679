"""Training state in a file, processed in pieces through the workspace of the instruction that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.targets.runtime.arena.scalars import UpdatePart
from ratrain.targets.runtime.arena.tensor_file import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.arena.kernel_memory import Memory
    from ratrain.targets.runtime.arena.stores import StoredArray
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet, Scratch

_STATE = ("p", "m1", "m2")


def streamed_parts(whole: UpdatePart, files: Mapping[str, StoredArray], memory: Memory) -> Iterator[UpdatePart]:
    """Yield an update whose state is in files, part after part; a part is written back when the next is asked for."""
    buffers = _staged(whole.views["workspace"], files, memory)
    most = min(map(len, buffers.values()))
    for start, stop in cut(0, len(whole.views["g"]), most):
        views = {role: whole.views[role][start:stop] for role in (*_STATE, "g", "w") if role in whole.views}
        for role, stored in files.items():
            views[role] = buffers[role][: stop - start]
            stored.get(start, views[role])
        decay = [(max(low, start) - start, min(high, stop) - start) for low, high in whole.decay]
        yield UpdatePart(views, [(low, high) for low, high in decay if low < high])
        # The consumer has updated the buffers in place; the generator goes on only when the next part is wanted.
        for role, stored in files.items():
            stored.put(start, views[role])


def cast_master(
    rank: RankExecutor, instruction: Instruction, role: str, view: NDArray[Any], kernels: KernelSet, scratch: Scratch
) -> None:
    """Round an instruction's master, operand `role`, into a view of as many elements; it may be in a file."""
    stored = rank.in_files(instruction).get(role)
    views = rank.by_role(instruction)
    if stored is None:
        scratch.reset()
        kernels.cast(views[role], view, scratch=scratch)
        return
    buffer = _staged(views["workspace"], {role: stored}, rank.memory)[role]
    for start, stop in cut(0, len(stored), len(buffer)):
        piece = buffer[: stop - start]
        stored.get(start, piece)
        scratch.reset()
        kernels.cast(piece, view[start:stop], scratch=scratch)


def copy_frozen(
    rank: RankExecutor, instruction: Instruction, role: str, place: NDArray[Any], kernels: KernelSet
) -> None:
    """Copy an instruction's frozen parameters, operand `role`, to a place of a view; they may be in a file."""
    stored = rank.in_files(instruction).get(role)
    if stored is None:
        kernels.memory.copy(place, rank.by_role(instruction)[role])
    else:
        stored.get(0, place)


def _staged(workspace: NDArray[Any], files: Mapping[str, StoredArray], memory: Memory) -> dict[str, NDArray[Any]]:
    """Divide the bytes of a workspace into equal, aligned buffers, one for each file; the workspace has any dtype."""
    data = memory.bytes_of(workspace)
    share = len(data) // len(files) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return {
        role: memory.typed(data[at * share : (at + 1) * share], stored.element, (share // stored.dtype.itemsize,))
        for at, (role, stored) in enumerate(files.items())
    }
