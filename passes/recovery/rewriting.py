"""Recomputation written into a stage's lists: what a layer's forward keeps, and the ops that make the rest again.

Only lists change. Ops and tensors that others may share stay unchanged, so a choice can be tried on a draft of a stage.

With tensor-parallel ranks an exchange stands between the two blocks of a layer. `checkpoint=block` keeps its result and
recomputes each block from its own input; `checkpoint=layer` keeps the layer's input alone and repeats the exchange:

    %s.attention.0.m0.*, %r_part.mlp.0.m0 = recompute attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %r.mlp.0.m0 = reduce_rows activation mlp.0 m0 backward (%r_part.mlp.0.m0, %x.attention.0.m0)
    %s.mlp.0.m0.* = recompute mlp.0 m0 (%r.mlp.0.m0, %w.mlp.0)
    %dx_part.mlp.0.m0, %g.mlp.0 = backward mlp.0 m0 (%dx.attention.1.m0, %r.mlp.0.m0, %s.mlp.0.m0.*, %w.mlp.0)

If ranks share rows, a `gather_rows` for the backward stands before each of the two recomputations.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, TypeGuard

import attrs
from attrs import define, field, frozen

from ratrain.passes.recovery.layer_choice import ALL, LAYER, ChoiceOf, LayerChoice, keeps
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model import blocks
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.model.slots import ATTENDED, KEY_SLOTS, SQUARES, WHOLE_KEYS, place_in_attention
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase, Piece, piece_fields, piece_name
from ratrain.ratrain_ir.ops.collectives import AllGather, GatherRows, ReduceRows
from ratrain.ratrain_ir.ops.compute import BackwardHeads, Forward, InputGradientOp, Project, Recompute, attends
from ratrain.ratrain_ir.ops.context_ranks import Attend, GatherKeys
from ratrain.ratrain_ir.ops.expert_ranks import Route
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import Fetch
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.support.recent import Recent


@frozen
class Recovery:
    """Summary of what a stage recomputes."""

    ops: int
    """Number of recompute ops."""
    starts: list[Tensor]
    """Inputs of the layers that are recomputed as a whole."""


def rewrite(stage: Stage, choice_of: ChoiceOf) -> Recovery:
    """Drop and recompute tensors in a stage's lists, in place; its ops and tensors stay unchanged."""
    draft, recovery = Rewriting(stage).under(choice_of)
    stage.tensors, stage.ops = draft.tensors, draft.ops
    return recovery


def rewritten(stage: Stage, choice_of: ChoiceOf) -> Stage:
    """Return a draft of a stage under a choice."""
    return Rewriting(stage).under(choice_of)[0]


def mark_checkpoints(starts: Iterable[Tensor]) -> None:
    """Give activations that recomputation starts from the kind `checkpoint`, in place."""
    for tensor in starts:
        if tensor.kind is StateKind.ACTIVATION:
            tensor.kind = StateKind.CHECKPOINT


@frozen(eq=False)
class _Made:
    """Replacement of an op under a choice."""

    ops: tuple[Op, ...]
    operands: frozenset[Tensor]
    added: tuple[Tensor, ...] = ()
    """Tensors that only this replacement needs."""
    gathered: Tensors = ()
    """Views, and inputs of which ranks share the rows, that must be gathered before it."""
    start: Tensor | None = None
    """Input of a layer that is recomputed as a whole."""
    recovered: int = 0


