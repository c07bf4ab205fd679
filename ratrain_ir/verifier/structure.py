"""Layer 1: every op is legal at its level, names what exists, has the right operands, and finds them live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.analysis.columns import FoundError, StageColumns
from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.model.blocks import Block, has_backward, ties_gradients, trains
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.model.expert_ranks import shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import (
    gathers_at_step_end,
    gathers_within_step,
    is_sharded,
    keeps_view,
    parts_view,
    shares_frozen,
    zero_level,
)
from ratrain.ratrain_ir.model.slots import reads_documents
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import Engine, Group, Op, Part, Quantity
from ratrain.ratrain_ir.ops.collectives import (
    COLLECTIVE_OPS,
    TENSOR_OPS,
    AllGather,
    AllReduce,
    AllReduceScalar,
    ReduceScatter,
    TensorOp,
    mean_group,
    shards_group,
)
from ratrain.ratrain_ir.ops.compute import (
    BLOCK_OPS,
    Backward,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    LoadInput,
    Recompute,
    Release,
    Update,
)
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS, Fetch, MemoryOp, Store
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS, DonorAccept, DonorReturn, MessageOp, OffloadOp, Recv, Send
from ratrain.ratrain_ir.ops.operands import SignatureError
from ratrain.ratrain_ir.ops.signatures import bind
from ratrain.ratrain_ir.ops.state_homes import LEAST_STAGING, staged_state, streamed_state
from ratrain.ratrain_ir.verifier.exchanges import check_exchange
from ratrain.ratrain_ir.verifier.liveness import check_lives
from ratrain.ratrain_ir.verifier.reporter import Reporter, refuser

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.tensor import Tensors


def check_structure(module: Module, report: Reporter, stages: Sequence[Stage]) -> None:
    """Run all rules of this layer, on some stages. Raises RT064 where what trains does not fit the model."""
    check_training(module.model, module.plan)
    check_target_named(module, report)
    for stage in stages:
        check_ops(module, stage, report.columns(stage), report)
    if report.diagnostics.errors:
        return  # with wrong operands, it is not known what an op does to each
    has_releases = has_all_releases(module)
    for stage in stages:
        check_lives(stage, report.columns(stage), report, has_releases=has_releases)


def check_ops(module: Module, stage: Stage, columns: StageColumns, report: Reporter) -> None:
    """Run the rules about single ops: on one op of each kind, then on every op of the kinds that are not sound.

    Ops with operands in other memories are all checked: two operands of one op may be the same tensor, and ops of a
    kind can differ in that.
    """
    owned = frozenset(module.topology.stage_blocks[stage.index])
    asked = refuser(module)
    unsure: set[int] = set()
    for kind, op in enumerate(columns.examples):
        try:
            check_op(module, stage, owned, op, asked)
        except FoundError:
            unsure.add(kind)
        if any(tensor.home is not Home.DDR for tensor in op.operands):
            unsure.add(kind)
    for op in columns.ops_of(unsure):
        check_op(module, stage, owned, op, report)


def check_op(module: Module, stage: Stage, owned: frozenset[Block], op: Op, report: Reporter) -> None:
    """Run the rules about one op alone."""
    check_legal_at_level(module, stage, op, report)
    if isinstance(op, OffloadOp) and not check_donor(module, stage, op, report):
        return
    if check_names_exist(module, stage, owned, op, report) and type(op) is not Release:
        check_operands(module, stage, op, report)
    check_scratch(stage, op, report)
    check_homes(module, stage, op, report)


def check_target_named(module: Module, report: Reporter) -> None:
    """Report RT026 unless an allocated module names its target, and a dataflow module names none.

    Addresses hold for one target only; without an order nothing can be sized for a target.
    """
    if module.level is Level.ALLOCATED and module.target is None:
        text = "an allocated module says for which target: it has no 'target { name = \"...\", capacity = BYTES }'"
        way_out = "write the line back; or make it level placed, without offsets and workspace, and allocate it again"
        report.at_header("RT026", text, "module", help=way_out)
    if module.level is Level.DATAFLOW and module.target is not None:
        text = "a target is not allowed at level dataflow: it is named once workspace has been sized for it"
        report.at_header("RT026", text, "target", help="delete this line")


def has_all_releases(module: Module) -> bool:
    """Tell whether every step tensor of every stage must be released.

    It must once there is any release, or once workspace has been sized for a target.
    """
    if module.level is Level.ALLOCATED or module.target is not None:
        return True
    return any(type(op) is Release for stage in module.stages for op in stage.ops)


_SCALAR_GROUPS = {
    Quantity.LOSS: Group.REPLICAS,
    Quantity.FLAGS: Group.ALL,
    Quantity.NORM: Group.ALL,
    Quantity.COUNTS: Group.REPLICAS,
}
"""Group of each scalar. Only the last stage knows the loss; every rank needs the flags, and the norm, of all; a stage
counts the tokens of its own experts."""
_OF_BLOCKS = (Quantity.NORM, Quantity.COUNTS)

_ONE_BLOCK = frozenset({*BLOCK_OPS, *MEMORY_OPS, *OFFLOAD_OPS, Update})
_PEERS = frozenset(TENSOR_OPS)
_MOVES = frozenset({Store, Fetch})
_BLOCKS = frozenset({ReduceScatter, AllReduce, AllGather, AllReduceScalar})


def check_legal_at_level(module: Module, stage: Stage, op: Op, report: Reporter) -> None:
    """Report RT026 unless an op is legal at the module's level and, as a collective, fits the plan and the model.

    Releases, workspace, and ops on other memories or donors belong to later levels than `dataflow`.
    """
    if module.level is Level.DATAFLOW and isinstance(op, MemoryOp | OffloadOp):
        report.at_op("RT026", f"'{op.keyword}' is not allowed at level dataflow, where no order is claimed", stage, op)
    if module.level is Level.DATAFLOW and (type(op) is Release or op.scratch):
        what = "a release" if type(op) is Release else "workspace"
        report.at_op("RT026", f"{what} is not allowed at level dataflow, where no order is claimed", stage, op)
    if isinstance(op, COLLECTIVE_OPS):
        check_collective(module, stage, op, report)


def check_sharding(
    module: Module, stage: Stage, op: ReduceScatter | AllGather | AllReduce, block: Block, report: Reporter
) -> None:
    """Report RT026 unless a collective on a block fits how the block's state is sharded."""
    model, plan = module.model, module.plan
    kept = keeps_view(model, plan, block) if type(op) is AllGather else not is_sharded(model, plan, block)
    if type(op) is not AllReduce and kept:
        text = f"'{op.keyword}' needs sharded state: {block} has zero = {zero_level(plan, block)} and dp = {plan.dp}"
        report.at_op("RT026", text, stage, op)
    if type(op) is AllGather:
        check_gather(module, stage, op, block, report)
    averages = type(op) is ReduceScatter or op.group in (Group.REPLICAS, Group.COPIES)
    if type(op) is not AllGather and averages and op.group is not mean_group(model, plan, block):
        wanted = mean_group(model, plan, block).value
        report.at_op("RT026", f"'{op!r}': the gradient of {block} is averaged over '{wanted}'", stage, op)
    if type(op) is AllReduce and averages and not kept:
        report.at_op("RT026", f"{block} has sharded state, whose gradients 'reduce_scatter' reduces", stage, op)


