"""Table of saved tensors by block: kept, recovered or stored, the cost of that, and the cost of the alternatives.

Seconds are the target's: simulated if the stage stores anything, else the op's own. The exposed part of a
transfer is the time that compute waited for it; the rest is hidden.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.passes.recovery.layer_choice import NOTHING, same_for_all
from ratrain.passes.recovery.rewriting import rewrite
from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import Block, has_backward
from ratrain.ratrain_ir.ops.base import Engine, Slice
from ratrain.ratrain_ir.ops.compute import Forward, Recompute
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import Fetch, Store, fetches_parameters
from ratrain.ratrain_ir.ops.messages import PeerOffload, PeerReload
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import TextTable
from ratrain.targets.machine.store_cost import transfer_work
from ratrain.targets.simulator.bubbles import Bubbles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Piece
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.targets.simulator.timeline import Timeline
    from ratrain.targets.target import MachineTarget

_Key = tuple[Block, int | None]
"""A block, and its slice if micro-batches are cut."""


@frozen
class _Full:
    """Full recovery of a block: the bytes that its forward saves, and the seconds of computing them again."""

    nbytes: int
    seconds: float


@frozen
class _Use:
    """The treatment of the tensors that one forward saves."""

    choice: str
    """`kept`, or where they are stored, and `recovered`, in words"""
    nbytes: int
    """bytes that wait for the backward: saved tensors in DDR, or all that is stored, with the input of a recovery"""
    seconds: float
    """seconds of recovery and of transfers there and back"""
    exposed: float
    """seconds of the transfers that compute waited for"""


def recovery_facts(
    module: Module, stage: Stage, target: MachineTarget, timeline: Timeline | None
) -> list[dict[str, Any]]:
    """Return a row for each block and each group of its micro-batches that are treated alike, in forward order.

    Blocks of which nothing is ever made again have none: mlps whose experts replicas share out. `timeline` is that of
    a simulated step; None if the stage stores nothing.
    """
    full = _of_full_recovery(module, stage.index, target)
    rows: dict[tuple[Block, str, int], list[tuple[Piece, _Use]]] = {}
    for forward, use in _uses(module, stage, target, timeline):
        if _key(forward) not in full:
            continue
        rows.setdefault((forward.block, use.choice, use.nbytes), []).append((piece_of(forward), use))
    order = {block: place for place, block in enumerate(module.topology.stage_blocks[stage.index])}
    facts = []
    for (block, choice, nbytes), found in sorted(rows.items(), key=lambda item: order[item[0][0]]):
        whole = full[block, found[0][0].number if isinstance(found[0][0], Slice) else None]
        storing = {
            home.value: sum(
                transfer_work(whole.nbytes, home, target.machine, fetches=way).seconds for way in (False, True)
            )
            for home, _ in target.machine.stores
        }
        facts.append(
            {
                "block": str(block),
                "pieces": [str(piece) if isinstance(piece, Slice) else f"m{piece}" for piece, _ in found],
                "choice": choice,
                "bytes": nbytes,
                "seconds": sum(use.seconds for _, use in found) / len(found),
                "exposed_seconds": sum(use.exposed for _, use in found) / len(found),
                "recovering_seconds": whole.seconds,
                "storing_seconds": storing,
            }
        )
    return facts


def _of_full_recovery(module: Module, index: int, target: MachineTarget) -> dict[_Key, _Full]:
    """Return bytes and seconds of full recovery for each block and slice of a stage that can be recovered."""
    # all micro-batches cost the same, so one that recovers everything has all the figures
    one = lower(module.model, evolve(module.plan, micro_batches=1))
    stage = one.stages[index]
    forwards = [op for op in stage.ops if type(op) is Forward]
    saved = {_key(op): _bytes(t for t in op.writes if t.kind is StateKind.SAVED) for op in forwards}
    rewrite(stage, same_for_all(NOTHING))
    return {
        _key(op): _Full(saved[_key(op)], target.op_seconds(one, stage, op)) for op in stage.ops if type(op) is Recompute
    }


def _key(op: Forward | Recompute) -> _Key:
    return op.block, op.slice


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(aligned(tensor.type.nbytes) for tensor in tensors)


def _uses(
    module: Module, stage: Stage, target: MachineTarget, timeline: Timeline | None
) -> Iterable[tuple[Forward, _Use]]:
    """Yield each forward of a layer that has a backward, with the treatment of its saved tensors."""
    recovered: dict[tuple[Block, Piece], float] = {}
    stored: dict[tuple[Block, Piece], Store | PeerOffload] = {}
    for op in stage.ops:
        if type(op) is Recompute:
            where = op.block, piece_of(op)
            recovered[where] = recovered.get(where, 0.0) + target.op_seconds(module, stage, op)
        elif isinstance(op, Store | PeerOffload):
            stored[op.block, piece_of(op)] = op
    moved = {} if timeline is None else _transfers(timeline, stage.index)
    last = _last_reads(stage)
    for position, op in enumerate(stage.ops):
        if type(op) is not Forward or op.block.layer is None or not has_backward(module.model, module.plan, op.block):
            continue
        where = op.block, piece_of(op)
        store = stored.get(where)
        if store is None:
            # a saved tensor that nothing reads after its forward is dropped: it waits for no backward
            nbytes = _bytes(t for t in op.writes if t.kind is StateKind.SAVED and last.get(t, -1) > position)
        else:
            nbytes = _bytes(store.reads)
        words = [] if store is None else [_stored_words(store)]
        words += ["recovered"] * (where in recovered)
        seconds, exposed = moved.get((str(op.block), piece_of(op)), (0.0, 0.0))
        use = _Use(", ".join(words) or "kept", nbytes, recovered.get(where, 0.0) + seconds, exposed)
        yield op, use


def _stored_words(op: Store | PeerOffload) -> str:
    return f"stored at @{op.peer}" if isinstance(op, PeerOffload) else f"stored in {op.writes[0].home.value}"


def _last_reads(stage: Stage) -> dict[Tensor, int]:
    """Return the position of each tensor's last read by an op that works; releases and the like do not count."""
    last: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        if op.engine is not Engine.NONE:
            last |= dict.fromkeys(op.reads, position)
    return last