@define(eq=False)
class Rewriting:
    """Rewriter of a stage under one choice after another. Replacement ops are made once and shared by the drafts."""

    stage: Stage
    forwards: dict[tuple[Block, Piece], Forward] = field(factory=dict, init=False)
    """Original forward ops, with all saved slots among their writes."""
    projects: dict[tuple[Block, Piece], Project] = field(factory=dict, init=False)
    """`project` ops before the forward, where norms of queries and keys need sums over tensor-parallel ranks."""
    passing: dict[Tensor, Tensor] = field(factory=dict, init=False)
    """By saved tensor that is recomputed for the backward: the short-lived tensor that the forward reads instead."""
    views: dict[tuple[Block, Piece], Tensors] = field(factory=dict, init=False)
    """Parameters that each backward reads, which its recomputation reads too: its view, and frozen ones."""
    inputs: dict[tuple[Block, Piece], Tensor] = field(factory=dict, init=False)
    """Input that each backward reads, which its recomputation reads too."""
    gathers: dict[Tensor, AllGather | Fetch] = field(factory=dict, init=False)
    """By its first view: what brings views for a backward, where they are sharded or fetched within the step."""
    row_gathers: dict[Tensor, GatherRows] = field(factory=dict, init=False)
    """Gathers of inputs for backwards, where tensor-parallel ranks share rows."""
    key_gathers: dict[Tensor, GatherKeys] = field(factory=dict, init=False)
    """Gathers of keys and values of context ranks for backwards, by the first tensor that they write."""
    whole_keys: dict[tuple[Block, Piece], Tensors] = field(factory=dict, init=False)
    """Keys and values of context ranks that each backward reads, which its recomputation reads too."""
    routed: set[Block] = field(factory=set, init=False)
    """Blocks whose experts replicas share out: making any of it again would take an exchange, so all is kept."""
    sums: dict[Tensor, ReduceRows] = field(factory=dict, init=False)
    """By partial activation: the sum over tensor-parallel ranks that it goes into."""
    seen_later: set[Tensor] = field(factory=set, init=False)
    """Keys and values that other slices of their micro-batch read: a forward always keeps them."""
    _layers: list[tuple[int, Piece]] = field(factory=list, init=False)
    """Layers and pieces to choose for."""
    _steps: list[tuple[int, _OfLayer, int, dict[LayerChoice | str, _Made]]] = field(factory=list, init=False)
    """Ops that depend on a choice: position, op, index in `_layers`, and the replacements made so far."""
    _others: set[Tensor] = field(factory=set, init=False)
    """Operands of all other ops."""
    _saved: dict[tuple[Block, Piece], Tensors] = field(factory=dict, init=False)
    _dropped: dict[tuple[Block, Piece, str], Tensors] = field(factory=dict, init=False)
    _drafts: Recent[tuple[LayerChoice, ...], tuple[Stage, Recovery]] = field(factory=Recent, init=False)
    """By choices for `_layers`: the one that is taken is asked for again."""

    def __attrs_post_init__(self) -> None:
        numbers: dict[tuple[int, Piece], int] = {}
        # layers that only go forward keep nothing, so there is nothing to choose
        back = {op.block.layer for op in self.stage.ops if isinstance(op, InputGradientOp)}
        for position, op in enumerate(self.stage.ops):
            self._note(op)
            if _depends_on_choice(op) and op.block.layer is not None and op.block.layer in back:
                number = numbers.setdefault((op.block.layer, piece_of(op)), len(numbers))
                self._steps.append((position, op, number, {}))
            else:
                self._others.update(op.operands)
        self._layers = list(numbers)

    def _note(self, op: Op) -> None:
        if type(op) is Project:
            self.projects[op.block, piece_of(op)] = op
        if type(op) is Route:
            self.routed.add(op.block)
        if type(op) is Forward and op.block.layer is not None:
            self.forwards[op.block, piece_of(op)] = op
        if type(op) is Forward and op.slice:
            self.seen_later.update(_of_other_slices(op, self.projects.get((op.block, piece_of(op)))))
        if isinstance(op, InputGradientOp):
            if op.block.layer is not None:
                self.inputs[op.block, piece_of(op)] = op.reads[1]
            self.views[op.block, piece_of(op)] = views_of(op)
        elif isinstance(op, AllGather | Fetch) and op.phase is Phase.BACKWARD:
            self.gathers[op.writes[0]] = op
        elif type(op) is GatherRows and op.phase is Phase.BACKWARD:
            self.row_gathers[op.writes[0]] = op
        elif type(op) is GatherKeys and op.phase is Phase.BACKWARD:
            self.key_gathers[op.writes[0]] = op
        elif type(op) is BackwardHeads and (keys := whole_keys_of(op)):
            self.whole_keys[op.block, piece_of(op)] = keys
        elif type(op) is ReduceRows and op.payload is Payload.ACTIVATION:
            self.sums[op.reads[0]] = op

    def under(self, choice_of: ChoiceOf) -> tuple[Stage, Recovery]:
        """Return a draft of the stage under a choice, and a summary of its recomputation."""
        choices = tuple([choice_of(layer, piece) for layer, piece in self._layers])
        draft, recovery = self._drafts.of(choices, lambda: self._under(choices))
        return draft.draft(), recovery

    def _under(self, choices: tuple[LayerChoice, ...]) -> tuple[Stage, Recovery]:
        base = self.stage.ops
        waiting: _Gathers = {**self.gathers, **self.key_gathers}  # those that may move and are not in the new list yet
        if any(choice.checkpoint == LAYER for choice in choices):
            waiting |= self.row_gathers
        movable = {*waiting}
        ops: list[Op] = []
        made_of_ops: list[_Made] = []
        copied = 0
        for position, op, number, known in self._steps:
            choice = choices[number]
            # A forward, and what is recomputed for one block alone, is the same whatever the other block keeps.
            whole = choice.is_of_layer and type(op) is not Forward
            decisive = choice if whole else choice.kept(op.block.kind)
            made = known.get(decisive)
            if made is None:
                made = known[decisive] = self._made(op, choice)
            made_of_ops.append(made)
            ops += _without_pulled(base[copied:position], movable, waiting)
            copied = position + 1
            ops += [gather for each in made.gathered if (gather := waiting.pop(each, None)) is not None]
            ops += made.ops
        ops += _without_pulled(base[copied:], movable, waiting)
        # Tensors that no op touches any more are dropped; replacements add theirs.
        used = self._others.union(*(made.operands for made in made_of_ops))
        tensors = {name: tensor for name, tensor in self.stage.tensors.items() if tensor in used}
        tensors |= {tensor.name: tensor for made in made_of_ops for tensor in made.added if tensor in used}
        starts = [made.start for made in made_of_ops if made.start is not None]
        recovery = Recovery(sum(made.recovered for made in made_of_ops), starts)
        return Stage(self.stage.index, tensors, ops, self.stage.line), recovery

    def _made(self, op: _OfLayer, choice: LayerChoice) -> _Made:
        if type(op) is GatherRows:
            # Its rows are recomputed: the recovery of the layer gathers them.
            return _made(() if self.repeats_sum(op.block, piece_of(op), choice) else (op,))
        if type(op) is Forward:
            return _made((self.without_dropped(op, choice),))
        if type(op) is Project:
            return self.passing_on(op, choice)
        if type(op) is Attend:
            reads = self.read_in_passing(op, choice)
            return _made((op if reads == op.reads else attrs.evolve(op, reads=reads),))
        assert isinstance(op, InputGradientOp | BackwardHeads)
        return self.with_recovery(op, choice)

    def without_dropped(self, op: Forward, choice: LayerChoice) -> Forward:
        """Return a forward op without the saved slots that the choice drops."""
        dropped = self.dropped(op.block, piece_of(op), choice)
        if not dropped:
            return op
        reads = self.read_in_passing(op, choice)
        return attrs.evolve(op, reads=reads, writes=tuple(t for t in op.writes if t not in dropped))

    def read_in_passing(self, op: Forward | Attend, choice: LayerChoice) -> Tensors:
        """Return what an op of a forward reads, dropped projections as the short-lived tensors that they are."""
        dropped = self.dropped(op.block, piece_of(op), choice)
        return tuple(self.passing[t] if t in dropped and t in self.passing else t for t in op.reads)

    def passing_on(self, op: Project, choice: LayerChoice) -> _Made:
        """Return a `project` op whose dropped results end with the forward."""
        piece = piece_of(op)
        dropped = [tensor for tensor in self.dropped(op.block, piece, choice) if tensor in op.writes]
        if self.whole_keys or reads_output(self.forwards[op.block, piece]):  # context ranks attend to queries alone
            writes = tuple(t for t in op.writes if t not in dropped or t.slot == "q")
            op, dropped = attrs.evolve(op, writes=writes), [t for t in dropped if t.slot == "q"]
        for tensor in dropped:
            # The forward still needs the projections. Give it short-lived tensors; the recomputation makes the saved
            # ones.
            if tensor not in self.passing:
                name = self.stage.free_name(f"f.{op.block}.{piece_name(piece)}.{tensor.slot}")
                self.passing[tensor] = Tensor(name, StateKind.SAVED, tensor.type)
        writes = tuple(self.passing[t] if t in dropped else t for t in op.writes)
        return _made((attrs.evolve(op, writes=writes),), added=tuple(self.passing[t] for t in dropped))

    def saved(self, block: Block, m: Piece) -> Tensors:
        """Return the saved slots of a block, in their order."""
        found = self._saved.get((block, m))
        if found is None:  # asked for several times under each choice
            forward = self.forwards[block, m]
            own = tuple(t for t in forward.writes if t.kind is StateKind.SAVED)
            found = in_slot_order((*made_before(forward, self.projects.get((block, m))), *own))
            self._saved[block, m] = found
        return found

    def dropped(self, block: Block, m: Piece, choice: LayerChoice) -> Tensors:
        """Return the saved slots of a block that a choice does not keep."""
        kept = choice.kept(block.kind)
        found = self._dropped.get((block, m, kept))
        if found is None:
            found = self._dropped[block, m, kept] = self._dropped_of(block, m, kept)
        return found

    def _dropped_of(self, block: Block, m: Piece, kept: str) -> Tensors:
        if (
            kept == "all" or block in self.routed or (block, m) not in self.views
        ):  # without a backward nothing is there to be recomputed for
            return ()
        # Keys and values that context ranks gather again are needed whatever is recomputed.
        gathered = KEY_SLOTS if (block, m) in self.whole_keys else ()
        # Other ops have made the heads' output, from keys that context ranks gather again, or by an exchange.
        attended = (*KEY_SLOTS, *ATTENDED) if reads_output(self.forwards[block, m]) else ()
        # Sums over tensor-parallel ranks are always kept: making them again would take a collective.
        always = (SQUARES, *gathered, *attended)
        return tuple(
            t
            for t in self.saved(block, m)
            if t.slot not in always and not keeps(kept, block.kind, t.slot or "") and t not in self.seen_later
        )

    def with_recovery(self, op: InputGradientOp | BackwardHeads, choice: LayerChoice) -> _Made:
        """Return a backward op, preceded by the recomputation of what it, or its weight half, reads."""
        m = piece_of(op)
        if (op.block, m) in self.projects and not isinstance(op, BackwardHeads):
            return _made((op,))  # recomputed already, before its `backward_heads`
        # With `checkpoint=block` results of exchanges between tensor-parallel ranks within a layer are kept: each
        # block is recomputed from its own input.
        in_parts = self.forwards[op.block, m].writes[0].kind is StateKind.PARTIAL
        # Where the lowest block that trains is an mlp, the attention before it has no backward, so no recovery either.
        alone = op.block.kind == "mlp" and (blocks.block("attention", op.block.layer), m) not in self.views
        if choice.is_of_layer and not alone and (not in_parts or self.repeats_sum(op.block, m, choice)):
            if op.block.kind != "mlp":
                return _made((op,))
            assert not isinstance(op, BackwardHeads)  # of attention alone
            return self.with_exchanges(op, choice) if in_parts else self.with_whole_layer(op, choice)
        if not self.dropped(op.block, m, choice):
            return _made((op,))
        return _made((self.recompute(op.block, m, choice), op), recovered=1)

    def with_whole_layer(self, op: InputGradientOp, choice: LayerChoice) -> _Made:
        """Return an mlp's backward, preceded by the recomputation of its layer, from the layer's input on.

        The ops are attention's recompute, the mlp's, the backward. The first yields the mlp's input again, which the
        other two read; it is a new tensor.
        """
        m = piece_of(op)
        attention_block = blocks.block("attention", op.block.layer)
        attention = self.recompute(attention_block, m, choice)
        source = self.forwards[op.block, m].reads[0]
        again = self.again(f"r.{op.block}", m, source)
        attention.writes = (*attention.writes, again)
        keys = self.whole_keys.get((attention_block, m), ())
        project = self.projects.get((attention_block, m))
        attention.reads = with_what_it_sees(attention, self.forwards[attention_block, m], project, keys)
        reads = tuple(again if t is source else t for t in op.reads)
        # The attention's view must be gathered now, ahead of the attention's own backward.
        gathered = (*self.views[attention_block, m], *keys)
        start = attention.reads[0]
        if op.block in self.routed:
            ops = (attention, attrs.evolve(op, reads=reads))
            return _made(ops, added=(again,), gathered=gathered, start=start, recovered=1)
        mlp = self.recompute(op.block, m, choice)
        mlp.reads = (again, *mlp.reads[1:])
        added: Tensors = (again,)
        if choice.repeat == ALL:
            output = self.again(f"r_output.{op.block}", m, self.forwards[op.block, m].writes[0])
            mlp.writes, added = (*mlp.writes, output), (again, output)
        backward = attrs.evolve(op, reads=reads)
        return _made((attention, mlp, backward), added=added, gathered=gathered, start=start, recovered=2)

    def repeats_sum(self, block: Block, m: Piece, choice: LayerChoice) -> bool:
        """Tell whether the recovery of a layer sums the output of its attention over tensor-parallel ranks again.

        A parallel mlp has no such sum before it.
        """
        attention = self.forwards[blocks.block("attention", block.layer), m]
        return choice.keeps_nothing and choice.checkpoint == LAYER and attention.writes[0] in self.sums

    def with_exchanges(self, op: InputGradientOp, choice: LayerChoice) -> _Made:
        """Return an mlp's backward, preceded by the recomputation of its layer and of the exchanges in it.

        The recompute of attention yields a partial sum; the mlp reads the sum over tensor-parallel ranks, gathered if
        they share rows. Under `ALL` the mlp's output is made and summed again too.
        """
        m = piece_of(op)
        attention_block = blocks.block("attention", op.block.layer)
        attention, mlp = (self.recompute(block, m, choice) for block in (attention_block, op.block))
        sum_of_attention, part, again = self.sum_again(attention, m)
        ops: list[Op] = [attention, sum_of_attention]
        added = [part, again]
        source = mlp.reads[0]
        if (gather := self.row_gathers.get(source)) is not None:
            ops.append(attrs.evolve(gather, reads=(again,)))
        else:
            mlp.reads = (again, *mlp.reads[1:])
            op = attrs.evolve(op, reads=tuple(again if t is source else t for t in op.reads))
        ops.append(mlp)
        if choice.repeat == ALL:
            sum_of_mlp, *outputs = self.sum_again(mlp, m)
            sum_of_mlp.reads = (outputs[0], again)
            ops.append(sum_of_mlp)
            added += outputs
        # The attention's view and input must be gathered now, ahead of the attention's own backward.
        keys = self.whole_keys.get((attention_block, m), ())
        gathered = (*self.views[attention_block, m], self.inputs[attention_block, m], *keys)
        start = sum_of_attention.reads[1]
        return _made((*ops, op), added=tuple(added), gathered=gathered, start=start, recovered=2)

    def sum_again(self, op: Recompute, m: Piece) -> tuple[ReduceRows, Tensor, Tensor]:
        """Let a recompute op make its block's partial output again; return the op that sums it, the part and the sum.

        The residual stream of the sum is the one of the forward.
        """
        forward = self.forwards[op.block, m]
        summed = self.sums[forward.writes[0]]
        part = self.again(f"r_part.{summed.block}", m, forward.writes[0])
        total = self.again(f"r.{summed.block}", m, summed.writes[0])
        op.writes = (*op.writes, part)
        keys = self.whole_keys.get((op.block, m), ())
        op.reads = with_what_it_sees(op, forward, self.projects.get((op.block, m)), keys)
        again = attrs.evolve(summed, reads=(part, *summed.reads[1:]), writes=(total,), phase=Phase.BACKWARD)
        return again, part, total

    def again(self, name: str, m: Piece, tensor: Tensor) -> Tensor:
        """Return a new tensor for the values of an activation, or of a part of one, that a recovery makes again."""
        kind = StateKind.PARTIAL if tensor.kind is StateKind.PARTIAL else StateKind.ACTIVATION
        return Tensor(self.stage.free_name(f"{name}.{piece_name(m)}"), kind, tensor.type)

    def recompute(self, block: Block, m: Piece, choice: LayerChoice) -> Recompute:
        """Return the op that recomputes a block's dropped slots from its input and its kept slots."""
        forward, views = self.forwards[block, m], self.views[block, m]
        dropped = self.dropped(block, m, choice)
        kept = tuple(t for t in self.saved(block, m) if t not in dropped)
        keys = self.whole_keys.get((block, m), ())
        return recovery_op(forward, self.inputs[block, m], kept, views, dropped, self.projects.get((block, m)), keys)


