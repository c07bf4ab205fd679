"""Schedules as tables of actions: what the rules say of them, and an oracle that runs them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from ratrain.ratrain_ir.analysis.actions import parse_torch_csv
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Diagnostics
from ratrain.ratrain_ir.verifier.schedule_rules import verify_schedule

ROOT = Path(__file__).resolve().parents[3]

CROSSED = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"


def diagnose(text: str, *, sharded: bool = False) -> list[Diagnostic]:
    """Everything that is wrong with a schedule, in either step."""
    found = Diagnostics()
    try:
        verify_schedule(parse_torch_csv(text, "s.csv"), found, sharded=sharded)
    except DiagnosticError as error:
        return error.diagnostics
    return found.items


PARTS = re.compile(r"(\d+)([A-Z_]+)(\d*)")
Rows = list[list[str]]


def runs(rows: Rows, home: list[int], micro_batches: int, *, rendezvous: bool) -> bool:
    """Whether a schedule computes every step's values once and ends, and every value is there when it is taken.

    The oracle: one rank after the other takes its head action, if it can, until nothing moves.
    """
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
