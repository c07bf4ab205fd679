"""Invariants of every sound module, checked by brute force; each function raises AssertionError with the violation.

The checks are slow and plain second opinions. They do not use `ratrain.ratrain_ir.analysis` or the verifier's sweeps,
except to compare their results. `check_pass` runs all of them on the output of a pipeline for generated modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.model.blocks import block, block_chain, trained_blocks
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import Op, Payload, Piece, piece_name
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, ReduceScatter, repeats_sum
from ratrain.ratrain_ir.ops.compute import Forward, InputGradientOp, Recompute, Release, WeightGradientOp
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.slice_invariants import pieces, slices_see_each_other
from ratrain.ratrain_ir.testing.strategies import Case, cases, targets
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrain_ir.schedules.action import Order

Runner = Callable[["Module", str, FakeTarget], object]
"""Function that runs a pipeline string on a module in place, for a target.

For example `lambda m, text, target: PassManager(target, verify_each=True).run(m, text)`.
"""


def check_pass(pipeline: str, run: Runner, *, examples: int = 25, shrink: bool = True) -> None:
    """Run a pipeline over generated modules and check all invariants; the one call that a pass author needs.

    A pipeline that begins with a placement gets modules of one chunk a stage and whole micro-batches; any other gets
    chunks and slices too. Each module is run twice: the results must be equal, and must compute the same as before the
    pipeline. Raises AssertionError for a model and a plan that break an invariant, or whatever the pipeline raises.
    With `shrink` the counterexample is made small, which may take a minute.
    """
    from hypothesis import HealthCheck, Phase, given, settings

    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=examples, phases=phases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(max_chunks=1, max_slices=1) if pipeline.startswith("place-") else cases(), targets())
    def every_example(case: Case, target: FakeTarget) -> None:
        module, again = case.module(), parse_module(print_module(case.module()))
        run(module, pipeline, target)
        run(again, pipeline, target)
        check_everything(module, target.capacity_bytes)
        work = mathematics(case.module())
        assert mathematics(module) == work, f"'{pipeline}' changed what is computed:\n{print_module(module)}"
        difference = first_difference(module, again)
        assert difference is None, f"'{pipeline}' gives two results for one module: {difference}"

    every_example()


def check_everything(module: Module, capacity_bytes: int | None = None) -> None:
    """Check every invariant that applies to a module of this level.

    With `capacity_bytes`, arenas must not exceed it.
    """
    is_sound(module)
    text_round_trip_is_exact(module)
    messages_pass_between_chunks(module)
    for stage in module.stages:
        blocks_are_where_the_plan_says(module, stage)
        slices_see_each_other(module, stage)
        lifetimes_are_exact(stage)
        if any(type(op) is Release for op in stage.ops):
            nothing_is_used_after_release(stage)
            only_carried_bytes_are_live_at_the_end(stage)
        if module.level is not Level.DATAFLOW and module.plan.schedule is not None:
            in_flight_is_exact(module, stage)
        if module.level is Level.ALLOCATED:
            no_byte_is_shared(stage)
            arena_is_within(stage, capacity_bytes)
            peak_is_within_arena(stage)


def is_sound(module: Module) -> None:
    """Check that the verifier accepts the module."""
    try:
        check(module)
    except DiagnosticError as error:
        raise AssertionError(f"the verifier refuses the module:\n{error}\n{print_module(module)}") from None


def text_round_trip_is_exact(module: Module) -> None:
    """Check that parsing the printed text gives an equal module, which prints as the same text."""
    text = print_module(module)
    back = parse_module(text)
    difference = first_difference(module, back)
    assert difference is None, f"parsing what was printed gives another module: {difference}"
    assert print_module(back) == text, "printing what was parsed gives another text"


def live_sets(stage: Stage) -> list[set[Tensor]]:
    """Return the set of live tensors at each op, by brute force.

    A tensor is live at an op if it holds a value that is still needed: it was defined at or before the op (or carried
    in), and is accessed at or after it (or carried out) before it is defined again.
    """
    live: list[set[Tensor]] = [set() for _ in stage.ops]
    for tensor in stage.tensors.values():
        for start, stop in _lives(stage, tensor):
            for position in range(start, stop):
                live[position].add(tensor)
    return live


def _lives(stage: Stage, tensor: Tensor) -> list[tuple[int, int]]:
    """Return the range of positions [start, stop) of each value that a tensor holds in one step."""
    count = len(stage.ops)
    touching = [(p, op) for p, op in enumerate(stage.ops) if tensor in op.operands and type(op) is not Release]
    defining = [p for p, op in touching if tensor in op.writes or tensor in op.scratch]
    # Each definition begins a value; -1 stands for the value carried into the step.
    bounds = [-1, *defining, count]
    lives = []
    for first, following in pairwise(bounds):
        accesses = [p for p, _ in touching if max(first, 0) <= p < following]
        carried_in, carried_out = tensor.carried and first == -1, tensor.carried and following == count
        if carried_in and (accesses or carried_out):
            accesses.append(0)
        if carried_out:
            accesses.append(count - 1)
        if accesses:
            lives.append((min(accesses), max(accesses) + 1))
    return lives


def no_byte_is_shared(stage: Stage) -> None:
    """Check that at every op the byte ranges of the live tensors are disjoint."""
    for position, live in enumerate(live_sets(stage)):
        ranges = sorted((_start(tensor), _start(tensor) + tensor.type.nbytes, tensor.name) for tensor in live)
        for (_, end, name), (start, _, other) in pairwise(ranges):
            where = f"stage {stage.index}, op {position} '{stage.ops[position]!r}'"
            assert end <= start, f"{where}: %{name} ends at byte {end}, %{other} starts at {start}, and both are live"


def _start(tensor: Tensor) -> int:
    assert tensor.offset is not None, f"%{tensor.name} has no offset in an allocated module"
    return tensor.offset


def arena_is_within(stage: Stage, capacity_bytes: int | None) -> None:
    """Check that live tensors lie within the arena, and the arena within the capacity (None: any size)."""
    used = {tensor for live in live_sets(stage) for tensor in live}
    end = max((_start(tensor) + tensor.type.nbytes for tensor in used), default=0)
    assert end <= stage.arena_bytes, f"stage {stage.index} uses byte {end - 1} of an arena of {stage.arena_bytes}"
    assert capacity_bytes is None or stage.arena_bytes <= capacity_bytes, (
        f"the arena of stage {stage.index} has {stage.arena_bytes} bytes, the capacity is {capacity_bytes}"
    )


def peak_is_within_arena(stage: Stage) -> None:
    """Check that the live bytes never exceed the arena."""
    for position, live in enumerate(live_sets(stage)):
        size = sum(aligned(tensor.type.nbytes) for tensor in live)
        assert size <= stage.arena_bytes, (
            f"stage {stage.index}, op {position}: {size} bytes are live in an arena of {stage.arena_bytes}"
        )


def lifetimes_are_exact(stage: Stage) -> None:
    """Check that `analysis.lifetime` finds the same live tensors and live bytes at every op."""
    analysis = lifetimes(stage)
    for position, live in enumerate(live_sets(stage)):
        analysed = set(analysis.live_at(position))
        more, fewer = sorted(t.name for t in analysed - live), sorted(t.name for t in live - analysed)
        assert analysed == live, f"stage {stage.index}, op {position}: lifetimes() has {more} too many, lacks {fewer}"
        size = sum(aligned(tensor.type.nbytes) for tensor in live)
        curve = int(analysis.live_bytes[position])
        assert curve == size, f"stage {stage.index}, op {position}: lifetimes() counts {curve} live bytes, not {size}"


def nothing_is_used_after_release(stage: Stage) -> None:
    """Check that a released tensor is not accessed until defined again, and only live ones are released."""
    live = {tensor for tensor in stage.tensors.values() if tensor.carried}
    for position, op in enumerate(stage.ops):
        where = f"stage {stage.index}, op {position} '{op!r}'"
        for tensor in op.reads + op.updates:
            assert tensor in live, f"{where}: %{tensor.name} is not live"
        if type(op) is Release:
            live.difference_update(op.reads)
        for tensor in op.writes:
            assert tensor not in live, f"{where}: %{tensor.name} is defined while it is live"
            live.add(tensor)


def only_carried_bytes_are_live_at_the_end(stage: Stage) -> None:
    """Check that after the last op exactly the carried tensors are live: none leaks, none is lost."""
    live: Counter[Tensor] = Counter(tensor for tensor in stage.tensors.values() if tensor.carried)
    for op in stage.ops:
        live.update(op.writes)
        if type(op) is Release:
            live.subtract(op.reads)
    left = {tensor for tensor, count in live.items() if count > 0}
    carried = {tensor for tensor in stage.tensors.values() if tensor.carried}
    leaked, lost = sorted(t.name for t in left - carried), sorted(t.name for t in carried - left)
    assert left == carried, f"stage {stage.index} leaks {leaked} and loses {lost}"
    size, expected = (sum(aligned(t.type.nbytes) * n for t, n in c.items()) for c in (live, Counter(carried)))
    assert size == expected, f"stage {stage.index} ends with {size} live bytes, its carried tensors have {expected}"


def chunk_of_block(module: Module, held: Block) -> int:
    """Return the chunk of a block by the plan's cuts; the embedding is in the first, the head in the last."""
    if held.layer is None:
        return 0 if held.kind == "embed" else len(module.plan.cuts)
    return sum(cut <= held.layer for cut in module.plan.cuts)


