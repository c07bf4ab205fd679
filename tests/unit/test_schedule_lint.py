"""Tables of actions: reading and writing them, the rules they must satisfy, and the three commands around them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import event, given, settings
from hypothesis import strategies as st

from passes.manager import PassManager
from ratrain_ir.actions import (
    ActionTable,
    actions_of_module,
    actions_of_orders,
    compute_only,
    parse_torch_csv,
    read_torch_csv,
    torch_csv_lines,
    with_gathered_parameters,
)
from ratrain_ir.diagnostics import Diagnostic, DiagnosticError, Diagnostics
from ratrain_ir.ops import Backward, Forward, Op, Payload, Send
from ratrain_ir.schedules import SCHEDULES, ActionKind
from ratrain_ir.testing.fake_target import FakeTarget
from ratrain_ir.testing.strategies import cases
from ratrain_ir.verifier.schedule_rules import check_schedule, verify_schedule
from ratrainc import api
from ratrainc.cli import main

if TYPE_CHECKING:
    from random import Random

ROOT = Path(__file__).resolve().parents[2]
SOUND = sorted((ROOT / "tests/data/schedules").glob("*.csv"))


def diagnose(text: str) -> list[Diagnostic]:
    """Everything that is wrong with a schedule, in either step."""
    found = Diagnostics()
    try:
        verify_schedule(parse_torch_csv(text, "s.csv"), found)
    except DiagnosticError as error:
        return error.diagnostics
    return found.items


def place(diagnostic: Diagnostic) -> str:
    assert diagnostic.location is not None
    return f"{diagnostic.location.line}:{diagnostic.location.column}"


# sound ones


def test_the_sound_schedules_are_there() -> None:
    names = {path.stem for path in SOUND}
    assert names >= {"1f1b", "gpipe", "interleaved", "zero_bubble", "v_overlap", "1f1b_lowered", "v_lowered"}


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.stem)
def test_a_sound_schedule_is_clean_and_written_back_as_it_was(path: Path) -> None:
    table = read_torch_csv(str(path))
    check_schedule(table)
    assert "\n".join(torch_csv_lines(table)) + "\n" == path.read_text()


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 12))
def test_named_schedules_are_sound(kind: str, stages: int, micro_batches: int) -> None:
    table = actions_of_orders([SCHEDULES[kind](stages, micro_batches, stage) for stage in range(stages)])
    check_schedule(table)
    split = stages - 1 if kind == "zb-h1" else 0
    assert sum(map(len, table.rows)) == (2 * stages + split) * micro_batches


def test_an_overlapped_cell_is_two_actions_that_run_together() -> None:
    row = parse_torch_csv(" 0F0 ,0F1,( 0F2 ; 0B0 )OVERLAP_F_B,,0B1,0B2", "s.csv").rows[0]
    assert [(str(action), action.slot, action.column) for action in row] == [
        ("0F0", 0, 2),
        ("0F1", 1, 7),
        ("0F2", 2, 13),
        ("0B0", 2, 19),
        ("0B1", 4, 37),
        ("0B2", 5, 41),
    ]


@pytest.mark.parametrize("text", ["0F0,0B0", "0F0,0B0\r\n", '"0F0","0B0"\n', "00F00,\t0B0 ,,\n"])
def test_the_same_schedule_in_other_dress(text: str) -> None:
    assert list(torch_csv_lines(parse_torch_csv(text, "s.csv"))) == ["0F0,0B0"]


def test_a_weight_half_needs_no_parameters() -> None:
    assert diagnose("0UNSHARD,0F0,0I0,0RESHARD,0W0,0REDUCE_GRAD") == []


# broken ones: text, then (code, place, parts of the message) of each diagnostic

MALFORMED = [
    ("0F0,0X0,0B0", [("RT007", "1:5", ["there is no action 'X'", "REDUCE_GRAD"])]),
    ("0F0,0f1,0B0", [("RT007", "1:5", ["there is no action 'f'"])]),
    ("F0,0B", [("RT007", "1:1", ["'F0' is not an action"]), ("RT007", "1:4", ["'0B' has no micro-batch"])]),
    ("0F0,0B0,0UNSHARD1", [("RT007", "1:9", ["takes no micro-batch"])]),
    ("0F0,0B0\n\n", [("RT007", "2:1", ["rank 1 has no action"])]),
    ('0F0,0B0\n,"",', [("RT007", "2:1", ["rank 1 has no action"])]),
    ("0F1234567890", [("RT007", "1:1", ["more than 9 digits"])]),
    ("0F0,(0F1;0B0)", [("RT007", "1:5", ["expected '(0F1;0B0)OVERLAP_F_B'"])]),
    ("0F0,(0F1;0W0)OVERLAP_F_B", [("RT007", "1:5", ["one forward and one backward"])]),
    ("0F0,(0F1; 0Q0)OVERLAP_F_B,0B1", [("RT007", "1:11", ["there is no action 'Q'"])]),
    ("0F0 0B0", [("RT007", "1:1", ["'0F0 0B0' is not an action"])]),
    ('"0F0,0B0"', [("RT007", "1:1", ["""'"0F0' is not"""]), ("RT007", "1:6", ["""'0B0"' is not"""])]),
    ("\ufeff0F0,0B0", [("RT007", "1:1", [r"'\ufeff0F0' is not an action"])]),
    ("0F0,0\x1b[2J,0B0", [("RT007", "1:5", [r"'0\x1b[2J' is not an action"])]),
    ("\u0660F0,0B0", [("RT007", "1:1", ["is not an action"])]),
    ("", [("RT007", "1:1", ["the schedule is empty"])]),
]

BROKEN = [
    ("0F0,0F0,0B0", [("RT030", "1:5", ["'0F0' happens twice"])]),
    ("0B0,0F0", [("RT030", "1:1", ["'0B0' comes before '0F0', its forward"])]),
    ("0F0,0W0", [("RT030", "1:5", ["'0W0' has no input half: '0I0' is missing"])]),
    ("0F0,0I0", [("RT030", "1:5", ["'0I0' has no weight half: '0W0' is missing"])]),
    ("0F0,0W0,0I0", [("RT030", "1:5", ["'0W0' comes before '0I0', its input half"])]),
    ("0F0,0I0,0B0,0W0", [("RT030", "1:5", ["'0I0' repeats what '0B0' does"])]),
    ("0F0,0B0,0F1", [("RT030", "1:9", ["'0F1' has no backward: '0B1' (or '0I1' and '0W1') is missing"])]),
    ("0F0,0B0,0B1", [("RT030", "1:9", ["'0B1' has no forward: '0F1' is missing"])]),
    ("0F0,0B0,0F2,0B2", [("RT030", "1:9", ["no stage runs micro-batch 1, but there is a micro-batch 2"])]),
    ("0F0,0B0\n2F0,2B0", [("RT030", "2:1", ["no rank runs stage 1, but there is a stage 2"])]),
    ("0F0,0F1,0B0,0B1\n1F0,1B0", [("RT030", "2:1", ["stage 1 never runs micro-batch 1"])]),
    ("0F0,0B0\n1UNSHARD,1RESHARD", [("RT030", "2:1", ["stage 1 never runs forward or backward"])]),
    (
        "0F0,0B0\n1F0,1B0,0F1,0B1",
        [("RT027", "2:9", ["'0F1' on rank 1, but stage 0 is on rank 0"]), ("RT030", "2:1", [])],
    ),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", [("RT030", "1:10", ["'0B1' overlaps with '0F1', its forward"])]),
    ("1F0,0F0,1B0,0B0", [("RT020", "1:1", ["'1F0' comes before '0F0', which makes its input on the same rank"])]),
    ("0F0,1F0,0B0,1B0", [("RT020", "1:9", ["'0B0' comes before '1B0', which makes its input on the same rank"])]),
    # gathering and reduction
    ("0F0,0UNSHARD,0B0,0RESHARD", [("RT026", "1:1", ["'0F0' needs the parameters of stage 0"])]),
    ("0UNSHARD,0F0,0RESHARD,0B0", [("RT026", "1:23", ["'0B0' needs the parameters of stage 0"])]),
    ("0UNSHARD,0F0,0UNSHARD,0B0,0RESHARD", [("RT026", "1:14", ["stage 0 is gathered already"])]),
    ("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD", [("RT026", "1:27", ["stage 0 is not gathered here"])]),
    ("0UNSHARD,0F0,0B0", [("RT026", "1:1", ["'0UNSHARD' is never undone"])]),
    ("0F0,0REDUCE_GRAD,0B0", [("RT031", "1:5", ["'0REDUCE_GRAD' comes before '0B0'"])]),
    ("0F0,0I0,0REDUCE_GRAD,0W0", [("RT031", "1:9", ["'0REDUCE_GRAD' comes before '0W0'"])]),
    ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", [("RT031", "1:22", ["'0REDUCE_GRAD' happens twice"])]),
    ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0", [("RT031", "2:5", ["stage 1 are never reduced", "'1REDUCE_GRAD' is missing"])]),
    # messages
    (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0",
        [("RT040", "1:14", ["'0RECV_B0' on rank 0 is never sent: rank 1 has no '1SEND_B0'"])],
    ),
    (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        [("RT040", "1:5", ["'0SEND_F0' on rank 0 is never received: rank 1 has no '1RECV_F0'"])],
    ),
    (
        "0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        [("RT040", "2:1", ["'1F0' never gets its input: rank 0 has no '0SEND_F0', rank 1 no '1RECV_F0'"])],
    ),
    (
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        [("RT040", "1:14", ["'0SEND_F0' happens twice"])],
    ),
    (
        "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        [("RT020", "1:1", ["'0SEND_F0' comes before '0F0', which makes what it sends"])],
    ),
    (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
        [("RT020", "2:1", ["'1F0' comes before '1RECV_F0', which brings its input"])],
    ),
    (
        "0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        [("RT027", "1:27", ["'0SEND_B0' sends to no stage: 0 is the first one"])],
    ),
    (
        "0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0",
        [
            ("RT026", "1:5", ["'0SEND_F0' sends to its own rank: stages 0 and 1 are both on rank 0"]),
            ("RT026", "1:14", ["'1RECV_F0' receives from its own rank"]),
        ],
    ),
    # progress
    (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        [("RT042", "1:5", ["the schedule hangs wherever the messages are put", "ranks 0, 1"])],
    ),
    (
        "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        [("RT042", "1:5", ["the schedule hangs with buffered sends", "ranks 0, 1"])],
    ),
]


@pytest.mark.parametrize(("text", "expected"), MALFORMED + BROKEN, ids=lambda value: repr(value)[:40])
def test_what_is_wrong_is_named_and_placed(text: str, expected: list[tuple[str, str, list[str]]]) -> None:
    found = diagnose(text)
    assert [(d.code, place(d)) for d in found] == [(code, where) for code, where, _ in expected]
    for diagnostic, (_, _, parts) in zip(found, expected, strict=True):
        for part in parts:
            assert part in diagnostic.message
        assert "\x1b" not in diagnostic.render()


def test_all_malformed_cells_are_reported_at_once() -> None:
    found = diagnose("0F0,?,0B0,0F\n1F0,1K3,,(1F1;\n")
    assert [place(d) for d in found] == ["1:5", "1:11", "2:5", "2:10"]


def test_noise_is_cut_short() -> None:
    assert len(diagnose("\n".join(["?,!"] * 1000))) == 200


def test_large_numbers_cost_nothing() -> None:
    found = diagnose("999999999F999999999,999999999B999999999")
    assert [d.code for d in found] == ["RT030", "RT030"]
    assert "stages 0 to 999999998" in found[0].message
    assert "micro-batches 0 to 999999998" in found[1].message


CROSSED = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"


def test_crossed_messages_name_both_actions_on_both_ranks() -> None:
    (found,) = diagnose(CROSSED)
    assert (found.code, place(found)) == ("RT041", "2:1")
    for part in ("from rank 0 to rank 1", "'0SEND_F0' on rank 0", "'1RECV_F1' on rank 1", "message 1"):
        assert part in found.message
    assert str(found.notes[0].location) == "s.csv:1:5"


def test_messages_of_all_stages_between_two_ranks_share_one_order() -> None:
    # stage 1 hands over to stage 2 and back on the same two ranks as 0 to 1 and back: a V; each channel alone is in order
    sound = (ROOT / "tests/data/schedules/v_lowered.csv").read_text()
    swapped = sound.replace("3SEND_B0,0F1,0SEND_F1", "0F1,0SEND_F1,3SEND_B0")
    (found,) = diagnose(swapped)
    assert found.code == "RT041"
    assert "'0SEND_F1' on rank 0" in found.message
    assert "'2RECV_B0' on rank 1" in found.message


def test_a_hang_with_rendezvous_only_says_who_waits_for_whom() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    (found,) = diagnose(text)
    assert (found.code, place(found)) == ("RT042", "1:18")
    assert "with rendezvous sends" in found.message
    assert [note.message for note in found.notes] == [
        "rank 0 at '0SEND_F1' waits for '1RECV_F1' of rank 1, which comes after its '1SEND_B0'",
        "rank 1 at '1SEND_B0' waits for '0RECV_B0' of rank 0, which comes after its '0SEND_F1'",
    ]
    assert [str(note.location) for note in found.notes] == ["s.csv:1:18", "s.csv:2:18"]


def test_a_hang_with_buffered_sends_is_shown_before_one_with_rendezvous() -> None:
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,1RECV_F1,1F1,1SEND_F1,1RECV_B1,1B1,1SEND_B1\n"
        "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,2RECV_F1,2F1,2RECV_B1,2SEND_F1,2B1,2SEND_B1\n"
        "3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1\n"
    )
    (found,) = diagnose(text)
    assert "with buffered sends" in found.message
    assert [note.message for note in found.notes] == [
        "rank 2 at '2RECV_B1' waits for '3SEND_B1' of rank 3, which comes after its '3RECV_F1'",
        "rank 3 at '3RECV_F1' waits for '2SEND_F1' of rank 2, which comes after its '2RECV_B1'",
    ]


# an oracle: one rank after the other takes its head action, if it can, until nothing moves

PARTS = re.compile(r"(\d+)([A-Z_]+)(\d*)")
Rows = list[list[str]]


def runs(rows: Rows, home: list[int], micro_batches: int, *, rendezvous: bool) -> bool:
    """Whether a schedule computes every step's values once and ends, and every value is there when it is taken."""
    lowered = any("SEND" in text or "RECV" in text for row in rows for text in row)
    last = len(home) - 1
    position = [0] * len(rows)
    channels: dict[tuple[int, int], list[str]] = {}
    ran: Counter[str] = Counter()
    arrived: set[str] = set()
    gathered: set[int] = set()
    marks = any("SHARD" in text for row in rows for text in row)
    reduces = any("REDUCE" in text for row in rows for text in row)

    def head(rank: int) -> str:
        return rows[rank][position[rank]] if position[rank] < len(rows[rank]) else ""

    def step(rank: int) -> bool | None:
        """True: moved; False: waits; None: wrong."""
        text = head(rank)
        if not text:
            return False
        stage_text, kind, number = PARTS.fullmatch(text).groups()
        stage, backwards = int(stage_text), (f"B{number}", f"I{number}")
        if kind.startswith("SEND"):
            step_to = 1 if kind == "SEND_F" else -1
            made = ran[f"{stage}F{number}"] if step_to == 1 else sum(ran[f"{stage}{name}"] for name in backwards)
            peer = stage + step_to
            if not made or not 0 <= peer <= last or home[peer] == rank:
                return None
            message = f"{peer}{kind.replace('SEND', 'RECV')}{number}"
            if rendezvous:
                other = head(home[peer])
                if "RECV" not in other or source_rank(other) != rank:
                    return False
                if other != message or message in arrived:
                    return None
                arrived.add(message)
                position[home[peer]] += 1
            else:
                channels.setdefault((rank, home[peer]), []).append(message)
        elif kind.startswith("RECV"):
            if rendezvous:
                return False  # the sender moves both
            queue = channels.get((source_rank(text), rank), [])
            if not queue:
                return False
            if queue.pop(0) != text or text in arrived:
                return None
            arrived.add(text)
        elif kind == "UNSHARD":
            if stage in gathered:
                return None
            gathered.add(stage)
        elif kind == "RESHARD":
            if stage not in gathered:
                return None
            gathered.remove(stage)
        elif kind == "REDUCE_GRAD":
            done = sum(ran[f"{stage}{name}{m}"] for name in "BW" for m in range(micro_batches))
            if done < micro_batches or ran[text]:
                return None
        else:
            if kind != "W" and marks and stage not in gathered:
                return None
            if kind != "F" and not ran[f"{stage}{'I' if kind == 'W' else 'F'}{number}"]:
                return None
            source = None if kind == "W" else stage - 1 if kind == "F" else stage + 1
            if source is not None and 0 <= source <= last:
                made = ran[f"{source}F{number}"] if kind == "F" else sum(ran[f"{source}{name}"] for name in backwards)
                if lowered and home[source] != rank:
                    if f"{stage}RECV_{'F' if kind == 'F' else 'B'}{number}" not in arrived:
                        return None
                elif not made:
                    return False
        ran[text] += 1
        position[rank] += 1
        return True

    def source_rank(recv: str) -> int:
        stage_text, kind, _ = PARTS.fullmatch(recv).groups()
        return home[int(stage_text) + (-1 if kind == "RECV_F" else 1)]

    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            outcome = step(rank)
            if outcome is None:
                return False
            moved = moved or outcome
    complete = all(
        ran[f"{s}F{m}"] == 1
        and (ran[f"{s}B{m}"], ran[f"{s}I{m}"], ran[f"{s}W{m}"]) in {(1, 0, 0), (0, 1, 1)}
        and (ran[f"{s}REDUCE_GRAD"] == 1 or not reduces)
        for s in range(len(home))
        for m in range(micro_batches)
    )
    ended = all(not head(rank) for rank in range(len(rows)))
    return complete and ended and not any(channels.values()) and not gathered


