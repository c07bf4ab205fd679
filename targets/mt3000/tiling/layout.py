"""Places of buffers in on-chip memory, one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.targets.mt3000.tiles.schedule import Axes, Buffer, Level, Memories

if TYPE_CHECKING:
    from ratrain.ratrain_ir.types import Dtype


@define
class Layout:
    """Collects the buffers of a schedule and gives each its bytes and channels."""

    memories: Memories
    buffers: list[Buffer] = field(factory=list)
    used: dict[Level, int] = field(factory=lambda: dict.fromkeys(Level, 0))
    channels: int = 0

    def add(
        self,
        name: str,
        level: Level,
        dtype: Dtype,
        axes: Axes,
        shape: tuple[int, ...],
        *,
        copies: int = 1,
        transfers: bool = True,
    ) -> str:
        """Place a buffer behind those before it; its name. One without `transfers` takes no channel."""
        buffer = Buffer(name, level, dtype, axes, shape, copies, self.used[level], self.channels if transfers else 0)
        self.buffers.append(buffer)
        self.used[level] = buffer.end
        self.channels += copies if transfers else 0
        return name

    @property
    def fits(self) -> bool:
        """Whether everything lies within its memory."""
        return all(self.used[level] <= self.memories.capacity(level) for level in Level)
