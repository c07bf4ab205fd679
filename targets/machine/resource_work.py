"""Works of an instruction on a machine: seconds of its engine, bytes of DDR, bytes of links and uplinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import Home


class StorePath(NamedTuple):
    """One direction of the path between a rank's DDR and another memory of the rank."""

    home: Home
    fetches: bool


@frozen
class Flow:
    """Bytes that pass through several links at the same time."""

    nbytes: float
    """bytes of one replica, the mean where replicas differ"""
    link: int | None
    """level of the cluster's own link that they take, outwards at the sender and inwards at the receiver; 0 is the
    innermost group. None: another flow of the instruction counts them on links"""
    uplinks: tuple[int, ...] = ()
    """levels of the groups that they leave and enter"""
    path: StorePath | None = None
    """path to or from another memory of the stage, for bytes that go to no other rank"""


@frozen
class ResourceWork:
    """Works of one instruction. They proceed at the same time; the instruction ends when its last work ends."""

    seconds: float
    """its time if it has DDR and links to itself"""
    ddr_bytes: float = 0.0
    """bytes read from and written to the DDR of its stage"""
    link_bytes: float = 0.0
    """bytes sent by a cluster over all its links; a member of a collective receives as many"""
    flows: tuple[Flow, ...] = ()
    """the bytes that may compete for links, uplinks and paths"""

    def __add__(self, other: ResourceWork) -> ResourceWork:
        """Return the works of two instructions one after the other; bytes and flows simply add up."""
        return ResourceWork(
            self.seconds + other.seconds,
            self.ddr_bytes + other.ddr_bytes,
            self.link_bytes + other.link_bytes,
            self.flows + other.flows,
        )


@frozen
class LinkLevel:
    """A cluster's link within its group of one level, and the group's uplink; bytes per second of one direction."""

    bandwidth: float
    stages: int = 1
    """neighbouring stages that share a group"""
    uplink: float = math.inf
    """bandwidth by which one replica of these stages, all together, leaves the group"""


@frozen
class Bandwidths:
    """Bandwidths that overlapping instructions share, in bytes per second."""

    ddr: float
    links: tuple[LinkLevel, ...]
    """by level, from the innermost outwards; a cluster sends and receives at the same time"""
    host: float
    """most that the host engine takes of the DDR"""
    paths: Mapping[StorePath, float] = field(factory=dict)
    """of the paths to and from a rank's other memories"""