def check_gather(module: Module, stage: Stage, op: AllGather, block: Block, report: Reporter) -> None:
    """Report RT026 unless a view is gathered when its ZeRO level requires, by the replicas that share it."""
    model, plan = module.model, module.plan
    group = shards_group(model, plan, block)
    if op.group is not group:
        whose = "the replicas with its experts have" if group is Group.COPIES else "all replicas have"
        report.at_op("RT026", f"'{op!r}': {whose} the shards of {block} between them", stage, op)
    within_step, at_end = gathers_within_step(plan, block), gathers_at_step_end(model, plan, block)
    said = {op.phase is not None, op.micro_batch is not None}
    if said not in [{True}] * within_step + [{False}] * (at_end or not within_step):
        when = "within the step, for the forward or backward of a micro-batch"
        wanted = when if within_step else "once, at the step's end"
        wanted += ", or a part of it once, at its end" * (within_step and at_end)
        text = f"under zero = {zero_level(plan, block)} the view of {block} is gathered {wanted}"
        report.at_op("RT026", text, stage, op)
    if parts_view(model, plan, block) is not parts_view(model, plan, op.blocks[0]):
        text = (
            f"groups have the view of one of {op.blocks[0]} and {block} between them, of the other they do "
            "not: no group gathers both"
        )
        report.at_op("RT026", text, stage, op)


