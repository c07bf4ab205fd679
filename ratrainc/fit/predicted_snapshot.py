"""Allocations of a framework's step, as a memory snapshot: what each moment holds, made and freed in order.

The moments of a rank (holdings) are sums by owner. Between two of them an owner grows by a block, or its last blocks
are freed; activations grow and shrink layer by layer. So the bytes at each moment are those of the answer:

    forward        activations of layer 0, 1, ... are made
    loss, head     logits come and go
    backward       activations of the last layer, ... are freed, gradients are made
    step           copies of the optimizer come and go

Addresses are those of a first fit over these lives; the framework's own allocator may place them otherwise. Times count
events, a millisecond each: order, not duration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.memory.allocation import AllocationProblem, allocate
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrainc.report.memory_snapshot import DeviceMemory, Lived

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.terms import Moment, RankBytes

_LAYERED = "activations: "
"""Start of the names of owners that grow layer by layer in the forward."""
_EVENT = 1e-3
"""Seconds between two events."""


@define
class _Block:
    owner: str
    maker: str
    nbytes: int
    start: int
    """number of the event that makes it"""
    stop: int | None = None


@define
class _Step:
    """The blocks of one step so far, live ones by owner in the order in which they were made."""

    blocks: list[_Block] = field(factory=list)
    live: dict[str, list[_Block]] = field(factory=dict)
    events: int = 0

    def make(self, owner: str, maker: str, nbytes: int) -> None:
        """Make a block; nothing happens for no bytes."""
        if nbytes > 0:
            block = _Block(owner, maker, nbytes, self._next())
            self.blocks.append(block)
            self.live.setdefault(owner, []).append(block)

    def resize(self, owner: str, maker: str, nbytes: int) -> None:
        """Bring an owner to `nbytes`: by another block, or by freeing its last ones; a rest is made anew."""
        blocks = self.live.get(owner, [])
        now = sum(block.nbytes for block in blocks)
        while blocks and now > nbytes:
            block = blocks.pop()
            block.stop = self._next()
            now -= block.nbytes
        self.make(owner, maker, nbytes - now)

    def _next(self) -> int:
        self.events += 1
        return self.events


def predicted_memory(rank: RankBytes, layers: int) -> DeviceMemory:
    """Return the tensors of one rank over a step of `layers` layers a stage, at addresses of a first fit."""
    step = _Step()
    first, moments = rank.moments[0], rank.moments
    held = {each.name: each.bytes for each in first.owners}
    resident = {name: min(_of(moment, name) for moment in moments) for name in held}
    for name, nbytes in resident.items():
        step.make(name, "before the step", nbytes)
    for layer in range(layers):
        for name, nbytes in held.items():
            if name.startswith(_LAYERED):
                share = (nbytes - resident[name]) * (layer + 1) // layers - (nbytes - resident[name]) * layer // layers
                step.make(name, f"forward of layer {layer}", share)
    for moment in moments:
        now = {each.name: each.bytes for each in moment.owners}
        shrinking = sorted(now.keys() | step.live.keys(), key=lambda name: now.get(name, 0) - _live(step, name))
        for name in shrinking:  # what is freed first leaves its bytes to what is made
            step.resize(name, moment.name, now.get(name, 0))
    for name in list(step.live):
        step.resize(name, "after the step", resident.get(name, 0))
    return _placed(step.blocks, step.events)


def _of(moment: Moment, name: str) -> int:
    return sum(each.bytes for each in moment.owners if each.name == name)


def _live(step: _Step, name: str) -> int:
    return sum(block.nbytes for block in step.live.get(name, ()))


def _placed(blocks: list[_Block], events: int) -> DeviceMemory:
    """Give blocks addresses."""
    end = events + 1
    problem = AllocationProblem(
        [aligned(block.nbytes) for block in blocks],
        [((block.start, end if block.stop is None else block.stop),) for block in blocks],
        end,
    )
    placement = allocate(problem, search=False, trial=True)
    lives = [
        Lived(
            block.owner,
            block.maker,
            block.start,
            address,
            block.nbytes,
            block.start * _EVENT,
            None if block.stop is None else block.stop * _EVENT,
        )
        for block, address in zip(blocks, placement.offsets, strict=True)
    ]
    return DeviceMemory(placement.arena_bytes, lives)
