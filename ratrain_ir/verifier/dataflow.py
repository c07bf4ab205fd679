# ruff: noqa: D102 - a visit has the name of the op whose meaning it is
"""Layer 2: a symbolic run of every stage. Each tensor holds a symbolic value; each op must find the values it means.

A visit of an op checks the values that it reads (`expect`), records that the op happened, once (`once`), and gives
values to the tensors that it writes (`set`):

    %y.m0 = forward mlp.0 m0 (%w, %x.m0)     %w must hold ("view", mlp.0, "this step"), %x.m0 ("x", mlp.0, 0);
                                             ("forward", mlp.0, 0) is done; %y.m0 holds ("x", attention.1, 0)

Values are tuples; m is a piece, a micro-batch or a slice of one:

- ("x", block, m) is the input of a block, ("dx", block, m) its gradient
- ("saved", block, m, slot) is a saved slot, ("pending", block, m, slot) what an earlier part of the backward left
- ("g", block, range of micro-batches) is a gradient with its contributions
- "part of ..." is a partial sum of one tensor-parallel rank, "whole ..." has the rows of all of them
- values of carried tensors end in "this step" or "next step"

A receive is assumed to bring what it says; the visit of the send checks that exactly this is sent. At the end, all
required work must be done, and carried tensors must hold the next step's values. Each op is visited once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define

from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block, next_block
from ratrain.ratrain_ir.model.expert_ranks import KEPT_OF_ROWS, PRODUCTS_OF_ROWS, shares_experts
from ratrain.ratrain_ir.model.slots import (
    OUTPUT_GRADIENT,
    PRODUCTS,
    SQUARES,
    WEIGHT_HALF_SLOTS,
    WHOLE_KEYS,
    branch_slots,
    branch_sums,
    half_slots,
    head_gradient_slots,
    normed_gradient_slots,
    pending_slots,
    projected_slots,
)
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase, Piece
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import (
    AddBranch,
    AddBranchBackward,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    Forward,
    LoadInput,
    Project,
    Recompute,
    Release,
    ScaleUpdate,
    Update,
    attends,
)
from ratrain.ratrain_ir.ops.context_ranks import (
    Attend,
    AttendBackward,
    GatherHeads,
    GatherKeys,
    ReduceKeys,
    ReturnHeads,
)
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Combine, Dispatch, ForwardExperts, Route
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import COPY_SIDES, Fetch, Store, fetches_parameters
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.columns import Alike
    from ratrain.ratrain_ir.ops.tensor import Tensor

from ratrain.ratrain_ir.verifier.symbolic_blocks import SymbolicBlocks
from ratrain.ratrain_ir.verifier.symbolic_exchanges import PARTS_OF_LOSS
from ratrain.ratrain_ir.verifier.symbolic_values import FROZEN, word_of, words_of


@define(eq=False)
class SymbolicRun(SymbolicBlocks):
    """Symbolic run of one stage: the meaning of each kind of op, and the check that the step is complete."""

    def run(self) -> None:
        """Visit all ops in list order, then check that the step is complete."""
        columns = self.report.columns(self.stage)
        for op, kind in zip(columns.ops, columns.kinds, strict=True):
            if type(op) is not Release:
                self.visit(op, columns.alike[kind])
        self.check_complete()

    def visit(self, op: Op, alike: Alike) -> None:
        """Visit an op; `alike` holds facts about all ops of its kind."""
        self.op, self.alike = op, alike
        _VISITS.by_kind[type(op)](self, op)

    # forward, recovery and backward

    def load_input(self, op: LoadInput) -> None:
        self.once(op, "RT030", "input", op.part, piece_of(op))
        self.set(op.writes[0], op.part.value, piece_of(op))

    def forward(self, op: Forward) -> None:
        """Run a block on its input; the head adds to the loss."""
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "forward", block, m)
        self.view(op, roles, block)
        if self.norms_over_ranks(block):
            self.expect_saved(op, roles, block, m)
            # `project` has read the input already, and checked it.
            for name in _ROLES_OF_PROJECT:
                self.expect_made_forward("RT030", op, roles[name])
        elif self.shares_keys(block):
            self.expect_saved(op, roles, block, m)
            if self.reads_whole_keys(block):
                self.take_whole_keys(op, roles, block, m)
            self.expect_made_forward("RT030", op, roles["q" if self.reads_whole_keys(block) else "o"])
            if "x" in roles:
                self.block_input(op, roles, block, m)
        else:
            self.block_input(op, roles, block, m)
        if "x" in roles:
            self.expect_made_forward("RT030", op, roles["x"])
        if block.kind == "head":
            self.expect("RT030", op, roles["labels"], "labels", m)
            if self.module.plan.tp == 1:
                self.add_loss(op, roles["loss"], m)
            for name in PARTS_OF_LOSS if self.module.plan.tp > 1 else ():
                self.set(roles[name], f"part of {name}", m)
        else:
            self.check_branch_part(op, roles, "x", block, m)
            if self.adds_apart(block):
                self.set(roles["y"], "part of branch", block, m)
            else:
                self.set(roles["y"], self.written("x"), next_block(self.module.model, block), m)
        self.documents(op, roles, m)
        self.see_keys(op, roles, block, m)
        if shares_experts(self.module.model, self.module.plan, block):
            self.expect_saved(op, roles, block, m)
            self.take_back(op, roles, "returned")
        self.set_saved(op, roles, block, m)

    # experts that replicas share out

    def route(self, op: Route) -> None:
        """Choose the experts of a block's own tokens."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", "route", block, m)
        self.view(op, roles, block)
        self.block_input(op, roles, block, m)
        self.expect_made_forward("RT030", op, roles["x"])
        self.set_saved(op, roles, block, m)

    def dispatch(self, op: Dispatch) -> None:
        """Bring rows of all ranks to the ranks that compute them; each rank runs this op with its own tokens."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "dispatch", op.payload, block, m)
        self.view(op, roles, block)
        self.expect_saved(op, roles, block, m)
        if op.payload is Payload.GRADIENT:
            self.output_gradient(op, roles, block, m)
        if roles["counts"] in op.reads:
            self.expect("RT033", op, roles["counts"], *self.of_rows("sent", block, m, "counts", op))
        self.set_exchanged(op, block, m, "sent")

    def work_on_rows(self, op: ForwardExperts | BackwardExperts) -> None:
        """Compute the rows that came, or go back through them and begin the block's gradient of this piece."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", op.keyword, block, m)
        self.view(op, roles, block)
        for tensor in op.reads:
            if tensor.kind is StateKind.SAVED:
                what = "computed" if tensor.slot in PRODUCTS_OF_ROWS else "sent"
                self.expect("RT030", op, tensor, *self.of_rows(what, block, m, tensor.slot, op))
        self.set_exchanged(op, block, m, "computed")
        if type(op) is BackwardExperts:
            self.contribute(op, roles["g"], block, m)
            self.set(roles["g"], "begun g", block, self.contributed(block, m))

    def combine(self, op: Combine) -> None:
        """Bring computed rows back to their tokens, and add the gradients of copied experts at home."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "combine", op.payload, block, m)
        for tensor in op.reads:
            source = "sent" if tensor.slot == "counts" else "computed"
            if tensor.slot == "chosen":
                self.expect("RT032", op, tensor, "saved", block, m, "chosen")
            else:
                self.expect("RT033", op, tensor, *self.of_rows(source, block, m, tensor.slot, op))
        self.set_exchanged(op, block, m, "returned")
        if "g" in roles:
            self.expect("RT031", op, roles["g"], "begun g", block, self.contributed(block, m))
            self.set(roles["g"], "g with copies", block, self.contributed(block, m))

    def set_exchanged(self, op: ExpertRankOp, block: Block, m: Piece, what: str) -> None:
        """Set what an op of expert ranks leaves for the next one in its pass."""
        for tensor in op.writes:
            if tensor.kind is StateKind.SAVED:
                self.set(tensor, *self.of_rows(what, block, m, tensor.slot, op))

    def of_rows(self, what: str, block: Block, m: Piece, slot: str, op: ExpertRankOp) -> tuple[Any, ...]:
        """Return the value of what an op of expert ranks leaves or takes: what both passes make alike has no pass."""
        alike = slot in KEPT_OF_ROWS or slot in PRODUCTS_OF_ROWS
        return (what, block, m, slot) if alike else (what, block, m, slot, op.work_group)

    def take_back(self, op: Forward | Backward, roles: dict[str, Tensor], *names: str) -> None:
        """Check the rows that `combine` has brought back to this op's tokens."""
        for name in names:
            self.expect("RT030", op, roles[name], "returned", op.block, piece_of(op), name, op.work_group)

    def add_branch(self, op: AddBranch) -> None:
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", "add_branch", block, m)
        self.view(op, roles, block)
        self.expect("RT030", op, roles["stream"], "x", block, m)
        self.expect_made_forward("RT030", op, roles["stream"])
        self.expect("RT032", op, roles["branch"], "saved", block, m, "branch")
        self.set(roles["sum"], "x", next_block(self.module.model, block), m)
        self.set_saved(op, roles, block, m)

    def add_branch_backward(self, op: AddBranchBackward) -> None:
        block, m, roles = op.block, piece_of(op), self.roles(op)
        model, plan = self.module.model, self.plan_of(op)
        self.once(op, "RT030", "add_branch_backward", block, m)
        self.view(op, roles, block)
        self.expect("RT030", op, roles["dsum"], "dx", next_block(model, block), m)
        for slot in branch_slots(model, plan):
            self.expect("RT032", op, roles[slot.name], "saved", block, m, slot.name)
        self.set(roles["dbranch"], "dbranch", block, m)
        for slot in branch_sums(model, plan, block):
            self.set(roles[slot.name], "pending", block, m, slot.name)

    def project(self, op: Project) -> None:
        """Make queries, keys and values. They are not recorded as done once: a recovery may make them again."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", "project", block, m)
        self.view(op, roles, block)
        self.block_input(op, roles, block, m)
        self.expect_made_forward("RT030", op, roles["x"])
        if self.shares_keys(block):
            self.project_for_context(op)
            return
        self.set(roles[SQUARES], f"part of {SQUARES}", block, m)
        for slot in projected_slots(self.module.model, self.plan_of(op), block):
            self.set(roles[slot.name], "saved", block, m, slot.name)

    def backward_heads(self, op: BackwardHeads) -> None:
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", "backward_heads", block, m)
        self.view(op, roles, block)
        self.output_gradient(op, roles, block, m)
        self.expect_saved(op, roles, block, m)
        if self.module.plan.attends_apart:
            self.set(roles[OUTPUT_GRADIENT], "pending", block, m, OUTPUT_GRADIENT)
            return
        self.documents(op, roles, m)
        if self.shares_keys(block):
            self.take_whole_keys(op, roles, block, m)
            self.set(roles["dq_out"], "pending", block, m, "dq_out")
            self.add_up_sums(op, roles, block, m)
            for name in WHOLE_KEYS if isinstance(m, int) else ():
                self.set(roles[f"d{name}"], f"part of d{name}", block, m)
            return
        self.add_up_sums(op, roles, block, m)
        self.set(roles[PRODUCTS], f"part of {PRODUCTS}", block, m)
        for slot in normed_gradient_slots(self.module.model, self.plan_of(op), block):
            self.set(roles[slot.name], "pending", block, m, slot.name)

    def through_heads(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check what a backward needs behind the softmax and the products of queries and keys.

        It computes these gradients itself. If norms sum over ranks, or context ranks sum the gradients of keys, it
        reads the results of `backward_heads`.
        """
        if self.shares_keys(block):
            self.documents(op, roles, m)
            for slot in head_gradient_slots(self.module.model, self.plan_of(op), block):
                self.expect("RT030", op, roles[slot.name], "pending", block, m, slot.name)
            return
        if not self.norms_over_ranks(block):
            self.documents(op, roles, m)
            self.add_up_sums(op, roles, block, m)
            return
        for name in (
            *(slot.name for slot in normed_gradient_slots(self.module.model, self.plan_of(op), block)),
            PRODUCTS,
        ):
            self.expect("RT030", op, roles[name], "pending", block, m, name)

    def recompute(self, op: Recompute) -> None:
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT032", "recompute", block, m)
        self.view(op, roles, block)
        self.expect("RT032", op, roles["x"], self.read("x"), self.source(block), m)
        self.serves_phase(op, roles["x"])
        self.expect_saved(op, roles, block, m)
        self.documents(op, roles, m)
        if attends(op):
            self.see_keys(op, roles, block, m)
            if self.reads_whole_keys(block):
                self.take_whole_keys(op, roles, block, m)
        if "y" in roles:
            self.set(roles["y"], self.written("x"), next_block(self.module.model, block), m)
            self.recover(roles["y"], op)
        self.set_saved(op, roles, block, m)
        projected = _ROLES_OF_PROJECT if self.norms_over_ranks(block) else ("q",) * self.shares_keys(block)
        for name in projected:
            # Mark them: a forward of the same piece must not read recovered projections (`expect_made_forward`).
            if roles.get(name) in op.writes:
                self.recover(roles[name], op)

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
        self.through_heads(op, roles, block, m)
        self.take_branch_sums(op, roles, block, m)
        if "dx" in roles:
            self.set(roles["dx"], self.written("dx"), block, m)
        self.count_tokens(op, roles, block, m)
        if shares_experts(self.module.model, self.module.plan, block):
            self.take_back(op, roles, "dreturned", "dweights")
            self.end_contribution(op, roles["g"], block, m)
        elif "g" in roles:
            self.contribute(op, roles["g"], block, m)

    def backward_input(self, op: BackwardInput) -> None:
        """Do the input half of a backward; the micro-batch then needs a weight half too."""
        block, m = op.block, piece_of(op)
        roles = self.roles(op)
        self.once(op, "RT030", "backward", block, m)
        self.split.append((block, m))
        self.output_gradient(op, roles, block, m)
        self.block_input(op, roles, block, m)
        self.view(op, roles, block)
        self.expect_saved(op, roles, block, m)
        self.through_heads(op, roles, block, m)
        self.set(roles["dx"], self.written("dx"), block, m)
        for slot in pending_slots(self.module.model, self.plan_of(op), block):
            self.set(roles[slot.name], "pending", block, m, slot.name)

    def backward_weight(self, op: BackwardWeight) -> None:
        """Do the weight half of a backward. It needs what its input half left, so it comes later."""
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
        if self.norms_over_ranks(block):
            self.expect("RT030", op, roles["dv"], "pending", block, m, "dv")
        self.take_branch_sums(op, roles, block, m)
        self.count_tokens(op, roles, block, m)
        self.contribute(op, roles["g"], block, m)

    # other memories

    def copy(self, op: Store | Fetch) -> None:
        """Copy values to or from another memory; each must belong to the block and piece that the op names."""
        block, m = op.block, piece_of(op)
        if fetches_parameters(op):
            self.fetch_frozen(op)
            return
        for tensor, copied in zip(op.reads, op.writes, strict=True):
            held = self.values.get(tensor)
            if held is None or held[1:3] != (block, m):
                words = words_of(held) if held else "nothing"
                text = f"'{op!r}' copies %{tensor.name}, which holds {words}, and nothing of {block} {word_of(m)}"
                self.report.at_op("RT034", text, self.stage, op, tensor)
            if held is None:
                continue
            # `set` forgets that a value was recovered; a copy of a recovered value counts as recovered too.
            recovered = self.recovered.get(tensor)
            self.set(copied, *held)
            if recovered is not None:
                self.recovered[copied] = recovered

    def fetch_frozen(self, op: Fetch) -> None:
        """Fetch the frozen parameters of a block for a pass; an evaluation runs no fetch that is for a backward."""
        roles = self.roles(op)
        for name, value in FROZEN.items():
            if name in roles:
                copy = roles[f"{COPY_SIDES[1]}.{name}"]
                self.expect("RT034", op, roles[name], value, op.block, "this step")
                self.set(copy, value, op.block, "this step")
                if op.phase is Phase.BACKWARD:
                    self.recover(copy, op)

    # messages

    def send(self, op: Send) -> None:
        what, block = self.crossing(op)
        self.expect("RT040", op, op.reads[0], what, block, piece_of(op))
        self.expect_made_forward("RT040", op, op.reads[0])

    def recv(self, op: Recv) -> None:
        what, block = self.crossing(op)
        self.set(op.writes[0], what, block, piece_of(op))

    def crossing(self, op: Send | Recv) -> tuple[str, Block]:
        """Return what crosses the cut between this stage and the peer: `x` or `dx`, and the block at the cut."""
        hop = hop_of(op, self.stage, self.module.topology)
        assert hop is not None  # the structure of a sound module
        what = "x" if op.payload is Payload.ACTIVATION else "dx"
        return what, self.module.topology.crossing_block(hop.channel)


