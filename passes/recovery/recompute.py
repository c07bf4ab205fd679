"""`recompute{policy=auto|full|none|attention|mlp placement=inline|forward-side}`: which saved tensors are dropped after forward and recovered before backward.

Inline, recovery stands right before the backward that needs it; forward-side it fills the pipeline's idle windows
(`passes/recovery/recompute_placement.py`). Where nothing of a layer is kept, the layer is recovered as a whole from
its checkpoint, the input of its attention: `recompute attention` yields the input of `mlp`. Of a block either nothing is kept, or
what is expensive to recover (`lean`: the products; norms and elementwise results are recovered), or everything.

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes, under `full`,
    %x.mlp.0.m0 = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    ...
    %s.attention.0.m0.*, %r.mlp.0.m0 = recompute attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %s.mlp.0.m0.* = recompute mlp.0 m0 (%r.mlp.0.m0, %w.mlp.0)

`auto` keeps, per layer and micro-batch, what fits the bytes that everything else leaves free (`passes/recovery/recompute_choice.py`). It comes
after the passes that change how long gradients and views live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import ClassVar

import attrs
from attrs import define, field, frozen

from ratrain.passes.pass_base import Pass, PassContext
from ratrain.passes.trial import Trials
from ratrain.ratrain_ir.blocks import Block, block
from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops import AllGather, Forward, InputGradientOp, Op, Phase, Recompute, Tensor, Tensors
from ratrain.ratrain_ir.types import StateKind

POLICIES = ("full", "none", "attention", "mlp", "auto")

LEAN_SLOTS = {"attention": ("q", "k", "v", "o", "lse"), "mlp": ("gate", "up")}
"""What `lean` keeps of a block: the results of its products and of attention."""


@frozen
class LayerChoice:
    """What is kept of a layer's attention and mlp: `none`, `lean` or `all`."""

    attention: str
    mlp: str

    def kept(self, kind: str) -> str:
        """What is kept of one of the layer's blocks."""
        return self.attention if kind == "attention" else self.mlp


NOTHING, EVERYTHING = LayerChoice("none", "none"), LayerChoice("all", "all")
ChoiceOf = Callable[[int, int], LayerChoice]
"""The choice for a layer and a micro-batch."""

CHOICES = {
    "full": (NOTHING,),
    "none": (EVERYTHING,),
    "attention": (LayerChoice("none", "all"),),
    "mlp": (LayerChoice("all", "none"),),
    "auto": tuple(LayerChoice(attention, mlp) for attention, mlp in product(("none", "lean", "all"), repeat=2)),
}
"""What each policy may choose for a layer of a micro-batch."""


@frozen
class RecomputePass(Pass):
    """Drop saved activations after forward and recover them right before backward."""

    name: ClassVar[str] = "recompute"
    policy: str = field(default="full", metadata={"choices": POLICIES})
    budget: int | None = field(default=None, metadata={"unit": "bytes"})
    """Bytes a stage may use, for `auto` and `forward-side`; None: what the machine has."""
    placement: str = field(default="inline", metadata={"choices": ("inline", "forward-side")})

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage under the policy.

        Raises `DiagnosticError` RT071 where recovery is placed already.
        """
        refuse_second_recovery(module)
        mark_checkpoints(self.rewrite(module, context))

    def rewrite(self, module: Module, context: PassContext) -> list[Tensor]:
        """Rewrite the lists of every stage; the tensors that recovery starts from, to be marked once the module is final."""
        from ratrain.passes.recovery.recompute_placement import recover_forward_side

        recovered = moved = 0
        starts: list[Tensor] = []
        for stage in module.stages:
            trials = Trials(module, context)
            choice_of, summary = self.choice(stage, trials)
            if summary:
                context.statistics[f"stage {stage.index}"] = summary
            recovery = rewrite(stage, choice_of)
            recovered += recovery.ops
            starts += recovery.starts
            if self.placement == "forward-side":
                moved += recover_forward_side(stage, trials, self.budget_within(context))
        context.statistics["recompute ops"] = recovered
        context.statistics["moved to the forward side"] = moved
        return starts

    def budget_within(self, context: PassContext) -> int:
        """Bytes a stage may use."""
        return context.target.capacity_bytes if self.budget is None else self.budget

    def choice(self, stage: Stage, trials: Trials) -> tuple[ChoiceOf, str]:
        """What to keep of each layer and micro-batch of a stage, and under `auto` the same in words."""
        from ratrain.passes.recovery.recompute_choice import choose

        if self.policy != "auto":
            return same_for_all(*CHOICES[self.policy]), ""
        chosen = choose(stage, trials, self.budget_within(trials.context))
        return chosen.choice_of, chosen.summary


def refuse_second_recovery(module: Module) -> None:
    """Raise `DiagnosticError` RT071 where recovery is placed already."""
    if any(type(op) is Recompute for stage in module.stages for op in stage.ops):
        message = "'recompute' cannot run twice: what the first run dropped is not there to be kept or dropped again"
        fail("RT071", message, help="give one 'recompute' with the policy you want")


def same_for_all(choice: LayerChoice) -> ChoiceOf:
    """One choice for every layer and micro-batch."""
    return lambda _layer, _micro_batch: choice


@frozen
class Recovery:
    """What a stage recovers."""

    ops: int
    """how many do it"""
    starts: list[Tensor]
    """inputs of the layers that are recovered as a whole"""


def rewrite(stage: Stage, choice_of: ChoiceOf) -> Recovery:
    """Drop and recover in a stage's lists; its ops and tensors, which others may have too, stay as they are."""
    rewriter = _Rewriter(stage, choice_of)
    rewriter.run()
    return Recovery(rewriter.recovered, rewriter.starts)


