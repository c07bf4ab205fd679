"""Forward and backward of a 22B layer under five ways to keep or recompute activations, against published times.

python benchmarks/layer_recomputation.py [--machine FILE.toml]

Published: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, table
4: milliseconds of a layer of the 22B model, forward and backward, on eight A100 80 GB (t = 8, b = 4, s = 2048, h =
6144, a = 64). The figures were read in a public copy of the text.

Megatron-LM sums the gradient of a block's input while it computes the gradients of weights, and gathers inputs while
it computes the gradient of the input (megatron/core/tensor_parallel/layers.py,
LinearWithGradAccumulationAndAsyncCommunication): here `overlap-tensor{pieces=apart halves=split}`. Its full
recomputation calls the layer again from its input, to the end (random.py there, CheckpointFunction): here
`checkpoint=layer repeat=all`. Its selective recomputation makes the score matrix again: `attention =
scores-recomputed`.

A layer's time is the difference between steps with two and three layers, less the work at the step's end that a layer
adds: sums of its gradients, and its update. The last two columns are without `overlap-tensor`: gradients of weights wait
for the sum of the input's gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.ops.base import WorkGroup
from ratrain.ratrain_ir.ops.collectives import AllReduce
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block

FOLDER = Path(__file__).parent
MODEL = FOLDER / "published" / "models" / "megatron-22b.json"
MACHINE = FOLDER.parent / "examples" / "a100-80gb-8.toml"
OVERLAP = "overlap-tensor{pieces=apart halves=split}"
LAYERS = 2


@frozen
class Variant:
    """A way to keep or recompute activations, and what was measured of it."""

    name: str
    forward: float
    """measured milliseconds"""
    backward: float
    """measured milliseconds, recomputation included"""
    attention: str = "scores-kept"
    sharding: bool = False
    recompute: str = "policy=none"

    @property
    def measured(self) -> float:
        """Milliseconds of both passes."""
        return self.forward + self.backward

    def simulated(self, machine: Machine, overlap: str) -> float:
        """Milliseconds of both passes of a layer."""
        fewer, more = map(partial(self._passes, machine, overlap), (LAYERS, LAYERS + 1))
        return 1e3 * (more - fewer)

    def _passes(self, machine: Machine, overlap: str, layers: int) -> float:
        """Return the seconds of a step without the updates and sums of gradients of its layers."""
        model = evolve(load_model(str(MODEL)), layers=layers)
        keys = {"micro_batch_size": 4, "micro_batches": 1, "seq_len": 2048, "zero": 0, "tp": 8}
        plan = Plan(1, 1, (), **keys, attention=self.attention, sequence_sharding=self.sharding)
        passes = ",".join(filter(None, ("place-1f1b", overlap, f"recompute{{{self.recompute}}}", "allocate-ddr")))
        module = api.compile(model, plan, passes=passes, machine=machine)
        step = api.simulate(api.emit(module, machine=machine), machine=machine).to_json()["step_seconds"]
        (stage,), target = module.stages, target_of(machine)
        ends = [op for op in stage.ops if isinstance(op, AllReduce | Update) and op.work_group is WorkGroup.STEP_END]
        of_layers = (op for op in ends if _blocks(op)[0].layer is not None)
        return step - sum(target.op_seconds(module, stage, op) for op in of_layers)


def _blocks(op: AllReduce | Update) -> tuple[Block, ...]:
    """Return the blocks whose gradients an op sums, or which it updates."""
    return op.blocks if isinstance(op, AllReduce) else (op.block,)


FULL = Variant("full", 7.7, 19.5, recompute="policy=full checkpoint=layer repeat=all")
VARIANTS = (
    Variant("baseline", 7.7, 11.9),
    Variant("sequence sharding", 7.2, 11.8, sharding=True),
    FULL,
    Variant("selective", 7.7, 13.2, "scores-recomputed"),
    Variant("selective, sequence sharding", 7.2, 13.1, "scores-recomputed", sharding=True),
)
OTHERS = tuple(
    evolve(FULL, name=f"full, {recompute}", recompute=f"policy=full {recompute}")
    for recompute in ("checkpoint=layer", "checkpoint=block")
)
"""Full recomputation that stops at what the backward reads, and that keeps results of exchanges."""


@click.command(help=__doc__.partition("\n")[0])
@click.option("--machine", "path", default=str(MACHINE), help="Machine file.")
def main(path: str) -> None:
    """Print the table."""
    machine = load_machine(path)
    print(f"| {machine.name}: ms of a layer | measured | simulated | error | sums not under weight gradients | error |")
    print("|---|---:|---:|---:|---:|---:|")
    for variant in (*VARIANTS, *OTHERS):
        print("| " + " | ".join(cells(variant, machine)) + " |")


def cells(variant: Variant, machine: Machine) -> Sequence[str]:
    """Return the cells of a variant's row."""
    found = [variant.simulated(machine, overlap) for overlap in (OVERLAP, "")]
    pairs = ((f"{each:.2f}", f"{100 * (each / variant.measured - 1):+.1f} %") for each in found)
    return variant.name, f"{variant.measured:.1f}", *(cell for pair in pairs for cell in pair)


if __name__ == "__main__":
    sys.exit(main())