def check_collective(module: Module, stage: Stage, op: Op, report: Reporter) -> None:
    """Report RT026 unless a collective has a meaning under this plan and for this model."""
    if isinstance(op, ReduceScatter | AllGather | AllReduce):
        for block in dict.fromkeys(op.blocks):
            check_sharding(module, stage, op, block, report)
    if type(op) is AllReduceScalar and (op.quantity in _OF_BLOCKS) is not bool(op.blocks):
        # ranks of a stage in which nothing trains meet the others with a norm of nothing
        owned = module.topology.stage_blocks[stage.index]
        counts = op.quantity is Quantity.COUNTS
        if op.blocks or counts or any(trains(module.model, module.plan, each) for each in owned):
            text = "the norm, and the counts, name the blocks they cover, other scalars name none"
            report.at_op("RT026", text, stage, op)
    if type(op) is AllReduceScalar and op.quantity is Quantity.NORM and module.plan.optimizer.clip != "global":
        report.at_op("RT026", 'the norm of the gradient is for clip = "global"', stage, op)
    if type(op) is AllReduce and op.group is Group.TENSOR and module.plan.tp == 1:
        report.at_op("RT026", "'all_reduce tensor' needs tensor-parallel ranks: the plan has tp = 1", stage, op)
    if type(op) is AllReduce and (
        op.group in (Group.ALL, Group.SHARDS, Group.VIEWS, Group.PARTS, Group.CONTEXT)
        or (
            op.group is Group.EXPERTS
            and not all(shares_experts(module.model, module.plan, block) for block in op.blocks)
        )
        or (op.group is Group.ENDS and not ties_gradients(module.model, module.plan))
    ):
        report.at_op("RT026", f"'all_reduce {op.group.value}' has no meaning for this model", stage, op)
    if type(op) is AllReduceScalar and op.group is not _SCALAR_GROUPS[op.quantity]:
        wanted = _SCALAR_GROUPS[op.quantity].value
        report.at_op("RT026", f"'{op!r}' leaves members out: the group of {op.quantity.value} is '{wanted}'", stage, op)


def check_names_exist(module: Module, stage: Stage, owned: frozenset[Block], op: Op, report: Reporter) -> bool:
    """Report RT027 unless the blocks, micro-batch, slice and peers that an op names exist and belong to its stage.

    `owned` are the stage's blocks; ops for remote buffers name blocks of the stage that owns them. A block named
    twice, a message to a wrong stage and an input without use are RT027 too; an exchange that the plan does not have is
    RT026.
    Return True if nothing is reported.
    """
    blocks = _blocks_of(op)
    owner = stage.index
    # A donor names the blocks of the stage that it lends to.
    if isinstance(op, DonorAccept | DonorReturn):
        owner = op.peer
        owned = frozenset(module.topology.stage_blocks[owner])
    sound = True
    for block in blocks:
        if block not in owned:
            ends = module.topology.ends_of_chunks(owner)
            range_text = " and ".join(f"{first} to {last}" for first, last in ends)
            report.at_op("RT027", f"{block} is not a block of stage @{owner}, which holds {range_text}", stage, op)
            sound = False
        elif (wrong := _of_frozen(module, op, block)) is not None:
            report.at_op("RT026", f"'{op!r}': {wrong}", stage, op)
            sound = False
    if len(blocks) > 1 and len(set(blocks)) < len(blocks):
        report.at_op("RT027", f"'{op!r}' names a block twice", stage, op)
        sound = False
    micro_batch = getattr(op, "micro_batch", None)
    if micro_batch is not None and micro_batch >= module.plan.micro_batches:
        text = f"m{micro_batch} does not exist: the plan has micro-batches m0 to m{module.plan.micro_batches - 1}"
        report.at_op("RT027", text, stage, op)
        sound = False
    sound = check_slice(module, stage, op, report) and sound
    if type(op) in _PEERS:
        sound = check_exchange(module, stage, op, report) and sound
    if type(op) is Send or type(op) is Recv:
        sound = check_peer(module, stage, op, report) and sound
    if type(op) is LoadInput and not _has_use(module, stage, op.part):
        report.at_op("RT027", f"stage @{stage.index} has no use for {op.part.value}", stage, op)
        sound = False
    return sound


