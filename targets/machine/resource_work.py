"""What an instruction asks of the machine: seconds of its engine, bytes of DDR, bytes of the link."""

from __future__ import annotations

import math

from attrs import frozen


@frozen
class ResourceWork:
    """The works of one instruction. They proceed side by side; the instruction ends when its last work ends."""

    seconds: float
    """what it takes where it has DDR and link to itself"""
    ddr_bytes: float = 0.0
    """read from and written to the DDR of its stage"""
    link_bytes: float = 0.0
    """sent over the link; a member of a collective receives as many"""
    link_level: int = 0
    """which of a cluster's links: that of the innermost group is 0"""

    def __add__(self, other: ResourceWork) -> ResourceWork:
        """One after the other; links of two levels count as the outer one."""
        return ResourceWork(
            self.seconds + other.seconds,
            self.ddr_bytes + other.ddr_bytes,
            self.link_bytes + other.link_bytes,
            max(self.link_level, other.link_level),
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