@st.composite
def sound_schedules(draw, *, lowered: bool) -> tuple[Rows, list[int], int]:
    """Rows in which one global order of computations and messages is written down, for any map of stages to ranks.

    With the map (rank of each stage) and the number of micro-batches.
    """
    home = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    home = [sorted(set(home)).index(rank) for rank in home]
    micro_batches = draw(st.integers(1, 3))
    random = draw(st.randoms(use_true_random=True))
    needs: dict[str, list[str]] = {}
    last = len(home) - 1
    for m in range(micro_batches):
        halves = [random.random() < 0.4 for _ in home]
        for s in range(len(home)):
            backward = f"{s}{'I' if halves[s] else 'B'}{m}"
            needs[f"{s}F{m}"] = []
            needs[backward] = [f"{s}F{m}"]
            if halves[s]:
                needs[f"{s}W{m}"] = [backward]
        for s in range(last):
            back, front = f"{s + 1}{'I' if halves[s + 1] else 'B'}{m}", f"{s}{'I' if halves[s] else 'B'}{m}"
            for source, send, recv, taker in (
                (f"{s}F{m}", f"{s}SEND_F{m}", f"{s + 1}RECV_F{m}", f"{s + 1}F{m}"),
                (back, f"{s + 1}SEND_B{m}", f"{s}RECV_B{m}", front),
            ):
                message = f"{send} {recv}"
                if lowered and home[s] != home[s + 1]:
                    needs[message] = [source]
                    needs[taker] = [*needs[taker], message]
                else:
                    needs[taker] = [*needs[taker], source]
    rows: Rows = [[] for _ in range(max(home) + 1)]
    done: set[str] = set()
    while needs:
        ready = [text for text, before in needs.items() if done.issuperset(before)]
        chosen = random.choice(ready)
        del needs[chosen]
        done.add(chosen)
        for text in chosen.split():
            rows[home[int(text[0])]].append(text)
    if lowered:
        for s, rank in enumerate(home):
            rows[rank] = [f"{s}UNSHARD", *rows[rank], f"{s}REDUCE_GRAD", f"{s}RESHARD"]
    return rows, home, micro_batches


