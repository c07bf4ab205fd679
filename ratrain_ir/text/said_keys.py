"""Keys that a plan's text says although they change nothing in it: RT064 for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.plan import DEFAULT_HEAD_CHUNK
from ratrain.ratrain_ir.config.plan_checks import check_whole_logits, replicas_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import FieldReader
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.zero_levels import BlockLevel, ZeroLevels


def check_said(reader: FieldReader, plan: Plan) -> None:
    """Report keys that were written although they change nothing in this plan."""
    rows = plan.most_rows
    sized = reader.good("micro_batch_size", "seq_len", "slices")
    if plan.holds_logits:
        if "head_chunk" in reader.values and plan.head_chunk == DEFAULT_HEAD_CHUNK:
            check_whole_logits(reader, plan)
    elif sized and reader.good("head_chunk") and plan.head_chunk > rows and "head_chunk" in reader.values:
        _report_chunk(reader, plan, "head_chunk", plan.head_chunk)
    if sized and reader.good("mlp_chunk") and plan.mlp_chunk is not None and plan.mlp_chunk > rows:
        _report_chunk(reader, plan, "mlp_chunk", plan.mlp_chunk)
    if plan.zero_blocks is not None and reader.good("zero", "zero_blocks", "dp", "reduce"):
        for entry in plan.zero_blocks:
            _check_level_said(reader, plan.zero_blocks, entry, plan)
    if plan.shard_group is not None and reader.good("zero", "zero_blocks", "dp", "shard_group"):
        _check_shard_group_said(reader, plan)
    if plan.view_group is not None and reader.good("zero", "zero_blocks", "dp", "shard_group", "view_group"):
        _check_view_group_said(reader, plan)
    _check_quantised_said(reader, plan)
    optimizer = plan.optimizer
    # a file that writes out all keys has the default of max_norm next to clip = "none"
    is_written_out = "clip" in reader.values and optimizer.max_norm == type(optimizer)().max_norm
    idle = "max_norm" in reader.values and optimizer.clip == "none" and not is_written_out
    if idle and reader.good("max_norm", "clip"):
        text = 'max_norm changes nothing without clip = "global"'
        reader.contradiction("RT064", "max_norm", text, help='write clip = "global", or remove max_norm')


def _check_level_said(reader: FieldReader, levels: ZeroLevels, entry: BlockLevel, plan: Plan) -> None:
    """Report an entry whose level has the same effect as the level without it."""
    usual = levels.usual(entry, plan.zero)
    if _what_is_shared(plan, entry.level) != _what_is_shared(plan, usual):
        return
    text = f"'{entry}' changes nothing: {entry.blocks} has level {usual} without it"
    if entry.level != usual:
        why = "with one replica" if plan.replicas == 1 else 'with reduce = "last"'
        text += f", and {why} level {entry.level} is as level {usual}"
    reader.contradiction("RT064", "zero_blocks", text, help="leave it out")


def _check_shard_group_said(reader: FieldReader, plan: Plan) -> None:
    """Report a shard group that is all replicas, or has nothing to share out."""
    if plan.shard_group == plan.replicas:
        text = (
            f"shard_group = {plan.shard_group} changes nothing with {replicas_text(plan)}: all replicas share out state"
        )
    elif not plan.shards_state:
        text = (
            f"shard_group = {plan.shard_group} changes nothing: with zero = {plan.zero} and dp = {plan.dp} "
            "nothing is sharded"
        )
    else:
        return
    reader.contradiction("RT064", "shard_group", text, help="leave it out")


def _check_view_group_said(reader: FieldReader, plan: Plan) -> None:
    """Report a view group that is the whole shard group, or has no views to gather for each use."""
    if 3 not in plan.levels:
        text = (
            f"view_group = {plan.view_group} changes nothing: with zero = {max(plan.levels)} every replica "
            "has whole views"
        )
        reader.contradiction("RT064", "view_group", text, help="leave it out, or use zero = 3")
    elif plan.view_group == (plan.shard_group or plan.replicas):
        text = (
            f"view_group = {plan.view_group} changes nothing: as many replicas share all shards, and gather "
            "views from these"
        )
        reader.contradiction("RT064", "view_group", text, help="leave it out, or write a smaller group")


def _check_quantised_said(reader: FieldReader, plan: Plan) -> None:
    """Report quantised gathers or reductions if nothing is sharded."""
    if not reader.good("zero", "zero_blocks", "dp") or plan.shards_state:
        return
    for name in ("gather_quantised", "reduce_quantised"):
        if reader.good(name) and getattr(plan, name) is not None:
            text = (
                f"{name} changes nothing: with zero = {plan.zero} and dp = {plan.dp} nothing is sharded, and "
                "only shards are packed"
            )
            reader.contradiction("RT064", name, text, help="leave it out, or use zero = 1 or more with dp = 2 or more")


def _what_is_shared(plan: Plan, level: int) -> int:
    """Return the lowest level with the same effect as `level`.

    One replica shards nothing. Gradients are sharded only if reduced after each micro-batch.
    """
    if level == 3:
        return level
    if plan.replicas == 1:
        return 0
    return 1 if level == 2 and plan.reduce == "last" else level


def _report_chunk(reader: FieldReader, plan: Plan, key: str, chunk: int) -> None:
    whose = (
        "the longest slice (micro_batch_size * its tokens)"
        if plan.slices
        else "a micro-batch (micro_batch_size * seq_len)"
    )
    text = f"{key} {chunk} is more than the {plan.most_rows} rows of {whose}: it would change nothing"
    reader.contradiction("RT064", key, text, help=f"leave it out, or write fewer than {plan.most_rows}")