def _of_frozen(module: Module, op: Op, block: Block) -> str | None:
    """Explain why an op has no meaning for a block of which nothing, or nothing below it, trains; None if it has."""
    model, plan = module.model, module.plan
    if not plan.training:
        return None
    state = isinstance(op, ReduceScatter | AllGather | AllReduce | AllReduceScalar | Update)
    gathers_frozen = isinstance(op, AllGather) and op.phase is not None and shares_frozen(model, plan, block)
    if state and not gathers_frozen and not trains(model, plan, block):
        return f"no parameter of {block} trains"
    if isinstance(op, BackwardInput | BackwardWeight):
        return "backwards in halves, of a model with frozen parameters or adapters, are not built"
    if isinstance(op, Backward | Recompute) and not has_backward(model, plan, block):
        return f"no parameter of {block}, or of a block below it, trains: it has no backward"
    return None


def _has_use(module: Module, stage: Stage, part: Part) -> bool:
    """Tell whether a block of a stage reads a part of the input."""
    if part is Part.DOCUMENTS:
        owned = module.topology.stage_blocks[stage.index]
        return any(reads_documents(module.model, module.plan, block) for block in owned)
    topology = module.topology
    return stage.index == (topology.first_stage if part is Part.TOKENS else topology.last_stage)


def check_slice(module: Module, stage: Stage, op: Op, report: Reporter) -> bool:
    """Report RT027 unless an op names an existing slice if micro-batches are cut, and none if they are whole.

    Return True if nothing is reported.
    """
    if not isinstance(op, LoadInput | BlockOp | MessageOp | AllGather | TensorOp | Fetch):
        return True
    count, named = len(module.plan.slices), op.slice
    if not count and named is None:
        return True
    if isinstance(op, AllGather) and op.micro_batch is None:
        wrong = None if named is None else "the gather at the step's end is of no slice"
    elif named is None:
        wrong = f"the plan cuts micro-batches into slices s0 to s{count - 1}, and it names none" if count else None
    elif not count:
        wrong = "the plan has no slices"
    else:
        wrong = None if named < count else f"the plan has slices s0 to s{count - 1}"
    if wrong is None:
        return True
    report.at_op("RT027", f"'{op!r}': {wrong}", stage, op)
    return False


def check_donor(module: Module, stage: Stage, op: OffloadOp, report: Reporter) -> bool:
    """Report RT027 unless activations are offloaded to another stage, or come from one; return True if they do."""
    if hop_of(op, stage, module.topology) is not None:
        return True
    stages = module.topology.stages
    wanted = "the stage itself" if op.peer == stage.index else f"there are stages @0 to @{stages - 1}"
    report.at_op("RT027", f"'{op!r}' names @{op.peer}, which is no other stage: {wanted}", stage, op)
    return False


def check_peer(module: Module, stage: Stage, op: Send | Recv, report: Reporter) -> bool:
    """Report RT027 unless an activation goes to the next chunk's stage, or a gradient back.

    Return True if nothing is reported.
    """
    topology = module.topology
    if hop_of(op, stage, topology) is not None:
        return True
    hops = [hop for hop in topology.hops if hop.channel.payload is op.payload]
    if type(op) is Send:
        there = [(hop.target, topology.chunk_of_message(hop.channel)) for hop in hops if hop.source == stage.index]
    else:
        there = [(hop.source, topology.chunk_of_message(hop.channel)) for hop in hops if hop.target == stage.index]
    expected = " or ".join(_edge_words(*each) for each in there)
    wanted = f"expected {expected}" if there else f"stage @{stage.index} has no neighbour there"
    text = f"'{op.keyword} {op.payload.value}' names {_edge_words(op.peer, op.chunk)}: {wanted}"
    report.at_op("RT027", text, stage, op)
    return False