def text_of(rows: Rows) -> str:
    return "\n".join(",".join(row) for row in rows)


@given(st.booleans().flatmap(lambda lowered: sound_schedules(lowered=lowered)))
def test_whatever_follows_one_global_order_is_sound(schedule: tuple[Rows, list[int], int]) -> None:
    rows, home, micro_batches = schedule
    assert runs(rows, home, micro_batches, rendezvous=False)
    assert runs(rows, home, micro_batches, rendezvous=True)
    assert diagnose(text_of(rows)) == []


@settings(max_examples=400)
@given(
    st.booleans().flatmap(lambda lowered: sound_schedules(lowered=lowered)),
    st.sampled_from(("swap", "duplicate", "drop", "move", "delay")),
    st.randoms(use_true_random=True),
)
def test_one_changed_action_is_reported_exactly_where_it_matters(
    schedule: tuple[Rows, list[int], int], change: str, random: Random
) -> None:
    rows, home, micro_batches = schedule
    row = random.choice(rows)
    at, to = random.randrange(len(row)), random.randrange(len(row))
    if change == "swap":
        row[at], row[to] = row[to], row[at]
    elif change == "move":
        row.insert(to, row.pop(at))
    elif change == "delay":  # the small change that most often stays legal
        row.insert(at + 1, row.pop(at))
    elif change == "duplicate":
        row.insert(to, row[at])
    elif len(row) > 1:
        del row[at]
    buffered, rendezvous = (runs(rows, home, micro_batches, rendezvous=mode) for mode in (False, True))
    event(f"{change}: buffered {buffered}, rendezvous {rendezvous}")
    found = diagnose(text_of(rows))
    assert (found == []) == (buffered and rendezvous), [d.render() for d in found]
    if buffered and not rendezvous:
        assert [d.code for d in found] == ["RT042"]
        assert "with rendezvous sends" in found[0].message