def stage_of_chunk(module: Module, chunk: int) -> int:
    """Return the stage of a chunk by the plan's layout: a loop over the stages, or a vee."""
    turn, place = divmod(chunk, module.plan.pp)
    return module.plan.pp - 1 - place if module.plan.layout == "vee" and turn % 2 else place


def blocks_are_where_the_plan_says(module: Module, stage: Stage) -> None:
    """Check that a stage holds the masters of exactly its chunks' blocks that train.

    It must also run the forward of each of these blocks once for each micro-batch or slice.
    """
    layers = [block(kind, layer) for layer in range(module.model.layers) for kind in ("attention", "mlp")]
    chain = [block("embed"), *layers, block("head")]
    own = [held for held in chain if stage_of_chunk(module, chunk_of_block(module, held)) == stage.index]
    masters = Counter(tensor.name for tensor in stage.tensors.values() if tensor.kind is StateKind.MASTER)
    trained = _trained(module)
    assert masters == Counter(f"p.{held}" for held in own if held in trained), (
        f"stage {stage.index} holds {sorted(masters)}"
    )
    done = Counter((str(op.block), piece_of(op)) for op in stage.ops if type(op) is Forward)
    wanted = Counter((str(held), piece) for held in own for piece in _all_pieces(module))
    assert done == wanted, f"stage {stage.index} does {done - wanted} too often, {wanted - done} too rarely"


