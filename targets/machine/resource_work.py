"""What an instruction asks of the machine: seconds of its engine, bytes of DDR, bytes of links and uplinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import Home


class StorePath(NamedTuple):
    """One direction of the way between a rank's DDR and another memory of it."""

    home: Home
    fetches: bool


@frozen
class Flow:
    """Bytes that pass through links, all of them at the same time."""

    nbytes: float
    """of one replica, on average where its replicas differ"""
    link: int | None
    """the level of a cluster's own link that they take, outwards at the sender and inwards at the receiver: that of the innermost
    group is 0; None: what others do of the same instruction says so"""
    uplinks: tuple[int, ...] = ()
    """the levels of the groups that they leave and enter"""
    path: StorePath | None = None
    """to or from which memory of the stage they go, where it is not another rank"""


@frozen
class ResourceWork:
    """The works of one instruction. They proceed side by side; the instruction ends when its last work ends."""

    seconds: float
    """what it takes where it has DDR and link to itself"""
    ddr_bytes: float = 0.0
    """read from and written to the DDR of its stage"""
    link_bytes: float = 0.0
    """sent by a cluster over all its links; a member of a collective receives as many"""
    flows: tuple[Flow, ...] = ()
    """what of that others can be short of"""

    def __add__(self, other: ResourceWork) -> ResourceWork:
        """One after the other; of bytes it makes no difference which are first."""
        return ResourceWork(
            self.seconds + other.seconds,
            self.ddr_bytes + other.ddr_bytes,
            self.link_bytes + other.link_bytes,
            self.flows + other.flows,
        )


@frozen
class LinkLevel:
    """A cluster's link within its group of one level, and how the group is left; bytes per second of one direction."""

    bandwidth: float
    stages: int = 1
    """neighbouring stages that share a group"""
    uplink: float = math.inf
    """by which one replica of these stages, all together, leaves the group"""


@frozen
class Bandwidths:
    """What the instructions that overlap share, in bytes per second."""

    ddr: float
    links: tuple[LinkLevel, ...]
    """from the innermost level outwards; a cluster sends and receives at the same time"""
    host: float
    """the most that the host engine takes of the DDR"""
    paths: Mapping[StorePath, float] = field(factory=dict)
    """to and from a rank's other memories"""
