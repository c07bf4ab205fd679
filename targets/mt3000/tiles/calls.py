"""Tile schedules that a kernel call may have: schedules of its parts, for its shapes, types and options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.targets.mt3000.tiles.micro_kernels import ADD_RUN, PRODUCTS
from ratrain.targets.mt3000.tiles.tile_schedule import Compute, Loop, Statement, TileLoad, TileSchedule, statements
from ratrain.targets.mt3000.tiles.verifier import operands_problem, schedule_problem
from ratrain.targets.program.per_kernel import PerKernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ratrain.targets.mt3000.tiles.tile_schedule import Axes
    from ratrain.targets.program.kernel import Types
    from ratrain.targets.program.routine import OnChipSchedule, Step

UNTILED_SCORES = (
    *("attention_scores_forward", "attention_values_forward"),
    *("attention_values_backward", "attention_scores_backward"),
)
"""Products of attention with a whole score matrix, for which there are no tile schedules."""

UNTILED_BLOCKS = ("attention_partial_forward", "attention_partial_backward")
"""Attention of a slice to the keys of another one, for which there are no tile schedules."""

UNTILED_EXPERTS = ("expert_rows", "expert_sums", "expert_gradients")
"""Products of rows grouped by expert, for which there are no tile schedules."""

PARTS: PerKernel[tuple[str, ...]] = PerKernel(
    "parts on the chip",
    {
        "gemm": ("gemm",),
        "attention_forward": ("attention_forward",),
        "attention_backward": ("attention_query_gradient", "attention_key_gradient"),
    },
    never=(
        *("column_sum", "rmsnorm_forward", "rmsnorm_backward", "rope", "swiglu_forward", "swiglu_backward"),
        *("layernorm_forward", "layernorm_backward", "head_norm_forward", "head_norm_backward"),
        *("row_squares", "row_products", "summed_norm_forward", "summed_norm_backward"),
        *("gelu_forward", "gelu_backward", "geglu_forward", "geglu_backward", "relu2_forward", "relu2_backward"),
        *("position_forward", "position_backward"),
        *("embedding_forward", "embedding_backward", "head_forward", "head_backward", "zero", "cast", "add", "scale"),
        *("adamw", "mean_of_replicas", "all_finite", "quantise", "dequantise", "mean_of_quantised"),
        "dequantise_nf4",
        *("attention_softmax_forward", "attention_softmax_backward", "head_backward_from_logits"),
        *("attention_partial_finish", "attention_delta", "group_columns"),
        *UNTILED_SCORES,
        *UNTILED_BLOCKS,
        *UNTILED_EXPERTS,
        *("route_forward", "route_backward", "group_rows", "add_rows", "sigmoid_forward", "sigmoid_backward"),
        *("choice_sums", "weighted_swiglu_forward", "weighted_swiglu_backward"),
    ),
)
"""Parts of each tiled kernel, which are computed one after the other."""

_QUERY: Axes = (("b", "q"), ("g", "h", "d"))
_KEY: Axes = (("b", "k"), ("g", "d"))
_ROW: Axes = (("g", "h"), ("b", "q"))
_STARTS: Axes = (("b", "q"),)
_OPERANDS: dict[str, dict[str, Axes]] = {
    "attention_forward": {"q": _QUERY, "k": _KEY, "v": _KEY, "o": _QUERY, "lse": _ROW},
    "attention_query_gradient": {
        "q": _QUERY,
        "k": _KEY,
        "v": _KEY,
        "o": _QUERY,
        "lse": _ROW,
        "do": _QUERY,
        "dq": _QUERY,
        "delta": _ROW,
    },
    "attention_key_gradient": {
        "q": _QUERY,
        "k": _KEY,
        "v": _KEY,
        "lse": _ROW,
        "do": _QUERY,
        "delta": _ROW,
        "dk": _KEY,
        "dv": _KEY,
    },
}
"""Operands of the parts of attention: b sequences, g key-value heads of h query heads, q queries, k keys, d elements of
a head."""


def attention_operands(part: str, *, documents: bool) -> dict[str, Axes]:
    """Return the operands of a part of attention; with the starts of documents where it keeps these apart."""
    return {**_OPERANDS[part], "documents": _STARTS} if documents else _OPERANDS[part]


def has_softcap(step: Step) -> bool:
    """Return whether a step is attention that caps its scores, for which there are no tile schedules."""
    return step.options.get("softcap") is not None


def tiles_of(schedules: Mapping[str, OnChipSchedule]) -> dict[str, TileSchedule]:
    """Return the tile schedules among a step's on-chip schedules, by part."""
    return {part: schedule for part, schedule in schedules.items() if isinstance(schedule, TileSchedule)}