def rewritten(stage: Stage, choice_of: ChoiceOf) -> Stage:
    """A draft of a stage under a choice."""
    draft = stage.draft()
    rewrite(draft, choice_of)
    return draft


def mark_checkpoints(starts: Iterable[Tensor]) -> None:
    """Make checkpoints of the activations that recovery starts from."""
    for tensor in starts:
        if tensor.kind is StateKind.ACTIVATION:
            tensor.kind = StateKind.CHECKPOINT


@define
class _Rewriter:
    stage: Stage
    choice_of: ChoiceOf
    forwards: dict[tuple[Block, int], Forward] = field(factory=dict)
    """Forward ops as they were, with all saved slots among their writes."""
    views: dict[tuple[Block, int], Tensor] = field(factory=dict)
    """The view each backward reads, which its recovery reads too."""
    gathers: dict[Tensor, AllGather] = field(factory=dict)
    """Gathers of views that are not gathered yet, where views are sharded within the step."""
    recovered: int = 0
    starts: list[Tensor] = field(factory=list)

    def run(self) -> None:
        for op in self.stage.ops:
            if isinstance(op, InputGradientOp):
                for tensor in op.reads:
                    if tensor.kind is StateKind.VIEW:
                        self.views[op.block, op.micro_batch] = tensor
            elif type(op) is AllGather and op.phase is Phase.BACKWARD:
                self.gathers[op.writes[0]] = op
        ops: list[Op] = []
        for op in self.stage.ops:
            if type(op) is AllGather and op.phase is Phase.BACKWARD and self.gathers.pop(op.writes[0], None) is None:
                continue  # its recovery needed it earlier
            if type(op) is Forward and op.block.layer is not None:
                ops.append(self.lightened(op))
            elif isinstance(op, InputGradientOp) and op.block.layer is not None:
                ops.extend(self.with_recovery(op))
            else:
                ops.append(op)
        self.stage.ops = ops
        self.stage.prune()

    def lightened(self, op: Forward) -> Forward:
        """The forward op without the saved slots it does not keep."""
        self.forwards[op.block, op.micro_batch] = op
        dropped = set(self.dropped(op.block, op.micro_batch))
        if not dropped:
            return op
        return attrs.evolve(op, writes=tuple(t for t in op.writes if t not in dropped))

    def dropped(self, unit: Block, m: int) -> Tensors:
        """The saved slots of a block that are not kept."""
        assert unit.layer is not None
        kept = self.choice_of(unit.layer, m).kept(unit.kind)
        saved = tuple(t for t in self.forwards[unit, m].writes if t.kind is StateKind.SAVED)
        if kept == "all":
            return ()
        return saved if kept == "none" else tuple(t for t in saved if t.slot not in LEAN_SLOTS[unit.kind])

    def with_recovery(self, op: InputGradientOp) -> list[Op]:
        """The backward op, after the recovery of what it, or its weight half, reads."""
        layer, m = op.block.layer, op.micro_batch
        assert layer is not None
        if self.choice_of(layer, m) == NOTHING:
            return self.with_whole_layer(op) if op.block.kind == "mlp" else [op]
        return [self.recompute(op.block, m), op] if self.dropped(op.block, m) else [op]

    def with_whole_layer(self, op: InputGradientOp) -> list[Op]:
        """An mlp's backward after the recovery of its attention, which yields its input again, and its own."""
        m = op.micro_batch
        unit = block("attention", op.block.layer)
        gather = self.gathers.pop(self.views[unit, m], None)
        attention = self.recompute(unit, m)
        source = self.forwards[op.block, m].reads[0]
        again = self.stage.add(Tensor(self.stage.free_name(f"r.{op.block}.m{m}"), StateKind.ACTIVATION, source.type))
        attention.writes = (*attention.writes, again)
        self.starts.append(attention.reads[0])
        mlp = self.recompute(op.block, m)
        mlp.reads = (again, *mlp.reads[1:])
        reads = tuple(again if t is source else t for t in op.reads)
        recovery: list[Op] = [attention, mlp, attrs.evolve(op, reads=reads)]
        return [gather, *recovery] if gather is not None else recovery

    def recompute(self, unit: Block, m: int) -> Recompute:
        """Recovery of a block's dropped slots from its input and the slots it kept."""
        source, view = self.forwards[unit, m].reads[0], self.views[unit, m]
        dropped = self.dropped(unit, m)
        kept = tuple(t for t in self.forwards[unit, m].writes if t.kind is StateKind.SAVED and t not in dropped)
        self.recovered += 1
        return Recompute(block=unit, micro_batch=m, reads=(source, *kept, view), writes=dropped)