_Gathers = dict[Tensor, AllGather | Fetch | GatherRows | GatherKeys]
"""Gathers and fetches for backwards, by what they write."""


def _without_pulled(ops: list[Op], movable: Container[Tensor], waiting: _Gathers) -> list[Op]:
    """Return ops without the gathers that a recomputation has pulled forward; the others wait no longer."""
    if not movable:
        return ops
    kept = []
    for op in ops:
        moves = isinstance(op, AllGather | Fetch | GatherRows | GatherKeys) and op.writes[0] in movable
        if not moves or waiting.pop(op.writes[0], None) is not None:
            kept.append(op)
    return kept


_OfLayer = Forward | Project | Attend | InputGradientOp | BackwardHeads | GatherRows


def _depends_on_choice(op: Op) -> TypeGuard[_OfLayer]:
    """Tell whether a choice may replace an op, if it is of a layer: an op of a block, or a gather of an mlp's input."""
    if type(op) is GatherRows:
        return op.phase is Phase.BACKWARD and op.block.kind == "mlp"
    return isinstance(op, _OfLayer)


def _made(ops: tuple[Op, ...], **more: Any) -> _Made:
    return _Made(ops, frozenset(chain.from_iterable(map(_OPERANDS, ops))), **more)


_OPERANDS = attrgetter("operands")