ExpertRankOp = Dispatch | ForwardExperts | BackwardExperts | Combine
"""Ops of expert ranks that leave rows, or gradients of rows, for each other"""

_ROLES_OF_PROJECT = ("q_in", "k_in", "v")
"""Roles of what `project` makes before the forward."""


_VISITS: PerOp[Callable[[SymbolicRun, Any], None]] = PerOp(
    "meaning in the symbolic run",
    {
        LoadInput: SymbolicRun.load_input,
        Forward: SymbolicRun.forward,
        Recompute: SymbolicRun.recompute,
        Backward: SymbolicRun.backward,
        BackwardInput: SymbolicRun.backward_input,
        BackwardWeight: SymbolicRun.backward_weight,
        AddBranch: SymbolicRun.add_branch,
        AddBranchBackward: SymbolicRun.add_branch_backward,
        Project: SymbolicRun.project,
        BackwardHeads: SymbolicRun.backward_heads,
        Send: SymbolicRun.send,
        Recv: SymbolicRun.recv,
        ReduceScatter: SymbolicRun.reduce_scatter,
        AllReduce: SymbolicRun.all_reduce,
        AllReduceScalar: SymbolicRun.all_reduce_scalar,
        GatherRows: SymbolicRun.gather_rows,
        ReduceRows: SymbolicRun.reduce_rows,
        ReduceSums: SymbolicRun.reduce_sums,
        GatherHeads: SymbolicRun.gather_heads,
        ReturnHeads: SymbolicRun.return_heads,
        **dict.fromkeys((Attend, AttendBackward), SymbolicRun.attend),
        Route: SymbolicRun.route,
        Dispatch: SymbolicRun.dispatch,
        **dict.fromkeys((ForwardExperts, BackwardExperts), SymbolicRun.work_on_rows),
        Combine: SymbolicRun.combine,
        GatherKeys: SymbolicRun.gather_keys,
        ReduceKeys: SymbolicRun.reduce_keys,
        CombineLoss: SymbolicRun.combine_loss,
        Store: SymbolicRun.copy,
        Fetch: SymbolicRun.copy,
        PeerOffload: SymbolicRun.peer_offload,
        DonorAccept: SymbolicRun.donor_accept,
        DonorReturn: SymbolicRun.donor_return,
        PeerReload: SymbolicRun.peer_reload,
        Update: SymbolicRun.update,
        AllGather: SymbolicRun.all_gather,
        ScaleUpdate: SymbolicRun.scale_update,
    },
    never=(Release,),
)
