"""Mechanisms that make up the step of a plan, in closed form: seconds of a stage, as the mean of all stages."""

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
    """Seconds of a step by mechanism, of an average stage; a difference of two may be negative."""

    compute: float
    """forward and backward"""
    recovery: float
    """least recovery that bytes allow"""
    updates: float
    """updates on the compute engine"""
    bubble: float
    """way of the first micro-batch or slice through the first chunks of all other stages; and back if backwards are
    whole"""
    messages: float
    """messages over all links, once there and back"""
    exchanges: float
    """work of the tensor engine, much of which may be hidden"""
    transfers: float
    """transfers to or from another memory of the bytes that DDR has no room for, once a step; much may be hidden"""

    def over(self, other: Mechanisms) -> Mechanisms:
        """Return the extra seconds of each mechanism, compared with another plan."""
        return Mechanisms(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(Mechanisms)))


def mechanisms(space: FamilySpace, shape: Shape) -> Mechanisms:
    """Return the mechanisms of a shape under its best cuts; without recovery if none fit."""
    c = space.columns_of(shape)
    units = c.everything
    layers = np.array(best_cuts(c).layers, float)[:, None]
    stages = float(c.pp[0])
    # as in `placed_bounds.py`: with halves only the way forward is surely waited for
    first = c.first_forward if c.has_halves else c.first_forward + c.first_backward
    return Mechanisms(
        compute=float((c.micro_batches * (units @ (c.forward + c.backward)))[0]) / stages,
        recovery=float(recovery_seconds(c, layers).sum()) / stages,
        updates=float((units @ c.update)[0]) / stages,
        # the mean way through a stage's first chunk, for each of the other stages
        bubble=float((units @ first)[0]) / stages * (stages - 1) / shape.chunks,
        messages=float(c.message[0]) * 2 * (stages - 1),
        exchanges=float((c.micro_batches * (units @ c.exchange))[0]) / stages,
        transfers=float(transfer_seconds(c, layers).sum()) / stages,
    )