def made_before(forward: Forward, project: Project | None) -> Tensors:
    """Return the saved slots of a block that exist before its forward: results of `project`, and of exchanges.

    These are sums over ranks, or the output of heads. Empty if the block has no `project` op.
    """
    if project is None:
        return ()
    made = tuple(t for t in forward.reads if t.slot in (SQUARES, *ATTENDED))
    # What leaves for an exchange of heads is no saved slot; no log-sum-exp of all heads comes back from it.
    leaving = ("q", *KEY_SLOTS) if [t.slot for t in made] == ["o"] else ()
    projected = tuple(t for t in project.writes if t.kind is StateKind.SAVED and t.slot not in leaving)
    return (*projected, *made)


def reads_output(forward: Forward) -> bool:
    """Tell whether an attention's forward reads the heads' output, which ops of their own have made (`Attend`)."""
    return any(tensor.slot == "o" for tensor in forward.reads)


def whole_keys_of(op: Op) -> Tensors:
    """Return the keys and values of all context ranks that an op reads."""
    return tuple(tensor for tensor in op.reads if tensor.slot in WHOLE_KEYS)


def _of_other_slices(op: Forward, project: Project | None) -> Tensors:
    """Return the keys and values of earlier slices that a forward reads."""
    own = made_before(op, project)
    return tuple(t for t in op.reads if t.kind is StateKind.SAVED and t not in own)


