"""What makes up the step of a plan, in closed form: seconds of a stage, the mean of all, by mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import fields, frozen

from ratrain.ratrainc.planner.bounds.bounds import recovery_seconds, transfer_seconds
from ratrain.ratrainc.planner.bounds.cuts import best_cuts

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.family_spaces import FamilySpace
    from ratrain.ratrainc.planner.space.space import Shape


@frozen
class Mechanisms:
    """Seconds of a step that each mechanism takes of a stage; differences of two may be negative."""

    compute: float
    """forward and backward"""
    recovery: float
    """the least that the bytes allow"""
    updates: float
    """on the compute engine"""
    bubble: float
    """a first micro-batch's, or slice's, way through all other stages, of their first chunks; there and back where backwards are whole"""
    messages: float
    """their links, once there and back"""
    exchanges: float
    """of tensor peers: all that their engine does, much of which may be hidden"""
    transfers: float
    """to or from another memory, of what DDR has no room for: once a step at least, much of which may be hidden"""

    def over(self, other: Mechanisms) -> Mechanisms:
        """What each takes more than in another plan."""
        return Mechanisms(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(Mechanisms)))


def mechanisms(space: FamilySpace, shape: Shape) -> Mechanisms:
    """The mechanisms of a shape under its best cuts; without recovery where none fit."""
    c = space.columns_of(shape)
    units = np.array([1.0, c.layers, 1.0])
    layers = np.array(best_cuts(c).layers, float)[:, None]
    stages = float(c.pp[0])
    first = c.first_forward if c.has_halves else c.first_forward + c.first_backward
    return Mechanisms(
        compute=float((c.micro_batches * (units @ (c.forward + c.backward)))[0]) / stages,
        recovery=float(recovery_seconds(c, layers).sum()) / stages,
        updates=float((units @ c.update)[0]) / stages,
        bubble=float((units @ first)[0]) / stages * (stages - 1) / shape.chunks,
        messages=float(c.message[0]) * 2 * (stages - 1),
        exchanges=float((c.micro_batches * (units @ c.exchange))[0]) / stages,
        transfers=float(transfer_seconds(c, layers).sum()) / stages,
    )
