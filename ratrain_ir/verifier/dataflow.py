"""Layer 2: a symbolic run of every stage. Each tensor holds a value; each op must find the values it means, once.

Values are tuples: ("x", block, m) the input of a block, ("dx", block, m) the gradient of it, ("saved", block, m, slot),
("g", block, range of micro-batches) a gradient and whose contributions it holds, and so on; m is a piece: a micro-batch, or a slice of one. A receive is
believed to bring what it says; that the matching send sends exactly this is checked where the send stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import define, field

from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.blocks import (
    WEIGHT_HALF_SLOTS,
    Block,
    block_chain,
    half_slots,
    is_sharded,
    next_block,
    pending_slots,
    reduces_each_micro_batch,
    saved_slots,
    shares_rows,
)
from ratrain.ratrain_ir.frontend.plan import Plan, slice_plan
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    Backward,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    CombineLoss,
    Forward,
    GatherRows,
    Group,
    LoadInput,
    Op,
    Payload,
    Phase,
    Piece,
    Quantity,
    Recompute,
    Recv,
    ReduceRows,
    ReduceScatter,
    Release,
    ScaleUpdate,
    Send,
    Slice,
    Tensor,
    Update,
    piece_of,
    piece_text,
)
from ratrain.ratrain_ir.per_op import PerOp
from ratrain.ratrain_ir.signatures import attends, bind
from ratrain.ratrain_ir.types import StateKind
from ratrain.ratrain_ir.verifier.report import MAX_REPORTS, Reporter
from ratrain.ratrain_ir.verifier.slices import Contributions, Value, seen_keys, sum_steps

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig


def check_dataflow(module: Module, report: Reporter) -> None:
    """Run every stage symbolically."""
    for stage in module.stages:
        _SymbolicRun(module, stage, report).run()


@define(eq=False)
class _SymbolicRun:
    module: Module
    stage: Stage
    report: Reporter
    values: dict[Tensor, Value] = field(factory=dict)
    done: dict[Value, Op] = field(factory=dict)
    """What happened, as (what, block, m) to op: each may happen once."""
    carried_in: dict[Tensor, Value] = field(factory=dict)
    """The value a carried tensor had at the step's start: what its first reader took it for."""
    owned: dict[Tensor, Value] = field(factory=dict)
    """What a carried tensor holds, without the step: one thing, from whose initial value a run starts."""
    recovered: dict[Tensor, Op] = field(factory=dict)
    """Activations that a recovery made, and which."""
    gathers: dict[Tensor, AllGather] = field(factory=dict)
    """The op that last made a view whole."""
    row_gathers: dict[Tensor, GatherRows] = field(factory=dict)
    """The op that last made an input whole."""
    op: Op | None = None
    """The op that is visited."""
    blocks: tuple[Block, ...] = ()
    sums: Contributions = field(init=False)
    """Which contribution to the loss and to a gradient each piece makes."""
    split: list[tuple[Block, Piece]] = field(factory=list)
    """Blocks and pieces whose backward is in two halves."""

    def __attrs_post_init__(self) -> None:
        self.sums = Contributions.under(self.module.plan)

    def run(self) -> None:
        self.blocks = self.module.topology.stage_blocks[self.stage.index]
        for op in self.stage.ops:
            if type(op) is not Release:
                self.op = op
                _VISITS.by_kind[type(op)](self, op)
        self.check_complete()

    def roles(self, op: Op) -> dict[str, Tensor]:
        return bind(op, self.module.model, self.module.plan).tensors

    def plan_of(self, op: BlockOp) -> Plan:
        """The plan as it is for the piece that an op works on."""
        return slice_plan(self.module.plan, op.slice)

    def once(self, op: Op, code: str, *what: object) -> bool:
        """Record that something happens; report when it happened before."""
        earlier = self.done.get(what)
        if earlier is None:
            self.done[what] = op
            return True
        note = self.report.note("first done here", earlier)
        self.report.at_op(code, f"'{op!r}' happens twice", self.stage, op, notes=[note])
        return False

    def expect(self, code: str, op: Op, tensor: Tensor, *value: object) -> None:
        """A tensor must hold this value when the op reads it."""
        held = self.values.get(tensor)
        if held is None and tensor.carried and value[-1] == "this step":
            held = self.values[tensor] = self.carried_in[tensor] = value
            self.own(tensor, value)
        if held != value:
            absent = ("what the step before left",) if tensor.carried else ("nothing",)
            text = f"'{op!r}' needs {_words(value)} in %{tensor.name}, which holds {_words(held or absent)}"
            self.report.at_op(code, text, self.stage, op, tensor)

    def set(self, tensor: Tensor, *value: object) -> None:
        self.values[tensor] = value
        self.recovered.pop(tensor, None)
        if tensor.carried:
            self.own(tensor, value)

    def own(self, tensor: Tensor, value: Value) -> None:
        """RT024: a carried tensor holds one thing, also within the step."""
        owned = self.owned.setdefault(tensor, value[:-1])
        if owned != value[:-1]:
            assert self.op is not None
            text = f"%{tensor.name} carries {_words(owned)}, and '{self.op!r}' takes it for {_words(value[:-1])}"
            self.report.at_op("RT024", text, self.stage, self.op, tensor, help="use a tensor of its own")

    def expect_made_forward(self, code: str, op: Op, tensor: Tensor) -> None:
        """What goes forward was made by a forward: an evaluation has no recoveries."""
        if tensor in self.recovered:
            text = f"'{op!r}' takes %{tensor.name} from a recovery, which is for the backward"
            note = self.report.note("recovered here", self.recovered[tensor])
            way_out = "take what the forward before it wrote"
            self.report.at_op(code, text, self.stage, op, tensor, notes=[note], help=way_out)

    def view(self, op: BlockOp, roles: dict[str, Tensor], block: Block) -> None:
        view = roles["w"]
        self.expect("RT030", op, view, "view", block, "this step")
        gather = self.gathers.get(view)
        if self.module.level is not Level.DATAFLOW or gather is None or gather.phase is None:
            return
        phase = Phase.FORWARD if type(op) is Forward else Phase.BACKWARD
        assert gather.micro_batch is not None  # the structure of a sound module
        served = gather.micro_batch if gather.slice is None else Slice(gather.micro_batch, gather.slice)
        if (served, gather.phase) != (piece_of(op), phase):
            note = self.report.note("gathered here", gather)
            text = f"'{op!r}' uses %{view.name}, which was gathered for the {gather.phase.value} of {_word(served)}"
            way_out = "at level dataflow, where no order is claimed, each use has a gather of its own"
            self.report.at_op("RT030", text, self.stage, op, view, notes=[note], help=way_out)

    # forward, recovery and backward

    def load_input(self, op: LoadInput) -> None:
        self.once(op, "RT030", "input", op.part, piece_of(op))
        self.set(op.writes[0], op.part.value, piece_of(op))

    def forward(self, op: Forward) -> None:
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "forward", block, m)
        self.view(op, roles, block)
        self.block_input(op, roles, block, m)
        if "x" in roles:
            self.expect_made_forward("RT030", op, roles["x"])
        if block.kind == "head":
            self.expect("RT030", op, roles["labels"], "labels", m)
            if self.module.plan.tp == 1:
                self.add_loss(op, roles["loss"], m)
            for name in _PARTS_OF_LOSS if self.module.plan.tp > 1 else ():
                self.set(roles[name], f"part of {name}", m)
        else:
            self.set(roles["y"], self.written("x"), next_block(self.module.model, block), m)
        self.documents(op, roles, m)
        self.see_keys(op, roles, block, m)
        self.set_saved(op, roles, block, m)

    def documents(self, op: BlockOp, roles: dict[str, Tensor], m: Piece) -> None:
        """What asks where documents start has those of its own piece."""
        if "documents" in roles:
            self.expect("RT030", op, roles["documents"], "documents", m)

    # what tensor peers exchange

    def written(self, what: str) -> str:
        """What a block writes of an activation, or of the gradient of one: a part of it, where there are tensor peers."""
        return what if self.module.plan.tp == 1 else f"part of {what}"

    def read(self, what: str) -> str:
        """What a block reads of an activation, or of the gradient of one: all its rows, where peers have some each."""
        return f"whole {what}" if shares_rows(self.module.plan) else what

    def gather_rows(self, op: GatherRows) -> None:
        what, m = _EXCHANGED[op.payload], piece_of(op)
        self.once(op, "RT033", "gather_rows", op.payload, op.block, m, op.phase)
        self.expect("RT033", op, op.reads[0], what, op.block, m)
        if op.phase is Phase.FORWARD:
            self.expect_made_forward("RT033", op, op.reads[0])
        self.set(op.writes[0], f"whole {what}", op.block, m)
        self.row_gathers[op.writes[0]] = op

    def reduce_rows(self, op: ReduceRows) -> None:
        """The parts, and the stream that goes around the block that made them: forward from the one before, back from the one after."""
        what, m, block = _EXCHANGED[op.payload], piece_of(op), op.block
        self.once(op, "RT033", "reduce_rows", op.payload, block, m)
        roles = self.roles(op)
        self.expect("RT033", op, roles["part"], f"part of {what}", block, m)
        if "stream" in roles:
            chain = block_chain(self.module.model)
            step = -1 if op.payload is Payload.ACTIVATION else 1
            self.expect("RT033", op, roles["stream"], what, chain[chain.index(block) + step], m)
        self.set(roles["sum"], what, block, m)

    def combine_loss(self, op: CombineLoss) -> None:
        roles, m = self.roles(op), piece_of(op)
        self.once(op, "RT033", "combine_loss", m)
        for name in _PARTS_OF_LOSS:
            self.expect("RT033", op, roles[f"{name}_part"], f"part of {name}", m)
        self.expect("RT033", op, roles["labels"], "labels", m)
        self.add_loss(op, roles["loss"], m)
        self.set_saved(op, roles, op.block, m)

    def serves_phase(self, op: BlockOp, tensor: Tensor) -> None:
        """RT033: at level dataflow, where no order is claimed, each use of a sharded input has a gather of its own."""
        gather = self.row_gathers.get(tensor)
        phase = Phase.FORWARD if type(op) is Forward else Phase.BACKWARD
        if self.module.level is Level.DATAFLOW and gather is not None and gather.phase not in (None, phase):
            note = self.report.note("gathered here", gather)
            text = f"'{op!r}' uses %{tensor.name}, which was gathered for the {gather.phase.value} of {_word(piece_of(gather))}"
            way_out = "at level dataflow each use has a gather of its own"
            self.report.at_op("RT033", text, self.stage, op, tensor, notes=[note], help=way_out)

    def add_loss(self, op: Forward | CombineLoss, loss: Tensor, m: Piece) -> None:
        """The loss is a sum over micro-batches in ascending order, and over their slices."""
        share = self.sums.share(m, descending=False)
        if op.updates:
            self.expect("RT030", op, loss, "loss", self.sums.shares(share, descending=False))
        elif share != 0:
            first = piece_text(self.sums.piece(0, descending=False))
            text = f"the first contribution to the loss must be {first}: micro-batches ascend"
            self.report.at_op("RT030", text, self.stage, op, loss)
        self.set(loss, "loss", self.sums.shares(share + 1, descending=False))

    def block_input(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        if block.kind == "embed":
            self.expect("RT030", op, roles["tokens"], "tokens", m)
        else:
            self.expect("RT030", op, roles["x"], self.read("x"), block, m)
            self.serves_phase(op, roles["x"])

    def set_saved(self, op: Op, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        for name, tensor in roles.items():
            if tensor.kind is StateKind.SAVED and tensor in op.writes:
                self.once(op, "RT032", "saved", block, m, name)
                self.set(tensor, "saved", block, m, name)

    def expect_saved(self, op: Op, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        for name, tensor in roles.items():
            if tensor.kind is StateKind.SAVED and tensor in op.reads and name in self.own_slots(block):
                self.expect("RT032", op, tensor, "saved", block, m, name)

    def own_slots(self, block: Block) -> frozenset[str]:
        """The roles of what a forward saves: a sliced attention has operands of other slices too."""
        return _slot_names(self.module.model, self.module.plan, block)

    def recompute(self, op: Recompute) -> None:
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT032", "recompute", block, m)
        self.view(op, roles, block)
        self.expect("RT032", op, roles["x"], self.read("x"), block, m)
        self.serves_phase(op, roles["x"])
        self.expect_saved(op, roles, block, m)
        self.documents(op, roles, m)
        if attends(op):
            self.see_keys(op, roles, block, m)
        if "y" in roles:
            self.set(roles["y"], "x", next_block(self.module.model, block), m)
            self.recovered[roles["y"]] = op
        self.set_saved(op, roles, block, m)

    def backward(self, op: Backward) -> None:
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "backward", block, m)
        self.block_input(op, roles, block, m)
        if block.kind == "head":
            self.view(op, roles, block)
            self.expect("RT030", op, roles["labels"], "labels", m)
            self.expect("RT030", op, roles["scale"], "scale", "this step")
        else:
            self.output_gradient(op, roles, block, m)
            if block.kind != "embed":
                self.view(op, roles, block)
        self.expect_saved(op, roles, block, m)
        self.documents(op, roles, m)
        self.add_up_sums(op, roles, block, m)
        if "dx" in roles:
            self.set(roles["dx"], self.written("dx"), block, m)
        self.contribute(op, roles["g"], block, m)

    def output_gradient(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """What comes back to a block from the one after it."""
        self.expect("RT030", op, roles["dy"], self.read("dx"), next_block(self.module.model, block), m)

    def backward_input(self, op: BackwardInput) -> None:
        """One of the two ways to do a micro-batch's backward, which then has a weight half too."""
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "backward", block, m)
        self.split.append((block, m))
        self.output_gradient(op, roles, block, m)
        self.block_input(op, roles, block, m)
        self.view(op, roles, block)
        self.expect_saved(op, roles, block, m)
        self.documents(op, roles, m)
        self.add_up_sums(op, roles, block, m)
        self.set(roles["dx"], self.written("dx"), block, m)
        for slot in pending_slots(self.module.model, self.plan_of(op), block):
            self.set(roles[slot.name], "pending", block, m, slot.name)

    def backward_weight(self, op: BackwardWeight) -> None:
        """Finds what its input half left, so it comes after it."""
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "backward_weight", block, m)
        self.output_gradient(op, roles, block, m)
        if "x" in roles:
            self.block_input(op, roles, block, m)
        for name in half_slots(self.module.model, self.plan_of(op), block, WEIGHT_HALF_SLOTS):
            self.expect("RT032", op, roles[name], "saved", block, m, name)
        for slot in pending_slots(self.module.model, self.plan_of(op), block):
            self.expect("RT030", op, roles[slot.name], "pending", block, m, slot.name)
        self.contribute(op, roles["g"], block, m)

    def contribute(self, op: Backward | BackwardWeight, gradient: Tensor, block: Block, m: Piece) -> None:
        """Gradients gather micro-batches in ascending order, and of each its slices in descending order."""
        share = self.sums.share(m, descending=True)
        alone = reduces_each_micro_batch(self.module.plan)
        begin = share - share % self.sums.slices if alone else 0
        if gradient in op.writes:
            if share != begin:
                first = piece_text(self.sums.piece(begin, descending=True))
                text = f"the first contribution to the gradient of {block} must be {first}: micro-batches ascend"
                self.report.at_op("RT031", text, self.stage, op, gradient)
            self.set(gradient, "g", block, self.sums.shares(share + 1, share))
            return
        self.expect("RT031", op, gradient, "g", block, self.sums.shares(share, begin))
        self.set(gradient, "g", block, self.sums.shares(share + 1, begin))

    # slices of an attention

    def see_keys(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """A slice reads the keys and values of earlier slices, made by their forwards."""
        for role, value in seen_keys(self.module.model, self.module.plan, block, m):
            self.expect("RT030", op, roles[role], *value)

    def add_up_sums(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """The backward of a slice takes what later slices left for its keys and values, and adds to the sums of earlier ones."""
        self.see_keys(op, roles, block, m)
        for step in sum_steps(self.module.model, self.module.plan, block, m):
            if step.before is not None:
                self.expect("RT031", op, roles[step.role], *step.before)
            if step.after is not None:
                self.set(roles[step.role], *step.after)

    # messages

    def send(self, op: Send) -> None:
        what, block = self.crossing(op)
        self.expect("RT040", op, op.reads[0], what, block, piece_of(op))
        self.expect_made_forward("RT040", op, op.reads[0])

    def recv(self, op: Recv) -> None:
        what, block = self.crossing(op)
        self.set(op.writes[0], what, block, piece_of(op))

    def crossing(self, op: Send | Recv) -> tuple[str, Block]:
        """What crosses the cut between this stage and the peer."""
        hop = hop_of(op, self.stage, self.module.topology)
        assert hop is not None  # the structure of a sound module
        what = "x" if op.payload is Payload.ACTIVATION else "dx"
        return what, self.module.topology.crossing_block(hop.channel)

    # gradients, updates, views

    def reduce_scatter(self, op: ReduceScatter) -> None:
        roles = self.roles(op)
        count = self.module.plan.micro_batches
        for block in op.blocks:
            shard, flag = roles[f"gs.{block}"], roles[f"flag.{block}"]
            if op.micro_batch is None:
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(count))
                reduced = range(count)
            else:
                m = op.micro_batch
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(m + 1, m))
                reduced = range(m + 1)
                if op.updates:
                    self.expect("RT031", op, shard, "reduced", block, range(m))
                    self.expect("RT031", op, flag, "flag", block, range(m))
                elif m != 0:
                    text = f"the first reduction of {block} must be m0: micro-batches ascend"
                    self.report.at_op("RT031", text, self.stage, op, shard)
            self.once(op, "RT031", "reduce", block, op.micro_batch)
            self.set(shard, "reduced", block, reduced)
            self.set(flag, "flag", block, reduced)

    def all_reduce(self, op: AllReduce) -> None:
        roles = self.roles(op)
        everything = range(self.module.plan.micro_batches)
        for block in op.blocks:
            self.once(op, "RT031", "all_reduce", op.group, block)
            if op.group is Group.TENSOR:
                gradient, flag = self.reduced_values(block)
                self.expect("RT033", op, roles[f"gs.{block}"], *gradient)
                self.expect("RT033", op, roles[f"flag.{block}"], *flag)
                self.set(roles[f"gs.{block}"], "summed", block)
                self.set(roles[f"flag.{block}"], *flag, "of peers")
            elif op.group is Group.REPLICAS:
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(len(everything)))
                self.set(roles[f"g.{block}"], "reduced", block, everything)
                self.set(roles[f"flag.{block}"], "flag", block, everything)
            else:
                gradient, flag = self.peer_values(block)
                self.expect("RT031", op, roles[f"gs.{block}"], *gradient)
                self.expect("RT031", op, roles[f"flag.{block}"], *flag)
                self.set(roles[f"gs.{block}"], "tied", block)
                self.set(roles[f"flag.{block}"], *flag, "tied")
        if op.group is Group.ENDS:
            expected = {block for block in self.blocks if block.kind in ("embed", "head")}
            if set(op.blocks) != expected:
                names = ", ".join(sorted(map(str, expected)))
                text = f"'all_reduce ends' on stage @{self.stage.index} must cover {names}"
                self.report.at_op("RT031", text, self.stage, op)

    def is_tied(self, block: Block) -> bool:
        return self.module.model.tied_embeddings and block.kind in ("embed", "head")

    def update(self, op: Update) -> None:
        block = op.block
        roles = self.roles(op)
        self.once(op, "RT031", "update", block)
        self.expect_reduced(op, roles["g"], roles["flag"], block)
        if "norm" in roles:
            self.expect("RT031", op, roles["norm"], "norm")
        self.expect("RT031", op, roles["scale"], "scale", "this step")
        for name in ("p", "m1", "m2", "t"):
            self.expect("RT031", op, roles[name], name, block, "this step")
            self.set(roles[name], name, block, "next step")
        if "w" in roles:
            self.set(roles["w"], "view", block, "next step")

    def all_gather(self, op: AllGather) -> None:
        roles = self.roles(op)
        step = "next step" if op.phase is None else "this step"
        for block in op.blocks:
            self.expect("RT031", op, roles[f"p.{block}"], "p", block, step)
            self.set(roles[f"w.{block}"], "view", block, step)
            self.gathers[roles[f"w.{block}"]] = op

    def all_reduce_scalar(self, op: AllReduceScalar) -> None:
        self.once(op, "RT030", "all_reduce_scalar", op.quantity)
        if op.quantity is Quantity.NORM:
            self.norm(op)
            return
        if op.quantity is Quantity.LOSS:
            count = self.module.plan.micro_batches * self.sums.slices
            self.expect("RT030", op, op.reads[0], "loss", self.sums.shares(count, descending=False))
            return
        seen = {self.values.get(tensor) for tensor in op.reads}
        for block in self.blocks:
            if self.final_values(block)[1] not in seen:
                text = f"the overflow flag of {block}, of all micro-batches, is left out"
                self.report.at_op("RT031", text, self.stage, op)
        self.set(op.writes[0], "overflow")

    def norm(self, op: AllReduceScalar) -> None:
        """Every block's reduced gradient and flag, once; tied gradients after they have been summed."""
        roles = self.roles(op)
        for block in op.blocks:
            self.expect_reduced(op, roles[f"gs.{block}"], roles[f"flag.{block}"], block)
        if op.blocks != self.blocks:
            missing = ", ".join(str(block) for block in self.blocks if block not in op.blocks) or "the order"
            self.report.at_op("RT031", f"the norm takes the stage's blocks in order; wrong: {missing}", self.stage, op)
        self.set(op.writes[0], "norm")

    def expect_reduced(self, op: Op, gradient: Tensor, flag: Tensor, block: Block) -> None:
        """A gradient that all micro-batches and replicas (and the other end, where tied) have gone into, and its flag."""
        values = self.final_values(block)
        self.expect("RT031", op, gradient, *values[0])
        self.expect("RT031", op, flag, *values[1])

    def reduced_values(self, block: Block) -> tuple[Value, Value]:
        """A gradient that all micro-batches and replicas have gone into, and its flag."""
        everything = range(self.module.plan.micro_batches)
        return ("reduced", block, everything), ("flag", block, everything)

    def peer_values(self, block: Block) -> tuple[Value, Value]:
        """The same after tensor peers have summed what they share."""
        gradient, flag = self.reduced_values(block)
        return (gradient, flag) if self.module.plan.tp == 1 else (("summed", block), (*flag, "of peers"))

    def final_values(self, block: Block) -> tuple[Value, Value]:
        """The same after the other end, where tied; the sum of both ends may overflow where neither does."""
        gradient, flag = self.peer_values(block)
        return (("tied", block), (*flag, "tied")) if self.is_tied(block) else (gradient, flag)

    def scale_update(self, op: ScaleUpdate) -> None:
        self.once(op, "RT030", "scale_update")
        self.expect("RT031", op, op.reads[0], "overflow")
        self.expect("RT031", op, op.updates[0], "scale", "this step")
        self.set(op.updates[0], "scale", "next step")

    # the step's end

    def check_complete(self) -> None:
        for what in self.required():
            if len(self.report.diagnostics.items) >= MAX_REPORTS:
                break  # a plan can promise millions of micro-batches that a text does not have
            if what not in self.done:
                text = f"stage @{self.stage.index} never does '{' '.join(_word(w) for w in what if w is not None)}'"
                code = "RT031" if what[0] in ("reduce", "update", "all_reduce") else "RT030"
                if Group.TENSOR in what:
                    code = "RT033"
                self.report.at_stage(code, text, self.stage)
        for tensor in self.stage.tensors.values():
            if tensor.carried and not self.report.diagnostics.errors:
                self.check_carried(tensor)

    def required(self) -> Iterator[Value]:
        plan = self.module.plan
        for share in range(plan.micro_batches * self.sums.slices):
            m = self.sums.piece(share, descending=False)
            yield from ((what, block, m) for block in self.blocks for what in ("forward", "backward"))
        yield from (("backward_weight", block, m) for block, m in self.split)
        for block in self.blocks:
            if reduces_each_micro_batch(plan):
                yield from (("reduce", block, m) for m in range(plan.micro_batches))
            elif is_sharded(plan):
                yield ("reduce", block, None)
            else:
                yield ("all_reduce", Group.REPLICAS, block)
            if plan.tp > 1:
                yield ("all_reduce", Group.TENSOR, block)
            yield ("update", block)
        if self.stage.index == self.module.topology.last_stage:
            yield ("all_reduce_scalar", Quantity.LOSS)
        if plan.optimizer.clip == "global":
            yield ("all_reduce_scalar", Quantity.NORM)
        if plan.has_dynamic_scale:
            yield from (("all_reduce_scalar", Quantity.FLAGS), ("scale_update",))

    def check_carried(self, tensor: Tensor) -> None:
        """RT024: a carried tensor must end with the next step's value of what it began with."""
        before, after = self.carried_in.get(tensor), self.values.get(tensor)
        if before is None or after is None:
            self.report.at_tensor("RT024", f"%{tensor.name} is carried, but nothing uses what it carries", tensor)
            return
        static_scale = before[0] == "scale" and not self.module.plan.has_dynamic_scale
        expected = before if static_scale else (*before[:-1], "next step")
        if after != expected:
            text = (
                f"%{tensor.name} is carried: the step must leave {_words(expected)} in it, but leaves {_words(after)}"
            )
            self.report.at_tensor("RT024", text, tensor)


