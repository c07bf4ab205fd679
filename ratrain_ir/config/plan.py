"""Parallel plan: how a model is cut and replicated, a step's batch, the storage of state, and the optimizer.

A field is declared once, here: its type and default, its section in a plan's file, its effect (listed in
`docs/keys.md`), its valid values and their text. `plan_text.py` reads and prints plans from these declarations.
`plan_checks.py` checks fields against each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.accumulation import ACCUMULATIONS, F32_SUMS, HALF_RUN, HALF_RUNS
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.optimizer import Optimizer
from ratrain.ratrain_ir.config.plan_keys import (
    CONTEXT_EXCHANGES,
    CONTEXT_LAYOUTS,
    OF_HEADS,
    OF_KEYS,
    ZIGZAG,
    flag,
    integer,
    integer_or_none,
    integers,
    key,
    number_or_none,
    parsed,
    part,
    read_schedule,
    read_slices,
    runs_of_context,
    table_of,
    word,
    word_or_none,
)
from ratrain.ratrain_ir.config.plan_summary import summary_text
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.config.training import WHOLE, Training
from ratrain.ratrain_ir.config.types import STORAGE_DTYPES
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrain_ir.support.limits import (
    MAX_CHUNKS,
    MAX_MICRO_BATCH,
    MAX_MICRO_BATCHES,
    MAX_PARALLEL,
    MAX_SEED,
    MAX_SEQ_LEN,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.fields import Value
    from ratrain.ratrain_ir.config.model_config import ModelConfig

__all__ = ["Optimizer", "Plan"]

DTYPES = tuple(dtype.value for dtype in STORAGE_DTYPES)
_OTHER_DTYPE_NAMES = {"half": "f16", "float16": "f16", "bfloat16": "bf16", "brain": "bf16"} | dict.fromkeys(
    ("float", "single", "float32"), "f32"
)
DTYPE_KEYS = ("view_dtype", "grad_dtype", "grad_shard_dtype")
"""Keys of the types in which parameters and gradients are stored."""
REDUCTIONS = ("last", "each-micro-batch")
ATTENTION_MASKS = ("causal", "document")
ATTENTIONS = ("fused", "scores-kept", "scores-recomputed")
LOGITS = ("chunked", "whole")
_MAX_LOSS_SCALE = 2.0**32  # f32 represents it and its inverse exactly
DEFAULT_HEAD_CHUNK = 256

_LOSS_SCALE = number_or_none(
    lambda value: 1 / _MAX_LOSS_SCALE <= value <= _MAX_LOSS_SCALE,
    f'a number from 2**-32 to {_MAX_LOSS_SCALE:.0f} (1.0: no scaling), or "dynamic"',
)


def _usual(before: Mapping[str, Any], name: str) -> Any:
    """Return the usual chunks or layout of a plan's schedule, for a plan that does not give them."""
    schedule = SCHEDULES.get(before["schedule"])
    return _ONE_CHUNK[name] if schedule is None else getattr(schedule, name)


_ONE_CHUNK = {"chunks": 1, "layout": "loop"}
"""Chunks and layout of a plan without a schedule that does not give them."""


_MAPPING = parsed(RankMapping.parse, "tiles of stages x replicas from the inside out, like 'chip 1x4, node 2x8',")
_LEVELS = parsed(ZeroLevels.parse, "blocks and their ZeRO levels, like 'embed 3, mlp.* 2, attention.0-3 1',")