@settings(max_examples=300)
@given(sound_schedules(lowered=True), st.integers(1, 4), st.randoms(use_true_random=True))
def test_messages_moved_past_each_other_are_reported_exactly_where_it_matters(
    schedule: tuple[Rows, list[int], int], changes: int, random: Random
) -> None:
    """Small changes of this kind are what hangs with rendezvous sends only."""
    rows, home, micro_batches = schedule
    for _ in range(changes):
        row = random.choice(rows)
        messages = [n for n, text in enumerate(row) if "SEND" in text or "RECV" in text]
        if len(messages) > 1:
            at = random.randrange(len(messages) - 1)
            row.insert(messages[at], row.pop(messages[at + 1]))
    buffered, rendezvous = (runs(rows, home, micro_batches, rendezvous=mode) for mode in (False, True))
    event(f"buffered {buffered}, rendezvous {rendezvous}")
    found = diagnose(text_of(rows))
    assert (found == []) == (buffered and rendezvous), [d.render() for d in found]
    if buffered and not rendezvous:
        assert [d.code for d in found] == ["RT042"]
        assert "with rendezvous sends" in found[0].message


@given(st.data())
def test_reading_what_was_written_gives_the_same_table(data: st.DataObject) -> None:
    rows, _, _ = data.draw(sound_schedules(lowered=data.draw(st.booleans())))
    spaced = []
    for row in parse_torch_csv(text_of(rows), "s.csv").rows:
        slot, placed = -1, []
        for action in row:
            joins = (
                placed
                and {action.kind, placed[-1].kind} == {ActionKind.FORWARD, ActionKind.BACKWARD}
                and (len(placed) < 2 or placed[-2].slot < slot)
                and data.draw(st.booleans())
            )
            slot += 0 if joins else data.draw(st.integers(1, 3))
            placed.append(evolve(action, slot=slot))
        spaced.append(tuple(placed))
    table = ActionTable(tuple(spaced))
    assert parse_torch_csv("\n".join(torch_csv_lines(table)), "s.csv") == table