_EXCHANGED = {Payload.ACTIVATION: "x", Payload.GRADIENT: "dx"}
"""What tensor peers exchange."""


_PARTS_OF_LOSS = ("lse", "loss")
"""What a tensor peer makes of its part of the vocabulary."""


@cache
def _slot_names(model: ModelConfig, plan: Plan, block: Block) -> frozenset[str]:
    return frozenset(slot.name for slot in saved_slots(model, slice_plan(plan, 0) if plan.slices else plan, block))


def _words(value: Value) -> str:
    """A value in words."""
    names = {
        "x": "the input of",
        "dx": "the gradient at the input of",
        "g": "the gradient of",
        "reduced": "the reduced gradient of",
        "tied": "the summed tied gradient of",
        "summed": "the gradient, with the parts of all tensor peers, of",
        "whole x": "all rows of the input of",
        "whole dx": "all rows of the gradient at the input of",
        "part of x": "one peer's part of the input of",
        "part of dx": "one peer's part of the gradient at the input of",
        "part of lse": "one peer's logs of sums of the rows of",
        "part of loss": "one peer's part of the loss of",
        "p": "the master weights of",
        "m1": "the first moment of",
        "m2": "the second moment of",
        "t": "the update count of",
        "view": "the view of",
        "flag": "the overflow flag of",
        "scale": "the loss scale of",
        "dk_sum": "the gradients of the keys of",
        "dv_sum": "the gradients of the values of",
    }
    first = str(value[0])
    return " ".join(filter(None, [names.get(first, first), *map(_word, value[1:])]))


