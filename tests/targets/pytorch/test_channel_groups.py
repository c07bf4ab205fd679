"""Messages without tags: a group for each channel matches sends and receipts as the program does."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES, Engine, Group, Payload
from ratrain.targets.pytorch.ranks.channel_groups import channel_groups
from tests.end_to_end.tiny_runs import make_program
from tests.targets.runtime.ranks.rank_jobs import PLANS, chunked_programs

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

SLICED = {name: PLANS[name] for name in ("2x2", "2x2-slices", "2x2-documents-slices-gpt2", "4x1-tied")}


@cache
def programs() -> dict[str, Program]:
    made = {f"{kind}-{state}": program for (kind, state), program in chunked_programs().items()}
    return made | {name: make_program(**keys) for name, keys in SLICED.items()}


def tag_of(program: Program, stage: int, instruction: Instruction) -> int:
    """The channel of a message, as `ProgramEngine.hop` has it."""
    ends = instruction.ends(stage)
    assert ends is not None
    hop = program.topology.hop(*ends, Payload(instruction.variant), instruction.chunk)
    assert hop is not None
    return program.topology.channel_numbers[hop.channel]


def messages(program: Program, engine: Engine, key: Any) -> dict[Any, list[Any]]:
    """What each channel, or pair of stages, is given to send or to receive in a step, in the order of the streams."""
    found: dict[Any, list[Any]] = defaultdict(list)
    hops = program.topology.hops
    for stage, text in enumerate(program.stages):
        for instruction in text.streams[engine]:
            tag = tag_of(program, stage, instruction)
            found[key(tag, hops[tag])].append((tag, instruction.piece))
    return found


def by_channel(tag: int, _hop: Any) -> int:
    return tag


def by_pair(_tag: int, hop: Any) -> tuple[int, int]:
    return hop.source, hop.target


@pytest.mark.parametrize("name", programs())
def test_a_channel_receives_in_the_order_in_which_it_sends(name: str) -> None:
    program = programs()[name]
    sent, received = (messages(program, engine, by_channel) for engine in (Engine.SEND, Engine.RECV))
    assert sent == received
    assert sent


def test_one_order_between_two_ranks_would_be_one_that_programs_need_not_keep() -> None:
    """Nothing in the language orders receipts of two channels by their sends, and two ranks do share channels."""
    program = programs()["interleaved-zero-0"]
    sent = messages(program, Engine.SEND, by_pair)
    assert any(len({tag for tag, _ in between}) > 1 for between in sent.values())
    moved = {pair: sorted(between, key=lambda message: message[0]) for pair, between in sent.items()}
    assert moved != sent
    for pair, between in moved.items():
        for tag in {tag for tag, _ in between}:
            assert [m for m in between if m[0] == tag] == [m for m in sent[pair] if m[0] == tag]


@pytest.mark.parametrize("name", programs())
def test_no_rank_hangs_where_a_send_ends_only_when_it_is_received(name: str) -> None:
    """Each engine has one instruction under way; nothing is buffered. Steps run into one another as waits allow."""
    program, steps = programs()[name], 2
    done = [dict.fromkeys(ENGINES, 0) for _ in program.stages]

    def head(stage: int, engine: Engine) -> tuple[Instruction, int] | None:
        stream = program.stages[stage].streams[engine]
        if not stream or done[stage][engine] >= steps * len(stream):
            return None
        step, position = divmod(done[stage][engine], len(stream))
        waits = stream[position].waits
        for wait in waits:
            at = step - wait.previous_step
            if at >= 0 and done[stage][wait.engine] < at * len(program.stages[stage].streams[wait.engine]) + wait.count:
                return None
        return stream[position], step

    def advance() -> bool:
        offers: dict[Any, list[tuple[int, Engine]]] = defaultdict(list)
        meeting: list[int] = []
        for stage in range(len(program.stages)):
            for engine in ENGINES:
                found = head(stage, engine)
                if found is None:
                    continue
                if engine in (Engine.SEND, Engine.RECV):
                    offers[tag_of(program, stage, found[0])].append((stage, engine))
                elif engine is Engine.COLLECTIVE and found[0].group in (Group.ALL.value, Group.ENDS.value):
                    meeting.append(stage)
                else:
                    done[stage][engine] += 1
                    return True
        for both in offers.values():
            if len(both) == 2:
                for stage, engine in both:
                    done[stage][engine] += 1
                return True
        whole = [stage for stage in meeting if head(stage, Engine.COLLECTIVE)[0].group != Group.ENDS.value]
        ends = [stage for stage in meeting if stage not in whole]
        topology = program.topology
        for stages, size in ((whole, len(program.stages)), (ends, len({topology.first_stage, topology.last_stage}))):
            if len(stages) == size:
                for stage in stages:
                    done[stage][Engine.COLLECTIVE] += 1
                return True
        return False

    while advance():
        pass
    for stage, text in enumerate(program.stages):
        assert done[stage] == {engine: steps * len(text.streams[engine]) for engine in ENGINES}


@given(
    st.integers(2, 6).flatmap(lambda n: st.lists(st.permutations(range(n)).map(lambda p: (p[0], p[1])), max_size=20))
)
def test_both_ends_of_a_channel_make_its_group_and_none_waits_in_a_circle(channels: list[tuple[int, int]]) -> None:
    """Ranks that each go through their groups, and meet the other members at each, come to the end, each with a group a tag."""
    ranks = sorted({end for ends in channels for end in ends})
    made = {rank: list(channel_groups(channels, rank)) for rank in ranks}
    for tag, ends in enumerate(channels):
        assert {rank for rank in ranks if len(made[rank][tag]) == 2} == {*ends}
        assert all(made[end][tag] == tuple(sorted(ends)) for end in ends)
    at = dict.fromkeys(ranks, 0)
    while any(at[rank] < len(channels) for rank in ranks):
        waiting = {rank: (at[rank], made[rank][at[rank]]) for rank in ranks if at[rank] < len(channels)}
        ready = [group for group in waiting.values() if all(waiting.get(member) == group for member in group[1])]
        assert ready, "ranks wait in a circle"
        for member in ready[0][1]:
            at[member] += 1


def test_a_channel_has_two_ends() -> None:
    with pytest.raises(ValueError, match="channel 1 has one end only"):
        list(channel_groups([(0, 1), (1, 1)], 0))