def _edge_words(peer: int, chunk: int | None) -> str:
    """Format the far end of a message, and the chunk that it goes into if it names one."""
    return f"@{peer}" if chunk is None else f"c{chunk} @{peer}"


def check_operands(module: Module, stage: Stage, op: Op, report: Reporter) -> None:
    """Report RT025 unless operands have the kinds, types and order of the op's signature."""
    try:
        bind(op, module.model, module.plan)
    except SignatureError as error:
        report.at_op("RT025", str(error), stage, op, error.tensor)


def check_scratch(stage: Stage, op: Op, report: Reporter) -> None:
    """Report RT025 unless scratch is workspace, and at most one tensor.

    A routine has one place for its intermediates.
    """
    if len(op.scratch) > 1:
        report.at_op("RT025", f"'{op!r}' has more than one workspace", stage, op, op.scratch[1])
    for tensor in op.scratch:
        if tensor.kind is not StateKind.WORKSPACE:
            report.at_op(
                "RT025", f"%{tensor.name} is {tensor.kind.value}, but 'using' takes workspace", stage, op, tensor
            )


def check_homes(module: Module, stage: Stage, op: Op, report: Reporter) -> None:
    """Report RT034 if an op uses a tensor in another memory than DDR, except to store, fetch or release it.

    Masters and moments are an exception: an update or a gather streams them through its workspace.
    """
    if type(op) is Release:
        return
    if type(op) not in _MOVES and all(tensor.home is Home.DDR for tensor in op.operands):
        return
    streamed = streamed_state(op)
    stored = streamed or (op.writes if isinstance(op, Store) else op.reads if isinstance(op, Fetch) else ())
    if staged := staged_state(op):
        check_staging(module, stage, op, staged, report)
    for tensor in op.operands:
        if tensor.home is not Home.DDR and tensor not in stored:
            text = f"'{op!r}' works in DDR, and %{tensor.name} is in the memory '{tensor.home.value}'"
            report.at_op("RT034", text, stage, op, tensor, help="fetch it into a tensor in DDR, and use that")
        elif tensor.home is Home.DDR and tensor in stored and not streamed:
            text = f"'{op!r}' moves %{tensor.name}, which is in DDR, to where it is"
            report.at_op("RT034", text, stage, op, tensor, help="declare it in another memory: 'in host' or 'in file'")
    for tensor in stored:
        if tensor.home is not stored[0].home:
            text = f"'{op!r}' is of one memory, and %{tensor.name} is in '{tensor.home.value}'"
            report.at_op("RT034", text, stage, op, tensor, help="store and fetch by ops of each memory")
            return


def check_staging(module: Module, stage: Stage, op: Op, streamed: Tensors, report: Reporter) -> None:
    """Report RT034 unless an op that streams state has the engine and the workspace for it.

    This applies once workspace has been sized. An update that streams must be on the host engine. State in a file needs
    a workspace to be streamed through.
    """
    if module.target is None:
        return
    if isinstance(op, Update) and op.engine is not Engine.HOST:
        text = (
            f"'{op!r}' updates %{streamed[0].name} in the memory '{streamed[0].home.value}' on the "
            f"{op.engine.value} engine"
        )
        way_out = f"write 'update {op.block} host': the host updates it, and compute need not wait"
        report.at_op("RT034", text, stage, op, streamed[0], help=way_out)
    held = sum(tensor.type.nbytes for tensor in op.scratch)
    if held >= LEAST_STAGING or all(tensor.home is Home.HOST for tensor in streamed):
        return
    text = f"'{op!r}' streams %{streamed[0].name} through a workspace of {held} bytes"
    report.at_op(
        "RT034", text, stage, op, streamed[0], help=f"give it 'using' a workspace of {LEAST_STAGING} bytes or more"
    )


def _blocks_of(op: Any) -> tuple[Block, ...]:
    if type(op) in _ONE_BLOCK:
        return (op.block,)
    return op.blocks if type(op) in _BLOCKS else ()
