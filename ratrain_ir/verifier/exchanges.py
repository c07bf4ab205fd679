"""Which exchanges of tensor peers have a meaning under a plan, on a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.tensor_peers import norms_over_peers
from ratrain.ratrain_ir.model.blocks import block_chain, shares_rows
from ratrain.ratrain_ir.model.peer_blocks import source_block, stands_beside
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.collectives import CombineLoss, GatherRows, PeerOp, ReduceSums

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.verifier.report import Reporter


def check_exchange(module: Module, stage: Stage, op: Op, report: Reporter) -> bool:
    """RT026, RT027: the plan has tensor peers that exchange this, and the stage has a block that reads or writes it."""
    assert isinstance(op, PeerOp)
    wrong = _without_meaning(module, op)
    if wrong is not None:
        report.at_op("RT026", f"'{op!r}': {wrong}", stage, op)
        return False
    if _may_name(op):
        (owner,) = op.served_blocks(module.model)
        chunk = module.topology.chunk_of.get(owner)
        if chunk is not None and module.topology.chunk_stages[chunk] == stage.index:
            return True
    blocks = _exchanged_blocks(module, stage, op)
    ends = " or ".join(map(str, blocks)) if len(blocks) < 3 else f"{blocks[0]} to {blocks[-1]}"
    expected = f"expected {ends}" if blocks else "it has nothing to exchange there"
    report.at_op("RT027", f"'{op!r}' is not of stage @{stage.index}: {expected}", stage, op)
    return False


def _without_meaning(module: Module, op: PeerOp) -> str | None:
    plan = module.plan
    if plan.tp == 1:
        return "the plan has no tensor peers (tp = 1)"
    if isinstance(op, ReduceSums) and not norms_over_peers(module.model, plan):
        return f"{module.model.name} norms no queries and keys over all heads of a token"
    if stands_beside(module.model, plan, op.block):
        return f"attention and mlp of a layer are side by side: {op.block} has no input of its own"
    if not isinstance(op, GatherRows):
        return None
    if not shares_rows(plan):
        return "every tensor peer has all rows (sequence_sharding = false)"
    if (op.phase is None) == (op.payload is Payload.ACTIVATION):
        return (
            "a gather of an activation says whether it is for the forward or the backward, one of a gradient does not"
        )
    return None


def _may_name(op: PeerOp) -> bool:
    """Whether an exchange of its kind may be of a block of its block's kind."""
    kinds = {CombineLoss: ("head",), ReduceSums: ("attention",)}.get(type(op), ("attention", "mlp", "head"))
    return op.block.kind in kinds


def _exchanged_blocks(module: Module, stage: Stage, op: PeerOp) -> list[Block]:
    """The blocks that such an op may name on a stage, in forward order: those whose exchange a block of the stage reads or has written."""
    own = set(module.topology.stage_blocks[stage.index])
    named = [each for each in block_chain(module.model)[1:] if source_block(module.model, module.plan, each) is each]
    if isinstance(op, CombineLoss | ReduceSums):
        return [block for block in named if _may_name(evolve(op, block=block)) and block in own]
    return [block for block in named if evolve(op, block=block).served_blocks(module.model)[0] in own]