def _trained(module: Module) -> tuple[Block, ...]:
    return trained_blocks(trained_model(module.model, module.plan))


def _all_pieces(module: Module) -> list[Piece]:
    return [piece for m in range(module.plan.micro_batches) for piece in pieces(module, m)]


def messages_pass_between_chunks(module: Module) -> None:
    """Check that messages between chunks on different stages are complete, and ordered alike at both ends.

    Each micro-batch or slice has one activation, and one gradient where a block below trains. Messages of each chunk
    are a sequence of their own.
    """
    sent, received = (_messages(module, kind) for kind in (Send, Recv))
    wanted: dict[tuple[int, int, Payload, int | None], Counter[Piece]] = {}
    lowest = min(chunk_of_block(module, held) for held in _trained(module))
    for into in range(1, module.plan.pp * module.plan.chunks):
        before, after = stage_of_chunk(module, into - 1), stage_of_chunk(module, into)
        said = into if module.plan.chunks > 1 else None
        if before != after:
            each = Counter(_all_pieces(module))
            wanted[before, after, Payload.ACTIVATION, said] = each
            if lowest < into:
                wanted[after, before, Payload.GRADIENT, said] = each
    for ways, verb in ((sent, "sent"), (received, "received")):
        found = {way: Counter(order) for way, order in ways.items()}
        assert found == wanted, f"there are {verb} {found}, where the plan has {wanted}"
    assert sent == received, f"there are sent {sent}, but received {received}"


