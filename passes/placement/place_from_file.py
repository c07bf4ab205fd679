r"""`place-from-file{path=FILE.csv renumber=true}`: puts a module into the order of a schedule table in PyTorch's CSV (`ratrainc lint` says what is in one).

    0F0,0F1,3F0,3B0,...   becomes, on the stage of chunks 0 and 3,   F0 of c0, F1 of c0, F0 of c3, B0 of c3, ...

A rank of the table is a stage, a "stage" of it a chunk. The table must be sound, and of the shape that the plan has: `pp`, `micro_batches`,
`chunks`, `layout` and as many `slices`. The plan's `schedule` becomes the one whose order the table has exactly; an order that has no name is one of its own.
What the table asks for is done as it stands there or refused, with the cell:

| in the table | in the module |
|---|---|
| `F`, `B` | a forward, a whole backward of a micro-batch through a chunk |
| `I` and `W` | the backward of each attention and mlp block is split (`backward_input`, `backward_weight`) in these passes, and in no others |
| `(F;B)OVERLAP_F_B` | the two one after the other, as the cell has them |
| `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B` | the message stands there |
| no message anywhere | messages are placed where they pass in a run in which every forward, and every half of a backward, takes one unit of time (`ratrain_ir/analysis/unit_run.py`) |
| `UNSHARD` to `RESHARD`, `zero = 3` | one gather of each block at the UNSHARD serves all that the chunk does until the RESHARD, and the view is released after the last of it; a chunk without them gathers for each use |
| `UNSHARD` to `RESHARD`, otherwise | views are whole throughout the step: once a chunk the pair says no more than that; a second UNSHARD is refused |
| `REDUCE_GRAD`, `reduce = "last"` | the reductions of the chunk's gradients over the replicas stand there; without it, at the step's end |
| `REDUCE_GRAD`, `reduce = "each-micro-batch"` | refused: gradients are reduced once a micro-batch |

The micro-batches of a chunk ascend in its forwards, its input gradients and its weight gradients (the slices of each descend in the
gradients), because that is the order in which losses and gradients are added up and rounded. Other tables are refused. With `renumber=true` the micro-batches of all backwards are numbered anew, in
the order in which the first chunk takes them, if that makes them ascend everywhere and leaves the table sound: PyTorch's LoopedBFS takes the
last one first.

Passes that follow decide what is theirs: `insert-prefetch` how far ahead of its first use a view is gathered, `bucket-grad-sync` and
`joint-order` how early within a chunk's last backward its reductions begin. None moves a message, or a reduction behind later work.

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
    """Number the micro-batches of backwards in the order in which the file has them."""

    def run(self, module: Module, context: PassContext) -> None:
        """Split the backwards that the table has in halves, and put groups of ops, and messages, where it has them.

        Raises `DiagnosticError` RT002, RT007 or what `lint` says where the file is no sound table, RT010 where it does not fit the plan or
        asks for what a module cannot say, RT064 where the plan names another schedule.
        """
        table = read_foreign_table(self.path)
        check_against_plan(table, module.plan)
        if self.renumber:
            table = renumbered(table)
        check_ascending(table)
        check_state_actions(table, module.topology)
        if (
            module.level is Level.DATAFLOW
        ):  # of a module that has an order, the plan tells which; the new one replaces it
            check_said_schedule(table, module.plan)
        schedule = schedule_of(table, module.plan)
        split_where_halves_are_apart(module, orders_of_table(table))
        place_table(module, table)
        module.plan = attrs.evolve(module.plan, schedule=schedule)
        context.statistics["schedule"] = schedule or "one of its own"
        context.statistics["messages"] = "as in the file" if table.is_lowered else "placed"
