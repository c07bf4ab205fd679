"""Checks of a plan's fields against each other and against the model: RT064 for each contradiction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.accumulation import F32_SUMS
from ratrain.ratrain_ir.config.expert_keys import BALANCED
from ratrain.ratrain_ir.config.optimizer import COSINE
from ratrain.ratrain_ir.config.plan import DEFAULT_HEAD_CHUNK, DTYPE_KEYS
from ratrain.ratrain_ir.config.plan_keys import OF_KEYS, ZIGZAG, runs_of_context
from ratrain.ratrain_ir.config.rope_scaling import parse_scaling
from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks, problems, rank_model, shares_heads
from ratrain.ratrain_ir.config.training import ADAPTER_KEYS, AS_VIEWS, WHOLE
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.support.toml_text import toml_value

_MOST_COUNTED = 1 << 30
"""Tokens of a step whose doubled counts fit in 32 bits."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.fields import FieldReader
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Optimizer, Plan
    from ratrain.ratrain_ir.config.training import Training
    from ratrain.ratrain_ir.config.zero_levels import ZeroLevels


def check_together(reader: FieldReader, plan: Plan, model: ModelConfig | None, *, auto_cuts: bool) -> None:
    """Report all contradictions among the fields of a plan, and with the model if one is given.

    `auto_cuts`: the plan's cuts are still to be chosen, so they are not checked.
    """
    _check_loss_scale(reader, plan)
    _check_accumulate(reader, plan)
    _check_learning_rate(reader, plan.optimizer)
    _check_training(reader, plan.training)
    if model is not None and reader.good("pp") and plan.pp > model.layers:
        reader.bad.add("pp")
        reader.contradiction(
            "RT064",
            "pp",
            f"{plan.pp} stages need at least {plan.pp} layers, but {model.name} has {model.layers}",
            help=f"use pp = {model.layers} or fewer, and more replicas (dp) for the other clusters",
        )
    _check_chunks(reader, plan, model)
    _check_slices(reader, plan)
    if model is not None:
        _check_positions(reader, plan, model)
        _check_experts(reader, plan, model)
        _check_softcap(reader, plan, model)
    _check_tensor_ranks(reader, plan, model)
    _check_context_ranks(reader, plan, model)
    if plan.ep > 1 and reader.good("ep"):
        _check_expert_ranks(reader, plan, model)
    _check_dispatch(reader, plan)
    if (
        plan.mapping is not None
        and reader.good("pp", "dp", "cp", "tp")
        and (wrong := plan.mapping.error(plan.pp, plan.replicas, plan.tp))
    ):
        reader.contradiction(
            "RT064",
            "mapping",
            wrong,
            help="tiles are written stages x replicas [x tensor-parallel ranks], from the inside out",
        )
    if not auto_cuts:
        _check_cuts(reader, plan, model)
    _check_state(reader, plan, model)
    if plan.head_chunk != DEFAULT_HEAD_CHUNK:
        check_whole_logits(reader, plan)


def _check_training(reader: FieldReader, training: Training) -> None:
    """Check that keys of adapters are given only where adapters train, and frozen parameters only where others do."""
    for name in ADAPTER_KEYS:
        if not training.adapts and reader.good("method", name) and getattr(training, name) != getattr(WHOLE, name):
            said = getattr(training, name)
            said = str(said) if isinstance(said, ModuleNumbers) else said
            text = f'{name} = {shown(said)} changes nothing without adapters (method = "full")'
            reader.contradiction("RT064", name, text, help=f'leave {name} out, or write method = "lora"')
    if not training and training.base != AS_VIEWS:
        text = f"base = {shown(training.base)} changes nothing where all parameters train"
        reader.contradiction("RT064", "base", text, help='leave base out, or write method = "lora"')
    if training.adapts and training.freeze:
        text = 'freeze changes nothing with method = "lora": the model is frozen as a whole beside its adapters'
        reader.contradiction("RT064", "freeze", text, help="leave freeze out")


