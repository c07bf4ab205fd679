"""Which channels a rank makes groups for, and in which order, where messages between ranks carry no tags. Needs no PyTorch.

Two ranks may share several channels, of several chunks and of both payloads, whose messages one order between the two would mix up: a
receiver may take those of two channels in another order than they are sent in. Of one channel it never does. So each channel is a
group of its two ranks, with an order of its own and with a stream of its own on a GPU: a message that waits holds up no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def channel_groups(channels: Sequence[tuple[int, int]], rank: int) -> Iterator[tuple[int, ...]]:
    """By tag: the members of the group that a rank makes, the channel's ends in ascending order; itself alone where it is none of them.

    Both ends of a channel make its group together. All ranks go by tag, so that a rank waits only for one that is at a lower tag, and
    none waits in a circle. PyTorch tells groups apart by their members and by how many its process has made before, so that has to be the
    same on both ends: each rank makes one a tag.
    """
    for tag, (source, target) in enumerate(channels):
        if source == target:
            raise ValueError(f"channel {tag} has one end only, rank {source}")
        yield (min(source, target), max(source, target)) if rank in (source, target) else (rank,)