@frozen(cache_hash=True)
class Plan:
    """Resolved plan: nothing in it is left to be chosen."""

    pp: int = field(metadata=key("parallel", "pipeline stages", integer(1, MAX_PARALLEL)))
    """Pipeline stages."""
    dp: int = field(
        metadata=key(
            "parallel", "replicas of the pipeline: shards, reductions, the global batch", integer(1, MAX_PARALLEL)
        )
    )
    """Data-parallel replicas of the pipeline, each with sequences of its own."""
    cuts: tuple[int, ...] = field(
        metadata=key("parallel", "the layers where later chunks (stages) start", integers("a list of layer indices"))
    )
    """Layer index where each chunk but the first starts, ascending; a stage has `chunks` chunks. A file may leave
    them out, or write "auto"."""
    micro_batch_size: int = field(
        metadata=key("batch", "sequences of a micro-batch", integer(1, MAX_MICRO_BATCH)),
    )
    """Sequences of one micro-batch of one replica."""
    micro_batches: int = field(
        metadata=key("batch", "micro-batches of a replica in a step", integer(1, MAX_MICRO_BATCHES))
    )
    """Micro-batches of one replica in one step."""
    seq_len: int = field(metadata=key("batch", "tokens of a sequence", integer(1, MAX_SEQ_LEN)))
    cp: int = field(
        default=1,
        metadata=key(
            "parallel",
            "context ranks, which share the tokens of every sequence, and shard state as replicas do",
            integer(1, MAX_PARALLEL),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.cp == 1,
        ),
    )
    """Context ranks: each computes its tokens of every sequence of a replica (`model/context_rows.py`)."""
    context_layout: str = field(
        default=ZIGZAG,
        metadata=key(
            "parallel",
            "which tokens a context rank has: `zigzag` an early and a late run, so that all attend to equally many; or "
            "one run, `contiguous`",
            word(CONTEXT_LAYOUTS),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.context_layout == ZIGZAG,
        ),
    )
    """Tokens of a context rank: one of `CONTEXT_LAYOUTS`."""
    context_exchange: str = field(
        default=OF_KEYS,
        metadata=key(
            "parallel",
            "what context ranks exchange for attention: `keys` of all tokens; or `heads`, so that each rank attends "
            "with a share of the heads over all tokens",
            word(CONTEXT_EXCHANGES),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.context_exchange == OF_KEYS,
        ),
    )
    """Form of attention over context ranks: one of `CONTEXT_EXCHANGES`."""
    context_groups: int = field(
        default=1,
        metadata=key(
            "parallel",
            "groups of key heads that context ranks gather one after the other: bytes, where they exchange `keys`",
            integer(1, MAX_PARALLEL),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.context_groups == 1,
        ),
    )
    """Equal groups of neighbouring key heads of a rank, with their queries; attention works on one at a time."""
    ep: int = field(
        default=1,
        metadata=key(
            "parallel",
            "expert ranks: as many neighbouring replicas share out the experts of every layer, and exchange tokens",
            integer(1, MAX_PARALLEL),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.ep == 1,
        ),
    )
    """Expert ranks: each holds E / ep experts of every layer (`model/expert_ranks.py`)."""
    head_chunk: int = field(
        default=DEFAULT_HEAD_CHUNK,
        metadata=key(
            "batch",
            "rows of logits at a time: bytes, and the rounding of the head's weight gradient",
            integer(1, MAX_SEQ_LEN),
            not_in_file=lambda plan: plan.holds_logits or plan.most_rows < plan.head_chunk == DEFAULT_HEAD_CHUNK,
        ),
    )
    """Most rows of logits that the head holds at a time. Its weight gradient is rounded once per chunk, so this
    affects results."""
    mlp_chunk: int | None = field(
        default=None,
        metadata=key(
            "batch",
            "rows of an mlp at a time: bytes, and the rounding of its weight gradients",
            integer_or_none(1, MAX_SEQ_LEN * MAX_MICRO_BATCH),
        ),
    )
    """Rows that an mlp block computes at a time; None: all of a micro-batch. Its weight gradients are rounded once
    per chunk."""
    zero: int = field(
        default=1,
        metadata=key(
            "state",
            'what replicas share out: 1 optimizer state, 2 gradients too (with reduce = "each-micro-batch"; '
            'with "last" it is as 1), '
            "3 parameter views too",
            integer(0, 3),
            default=lambda before: min(1, before["dp"] * before["cp"] - 1),
        ),
    )
    """ZeRO level: 0 nothing sharded, 1 master weights and moments, 2 also gradients, 3 also parameter views."""
    reduce: str = field(
        default="last", metadata=key("state", "when gradients are reduced over replicas", word(REDUCTIONS))
    )
    """Time at which gradients are reduced over replicas: after the `last` micro-batch, or after `each-micro-batch`."""
    view_dtype: str = field(
        default="f16",
        metadata=key("state", "the type of the parameters that blocks compute with", word(DTYPES, _OTHER_DTYPE_NAMES)),
    )
    """Type of the parameters that blocks compute with."""
    grad_dtype: str = field(
        default="f16",
        metadata=key(
            "state",
            "the type of a block's gradient",
            word(DTYPES, _OTHER_DTYPE_NAMES),
            default=lambda before: before["view_dtype"],
        ),
    )
    """Type of a block's full gradient."""
    grad_shard_dtype: str = field(
        default="f16",
        metadata=key(
            "state",
            "the type in which reduced gradients are added up",
            word(DTYPES, _OTHER_DTYPE_NAMES),
            default=lambda before: before["grad_dtype"],
        ),
    )
    """Type in which reduced gradients are accumulated; equal to `grad_dtype` if nothing is sharded."""
    loss_scale: float | None = field(
        default=None,
        metadata=key(
            "state",
            "the factor of the loss: fixed, or adapted to overflow; 1.0 unless views or gradients are f16, as "
            "bf16 has the exponents of f32",
            _LOSS_SCALE,
            default=lambda before: None if before["view_dtype"] == "f16" else 1.0,
            none_word="dynamic",
        ),
    )
    """Fixed factor of the loss; None: adapted to overflow."""
    schedule: str | None = field(
        default=None,
        metadata=key(
            "parallel",
            "the order of each stage's work, where the strategy is not named after one",
            read_schedule,
        ),
    )
    """Order of each stage's work. None: the placement chooses; in a placed module, it has chosen an order without a
    name."""
    seed: int = field(
        default=0,
        metadata=key(
            "batch",
            "initial weights and the order of the data, where `run` is given no --seed",
            integer(0, MAX_SEED),
        ),
    )
    """Seed of initial weights and of the order of the training data."""
    optimizer: Optimizer = field(default=Optimizer(), metadata=part(Optimizer))
    router: RouterLosses = field(default=RouterLosses(), metadata=part(RouterLosses))
    """Losses of the routers of experts."""
    experts: ExpertDispatch = field(default=ExpertDispatch(), metadata=part(ExpertDispatch))
    """Rows that expert ranks send each other."""
    training: Training = field(default=WHOLE, metadata=part(Training))
    """Parameters that train: all, all but frozen ones, or adapters."""
    mapping: RankMapping | None = field(
        default=None,
        metadata=key(
            "parallel",
            "which ranks share a chip, a node, ... of the machine; refused where its groups have other names",
            _MAPPING,
            text=str,
            in_header_if_default=False,
        ),
    )
    """Ranks that share a chip, a node, ... of the machine; affects times, not results. None: replicas of a stage are
    neighbours."""
    attention: str = field(
        default="fused",
        metadata=key(
            "compute",
            "whether attention holds its score matrix: fused, tile by tile; or whole, kept for the backward or "
            "made again in it",
            word(ATTENTIONS),
            in_header_if_default=False,
        ),
    )
    """`fused`: scores are never whole. Otherwise the matrix [heads * tokens, seq_len] is: `scores-kept` saves its
    probabilities for the backward, `scores-recomputed` holds them only while an op uses them (Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models", 2022)."""
    attention_mask: str = field(
        default="causal",
        metadata=key(
            "compute",
            "what a token attends to: all tokens before it in its sequence, or only those in its document, "
            "where positions start at 0",
            word(ATTENTION_MASKS),
            in_header_if_default=False,
        ),
    )
    """`causal`: a token sees its sequence up to itself. `document`: it sees its own document up to itself, and
    positions count from the document's start, so that documents packed into one sequence train as if each stood
    alone. The starts are an input next to the tokens."""
    logits: str = field(
        default="chunked",
        metadata=key(
            "compute",
            "whether the head computes its logits in chunks of `head_chunk` rows, twice, or keeps all of them "
            "from forward to backward",
            word(LOGITS),
            in_header_if_default=False,
        ),
    )
    """`chunked`: `head_chunk` rows at a time, computed again in the backward. `whole`: all rows in f32, saved for
    the backward."""
    chunks: int = field(
        default=1,
        metadata=key(
            "parallel",
            "chunks of the model that a stage holds (virtual stages)",
            integer(1, MAX_CHUNKS),
            default=lambda before: _usual(before, "chunks"),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.chunks == 1,
        ),
    )
    """Chunks of consecutive layers that a stage holds; a file that leaves it out means the schedule's usual number."""
    layout: str = field(
        default="loop",
        metadata=key(
            "parallel",
            "how chunks lie on the stages: `loop` puts chunk c on stage c mod pp, `vee` goes 0..pp-1 and back",
            word(LAYOUTS),
            default=lambda before: _usual(before, "layout"),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.chunks == 1,
        ),
    )
    """Placement of chunks, in forward order, on the stages: one of `LAYOUTS`."""
    slices: tuple[int, ...] = field(
        default=(),
        metadata=key(
            "batch",
            "tokens of each slice that a sequence is cut into, one after the other; a file may say how many, "
            "evenly or `even-work`",
            read_slices,
            in_header_if_default=False,
            not_in_file=lambda plan: not plan.slices,
        ),
    )
    """Tokens of each slice of a sequence; empty: micro-batches are not cut."""
    tp: int = field(
        default=1,
        metadata=key(
            "parallel",
            "tensor-parallel ranks, which share every block of a stage: heads, rows of the MLP, the vocabulary",
            integer(1, MAX_PARALLEL),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.tp == 1,
        ),
    )
    """Tensor-parallel ranks, which share every block of a stage of a replica."""
    sequence_sharding: bool = field(
        default=True,
        metadata=key(
            "parallel",
            "whether tensor-parallel ranks share out the rows of activations between blocks too, or each has all of "
            "them; false is refused with tp = 1",
            flag,
            in_header_if_default=False,
            not_in_file=lambda plan: plan.sequence_sharding,
        ),
    )
    """True if activations between blocks are sharded by rows over tensor-parallel ranks (Korthikanti, 2022), or whole
    on each."""
    zero_blocks: ZeroLevels | None = field(
        default=None,
        metadata=key(
            "state",
            "blocks whose ZeRO level is another: of the embedding, the head, all layers of a kind, or some of them",
            _LEVELS,
            text=str,
            in_header_if_default=False,
        ),
    )
    """ZeRO levels of the blocks that differ from `zero`; None: none differ."""
    shard_group: int | None = field(
        default=None,
        metadata=key(
            "state",
            "replicas, neighbours, that have all shards between them; the other such groups have the same ones",
            integer_or_none(2, MAX_PARALLEL),
            in_header_if_default=False,
        ),
    )
    """Number of replicas that share out sharded state. Other groups have copies, which reductions keep equal (Zhang
    et al., "MiCS", 2022). None: all replicas are one group."""
    view_group: int | None = field(
        default=None,
        metadata=key(
            "state",
            "neighbouring replicas that share views if these are gathered for each use; shards are unchanged",
            integer_or_none(2, MAX_PARALLEL),
            in_header_if_default=False,
        ),
    )
    """Number of replicas that share out parameter views of level 3, in `view_dtype`, in addition to the shards of
    state (hpZ of Wang et al., "ZeRO++", 2023). None: views are gathered from masters, over all replicas that share
    these out."""
    gather_quantised: str | None = field(
        default=None,
        metadata=key(
            "numerics",
            "how sharded parameters are rounded to be gathered: in blocks of 256 elements, to 8 or 4 bits each; "
            "left out, they are not",
            word_or_none(tuple(FORMATS)),
            in_header_if_default=False,
        ),
    )
    """Packing of sharded blocks' views for gathers; every replica computes with the packed values. None: exact."""
    reduce_quantised: str | None = field(
        default=None,
        metadata=key(
            "numerics",
            "how gradients of sharded blocks are rounded to be reduced: once on each replica, in blocks of 256 "
            "elements, to 8 bits each; "
            "left out, they are not",
            word_or_none(("int8-block",)),
            in_header_if_default=False,
        ),
    )
    """Packing of each replica's part of a gradient before it is summed into a shard. None: exact."""
    accumulate: str = field(
        default=F32_SUMS,
        metadata=key(
            "numerics",
            f"how products with weights, and their gradients, are summed: `f32`, or `f16-runs`: {HALF_RUN} products at "
            "a time in f16, these runs in f32; attention and head sum in f32",
            word(ACCUMULATIONS),
            in_header_if_default=False,
            not_in_file=lambda plan: plan.accumulate == F32_SUMS,
        ),
    )
    """Sums of products with weights: see `accumulation.py`. `f16-runs` needs f16 views."""

    @property
    def whole(self) -> Plan:
        """Plan of whole micro-batches: this one, unless it is a slice's."""
        return self

    @property
    def first_position(self) -> int:
        """Position in its sequence of the first row that passes through the blocks."""
        return 0

    @property
    def most_rows(self) -> int:
        """Most rows that a block has at a time: a micro-batch's, or its longest slice's; of these a context rank's."""
        return self.micro_batch_size * max(self.slices or (self.seq_len,)) // self.cp

    @property
    def exchanges_keys(self) -> bool:
        """Tell whether context ranks gather keys and values for attention."""
        return self.cp > 1 and self.context_exchange == OF_KEYS

    @property
    def exchanges_heads(self) -> bool:
        """Tell whether context ranks exchange their tokens of all heads for all tokens of some heads."""
        return self.cp > 1 and self.context_exchange == OF_HEADS

    @property
    def attends_apart(self) -> bool:
        """Tell whether ops of their own attend, between exchanges, with a part of the heads each."""
        return self.exchanges_heads or self.context_groups > 1

    @property
    def context_runs(self) -> int:
        """Runs of tokens that a context rank has of each sequence (`model/context_rows.py`)."""
        return runs_of_context(self.cp, self.context_layout) // self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights of a stage, and sum their gradients: replicas times context ranks."""
        return self.dp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences of one step, over all replicas."""
        return self.micro_batches * self.micro_batch_size * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.global_batch * self.seq_len

    @property
    def clusters(self) -> int:
        """Number of ranks."""
        return self.pp * self.replicas * self.tp

    @property
    def is_whole(self) -> bool:
        """True if a rank of a stage computes a micro-batch alone, without tensor-parallel, context and expert ranks."""
        return self.tp == self.cp == self.ep == 1

    @property
    def keeps_documents_apart(self) -> bool:
        """True if attention stays inside documents, whose starts are then an input."""
        return self.attention_mask == "document"

    @property
    def half_run(self) -> int | None:
        """Number of products with weights that are summed in float16 at a time; None: sums are float32."""
        return HALF_RUN if self.accumulate == HALF_RUNS else None

    @property
    def holds_logits(self) -> bool:
        """True if the head holds the logits of all rows until its backward."""
        return self.logits == "whole"

    @property
    def has_dynamic_scale(self) -> bool:
        """True if the loss scale follows overflows."""
        return self.loss_scale is None

    @property
    def shards_state(self) -> bool:
        """True if replicas share out the optimizer state of any block."""
        return self.replicas > 1 and max(self.levels) > 0

    @property
    def levels(self) -> tuple[int, ...]:
        """ZeRO levels that occur: the plan's, then the levels of single blocks."""
        return (self.zero, *(entry.level for entry in self.zero_blocks or ()))

    @property
    def summary(self) -> str:
        """Sizes, chunks, slices, ZeRO levels and numerics in a few words."""
        return summary_text(self)

    @property
    def shape(self) -> PipelineShape:
        """Numbers that a schedule depends on."""
        return PipelineShape(self.pp, self.micro_batches, self.chunks, self.layout, max(1, len(self.slices)))

    def chunk_layers(self, chunk: int, model: ModelConfig) -> range:
        """Return the layers of a chunk, counted from 0."""
        ends = (0, *self.cuts, model.layers)
        return range(ends[chunk], ends[chunk + 1])

    def reshaped(self, **changes: Any) -> Plan:
        """Return the plan with changed fields (`dp`, `zero`, ...), without settings that have no meaning any more.

        A `shard_group` that is no proper divisor of `replicas` is dropped; so is a `view_group` that is no proper
        divisor of the shards or has no block of level 3. If nothing is sharded, the shards' own dtype and the
        quantisation are dropped too; with one expert rank, what several send each other.
        """
        plan = evolve(self, **changes)
        if plan.ep == 1:
            plan = evolve(plan, experts=ExpertDispatch())
        if plan.shard_group is not None and (plan.replicas % plan.shard_group or plan.replicas == plan.shard_group):
            plan = evolve(plan, shard_group=None)
        shards, views = plan.shard_group or plan.replicas, plan.view_group
        if views is not None and (shards % views or shards == views or 3 not in plan.levels):
            plan = evolve(plan, view_group=None)
        if plan.shards_state:
            return plan
        return evolve(plan, grad_shard_dtype=plan.grad_dtype, gather_quantised=None, reduce_quantised=None)

    def to_fields(self) -> dict[str, Value]:
        """Return the plan as flat `field = value`, the optimizer's included, as in the header of the IR text."""
        return table_of(type(self)).header(self)


KEYS = table_of(Plan)
"""Keys of a plan."""
