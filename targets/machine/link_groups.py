"""Groups of clusters by their links, from the inside out: chip, node, system. Uniform links are one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from attrs import frozen


@frozen
class Link:
    """Link between two clusters."""

    bandwidth: float
    """bytes a second, of one direction"""
    latency: float
    """seconds of a message in addition to its bytes"""


@frozen
class LinkGroup:
    """Clusters that reach one another over equal links. A cluster has a link of each of its groups."""

    name: str
    clusters: int | None
    """of one group; None for the outermost: all there are"""
    link: Link
    uplink: float | None = None
    """bytes a second, of one direction, by which all clusters of one group together leave it; None: as many as their
    links carry"""


CHIP_KEYS = ("chip_bandwidth", "chip_latency", "chip_uplink")
"""Constants of clusters that share a chip."""
SHORT_KEYS = ("link_bandwidth", "link_latency", "clusters_per_chip", *CHIP_KEYS)
"""Constants that describe one group, or two, without naming them."""
GROUP_UNITS = {"clusters": "clusters", "bandwidth": "bytes/s", "latency": "s", "uplink": "bytes/s"}
"""Units of a group's constants. Their names are prefixed with the group's: node.bandwidth."""


def named_groups(names: Sequence[str], values: Mapping[str, float]) -> tuple[LinkGroup, ...]:
    """Return the groups of a machine whose file names them."""
    return tuple(_group(name, values) for name in names)


def _group(name: str, values: Mapping[str, float]) -> LinkGroup:
    clusters = values.get(f"{name}.clusters")
    link = Link(values[f"{name}.bandwidth"], values[f"{name}.latency"])
    return LinkGroup(name, None if clusters is None else int(clusters), link, values.get(f"{name}.uplink"))


def chip_and_system(values: Mapping[str, float]) -> tuple[LinkGroup, ...]:
    """Return the groups of a machine whose file names none: a chip, if clusters share one, and the system.

    On the chip they use the system's link where the file gives no other.
    """
    bandwidth, latency = values["link_bandwidth"], values["link_latency"]
    system = LinkGroup("system", None, Link(bandwidth, latency))
    clusters = int(values.get("clusters_per_chip", 1))
    if clusters == 1:
        return (system,)
    on_chip = Link(values.get("chip_bandwidth", bandwidth), values.get("chip_latency", latency))
    return LinkGroup("chip", clusters, on_chip, values.get("chip_uplink")), system


def are_uniform(groups: Sequence[LinkGroup]) -> bool:
    """Return whether all links are equal, so that the placement of ranks makes no difference."""
    return len({group.link for group in groups}) == 1 and all(group.uplink is None for group in groups)


def size_error(groups: Sequence[LinkGroup]) -> tuple[str, str] | None:
    """Return the name of a group whose size contradicts the others', and why; None where all is well."""
    for group in groups[:-1]:
        if group.clusters is None:
            return group.name, f"the group '{group.name}' needs clusters: only the outermost may leave them out"
    if groups[0].clusters == 1:
        return groups[0].name, f"the group '{groups[0].name}' has one cluster, which is no group"
    for inner, outer in pairwise(groups):
        if inner.clusters is None or outer.clusters is None:
            continue
        if outer.clusters <= inner.clusters or outer.clusters % inner.clusters:
            text = (
                f"{outer.clusters} clusters of '{outer.name}' are no two or more groups '{inner.name}' of "
                f"{inner.clusters}"
            )
            return outer.name, f"{text}: groups come from the inside out, and each is made of whole ones"
    if groups[-1].uplink is not None:
        return groups[-1].name, f"nothing leaves the outermost group '{groups[-1].name}': it has no uplink"
    return None