def tiles_problem(step: Step, types: Types) -> str | None:
    """Return why the tile schedules of a step do not compute it, or None.

    Every part of its kernel (`PARTS`) must have one, for its options and all for the same memories. `types` has the
    dtype and shape of each operand.
    """
    tiles = tiles_of(step.on_chip)
    if sorted(tiles) != sorted(PARTS.get(step.kernel, ())):
        return f"'{step.kernel}' has tiles for {', '.join(tiles)}"
    for part, schedule in tiles.items():
        if schedule.kernel != part:
            return f"the tiles for {part} are for {schedule.kernel}"
        problem = operands_problem(schedule, types) or _options_problem(step, schedule) or schedule_problem(schedule)
        if problem is not None:
            return f"tiles of {part}: {problem}"
    if len({schedule.memories for schedule in tiles.values()}) > 1:
        return f"the parts of '{step.kernel}' have tiles for different machines"
    return None


def _options_problem(step: Step, schedule: TileSchedule) -> str | None:
    axes = {operand.name: operand.axes for operand in schedule.operands}
    if schedule.kernel != "gemm":
        options = step.options
        if has_softcap(step):
            return "they are for attention without a soft cap"
        group = options["heads"] // options["kv_heads"]
        extents = (
            options["batch"],
            options["kv_heads"],
            group,
            options["seq_len"],
            options["seq_len"],
            options["head_dim"],
        )
        fits = schedule.dims == tuple(zip("bghqkd", extents, strict=True)) and schedule.window == options["window"]
        expected = attention_operands(schedule.kernel, documents="documents" in step.operands)
        return None if fits and axes == expected else "they are for another attention"
    a = (("k",), ("m",)) if step.options.get("trans_a") else (("m",), ("k",))
    b = (("n",), ("k",)) if step.options.get("trans_b") else (("k",), ("n",))
    expected = {"a": a, "b": b, "out": (("m",), ("n",))}
    expected |= {name: c for name, c in (("bias", (("n",),)), ("residual", (("m",), ("n",)))) if name in step.operands}
    adds = any(isinstance(s, TileLoad) and s.source == "out" for s in statements(schedule.body))
    if (
        axes != expected
        or {name for name, _ in schedule.dims} != {"m", "n", "k"}
        or adds != bool(step.options.get("accumulate"))
    ):
        return "they are for another product"
    return _sums_problem(schedule, step.options.get("half_run"))


def _sums_problem(schedule: TileSchedule, run: int | None) -> str | None:
    """Return why a product's micro-kernels do not sum by runs of `run` products (None: in float32), or None.

    A micro-kernel that sums in float16 takes the range of k as one run. So loops must cut k into pieces of `run`:

        loop k by 2048 { loop k by 512 { add_run } }      sound for runs of 512
        loop k by 768  { loop k by 512 { add_run } }      not: the second piece of each 768 is short
    """
    products = {s.kernel for s in statements(schedule.body) if isinstance(s, Compute) and s.kernel in PRODUCTS}
    if run is None or products != {ADD_RUN}:
        return None if run is None and ADD_RUN not in products else "they sum products in another way"
    whole = schedule.extent("k")
    for tiles in _cuts_around_runs(schedule.body, ()):
        inner = tiles[-1] if tiles else whole
        if inner != run and not (inner >= whole <= run):
            return f"they sum runs of {inner} products in f16, not of {run}"
        if any(tile % run and tile < whole for tile in tiles):
            return f"their loops over k cut runs of {run} products short"
    return None


def _cuts_around_runs(body: tuple[Statement, ...], tiles: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield, for each micro-kernel that sums a run, the tiles of the loops over k around it, from the outside in."""
    for statement in body:
        if isinstance(statement, Compute) and statement.kernel == ADD_RUN:
            yield tiles
        elif isinstance(statement, Loop):
            inner = (*tiles, statement.tile) if statement.dim == "k" else tiles
            yield from _cuts_around_runs(statement.body, inner)