def views_of(op: Op) -> Tensors:
    """Return the parameters among the tensors that an op reads: a view, and frozen ones."""
    return tuple(tensor for tensor in op.reads if tensor.kind in (StateKind.VIEW, StateKind.FROZEN))


def with_what_it_sees(op: Recompute, forward: Forward, project: Project | None = None, keys: Tensors = ()) -> Tensors:
    """Return the reads of a recompute op, completed by the starts of documents.

    If it computes attention again, the keys and values of earlier slices are added too, or `keys` of context ranks.
    """
    seen = keys or _of_other_slices(forward, project)
    attention = project if project is not None and reads_output(forward) else forward
    documents = tuple(t for t in attention.reads if t.kind is StateKind.INPUT and forward.block.kind == "attention")
    own = tuple(t for t in op.reads if t not in seen and t not in documents)
    return (*own, *documents, *seen) if attends(op) else (*own, *documents)


def recovery_op(
    forward: Forward,
    source: Tensor,
    kept: Tensors,
    views: Tensors,
    writes: Tensors,
    project: Project | None = None,
    keys: Tensors = (),
) -> Recompute:
    """Return the op that recomputes, from the block's input, the tensors that a forward does not keep.

    `keys` are the gathered keys and values of context ranks, as the block's backward reads them.
    """
    # An mlp's forward reads no numbers but the bias with which its router chooses.
    bias = tuple(t for t in forward.reads if t.kind is StateKind.SCALAR)
    reads = (source, *kept, *views, *bias)
    op = Recompute(block=forward.block, **piece_fields(piece_of(forward)), reads=reads, writes=writes)
    op.reads = with_what_it_sees(op, forward, project, keys)
    return op


def in_slot_order(slots: Tensors) -> Tensors:
    """Return an attention's saved slots in the order of its signature, where `project` makes some that come later.

    It does for context ranks; before norms over tensor-parallel ranks (`SQUARES`) what it makes comes first. Products
    of adapters (`..._low`) keep their order, and statistics of norms come last.
    """
    names = [tensor.slot for tensor in slots]
    if "o" not in names or "probs" in names or SQUARES in names:
        return slots
    return tuple(sorted(slots, key=lambda tensor: place_in_attention(tensor.slot)))
