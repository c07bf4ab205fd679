"""Process groups for channels, where messages between ranks have no tags. Needs no PyTorch.

Two ranks may share several channels (of several chunks, of activations and gradients). A receiver may take messages of
two channels in another order than they are sent in, but messages of one channel only in their order. So each channel is
a group of its two ranks, with its own order and, on a GPU, its own stream: a message that waits holds up no other.

    channels 0 -> 1, 1 -> 0      rank 0 makes (0, 1) (0, 1)      rank 2 makes (2,) (2,)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def channel_groups(channels: Sequence[tuple[int, int]], rank: int) -> Iterator[tuple[int, ...]]:
    """Yield by tag the members of the group that a rank makes: the channel's ends in ascending order, or itself alone.

    Both ends of a channel must make its group together. All ranks go by tag, so a rank only waits for one that is at a
    lower tag, and no circle of waits arises. PyTorch names a group by its members and the number of groups that its
    process has made before. The names must agree on both ends, so each rank makes one group a tag, even where it is no
    end. Raises ValueError for a channel from a rank to itself.
    """
    for tag, (source, target) in enumerate(channels):
        if source == target:
            raise ValueError(f"channel {tag} has one end only, rank {source}")
        yield (min(source, target), max(source, target)) if rank in (source, target) else (rank,)