def _check_chunks(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that chunks, layout and schedule fit together, and that every chunk has a layer."""
    if not reader.good("pp", "chunks", "layout", "micro_batches"):
        return
    count = plan.pp * plan.chunks
    if plan.chunks > 1 and plan.pp == 1:
        text = f"chunks = {plan.chunks} changes nothing on one stage, which holds all layers in any case"
        reader.contradiction("RT064", "chunks", text, help="leave chunks out, or use pp = 2 or more")
    elif model is not None and plan.chunks > 1 and count > model.layers:
        reader.bad.add("pp")
        text = (
            f"{plan.pp} stages of {plan.chunks} chunks need at least {count} layers, but {model.name} has "
            f"{model.layers}"
        )
        reader.contradiction("RT064", "chunks", text, help="use fewer chunks, or fewer stages")
    if plan.layout != "loop" and plan.chunks == 1:
        text = f'layout = "{plan.layout}" changes nothing with one chunk a stage'
        reader.contradiction("RT064", "layout", text, help="leave layout out, or use chunks = 2 or more")
    if plan.schedule is not None and plan.schedule in SCHEDULES:
        schedule = SCHEDULES[plan.schedule]
        if (problem := schedule.problem(plan.shape)) is not None:
            text = f"{schedule.title} cannot be placed: {problem}"
            reader.contradiction("RT064", "schedule", text, help="another schedule, or other chunks, layout or slices")


def _check_slices(reader: FieldReader, plan: Plan) -> None:
    """Check that slices add up to the sequence, and that attention can continue from slice to slice."""
    if not reader.good("slices", "seq_len") or not plan.slices:
        return
    if len(plan.slices) == 1:
        text = f"one slice of {plan.slices[0]} tokens changes nothing"
        reader.contradiction("RT064", "slices", text, help="leave slices out, or give two or more")
    if min(plan.slices) < 1 or sum(plan.slices) != plan.seq_len:
        text = f"the slices {shown(list(plan.slices))} do not make up a sequence of {plan.seq_len} tokens"
        reader.contradiction(
            "RT064", "slices", text, help="give their number, or lengths of at least 1 that add up to seq_len"
        )
    if reader.good("attention") and plan.attention != "fused":
        text = f'attention = "{plan.attention}" holds the scores of whole sequences, which slices do not have'
        reader.contradiction("RT064", "attention", text, help='use attention = "fused", or leave slices out')


def _check_positions(reader: FieldReader, plan: Plan, model: ModelConfig) -> None:
    """Check that every token has a learned position, or one within the original length of dynamic NTK scaling."""
    positions, what, key = model.learned_positions, f"learned positions of {model.name}", "n_positions"
    scaling = parse_scaling(model.rope_scaling)
    if scaling is not None and scaling.kind == "dynamic":
        positions, key = int(scaling["original_positions"]), "max_position_embeddings"
        what = f"positions of {model.name}, beyond which dynamic NTK scaling changes its frequencies"
    if positions is not None and reader.good("seq_len") and plan.seq_len > positions:
        reader.contradiction(
            "RT064",
            "seq_len",
            f"sequences of {plan.seq_len} tokens are longer than the {positions} {what}",
            help=f"use seq_len = {positions} or less, or a model with more positions ({key})",
        )


def _check_experts(reader: FieldReader, plan: Plan, model: ModelConfig) -> None:
    """Check for keys that products of experts do not follow."""
    for name in ("balance_loss", "z_loss"):
        if not reader.good(name) or not getattr(plan.router, name):
            continue
        if model.experts is None:
            text = f"{name} is for routers of experts, which {model.name} has not"
            reader.contradiction("RT064", name, text, help="leave it out")
        elif plan.slices and reader.good("slices"):
            text = f"{name} is taken of whole micro-batches, which slices cut"
            reader.contradiction("RT064", name, text, help="leave it out, or use no slices")
    _check_bias_update(reader, plan, model)
    if model.experts is None:
        return
    if plan.mlp_chunk is not None and reader.good("mlp_chunk"):
        some = "some of " if model.mlp_kinds else ""
        whose = f"{some}those of {model.name} are experts"
        text = f"mlp_chunk cuts the rows of dense MLPs, but {whose}, which take all rows"
        way_out = "leave it out; smaller micro-batches or slices have fewer rows at a time"
        reader.contradiction("RT064", "mlp_chunk", text, help=way_out)
    if plan.half_run is not None and reader.good("accumulate"):
        text = f'accumulate = "{plan.accumulate}" is not built for the products of experts, which {model.name} has'
        reader.contradiction("RT064", "accumulate", text, help="leave it out: products are summed in f32")


def _check_bias_update(reader: FieldReader, plan: Plan, model: ModelConfig) -> None:
    """Check that routers have a bias only where experts train, and that counts of tokens are exact."""
    if not reader.good("bias_update") or not plan.router.bias_update:
        return
    text = help_text = None
    if model.experts is None:
        text, help_text = f"bias_update is for routers of experts, which {model.name} has not", "leave it out"
    elif plan.training:
        text = "bias_update follows the updates of a layer's experts, and this plan trains less than the whole model"
        help_text = "leave it out, or train the whole model"
    elif plan.tokens_per_step >= _MOST_COUNTED:
        text = f"bias_update counts tokens in 32 bits, and a step has {plan.tokens_per_step:,}"
        help_text = f"use steps of fewer than {_MOST_COUNTED:,} tokens, or leave it out"
    if text is not None:
        reader.contradiction("RT064", "bias_update", text, help=help_text)


def _check_tensor_ranks(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that tensor-parallel ranks can share out the model."""
    if not reader.good("tp", "sequence_sharding", "micro_batch_size", "seq_len", "slices"):
        return
    if plan.tp == 1 and not plan.sequence_sharding:
        text = "sequence_sharding = false changes nothing with one tensor-parallel rank (tp = 1)"
        reader.contradiction("RT064", "sequence_sharding", text, help="leave it out, or use tp = 2 or more")
    if model is not None:
        for text, way_out in problems(model, plan):
            reader.contradiction("RT064", "tp", text, help=way_out)


def _check_context_ranks(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that context ranks can share out every sequence."""
    if not reader.good("cp", "context_layout", "context_exchange", "context_groups", "seq_len", "slices"):
        return
    if plan.cp == 1:
        for name, default in (("context_layout", ZIGZAG), ("context_exchange", OF_KEYS), ("context_groups", 1)):
            if (value := getattr(plan, name)) != default:
                text = f"{name} = {toml_value(value)} changes nothing with one context rank (cp = 1)"
                reader.contradiction("RT064", name, text, help="leave it out, or use cp = 2 or more")
        return
    if plan.exchanges_heads:
        _check_exchanged_heads(reader, plan, model)
    if plan.context_groups > 1:
        _check_context_groups(reader, plan, model)
    runs = runs_of_context(plan.cp, plan.context_layout)
    lengths = [("a slice", "slices", length) for length in plan.slices] or [("a sequence", "seq_len", plan.seq_len)]
    if short := next((each for each in lengths if each[2] % runs), None):
        cut, key, length = short
        text = f"{plan.cp} context ranks cut {cut} of {length} tokens into {runs} equal runs: it has none"
        half = ', or context_layout = "contiguous", which has half as many' * (plan.context_runs > 1)
        reader.contradiction("RT064", key, text, help=f"use a length that {runs} divides{half}")
    if plan.attention != "fused" and reader.good("attention"):
        text = f'attention = "{plan.attention}" holds the scores of whole sequences, which context ranks do not have'
        reader.contradiction("RT064", "attention", text, help='use attention = "fused", or cp = 1')
    if model is not None and reader.good("tp") and norms_over_ranks(model, plan):
        text = f"{model.name} norms queries and keys over the heads of all tensor-parallel ranks before they travel"
        reader.contradiction("RT064", "cp", text, help="use cp = 1, or tp = 1")
    for name in ("balance_loss", "z_loss"):
        if reader.good(name) and getattr(plan.router, name):
            text = f"{name} is taken of whole micro-batches, which context ranks share out"
            reader.contradiction("RT064", name, text, help="leave it out, or use cp = 1")


def _check_exchanged_heads(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that context ranks can share out the heads of a rank, and that attention needs nothing else of a rank."""
    if plan.slices:
        text = 'with context_exchange = "heads" a rank attends over whole sequences, which slices cut'
        reader.contradiction("RT064", "slices", text, help='leave them out, or use context_exchange = "keys"')
    if model is None or not reader.good("tp"):
        return
    own, way_out = rank_model(model, plan), 'use context_exchange = "keys"'
    if not shares_heads(own, plan.cp):
        fits = [number for number in range(2, own.heads + 1) if shares_heads(own, number)]
        text = f"{plan.cp} context ranks do not share out {own.heads} heads, {own.kv_heads} of keys, evenly"
        other = f'use cp = {" or ".join(map(str, fits))}, or context_exchange = "keys"' if fits else way_out
        reader.contradiction("RT064", "context_exchange", text, help=other)
    if model.position == "alibi":
        text = f"{model.name} has a slope of its own for each head (ALiBi), so that ranks would run other kernels"
        reader.contradiction("RT064", "context_exchange", text, help=way_out)


def _check_context_groups(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that the key heads of a rank can be gathered group by group, and that this saves bytes."""
    groups, way_out = plan.context_groups, "leave it out"
    if plan.exchanges_heads:
        text = 'with context_exchange = "heads" ranks gather no keys, of which context_groups makes groups'
        reader.contradiction("RT064", "context_groups", text, help='leave it out, or use context_exchange = "keys"')
        return
    if plan.slices:
        text = "context_groups saves nothing with slices: gathered keys of all groups wait for later slices"
        reader.contradiction("RT064", "context_groups", text, help="leave one of them out")
    if model is None or not reader.good("tp"):
        return
    heads = rank_model(model, plan).kv_heads
    if heads % groups:
        fits = [str(number) for number in range(2, heads + 1) if heads % number == 0]
        text = f"{number_of(heads, 'key head')} of a rank cannot be cut into {groups} equal groups"
        reader.contradiction(
            "RT064", "context_groups", text, help=f"use {' or '.join(fits)}, or {way_out}" if fits else way_out
        )
    if model.position == "alibi":
        text = f"{model.name} has a slope of its own for each head (ALiBi), which attention of a group does not take"
        reader.contradiction("RT064", "context_groups", text, help=way_out)


def _check_expert_ranks(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check that expert ranks can share out the experts, and that nothing asks for what is not built with them."""
    if model is not None and model.experts is None:
        text = f"ep = {plan.ep} shares out experts, which {model.name} has not"
        reader.contradiction("RT064", "ep", text, help="leave it out")
    elif model is not None and model.experts is not None and model.experts % plan.ep:
        text = f"{plan.ep} expert ranks do not share out {model.experts} experts evenly"
        reader.contradiction("RT064", "ep", text, help=f"use an ep that divides {model.experts}")
    elif model is not None and (model.has_post_norm or not model.has_pre_norm):
        text = f"{model.name} does not norm the input of its mlps alone, and expert ranks are not built for that"
        reader.contradiction("RT064", "ep", text, help="use ep = 1")
    if reader.good("dp") and plan.dp % plan.ep:
        text = f"groups of {plan.ep} replicas that share out experts do not make up dp = {plan.dp}"
        reader.contradiction("RT064", "ep", text, help="use an ep that divides dp")
    for name, default in _WITHOUT_EXPERT_RANKS.items():
        if reader.good(name) and getattr(plan, name) != default:
            text = f"{name} = {shown(getattr(plan, name))} is not built for replicas that share out experts (ep)"
            reader.contradiction("RT064", name, text, help=f"leave {name} out, or use ep = 1")
    if plan.training and reader.good("method", "freeze"):
        text = "frozen parameters and adapters are not built for replicas that share out experts (ep)"
        reader.contradiction("RT064", "ep", text, help="use ep = 1")


def _check_dispatch(reader: FieldReader, plan: Plan) -> None:
    """Check that a capacity is given only where rows are dropped above one, and neither where no row is sent."""
    dispatch, factor = plan.experts.dispatch, plan.experts.capacity_factor
    if not reader.good("ep", "dispatch", "capacity_factor"):
        return
    if plan.ep == 1:
        for name, value in (("dispatch", dispatch), ("capacity_factor", factor)):
            if value not in (BALANCED, None):
                text = f"{name} = {toml_value(value)} changes nothing with one expert rank (ep = 1): it sends no row"
                reader.contradiction("RT064", name, text, help="leave it out, or use ep = 2 or more")
    elif dispatch == BALANCED and factor is not None:
        text = f'capacity_factor = {toml_value(factor)} changes nothing with dispatch = "balanced", which drops no row'
        reader.contradiction("RT064", "capacity_factor", text, help='leave it out, or use dispatch = "capacity"')


_WITHOUT_EXPERT_RANKS: Mapping[str, object] = {
    "tp": 1,
    "cp": 1,
    "shard_group": None,
    "view_group": None,
    "gather_quantised": None,
    "reduce_quantised": None,
}
"""Keys that are not built for expert ranks, with the values that leave them out."""


def _check_softcap(reader: FieldReader, plan: Plan, model: ModelConfig) -> None:
    """Check that scores are not capped by kernels that hold score matrices, which cannot do it."""
    if model.attention_softcap is not None and reader.good("attention") and plan.attention != "fused":
        reader.contradiction(
            "RT064",
            "attention",
            f'attention = "{plan.attention}" does not cap scores, as {model.name} does at {model.attention_softcap:g}',
            help='use attention = "fused"',
        )


def _check_loss_scale(reader: FieldReader, plan: Plan) -> None:
    """Check that a loss scale other than 1 has a use: f16 views, or f16 gradients next to bf16 views.

    bf16 has the exponent range of f32, so bf16 alone needs no scale.
    """
    scale = plan.loss_scale
    scaled = plan.view_dtype != "f32" and "f16" in [getattr(plan, key) for key in DTYPE_KEYS]
    if not scaled and reader.good("loss_scale", *DTYPE_KEYS) and scale != 1.0:
        reader.contradiction(
            "RT064",
            "loss_scale",
            f"the loss scale is {'dynamic' if scale is None else scale}, but {plan.view_dtype} parameter views "
            "are not scaled",
            help='remove loss_scale (or write 1.0), or use view_dtype = "f16"',
        )


def _check_accumulate(reader: FieldReader, plan: Plan) -> None:
    """Check that products summed in f16 have f16 factors: the machine's instruction takes no others."""
    if plan.accumulate == F32_SUMS or plan.view_dtype == "f16" or not reader.good("accumulate", "view_dtype"):
        return
    text = (
        f'accumulate = "{plan.accumulate}" sums products of f16, but {plan.view_dtype} parameter views are multiplied'
    )
    reader.contradiction("RT064", "accumulate", text, help='leave accumulate out, or use view_dtype = "f16"')


def _check_learning_rate(reader: FieldReader, optimizer: Optimizer) -> None:
    total = optimizer.total_steps
    if reader.good("lr", "min_lr") and optimizer.min_lr > optimizer.lr:
        reader.contradiction(
            "RT064",
            "min_lr",
            f"min_lr {optimizer.min_lr} is above lr {optimizer.lr}: the learning rate would rise at the end",
            help="lower min_lr, or raise lr",
        )
    if reader.good("min_lr", "total_steps") and optimizer.min_lr > 0 and total is None:
        reader.contradiction(
            "RT064",
            "min_lr",
            f"min_lr {optimizer.min_lr} is never reached: without total_steps the learning rate stays at lr",
            help="give total_steps, or remove min_lr",
        )
    for name, default in (("decay", COSINE), ("decay_steps", None)):
        value = getattr(optimizer, name)
        if reader.good(name, "total_steps") and value != default and total is None:
            text = f"{name} {value} changes nothing: without total_steps the learning rate stays at lr"
            reader.contradiction("RT064", name, text, help=f"give total_steps, or remove {name}")
    falls, warm = optimizer.decay_steps, optimizer.warmup_steps
    if reader.good("warmup_steps", "total_steps", "decay_steps") and falls and total and warm < total < warm + falls:
        text = f"{falls} steps of decay after {warm} of warm-up do not fit into {total} steps in total"
        reader.contradiction("RT064", "decay_steps", text, help="lower decay_steps, or raise total_steps")
    if reader.good("warmup_steps", "total_steps") and total is not None and optimizer.warmup_steps > total:
        reader.contradiction(
            "RT064",
            "warmup_steps",
            f"{optimizer.warmup_steps} warm-up steps do not fit into {total} steps in total",
            help="lower warmup_steps, or raise total_steps",
        )


def _check_cuts(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """Check the cuts: one before each chunk but the first, ascending, with at least one layer per chunk."""
    if not reader.good("pp", "chunks", "cuts"):
        return
    what, needed = ("stage", plan.pp) if plan.chunks == 1 else ("chunk", plan.pp * plan.chunks)
    auto = 'or leave the choice to cuts = "auto"'
    if len(plan.cuts) != needed - 1:
        reader.contradiction(
            "RT064",
            "cuts",
            f"{len(plan.cuts)} cuts are given, but {needed} {what}s have {needed - 1}",
            help=f"name the layer where each {what} but the first starts, {auto}",
        )
    if any(later <= earlier for earlier, later in zip(plan.cuts, plan.cuts[1:], strict=False)):
        reader.contradiction(
            "RT064",
            "cuts",
            f"the cuts {shown(list(plan.cuts))} do not ascend: a {what} would have no layer",
            help=f"write them in ascending order, {auto}",
        )
    for cut in plan.cuts:
        if cut < 1 or (model is not None and cut >= model.layers):
            bounds = "at 1 or later" if model is None else f"at 1 to {model.layers - 1}"
            reader.contradiction(
                "RT064",
                "cuts",
                f"a {what} cannot start at layer {shown(cut)}: later {what}s start {bounds}",
                help=f"layers count from 0 and the first {what} starts at 0, {auto}",
            )


def _check_state(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    if reader.good("zero_blocks", "zero") and plan.zero_blocks is not None:
        _check_levels(reader, plan.zero_blocks, plan, model)
    if (
        reader.good("zero", "zero_blocks", "reduce", "dp")
        and plan.reduce == "each-micro-batch"
        and max(plan.levels) < 2
    ):
        reader.contradiction(
            "RT064",
            "reduce",
            f'reduce = "each-micro-batch" needs sharded gradients, but zero = {max(plan.levels)} keeps them whole',
            help='use zero = 2, or reduce = "last"',
        )
    if reader.good("shard_group", "dp", "cp") and plan.shard_group is not None and plan.replicas % plan.shard_group:
        text = f"groups of {plan.shard_group} replicas do not make up {replicas_text(plan)}"
        reader.contradiction("RT064", "shard_group", text, help="write a number that divides dp")
    shards = plan.shard_group or plan.replicas
    if reader.good("view_group", "shard_group", "dp") and plan.view_group is not None and shards % plan.view_group:
        text = f"groups of {plan.view_group} replicas do not make up the {shards} that have all shards"
        wanted = "shard_group" if plan.shard_group else "dp"
        reader.contradiction("RT064", "view_group", text, help=f"write a number that divides {wanted}")
    if reader.good("zero", "zero_blocks", "dp", "grad_dtype", "grad_shard_dtype") and not plan.shards_state:
        _check_unsharded(reader, plan)


def _check_levels(reader: FieldReader, levels: ZeroLevels, plan: Plan, model: ModelConfig | None) -> None:
    """Check that no block has two levels, all named layers exist, and tied ends have the same level.

    Shards of a tied table must have the same rows at both ends.
    """
    if twice := levels.named_twice:
        reader.contradiction("RT064", "zero_blocks", f"{twice} has two levels", help="name each block once")
    if model is None:
        return
    last = levels.last_layer
    if last is not None and last.last is not None and last.last >= model.layers:
        text = f"'{last}' names layer {last.last}, but {model.name} has {model.layers} layers"
        reader.contradiction(
            "RT064", "zero_blocks", text, help=f"layers count from 0: the last one is {model.layers - 1}"
        )
    ends = [levels.level(kind, None, plan.zero) for kind in ("embed", "head")]
    if model.tied_embeddings and len(set(ends)) > 1:
        text = f"embed and head of {model.name} share their table, but have the levels {ends[0]} and {ends[1]}"
        reader.contradiction("RT064", "zero_blocks", text, help=f"write 'embed {ends[0]}, head {ends[0]}'")


def _check_unsharded(reader: FieldReader, plan: Plan) -> None:
    """Check that no dtype is given for shards that do not exist: an unsharded gradient is reduced in its own dtype."""
    if plan.grad_shard_dtype == plan.grad_dtype:
        return
    why = f"zero = {plan.zero}" if plan.replicas > 1 else f"dp = {plan.dp}"
    reader.contradiction(
        "RT064",
        "grad_shard_dtype",
        f"gradients are reduced in {plan.grad_dtype}, their grad_dtype: with {why} there are no shards to be "
        f"{plan.grad_shard_dtype}",
        help=f'remove grad_shard_dtype, use grad_dtype = "{plan.grad_shard_dtype}", or shard (zero = 1 or more, '
        "dp = 2 or more)",
    )


def check_whole_logits(reader: FieldReader, plan: Plan) -> None:
    """Report a given `head_chunk` for a head that holds the logits of all rows."""
    if plan.holds_logits and reader.good("logits", "head_chunk"):
        text = (
            f'head_chunk {plan.head_chunk} changes nothing with logits = "whole": the head has the logits of '
            "all rows at once"
        )
        reader.contradiction("RT064", "head_chunk", text, help='leave it out, or write logits = "chunked"')


def replicas_text(plan: Plan) -> str:
    """Return the replicas that share out state, by the plan's keys."""
    return f"dp = {plan.dp}" if plan.cp == 1 else f"dp x cp = {plan.replicas}"
