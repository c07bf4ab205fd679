"""State of the symbolic run: the value of every tensor of a stage, what has been done, and the checks of both."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.analysis.columns import Alike
from ratrain.ratrain_ir.model.blocks import Block, trains
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.base import Op, Piece
from ratrain.ratrain_ir.ops.collectives import AllGather, GatherRows
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys
from ratrain.ratrain_ir.ops.memory import Fetch
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrain_ir.verifier.slices import Contributions, Value

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.compute import BlockOp


@define(eq=False)
class SymbolicValues:
    """A stage, the values of its tensors, and what has been done."""

    module: Module
    stage: Stage
    report: Reporter
    values: dict[Tensor, Value] = field(factory=dict)
    done: dict[Value, Op] = field(factory=dict)
    """Op by (what, block, m) of everything that was done; each may be done once."""
    carried_in: dict[Tensor, Value] = field(factory=dict)
    """Value of a carried tensor at the step's start, as its first reader takes it."""
    owned: dict[Tensor, Value] = field(factory=dict)
    """Thing that a carried tensor belongs to: its value without the step. It never changes in a run."""
    recovered: dict[Tensor, Op] = field(factory=dict)
    """Recovery, or gather or fetch for a backward, that made the value of a tensor, where one did."""
    gathers: dict[Tensor, AllGather] = field(factory=dict)
    """Op that last gathered a view."""
    row_gathers: dict[Tensor, GatherRows] = field(factory=dict)
    """Op that last gathered the rows of an input."""
    key_gathers: dict[Tensor, GatherKeys] = field(factory=dict)
    """Op that last gathered keys or values of context ranks."""
    op: Op | None = None
    """Op that is being visited."""
    alike: Alike = field(factory=Alike)
    """Facts about the ops of its kind."""
    blocks: tuple[Block, ...] = field(init=False)
    trained: tuple[Block, ...] = field(init=False)
    """Blocks of the stage with parameters that train."""
    sums: Contributions = field(init=False)
    """Order of the contributions of pieces to the loss and to gradients."""
    split: list[tuple[Block, Piece]] = field(factory=list)
    """Blocks and pieces whose backward is in two halves; each needs a weight half."""

    def __attrs_post_init__(self) -> None:
        self.sums = Contributions.under(self.module.plan)
        self.blocks = self.module.topology.stage_blocks[self.stage.index]
        self.trained = tuple(each for each in self.blocks if trains(self.module.model, self.module.plan, each))

    def roles(self, op: Op) -> dict[str, Tensor]:
        """Return the operands of the visited op by role."""
        return self.alike.roles(op, self.module)

    def plan_of(self, op: BlockOp) -> Plan:
        """Return the plan for the piece that an op works on."""
        return slice_plan(self.module.plan, op.slice)

    def once(self, op: Op, code: str, *what: object) -> bool:
        """Record that something is done, and return True; report it and return False if it was done before."""
        earlier = self.done.get(what)
        if earlier is None:
            self.done[what] = op
            return True
        note = self.report.note("first done here", earlier)
        self.report.at_op(code, f"'{op!r}' happens twice", self.stage, op, notes=[note])
        return False

    def expect(self, code: str, op: Op, tensor: Tensor, *value: object) -> None:
        """Report unless a tensor holds this value when the op reads it."""
        held = self.values.get(tensor)
        # The first reader of a carried tensor decides what it holds; `check_carried` compares the end of the step with
        # it.
        if held is None and tensor.carried and value[-1] == "this step":
            held = self.values[tensor] = self.carried_in[tensor] = value
            self.own(tensor, value)
        if held != value:
            absent = (
                ("the value of the step before, which nothing has written since",) if tensor.carried else ("nothing",)
            )
            text = f"'{op!r}' needs {words_of(value)} in %{tensor.name}, which holds {words_of(held or absent)}"
            self.report.at_op(code, text, self.stage, op, tensor)

    def set(self, tensor: Tensor, *value: object) -> None:
        """Let a tensor hold this value from here on."""
        self.values[tensor] = value
        self.recovered.pop(tensor, None)
        if tensor.carried:
            self.own(tensor, value)

    def holds(self, tensors: Tensors, value: Value) -> bool:
        """Tell whether any of some tensors holds a value."""
        return any(self.values.get(tensor) == value for tensor in tensors)

    def recover(self, tensor: Tensor, op: Op) -> None:
        """Mark the value of a tensor as made by a recovery."""
        self.recovered[tensor] = op

    def own(self, tensor: Tensor, value: Value) -> None:
        """Report RT024 if a carried tensor is used for two things, also within the step.

        The first use decides what it belongs to: the value without the step.
        """
        owned = self.owned.setdefault(tensor, value[:-1])
        if owned != value[:-1]:
            assert self.op is not None
            text = f"%{tensor.name} carries {words_of(owned)}, and '{self.op!r}' takes it for {words_of(value[:-1])}"
            self.report.at_op("RT024", text, self.stage, self.op, tensor, help="use a separate tensor")

    def expect_made_forward(self, code: str, op: Op, tensor: Tensor) -> None:
        """Report a tensor that a forward needs and a recovery, or a gather or fetch for the backward, made.

        The values of a forward come from forwards, because an evaluation runs forwards without recoveries.
        """
        if tensor in self.recovered:
            maker = self.recovered[tensor]
            gathered = ("gather", "gathered")
            kinds = {GatherRows: gathered, GatherKeys: gathered, Fetch: ("fetch", "fetched")}
            source, done = kinds.get(type(maker), ("recovery", "recovered"))
            text = f"'{op!r}' takes %{tensor.name} from a {source}, which is for the backward"
            note = self.report.note(f"{done} here", maker)
            way_out = "take what the forward before it wrote"
            if type(maker) is Fetch:
                way_out = "fetch it for the forward: an evaluation runs no fetches for backwards"
            self.report.at_op(code, text, self.stage, op, tensor, notes=[note], help=way_out)