NAMES = st.sampled_from([kind.value for kind in ActionKind])
CELLS = st.tuples(st.integers(0, 3), NAMES, st.integers(0, 2)).map(
    lambda cell: f"{cell[0]}{cell[1]}" + ("" if cell[1] in {"UNSHARD", "RESHARD", "REDUCE_GRAD"} else str(cell[2]))
)
PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)).map(
    "({0[0]}F{0[1]};{0[0]}B{0[2]})OVERLAP_F_B".format
)


@given(st.lists(st.lists(CELLS | PAIRS | st.just(""), min_size=1, max_size=8), min_size=1, max_size=4))
def test_no_table_is_too_strange_for_the_rules(rows: Rows) -> None:
    home = [0] * 4
    for diagnostic in diagnose(text_of(rows)):
        assert diagnostic.code in {"RT007", "RT020", "RT026", "RT027", "RT030", "RT031", "RT040", "RT041", "RT042"}
        assert diagnostic.location is not None
    if len(rows) == 1 and "OVERLAP" not in text_of(rows) and diagnose(text_of(rows)) == []:
        stages = 1 + max(int(text[0]) for text in rows[0] if text)
        numbers = {int(text[-1]) for text in rows[0] if text and text[-1].isdigit()}
        assert runs([[text for text in rows[0] if text]], home[:stages], len(numbers), rendezvous=True)


