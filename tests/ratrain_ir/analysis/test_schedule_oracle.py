"""Tables of actions against an oracle: what the rules accept runs, what they refuse does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.analysis.actions import ActionTable, actions_of_orders, parse_torch_csv, torch_csv_lines
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.verifier.schedule_rules import verify_schedule
from ratrain.ratrainc.cli import main
from tests.ratrain_ir.schedules.unit_time import orders_of, run, shape_of
from tests.ratrain_ir.verifier.schedule_tables import Rows, diagnose, runs

if TYPE_CHECKING:
    from random import Random

    import pytest


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


@settings(max_examples=200)
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


@settings(max_examples=150)
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


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 3)),
    st.randoms(use_true_random=True),
)
def test_a_named_schedule_with_two_actions_swapped_is_refused_exactly_where_it_does_not_run(
    kind: str, size: tuple[int, int, int], random: Random
) -> None:
    """Slices of a micro-batch, several chunks and halves of backwards included, against a run that shares nothing with the rules."""
    stages, micro_batches, slices = size
    shape = shape_of(kind, stages, micro_batches, slices=slices if kind == "seq1f1b" else 1)
    orders = [list(order) for order in orders_of(kind, shape)]
    row = random.choice(orders)
    at = random.randrange(len(row))
    to = random.choice([min(at + 1, len(row) - 1), random.randrange(len(row))])
    row[at], row[to] = row[to], row[at]
    try:
        run(list(orders), shape)
        sound = True
    except AssertionError:
        sound = False
    event(f"sound {sound}")
    found = Diagnostics()
    verify_schedule(actions_of_orders(orders), found)
    assert (found.items == []) == sound, [d.message for d in found.items]


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
