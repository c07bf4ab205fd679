"""What an instruction asks of the machine: seconds of its engine, bytes of DDR, bytes of the link."""

from __future__ import annotations

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

    def __add__(self, other: ResourceWork) -> ResourceWork:
        """One after the other."""
        return ResourceWork(
            self.seconds + other.seconds, self.ddr_bytes + other.ddr_bytes, self.link_bytes + other.link_bytes
        )


@frozen
class Bandwidths:
    """What the instructions that overlap on a stage share, in bytes per second."""

    ddr: float
    link: float
    """of one direction; a cluster sends and receives at the same time"""
    host: float
    """the most that the host engine takes of the DDR"""
