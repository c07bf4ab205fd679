"""Rules about exchanges of tensor-parallel ranks: the plan has them, and a block of the stage reads or writes them.

The class of an op defines what it needs of model and plan (`missing`), which kinds of blocks exchange it
(`block_kinds`) and whose pass it serves (`served_blocks`), so a new exchange changes nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.tensor_blocks import source_block
from ratrain.ratrain_ir.ops.collectives import TensorOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.verifier.reporter import Reporter


def check_exchange(module: Module, stage: Stage, op: Op, report: Reporter) -> bool:
    """Report RT026 if the plan has no such exchange, RT027 if no block of the stage reads or writes it.

    Return True if neither is reported.
    """
    assert isinstance(op, TensorOp)
    wrong = op.missing(module.model, module.plan)
    if wrong is not None:
        report.at_op("RT026", f"'{op!r}': {wrong}", stage, op)
        return False
    if op.block.kind in op.block_kinds:
        (owner,) = op.served_blocks(module.model)
        chunk = module.topology.chunk_of.get(owner)
        if chunk is not None and module.topology.chunk_stages[chunk] == stage.index:
            return True
    blocks = _exchanged_blocks(module, stage, op)
    ends = " or ".join(map(str, blocks)) if len(blocks) < 3 else f"{blocks[0]} to {blocks[-1]}"
    expected = f"expected {ends}" if blocks else "it has nothing to exchange there"
    report.at_op("RT027", f"'{op!r}' is not of stage @{stage.index}: {expected}", stage, op)
    return False


def _exchanged_blocks(module: Module, stage: Stage, op: TensorOp) -> list[Block]:
    """List the blocks that such an op may name on a stage, in forward order."""
    own = set(module.topology.stage_blocks[stage.index])
    named = [each for each in block_chain(module.model)[1:] if source_block(module.model, module.plan, each) is each]
    return [
        block
        for block in named
        if block.kind in op.block_kinds and evolve(op, block=block).served_blocks(module.model)[0] in own
    ]
