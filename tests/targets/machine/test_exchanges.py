"""Patterns of collectives: the closed forms against a count of the messages, and that everybody gets everything."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.machine.exchanges import Circle, Climb, Pattern, Shift, doublings


def nested(sizes: list[int]) -> tuple[int, ...]:
    """Members within groups of each level, from how many groups of the level below meet in one."""
    within = [sizes[0]]
    for size in sizes[1:]:
        within.append(within[-1] * size)
    return tuple(within)


WITHIN = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(nested).filter(lambda within: within[-1] > 1)


def counted(pattern: Pattern, number: int, within: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """By level, the most messages that leave one group, and the part of all messages that leaves the level below and stays within."""
    targets = pattern.targets(number, within[-1])
    senders = np.flatnonzero(targets >= 0)
    targets = targets[senders]
    outside = [senders != targets] + [senders // group != targets // group for group in within]
    leaving = [
        int(np.bincount(senders[out] // group, minlength=1).max(initial=0))
        for group, out in zip(within, outside[1:], strict=True)
    ]
    shares = [(below & ~above).sum() / len(senders) for below, above in pairwise(outside)]
    return leaving, shares


@given(WITHIN, st.data())
def test_shifts_cross_what_a_count_of_messages_says(within: tuple[int, ...], data: st.DataObject) -> None:
    """Round all members, and among circles of members that have the same place in each group."""
    circles = [Circle(within[-1])]
    below = 1
    for group in within:
        if group > below:
            circles.append(Circle(group // below, below))
        below = group
    circle = data.draw(st.sampled_from(circles))
    pattern = Shift(circle, data.draw(st.integers(1, circle.places - 1)))
    leaving, shares = counted(pattern, 0, within)
    assert [pattern.leaving(group) for group in within] == leaving
    assert pattern.shares(within) == pytest.approx(shares)
    assert sorted(pattern.targets(0, within[-1])) == list(range(within[-1])), "each receives once"


@given(WITHIN, st.data())
def test_trees_cross_no_more_than_they_are_counted_for(within: tuple[int, ...], data: st.DataObject) -> None:
    distance, _ = data.draw(st.sampled_from(doublings(within[-1])))
    pattern = Climb(within[-1], distance, down=data.draw(st.booleans()))
    leaving, shares = counted(pattern, 0, within)
    assert all(found <= said for said, found in zip(map(pattern.leaving, within), leaving, strict=True))
    assert all(said or not found for said, found in zip(pattern.shares(within), shares, strict=True))
    if all(group & (group - 1) == 0 for group in within):
        assert list(map(pattern.leaving, within)) == leaving


@given(st.integers(2, 200))
def test_in_rounds_of_doubling_everybody_gets_every_part_once(members: int) -> None:
    """Member i has the parts i, i - 1, ...; it sends the first `parts` of them and has them in order."""
    held = [[member] for member in range(members)]
    for distance, parts in doublings(members):
        targets = Shift(Circle(members), distance).targets(0, members)
        sent = [each[:parts] for each in held]
        assert all(len(each) == parts for each in sent)
        for member, target in enumerate(targets):
            held[target] = held[target] + sent[member]
    assert all(sorted(each) == list(range(members)) for each in held)
    assert len(doublings(members)) == (members - 1).bit_length()


@given(st.integers(2, 100))
def test_pairwise_rounds_bring_all_pairs_together_once(members: int) -> None:
    shift = Shift(Circle(members), 1, step=1)
    met = {
        (member, int(to)) for number in range(members - 1) for member, to in enumerate(shift.targets(number, members))
    }
    assert len(met) == members * (members - 1)
    assert all(one != other for one, other in met)


@given(WITHIN)
def test_groups_meet_all_pairs_once_and_each_over_the_links_of_its_level(within: tuple[int, ...]) -> None:
    count, met, stride = within[-1], set(), 1
    for group in within:
        places = group // stride
        if places == 1:
            continue
        shift = Shift(Circle(places, stride), 1, step=1, turns=stride)
        for number in range((places - 1) * stride):
            targets = shift.targets(number, count)
            assert sorted(targets) == list(range(count)), "each receives once"
            pairs = {(member, int(to)) for member, to in enumerate(targets)}
            assert all(one // group == other // group and one // stride != other // stride for one, other in pairs)
            met |= pairs
        stride = group
    assert len(met) == count * (count - 1)


@given(st.integers(2, 100))
def test_a_tree_brings_everything_to_its_root_and_back(members: int) -> None:
    heard = [{member} for member in range(members)]
    climbs = [Climb(members, distance) for distance, _ in doublings(members)]
    for climb in climbs:
        for member, target in enumerate(climb.targets(0, members)):
            if target >= 0:
                heard[target] |= heard[member]
    assert heard[0] == set(range(members))
    knows = {0}
    for climb in reversed(climbs):
        targets = Climb(members, climb.distance, down=True).targets(0, members)
        knows |= {int(to) for member, to in enumerate(targets) if to >= 0 and member in knows}
    assert knows == set(range(members))