FROZEN = {"f": "frozen", "fq": "packed"}
"""Values of frozen parameters, by role."""
FROZEN_PARTS = {f"{role}s": f"part of {value}" for role, value in FROZEN.items()}
"""Values of a replica's parts of them, by role without the block."""


def words_of(value: Value) -> str:
    """Format a value for a message."""
    names = {
        "x": "the input of",
        "dx": "the gradient at the input of",
        "g": "the gradient of",
        "reduced": "the reduced gradient of",
        "frozen": "the frozen parameters of",
        "packed": "the packed frozen matrices of",
        "part of frozen": "a replica's part of the frozen parameters of",
        "part of packed": "a replica's part of the packed frozen matrices of",
        "tied": "the summed tied gradient of",
        "summed": "the gradient, with the parts of all tensor-parallel ranks, of",
        "whole x": "all rows of the input of",
        "whole dx": "all rows of the gradient at the input of",
        "part of x": "one rank's part of the input of",
        "part of dx": "one rank's part of the gradient at the input of",
        "part of branch": "one rank's part of the output of",
        "dbranch": "the gradient of the output of",
        "whole dbranch": "all rows of the gradient of the output of",
        "part of lse": "one rank's logs of sums of the rows of",
        "part of loss": "one rank's part of the loss of",
        "part of squares": "one rank's squares of the queries and keys of",
        "part of products": "one rank's products of the gradients of queries and keys of",
        "shared": "what one context rank's heads take, or make, of all tokens of",
        "groups of heads": "of some groups of heads",
        "sent": "what came to one expert rank for",
        "computed": "what one expert rank made of what came for",
        "returned": "what came back to one rank's tokens of",
        "begun g": "the gradient, without copies of experts and the rest of the last piece, of",
        "g with copies": "the gradient, without the last piece's backward proper, of",
        "keys": "all context ranks' keys of",
        "values": "all context ranks' values of",
        "part of dkeys": "one context rank's part of the gradients of keys of",
        "part of dvalues": "one context rank's part of the gradients of values of",
        "p": "the master weights of",
        "m1": "the first moment of",
        "m2": "the second moment of",
        "t": "the update count of",
        "bias": "the bias of the router's choice of",
        "load": "the counts of tokens sent to the experts of",
        "view": "the view of",
        "part of view": "a replica's part of the view of",
        "flag": "the overflow flag of",
        "scale": "the loss scale of",
        "dk_sum": "the gradients of the keys of",
        "dv_sum": "the gradients of the values of",
    }
    first = str(value[0])
    return " ".join(filter(None, [names.get(first, first), *map(word_of, value[1:])]))


def word_of(part: object) -> str:
    """Format a part of a value for a message."""
    if isinstance(part, int):
        return f"m{part}"
    if isinstance(part, range):
        return " ".join(map(word_of, part))
    return str(part.value) if isinstance(part, Enum) else str(part)