@given(st.binary(max_size=200))
def test_noise_is_refused_without_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise.csv"
    path.write_bytes(b"\x00" + data)
    assert main(["lint", str(path)]) == 1


# modules


@settings(max_examples=25)
@given(cases(max_layers=3, max_stages=4, max_micro_batches=5), st.sampled_from(("gpipe", "1f1b", "zb-h1")))
def test_compiled_modules_export_soundly(case, schedule: str) -> None:
    module = PassManager(FakeTarget()).run(case.module(), f"place-{schedule}")
    plan = module.plan
    table = actions_of_module(module)
    lowered, bare = with_gathered_parameters(table), compute_only(table)
    for checked in (table, lowered, bare):
        check_schedule(checked)
    assert lowered.is_lowered == (plan.pp > 1)
    assert not bare.is_lowered
    order = SCHEDULES[schedule]
    assert bare == actions_of_orders([order(plan.pp, plan.micro_batches, stage) for stage in range(plan.pp)])
    home = list(range(plan.pp))
    rows = [line.split(",") for line in torch_csv_lines(lowered)]
    assert runs(rows, home, plan.micro_batches, rendezvous=False)
    assert runs(rows, home, plan.micro_batches, rendezvous=True)


def postponed(ops: list[Op], work: type[Op], payload: Payload) -> list[Op]:
    """The ops with all of micro-batch 0's work and its message, but for the first op, after that of micro-batch 1."""
    mine = [op for op in ops if type(op) is work or (type(op) is Send and op.payload is payload)]
    late = [op for op in mine if op.micro_batch == 0][1:]
    kept = [op for op in ops if op not in late]
    after = 1 + max(n for n, op in enumerate(kept) if type(op) is work and op.micro_batch == 1)
    return kept[:after] + late + kept[after:]