def _messages(module: Module, kind: type[Op]) -> dict[tuple[int, int, Payload, int | None], list[Piece]]:
    """Return the pieces of all sends (or receives) in list order, by sender, receiver, payload and chunk."""
    found: dict[tuple[int, int, Payload, int | None], list[Piece]] = {}
    for stage in module.stages:
        for op in stage.ops:
            if type(op) is kind and isinstance(op, Send | Recv):
                source, target = (stage.index, op.peer) if kind is Send else (op.peer, stage.index)
                found.setdefault((source, target, op.payload, op.chunk), []).append(piece_of(op))
    return found


def in_flight_is_exact(module: Module, stage: Stage) -> None:
    """Check that at most as many passes are in flight on a stage as in its schedule's order, and at some time as many.

    A pass is in flight from its forward to its backward, or the input half of it. Under 1F1B and ZB-H1 the number is
    min(P - s, M), or 0 where nothing has a backward.
    """
    plan = module.plan
    assert plan.schedule is not None
    blocks, chain = module.topology.stage_blocks[stage.index], block_chain(module.model)
    back = chain[chain.index(_trained(module)[0]) :]
    firsts = {chunk_of_block(module, held): held for held in reversed(blocks) if held in back}
    started: set[tuple[int, Piece]] = set()
    most = 0
    for op in stage.ops:
        if type(op) is Forward and chunk_of_block(module, op.block) in firsts:
            started.add((chunk_of_block(module, op.block), piece_of(op)))
        most = max(most, len(started))
        if isinstance(op, InputGradientOp) and op.block in firsts.values():
            started.discard((chunk_of_block(module, op.block), piece_of(op)))
    if plan.schedule in ("1f1b", "zb-h1"):
        expected = min(plan.pp - stage.index, plan.micro_batches) if firsts else 0
    else:
        order = [each for each in SCHEDULES[plan.schedule].actions(plan.shape, stage.index) if each.chunk in firsts]
        expected = max(_in_flight_after(order[:count]) for count in range(len(order) + 1))
    title = SCHEDULES[plan.schedule].title
    assert most == expected, f"stage {stage.index} has up to {most} passes in flight, {title} has {expected}"


def _in_flight_after(order: Order) -> int:
    """Count the passes that a prefix of an order begins and does not end."""
    begun = {action.work for action in order if action.kind is ActionKind.FORWARD}
    ended = {action.work for action in order if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)}
    return len(begun - ended)


def mathematics(module: Module) -> list[Counter[tuple[str, ...]]]:
    """Return the computations and exchanges of every stage, without order, bucketing and recovery.

    A pass that must not change the training leaves the result as it is.
    """
    return [Counter(item for op in stage.ops for item in _work(op)) for stage in module.stages]


def _work(op: Op) -> list[tuple[str, ...]]:
    if isinstance(op, Release | Recompute) or repeats_sum(op):
        return []
    if isinstance(op, InputGradientOp | WeightGradientOp):  # two halves have the results of the whole
        results = [t.name for t in op.writes + op.updates if t.kind is not StateKind.SAVED]
        return [("backward", str(op.block), piece_name(piece_of(op)), name) for name in results]
    if isinstance(op, ReduceScatter | AllReduce | AllGather):
        detail = str(getattr(op, "micro_batch", None))
        group = op.group.value if isinstance(op, AllReduce) else "replicas"
        return [(op.keyword, str(block), detail, group) for block in op.blocks]
    kinds = (StateKind.SAVED, StateKind.WORKSPACE)
    kept = [t.name for t in op.writes + op.updates if t.kind not in kinds]
    # The engine is no part of the computation: a target may move an update to another one.
    words = repr(op).removesuffix(" host")
    return [(words, *sorted(kept))]