def _word(part: object) -> str:
    if isinstance(part, int):
        return f"m{part}"
    if isinstance(part, range):
        return " ".join(map(_word, part))
    return str(part.value) if isinstance(part, Enum) else str(part)


_VISITS: PerOp[Callable[[_SymbolicRun, Any], None]] = PerOp(
    "meaning in the symbolic run",
    {
        LoadInput: _SymbolicRun.load_input,
        Forward: _SymbolicRun.forward,
        Recompute: _SymbolicRun.recompute,
        Backward: _SymbolicRun.backward,
        BackwardInput: _SymbolicRun.backward_input,
        BackwardWeight: _SymbolicRun.backward_weight,
        Send: _SymbolicRun.send,
        Recv: _SymbolicRun.recv,
        ReduceScatter: _SymbolicRun.reduce_scatter,
        AllReduce: _SymbolicRun.all_reduce,
        AllReduceScalar: _SymbolicRun.all_reduce_scalar,
        GatherRows: _SymbolicRun.gather_rows,
        ReduceRows: _SymbolicRun.reduce_rows,
        CombineLoss: _SymbolicRun.combine_loss,
        Update: _SymbolicRun.update,
        AllGather: _SymbolicRun.all_gather,
        ScaleUpdate: _SymbolicRun.scale_update,
    },
    never=(Release,),
)