def test_a_stage_has_done_its_work_when_its_last_block_has() -> None:
    module = api.lowered(str(ROOT / "examples/tiny.json"), str(ROOT / "examples/tiny.toml"))
    first, last = module.stages
    first.ops = postponed(first.ops, Forward, Payload.ACTIVATION)
    last.ops = postponed(last.ops, Backward, Payload.GRADIENT)
    rows = [[str(action) for action in row] for row in actions_of_module(module).rows]
    assert rows[0][:4] == ["0F1", "0F0", "0SEND_F0", "0SEND_F1"]
    assert rows[1][8:12] == ["1B1", "1B0", "1SEND_B0", "1SEND_B1"]


# commands


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled schedule of the example."""
    path = tmp_path_factory.mktemp("export") / "tiny.rtir"
    model, plan = (str(ROOT / "examples" / name) for name in ("tiny.json", "tiny.toml"))
    assert main(["compile", "--model", model, "--plan", plan, "-o", str(path)]) == 0
    return path


def test_export_writes_what_lint_accepts(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", str(tiny), "--format", "torch-csv"]) == 0
    rows = capsys.readouterr().out
    assert rows == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    path = tmp_path / "tiny.csv"
    assert main(["export", str(tiny), "--lowered", "-o", str(path)]) == 0
    assert path.read_text().startswith("0UNSHARD,0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0")
    assert main(["lint", str(path)]) == 0
    assert "sound (2 ranks, 2 stages, 4 micro-batches, 38 actions, with messages)" in capsys.readouterr().out


def test_export_refuses_an_order_that_hangs_one_action_at_a_time(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tiny.read_text().splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if "stage @1 {" in line)
    send, recv = (
        next(n for n, line in enumerate(lines) if n < start and text in line)
        for text in ("send activation m0 @1", "recv gradient m0 @1")
    )
    lines.insert(send, lines.pop(recv))  # engines run side by side, so the module is still sound
    edited = tmp_path / "edited.rtir"
    edited.write_text("".join(lines))
    assert main(["verify", str(edited)]) == 0
    assert main(["export", str(edited)]) == 0
    capsys.readouterr()
    assert main(["export", str(edited), "--lowered"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{edited}:{send + 1}:" in shown.err
    assert "error[RT042]: the schedule hangs with buffered sends" in shown.err


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("1f1b", "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
        ("gpipe", "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"),
        ("zb-h1", "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"),
    ],
)
def test_schedule_prints_a_row_a_stage(
    kind: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["schedule", "--kind", kind, "--stages", "2", "--micro-batches", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out == rows
    path = tmp_path / "s.csv"
    assert main([*words, "-o", str(path)]) == 0
    assert path.read_text() == rows
    assert main(["lint", str(path), "--format", "torch-csv"]) == 0


def test_lint_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.csv"

    def linted(text: str) -> tuple[int, dict[str, object]]:
        path.write_text(text)
        code = main(["lint", str(path), "--json"])
        return code, json.loads(capsys.readouterr().out)

    assert linted("0F0,0B0\n") == (0, {"sound": True, "diagnostics": [], "ranks": 1, "actions": 2})
    code, report = linted(CROSSED)
    assert (code, report["sound"], report["ranks"], report["actions"]) == (1, False, 2, 16)
    assert [(d["code"], d["line"], d["column"]) for d in report["diagnostics"]] == [("RT041", 2, 1)]
    code, report = linted("0F0,oops\n")
    assert (code, report["sound"], report["ranks"], report["actions"]) == (1, False, None, None)
    assert [d["code"] for d in report["diagnostics"]] == ["RT007"]


@pytest.mark.parametrize("words", [["lint"], ["lint", "x.csv", "--format", "xml"], ["schedule", "--kind", "1f1b"]])
def test_wrong_usage(words: list[str]) -> None:
    assert main(words) == 2


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path / "none.csv"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "RT002"


@pytest.mark.parametrize("name", ["lint", "export", "schedule"])
def test_help_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"  ratrainc {name} " in capsys.readouterr().out