def _transfers(timeline: Timeline, stage: int) -> dict[tuple[str, Piece], tuple[float, float]]:
    """Return, by block and piece, the seconds of transfers in a steady step, and those that compute waited for."""
    waited = Bubbles(timeline).waited_for_ops(stage, Engine.COMPUTE)
    # events are numbered step by step; the last simulated step is the steady one
    first_event = (timeline.steps - 1) * timeline.ops
    found: dict[tuple[str, Piece], tuple[float, float]] = {}
    for engine in (Engine.STORE, Engine.FETCH):
        for number in range(*timeline.ops_of(stage, engine)):
            item = timeline.instructions[number]
            if item.keyword == Fetch.keyword and item.variant:  # of frozen parameters, for a pass
                continue
            assert item.micro_batch is not None
            piece = item.micro_batch if item.slice is None else Slice(item.micro_batch, item.slice)
            took = float(timeline.ends[first_event + number] - timeline.starts[first_event + number])
            seconds, exposed = found.get((item.blocks[0], piece), (0.0, 0.0))
            found[item.blocks[0], piece] = seconds + took, exposed + waited.get(number, 0.0)
    return found


def stores_anything(stage: Stage) -> bool:
    """Return True if the stage stores anything, so that its costs need a simulated step."""
    kinds = Store | Fetch | PeerOffload | PeerReload
    return any(isinstance(op, kinds) and not fetches_parameters(op) for op in stage.ops)


