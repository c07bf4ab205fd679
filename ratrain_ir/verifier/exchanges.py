"""Which exchanges of tensor peers have a meaning under a plan, on a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.blocks import block_chain, shares_rows
from ratrain.ratrain_ir.ops import CombineLoss, GatherRows, Op, Payload, PeerOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.verifier.report import Reporter


def check_exchange(module: Module, stage: Stage, op: Op, report: Reporter) -> bool:
    """RT026, RT027: the plan has tensor peers that exchange this, and the stage has a block that reads or writes it."""
    assert isinstance(op, PeerOp)
    wrong = _without_meaning(module, op)
    if wrong is not None:
        report.at_op("RT026", f"'{op!r}': {wrong}", stage, op)
        return False
    blocks = exchanged_blocks(module, stage, op)
    if op.block in blocks:
        return True
    ends = " or ".join(map(str, blocks)) if len(blocks) < 3 else f"{blocks[0]} to {blocks[-1]}"
    expected = f"expected {ends}" if blocks else "it has nothing to exchange there"
    report.at_op("RT027", f"'{op!r}' is not of stage @{stage.index}: {expected}", stage, op)
    return False


def _without_meaning(module: Module, op: PeerOp) -> str | None:
    plan = module.plan
    if plan.tp == 1:
        return "the plan has no tensor peers (tp = 1)"
    if not isinstance(op, GatherRows):
        return None
    if not shares_rows(plan):
        return "every tensor peer has all rows (sequence_sharding = false)"
    if (op.phase is None) == (op.payload is Payload.ACTIVATION):
        return (
            "a gather of an activation says whether it is for the forward or the backward, one of a gradient does not"
        )
    return None


def exchanged_blocks(module: Module, stage: Stage, op: PeerOp) -> list[Block]:
    """The blocks whose inputs, or the gradients of whose inputs, such an op may exchange on a stage, in forward order.

    What a block reads is gathered before it, what it writes is summed after it.
    """
    own = module.topology.stage_blocks[stage.index]
    if isinstance(op, CombineLoss):
        return [block for block in own if block.kind == "head"]
    chain = block_chain(module.model)
    if isinstance(op, GatherRows) == (op.payload is Payload.ACTIVATION):
        return [block for block in own if block is not chain[0]]
    return [chain[chain.index(block) + 1] for block in own if block is not chain[-1]]
