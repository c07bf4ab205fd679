r"""`place-from-file{path=FILE.csv renumber=true}`: puts a module into the order of a schedule table.

    0F0,0F1,3F0,3B0,...   becomes, on the stage of chunks 0 and 3,   F0 of c0, F1 of c0, F0 of c3, B0 of c3, ...

The table is a CSV file in PyTorch's format (`ratrainc lint` describes one). A rank of the table is a stage, a "stage"
of it a chunk. The table must be sound and have the plan's shape: `pp`, `micro_batches`, `chunks`, `layout` and
`slices`. The plan's `schedule` becomes the one whose order the table has exactly, or none if no schedule has it. Each
request of the table is carried out where it stands, or refused at its cell:

| in the table | in the module |
|---|---|
| `F`, `B` | a forward, a whole backward of a micro-batch through a chunk |
| `I` and `W` | the backwards of attention and mlp blocks are split in these passes, and in no others |
| `(F;B)OVERLAP_F_B` | the two one after the other, in the order of the cell |
| `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B` | the message stands there |
| no message anywhere | messages pass as in a run of unit times (`ratrain_ir/analysis/unit_run.py`) |
| `UNSHARD` to `RESHARD`, `zero = 3` | one gather of each block serves the whole window; see below |
| `UNSHARD` to `RESHARD`, otherwise | views stay whole throughout the step; a second UNSHARD of a chunk is refused |
| `REDUCE_GRAD`, `reduce = "last"` | the chunk's gradients are reduced over the replicas there |
| `REDUCE_GRAD`, `reduce = "each-micro-batch"` | refused: gradients are reduced once a micro-batch |

In the run of unit times every forward and every half of a backward takes one unit. With `zero = 3` the gather stands at
the UNSHARD, and the view is released after its last use before the RESHARD; a chunk without UNSHARD gathers for each
use. A chunk without REDUCE_GRAD reduces at the step's end.

The micro-batches of a chunk must ascend in its forwards, its input gradients and its weight gradients (slices descend
in the gradients), because losses and gradients are added up and rounded in that order. Other tables are refused. With
`renumber=true` the micro-batches of all backwards are numbered anew, in the order in which the first chunk takes them,
if that makes them ascend everywhere and leaves the table sound. PyTorch's LoopedBFS needs it: it takes the last
micro-batch first.

Later passes decide the rest: `insert-prefetch` how far ahead of its first use a view is gathered, `bucket-grad-sync`
and `joint-order` how early within a chunk's last backward its reductions begin. None of them moves a message, or moves
a reduction behind later work.

In `path`, blanks, commas, braces, quotes, `\` and `%` are written as in a URL (`%20` is a blank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs import field, frozen

from ratrain.passes.pass_base import SWITCH, Decision, Fact, Pass, PassContext
from ratrain.passes.placement.foreign_table import (
    check_against_plan,
    check_ascending,
    check_said_schedule,
    orders_of_table,
    read_foreign_table,
    renumbered,
    schedule_of,
)
from ratrain.passes.placement.place_schedule import split_where_halves_are_apart
from ratrain.passes.placement.place_table import check_state_actions, place_table
from ratrain.ratrain_ir.module import Level

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module


@frozen
class PlaceFromFilePass(Pass):
    """Put every stage's work into the order of a schedule table."""

    name: ClassVar[str] = "place-from-file"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.ORDER})
    path: str = field(metadata={"unit": "path"})
    """The table's file."""
    renumber: bool = field(default=False, metadata={"choices": SWITCH})
    """True: number the micro-batches of backwards in the order in which the file has them."""

    def run(self, module: Module, context: PassContext) -> None:
        """Split the backwards that the table has in halves, and put groups of ops and messages in its order.

        Raises `DiagnosticError` RT002, RT007 or the findings of `lint` where the file is no sound table, RT010 where it
        does not fit the plan or asks for something that a module cannot express, RT064 where the plan names another
        schedule.
        """
        shape = module.topology.shape
        table = read_foreign_table(self.path, shape.forward_only)
        check_against_plan(table, module.plan)
        if self.renumber:
            table = renumbered(table)
        check_ascending(table)
        check_state_actions(table, module.topology)
        if (
            module.level is Level.DATAFLOW
        ):  # of a module that has an order, the plan tells which; the new one replaces it
            check_said_schedule(table, module.plan, shape)
        schedule = schedule_of(table, module.plan, shape)
        split_where_halves_are_apart(module, orders_of_table(table))
        place_table(module, table)
        module.plan = attrs.evolve(module.plan, schedule=schedule)
        context.statistics["schedule"] = schedule or "one of its own"
        context.statistics["messages"] = "as in the file" if table.is_lowered else "placed"