def recovery_table(facts: list[dict[str, Any]]) -> TextTable:
    """Return the table of `recovery_facts`; layers with equal entries share a row, and so do slices of a block.

    Bytes and seconds of a row are means over what shares it.
    """
    rows = []
    for _, alike in groupby(_by_kind(_over_slices(facts)), key=_shown):
        found = list(alike)
        size = size_text(round(_mean(found, "bytes"))) if found[0]["bytes"] else "-"
        first = found[0]
        rows.append([_blocks_text(found), _pieces_text(first["pieces"]), first["choice"], size, *_cost_texts(found)])
    columns: tuple[str, ...] = ("block", "micro-batches", "now", "bytes", "cost", "other choice")
    if all(row[-1] == "-" for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    piece = "slice on average" if " " in facts[0]["pieces"][0] else "micro-batch"
    return TextTable(f"saved for the backward, by block (seconds of one {piece}, simulated)", columns, rows)


def _over_slices(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the facts of a block that differ only in figures, as the facts of a sequence's slices do.

    The pieces of a fact become their numbers: micro-batch and slice, counted through.
    """
    slices = 1 + max(_numbers(piece)[1] for fact in facts for piece in fact["pieces"])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for place, fact in enumerate(facts):
        figures = fact["bytes"] > 0 if slices > 1 else place
        groups.setdefault((fact["block"], fact["choice"], figures), []).append(fact)
    merged = []
    for alike in groups.values():
        pieces = sorted(_numbers(piece) for fact in alike for piece in fact["pieces"])
        figures = {name: _mean(alike, name) for name in ("bytes", "seconds", "exposed_seconds", "recovering_seconds")}
        homes = alike[0]["storing_seconds"]
        storing = {home: _mean([fact["storing_seconds"] | fact for fact in alike], home) for home in homes}
        merged.append(alike[0] | figures | {"storing_seconds": storing, "pieces": _Pieces(pieces, slices)})
    return merged


@frozen(order=True)
class _Pieces:
    """Micro-batches, or slices of them, in order."""

    numbers: list[tuple[int, int]]
    """micro-batch and slice"""
    slices: int

    def __len__(self) -> int:
        return len(self.numbers)


def _numbers(piece: str) -> tuple[int, int]:
    """Return the numbers of micro-batch and slice in a text like `m3 s1`; the slice of a whole one is 0."""
    micro_batch, _, part = piece.partition(" ")
    return int(micro_batch[1:]), int(part[1:] or 0)


def _mean(facts: list[dict[str, Any]], name: str) -> float:
    """Return the mean of a figure over the pieces of facts."""
    return float(sum(fact[name] * len(fact["pieces"]) for fact in facts) / sum(len(fact["pieces"]) for fact in facts))


def _blocks_text(facts: list[dict[str, Any]]) -> str:
    """Name blocks of one kind: `attention.0-7, 16-23`."""
    kind = facts[0]["block"].partition(".")[0]
    layers = [int(fact["block"].partition(".")[2]) for fact in facts]
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0])]
    return f"{kind}.{', '.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)}"


def _by_kind(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort facts: attention blocks before mlps, each choice together, so that equal layers follow each other."""
    return sorted(facts, key=lambda each: (each["block"].partition(".")[0], each["choice"], each["pieces"]))


def _shown(fact: dict[str, Any]) -> tuple[Any, ...]:
    """Return the entries of a row that must be equal for layers to share it."""
    kind = fact["block"].partition(".")[0]
    return kind, fact["choice"], fact["pieces"].numbers, fact["bytes"], _cost_texts([fact])[1]


def _cost_texts(found: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the mean cost of a choice over rows of equal choice, and the costs of the alternatives, as texts."""
    first = found[0]
    stored = first["choice"].startswith("stored")
    costs, others = "-", []
    if first["choice"] != "kept":
        seconds, exposed = _mean(found, "seconds"), _mean(found, "exposed_seconds")
        costs = seconds_text(seconds)
        if stored:
            hidden = "hidden" if exposed <= _LITTLE * seconds else f"{seconds_text(exposed)} exposed"
            costs += f" {hidden}"
    if "recovered" not in first["choice"]:
        others.append(f"recovering {seconds_text(first['recovering_seconds'])}")
    if not stored:
        others += [f"{home} {seconds_text(seconds)}" for home, seconds in first["storing_seconds"].items()]
    return costs, ", ".join(others) or "-"


_LITTLE = 1e-3
"""Share of a transfer's seconds up to which exposed time is called hidden."""


def _pieces_text(pieces: _Pieces) -> str:
    """Name pieces: `m0 .. m7 (8)` is a range, `m1, m6 .. m16 (4)` evenly spaced; of others how many there are."""
    places = [micro_batch * pieces.slices + part for micro_batch, part in pieces.numbers]
    names = [f"m{one} s{part}" if pieces.slices > 1 else f"m{one}" for one, part in pieces.numbers]
    if len(names) < 3:
        return ", ".join(names)
    steps = {after - place for place, after in pairwise(places)}
    if len(steps) > 1:
        return f"{len(names)} of {names[0]} .. {names[-1]}"
    second = "" if steps == {1} else f", {names[1]}"
    return f"{names[0]}{second} .. {names[-1]} ({len(names)})"
