"""Places of buffers in on-chip memory, one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.targets.mt3000.tiles.tile_schedule import Axes, Memories, OnChipBuffer, OnChipMemory

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import Dtype


@define
class BufferLayout:
    """Buffers of a schedule, each with its bytes and channels."""

    memories: Memories
    buffers: list[OnChipBuffer] = field(factory=list)
    used: dict[OnChipMemory, int] = field(factory=lambda: dict.fromkeys(OnChipMemory, 0))
    channels: int = 0

    def add(
        self,
        name: str,
        memory: OnChipMemory,
        dtype: Dtype,
        axes: Axes,
        shape: tuple[int, ...],
        *,
        copies: int = 1,
        transfers: bool = True,
    ) -> str:
        """Place a buffer behind the earlier ones and return its name; a buffer without `transfers` takes no channel."""
        buffer = OnChipBuffer(
            name, memory, dtype, axes, shape, copies, self.used[memory], self.channels if transfers else 0
        )
        self.buffers.append(buffer)
        self.used[memory] = buffer.end
        self.channels += copies if transfers else 0
        return name

    @property
    def fits(self) -> bool:
        """True if every buffer lies within its memory."""
        return all(self.used[memory] <= self.memories.capacity(memory) for memory in OnChipMemory)
