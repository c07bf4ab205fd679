"""Tables of actions: reading and writing them, and the rules they must satisfy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.analysis.actions import actions_of_orders, parse_torch_csv, read_torch_csv, torch_csv_lines
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from tests.ratrain_ir.schedules.unit_time import orders_of, shape_of
from tests.ratrain_ir.verifier.schedule_tables import CROSSED, ROOT, diagnose

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.diagnostics import Diagnostic

SOUND = sorted((ROOT / "tests/data/schedules").glob("*.csv"))


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


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 12), st.integers(2, 5))
def test_named_schedules_are_sound(kind: str, stages: int, micro_batches: int, slices: int) -> None:
    shape = shape_of(kind, stages, micro_batches, slices=slices if kind == "seq1f1b" else 1)
    table = actions_of_orders(orders_of(kind, shape))
    check_schedule(table)
    text = "".join(f"{line}\n" for line in torch_csv_lines(table))
    assert ("." in text) == (kind == "seq1f1b")
    assert parse_torch_csv(text, "s.csv") == table
    if kind in {"1f1b", "gpipe", "zb-h1"}:
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


SHARDED = [
    ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD", []),
    (
        "0F0,0B0",
        [("RT008", "1:1", "stage 0, which are not gathered here"), ("RT009", "1:5", "'0REDUCE_GRAD' is missing")],
    ),
    (
        "0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n1UNSHARD,1F0,1B0,1RESHARD",
        [("RT008", "1:23", "'0B0' needs the parameters"), ("RT009", "2:18", "stage 1 are never reduced")],
    ),
    ("0UNSHARD,0F0,0I0,0RESHARD,0REDUCE_GRAD,0W0", [("RT031", "1:27", "comes before '0W0'")]),
]


@pytest.mark.parametrize(("text", "expected"), SHARDED)
def test_sharded_stages_gather_and_reduce_in_any_case(text: str, expected: list[tuple[str, str, str]]) -> None:
    found = diagnose(text, sharded=True)
    assert [(d.code, place(d)) for d in found] == [(code, where) for code, where, _ in expected]
    assert all(part in d.message for d, (_, _, part) in zip(found, expected, strict=True))


@given(st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 5), st.integers(1, 4), st.data())
def test_ranks_without_actions_are_sound_where_nobody_needs_them(
    kind: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    """Empty lines anywhere among the others; without one of those, the stages behind it have no neighbour."""
    rows = [*torch_csv_lines(actions_of_orders(orders_of(kind, shape_of(kind, stages, micro_batches))))]
    idle = data.draw(st.sampled_from(["", ",,", '"",']))
    for place in data.draw(st.lists(st.integers(0, stages), min_size=1, max_size=3)):
        rows.insert(place, idle)
    table = parse_torch_csv("\n".join(rows) + "\n", "s.csv")
    check_schedule(table)
    assert len(table.rows) == len(rows)
    assert [row != idle for row in rows] == [bool(row) for row in table.rows]
    assert parse_torch_csv("".join(f"{line}\n" for line in torch_csv_lines(table)), "s.csv") == table
    if stages > 1:
        lost = next(rank for rank, row in enumerate(rows) if row.startswith("0F"))
        rows[lost] = idle
        found = diagnose("\n".join(rows) + "\n")
        assert [diagnostic.code for diagnostic in found] == ["RT030"]
        assert found[0].notes[0].message.startswith("nothing runs on rank")


# broken ones: text, then (code, place, parts of the message) of each diagnostic

MALFORMED = [
    ("0F0,0X0,0B0", [("RT007", "1:5", ["there is no action 'X'", "REDUCE_GRAD"])]),
    ("0F0,0f1,0B0", [("RT007", "1:5", ["there is no action 'f'"])]),
    ("F0,0B", [("RT007", "1:1", ["'F0' is not an action"]), ("RT007", "1:4", ["'0B' has no micro-batch"])]),
    ("0F0,0B0,0UNSHARD1", [("RT007", "1:9", ["takes no micro-batch"])]),
    ("\n\n", [("RT007", "1:1", ["no action on any rank"])]),
    (',"",\n', [("RT007", "1:1", ["no action on any rank"])]),
    ("0F1234567890", [("RT007", "1:1", ["more than 9 digits"])]),
    ("0F0,(0F1;0B0)", [("RT007", "1:5", ["expected '(0F1;0B0)OVERLAP_F_B'"])]),
    ("0F0,(0F1;0W0)OVERLAP_F_B", [("RT007", "1:5", ["one forward and one backward"])]),
    ("0F0,(0F1; 0Q0)OVERLAP_F_B,0B1", [("RT007", "1:11", ["there is no action 'Q'"])]),
    ("0F0 0B0", [("RT007", "1:1", ["'0F0 0B0' is not an action"])]),
    ('"0F0,0B0"', [("RT007", "1:1", ["""'"0F0' is not"""]), ("RT007", "1:6", ["""'0B0"' is not"""])]),
    ("\ufeff0F0,0B0", [("RT007", "1:1", [r"'\ufeff0F0' is not an action"])]),
    ("0F0,0\x1b[2J,0B0", [("RT007", "1:5", [r"'0\x1b[2J' is not an action"])]),
    ("0F.1,0B0", [("RT007", "1:1", ["'0F.1' has no micro-batch: expected something like '0F0'"])]),
    ("0F0.,0B0", [("RT007", "1:1", ["'0F0.' is not an action"])]),
    ("0F0,0B0,0UNSHARD.1", [("RT007", "1:9", ["takes no micro-batch"])]),
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
    # slices
    ("0F0.0,0F0.1,0B0.1", [("RT030", "1:1", ["'0F0.0' has no backward: '0B0.0' (or '0I0.0' and '0W0.0') is missing"])]),
    ("0F0.0,0F0.1,0B0.1,0B0.1,0B0.0", [("RT030", "1:19", ["'0B0.1' happens twice"])]),
    ("0F0.1,0F0.0,0B0.1,0B0.0", [("RT020", "1:1", ["'0F0.1' comes before '0F0.0', whose keys it attends to"])]),
    (
        "0F0.0,0F0.1,0B0.0,0B0.1",
        [("RT020", "1:13", ["'0B0.0' comes before '0B0.1', which adds to the gradients of its keys"])],
    ),
    ("0F0.0,0F0.1,0I0.0,0I0.1,0W0.1,0W0.0", [("RT020", "1:13", ["'0I0.0' comes before '0I0.1'"])]),
    ("0F0.0,0B0.0,0F0.1,0B0.1", [("RT020", "1:7", ["'0B0.0' comes before '0B0.1'"])]),
    (
        "0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1B0.0",
        [("RT030", "2:1", ["stage 1 never runs slice 1 of micro-batch 0, which the schedule names elsewhere"])],
    ),
    (
        "0F0.0,0F0.3,0B0.3,0B0.0",
        [("RT030", "1:7", ["no stage runs slices 1 to 2 of micro-batch 0, but there is '0F0.3'"])],
    ),
    (
        "0F0,0B0,0F1.0,0B1.0\n1F0,1B0,1F1,1B1",
        [("RT030", "1:9", ["micro-batch 1 is cut into slices in '0F1.0', but whole in '1F1'"])],
    ),
    (
        "0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n2F0.0,2F0.1,2B0.1,2B0.0,1F1.0",
        [
            ("RT027", "3:25", ["'1F1.0' on rank 2, but stage 1 is on rank 1"]),
            ("RT030", "1:1", ["stage 0 never runs slice 0 of micro-batch 1"]),
            ("RT030", "3:25", ["'1F1.0' has no backward"]),
            ("RT030", "3:1", ["stage 2 never runs slice 0 of micro-batch 1"]),
        ],
    ),
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
    (
        "0F0.0,0SEND_F0.0,0RECV_B0.0,0B0.0\n1RECV_F0.0,1F0.0,1B0.0",
        [("RT040", "1:18", ["'0RECV_B0.0' on rank 0 is never sent: rank 1 has no '1SEND_B0.0'"])],
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
