"""Declarations of all kernels: operands, options and meaning, each given once.

Layers add their facts in `PerKernel` tables. The form of a declaration stands in `ratrain.targets.program.kernel`.

Arithmetic and accumulation are float32, with one rounding to storage; only `gemm` with a `half_run` sums in float16.
Infinities and NaNs propagate: an overflow of a half is stored as infinity. Results depend on values, shapes and options
only, never on addresses, timing or previous calls. T stands for tokens (rows), h for the hidden size, V for the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import attrs

from ratrain.ratrain_ir.config.quantised import FORMATS, nf4_bytes, packed_bytes
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
from ratrain.targets.program.expert_kernels import EXPERT_KERNELS
from ratrain.targets.program.kernel import Kernel, KernelOption, Types
from ratrain.targets.program.option_values import (
    ADDS,
    COUNT,
    DENOMINATOR,
    FLAG,
    HALF_RUN,
    NUMBER,
    OFFSETS,
    POSITION,
    POSITIVE,
    POSITIVE_OR_NONE,
    SCALES,
    STARTS_AT,
    TOKEN,
    UNLESS_GIVEN,
    is_count,
    is_count_or_none,
    is_scaling,
)

IGNORED_LABEL = -1
"""Label of a row that does not count in the loss."""

OTHER_RANKS = -2
"""Token or label whose row another rank has: its embedding is zero here, its logit is not among the logits
here."""


_OF_FIELD = {
    "float | None": POSITIVE_OR_NONE,
    "int": COUNT,
    "Position": POSITION,
    "int | None": KernelOption("int | None", is_count_or_none),
    "bool": FLAG,
}


_OF_NAME = {
    "all_heads": KernelOption("int | None", is_count, default=None),
    "first_head": KernelOption("int | None", lambda _: False, default=None),
}
"""Options of fields that place the heads among all heads of the model. A step gives `all_heads`; `first_head` is added
by the rank."""


def _options_of(spec: type[AttentionSpec | AttentionBlockSpec]) -> dict[str, KernelOption]:
    """Return one option for each field of a spec; a step may leave out options with a default."""
    return {each.name: _OF_NAME.get(each.name) or _OF_FIELD[str(each.type)] for each in attrs.fields(spec)}


def _product_rule(options: Mapping[str, Any], types: Types) -> str | None:
    a, b, out = (types[name][1] for name in ("a", "b", "out"))
    rows, inner = reversed(a) if options.get("trans_a") else a
    depth, columns = reversed(b) if options.get("trans_b") else b
    if inner != depth or out != (rows, columns):
        return f"'gemm' of {list(a)} and {list(b)} does not give {list(out)}"
    if "half_run" in options and {types[name][0] for name in ("a", "b")} != {Dtype.F16}:
        return "'gemm' sums products of f16 alone in f16"
    return None


def _rope_rule(options: Mapping[str, Any], types: Types) -> str | None:
    width = options.get("rotary_dim") or options["head_dim"]
    if width % 2 or width > options["head_dim"] or types["x"][1][0] % options["seq_len"]:
        return "'rope' needs whole sequences, and an even number of rotated elements of each head"
    return None


def _head_norm_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error unless there is a statistic for each head of each row, else None."""
    rows, statistics = types["x"][1][0], types["rstd"][1][0]
    if rows * options["heads"] == statistics:
        return None
    return (
        f"norms of {options['heads']} heads of {rows} rows have {rows * options['heads']} statistics, not {statistics}"
    )


def _position_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error unless rows of tokens are whole sequences, whose positions are in the table; else None."""
    rows, table = (types[name][1][0] for name in ("y", "positions"))
    first, seq_len = options.get("first_position", 0), options["seq_len"]
    if rows % seq_len == 0 and first + seq_len <= table:
        return None
    start = f" from position {first} on" if first else ""
    return f"positions of sequences of {seq_len} tokens{start} need whole sequences, and a table as long"


def _position_gradient_rule(options: Mapping[str, Any], types: Types) -> str | None:
    return _position_rule(options, {"y": types["dy"], "positions": types["dpositions"]})


def _packed_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error unless there are as many packed bytes as the elements take, else None."""
    elements, packed = prod(types["out"][1]), types["packed"][1][0]
    if packed == packed_bytes(elements, options["bits"]):
        return None
    return f"{packed} bytes are not those of {elements} elements packed to {options['bits']} bits each"


def _nf4_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error unless there are as many packed bytes as the elements take in nf4, else None."""
    del options
    elements, packed = prod(types["out"][1]), types["packed"][1][0]
    return None if packed == nf4_bytes(elements) else f"{packed} bytes are not those of {elements} elements in nf4"


def _attention_rule(options: Mapping[str, Any], types: Types) -> str | None:
    del types
    if options["heads"] % options["kv_heads"]:
        return f"{options['heads']} query heads cannot share {options['kv_heads']} key-value heads"
    return None


def _columns_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error unless runs of columns of one operand are the rows of the other, else None."""
    wide, tall = (types[name][1] for name in (("dst", "src") if options["inverse"] else ("src", "dst")))
    groups = options["groups"]
    if (wide[0] * groups, wide[1]) == (tall[0], tall[1] * groups):
        return None
    return f"{groups} runs of the columns of {list(wide)} are not the rows of {list(tall)}"


def _head_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error if logits of a normalised table are scaled or capped, else None.

    The gradient of the table's norms is computed from logits, which must be the products themselves.
    """
    del types
    if options["normalise"] and (options.get("scale_of_logits", 1) != 1 or options.get("softcap") is not None):
        return "logits of a table whose rows are normalised are neither scaled nor capped"
    return None


_Q, _KV, _LSE = "[batch*seq_len,heads*head_dim]", "[batch*seq_len,kv_heads*head_dim]", "[heads,batch*seq_len]"
_OF_LOGITS = {"scale_of_logits": SCALES, "softcap": POSITIVE_OR_NONE}
_BLOCK_Q, _BLOCK_KV = "[batch*queries,heads*head_dim]", "[batch*keys,kv_heads*head_dim]"
_BLOCK_LINE = "[heads,batch*queries]"
_ROWS, _ROW_LINE = "[T,heads*head_dim]", "[heads,T]"
_SCORES = "[heads*batch*seq_len,seq_len]"
_STARTS, _BLOCK_STARTS = "documents:i32[batch*seq_len]?", "documents:i32[batch*queries]?"
"""Starts of documents, for the rows of queries: see `AttentionBlockSpec`."""


def _of_scores(name: str, meaning: str, operands: str, *in_place: tuple[str, str]) -> Kernel:
    """Return a kernel of an attention whose score matrix is whole.

    Row head * tokens + t is query t of that head, column j key j of its sequence.
    """
    options = {option: rule for option, rule in _options_of(AttentionSpec).items() if option != "softcap"}
    return Kernel(name, meaning, operands, options, AttentionSpec, in_place=in_place, rule=_attention_rule)


_DECLARED = (
    Kernel(
        "gemm",
        "out = [out +] op(a) @ op(b) [+ bias, one per column] [+ residual], rounded once; `a` and `b` must not "
        "overlap `residual`. With `half_run` factors are float16, and so are sums of so many products; these runs, all "
        "from the first, are added in float32, in order (`ratrain_ir/config/accumulation.py`).",
        "a:*[A,B] b:*[C,D] out:*[M,N]+ bias:*[N]? residual:*[M,N]?",
        {**dict.fromkeys(("trans_a", "trans_b", "accumulate"), UNLESS_GIVEN), "half_run": HALF_RUN},
        in_place=(("out", "residual"),),
        rule=_product_rule,
    ),
    Kernel("column_sum", "out[n] = [out +] the sum over the rows of a[m, n].", "a:*[M,N] out:*[N]+", ADDS),
    Kernel(
        "rmsnorm_forward",
        "rstd[t] = 1 / sqrt(mean(x[t]^2) + eps); xn = x * rstd * gamma. With `unit_offset` 1 + gamma stands for gamma.",
        "x:s[T,h] gamma:s[h] xn:s[T,h]= rstd:f32[T]=",
        {"eps": POSITIVE, **OFFSETS},
    ),
    Kernel(
        "rmsnorm_backward",
        "Gradients of `rmsnorm_forward`: dx = [residual +] ..., dgamma = [dgamma +] ...",
        "dxn:s[T,h] x:s[T,h] gamma:s[h] rstd:f32[T] dx:s[T,h]= dgamma:*[h]+ residual:s[T,h]?",
        {**ADDS, **OFFSETS},
        in_place=(("dx", "dxn"), ("dx", "residual")),
    ),
    Kernel(
        "head_norm_forward",
        "`rmsnorm_forward` of each head of each row, with the same gamma: rstd[t * heads + n] is that of head n "
        "of row t.",
        f"x:s{_ROWS} gamma:s[head_dim] xn:s{_ROWS}= rstd:f32[_]=",
        {"heads": COUNT, "head_dim": COUNT, "eps": POSITIVE, **OFFSETS},
        rule=_head_norm_rule,
    ),
    Kernel(
        "head_norm_backward",
        "Gradients of `head_norm_forward`: dx = ..., dgamma = [dgamma +] ..., summed over the heads.",
        f"dxn:s{_ROWS} x:s{_ROWS} gamma:s[head_dim] rstd:f32[_] dx:s{_ROWS}= dgamma:*[head_dim]+",
        {"heads": COUNT, "head_dim": COUNT, **ADDS, **OFFSETS},
        in_place=(("dx", "dxn"),),
        rule=_head_norm_rule,
    ),
    Kernel(
        "row_squares",
        "squares[t] = share * the sum of x[t]^2: of a norm over what several ranks have of a row, what one of "
        "them has.",
        "x:s[T,h] squares:f32[T]=",
        {"share": POSITIVE},
    ),
    Kernel(
        "row_products",
        "products[t] = the sum of dxn[t] * gamma * x[t]: what the gradient of such a norm sums over the row.",
        "dxn:s[T,h] x:s[T,h] gamma:s[h] products:f32[T]=",
        {},
    ),
    Kernel(
        "summed_norm_forward",
        "`rmsnorm_forward` of a part of each row, given the `squares` of all of its `width` elements: xn = x * "
        "rstd * gamma.",
        "x:s[T,h] gamma:s[h] squares:f32[T] xn:s[T,h]=",
        {"width": COUNT, "eps": POSITIVE},
    ),
    Kernel(
        "summed_norm_backward",
        "Gradients of `summed_norm_forward`, given the `products` of all of the row, of which this rank's "
        "gradient takes a `share`:"
        " dx = ..., dgamma = [dgamma +] ...",
        "dxn:s[T,h] x:s[T,h] gamma:s[h] squares:f32[T] products:f32[T] dx:s[T,h]= dgamma:*[h]+",
        {"width": COUNT, "eps": POSITIVE, "share": POSITIVE, **ADDS},
    ),
    Kernel(
        "layernorm_forward",
        "mean[t] = mean(x[t]); rstd[t] = 1 / sqrt(mean((x[t] - mean[t])^2) + eps); xn = (x - mean) * rstd * "
        "gamma + beta.",
        "x:s[T,h] gamma:s[h] beta:s[h] xn:s[T,h]= mean:f32[T]= rstd:f32[T]=",
        {"eps": POSITIVE},
    ),
    Kernel(
        "layernorm_backward",
        "Gradients of `layernorm_forward`: dx = [residual +] ..., dgamma = [dgamma +] ..., dbeta = [dbeta +] ...",
        "dxn:s[T,h] x:s[T,h] gamma:s[h] mean:f32[T] rstd:f32[T] dx:s[T,h]= dgamma:*[h]+ dbeta:*[h]+ residual:s[T,h]?",
        ADDS,
        in_place=(("dx", "dxn"), ("dx", "residual")),
    ),
    Kernel(
        "rope",
        "Rotates x in place; row t has position first_position + t % seq_len. The first rotary_dim elements of "
        "a head turn, all unless "
        "given; element i pairs with i + rotary_dim / 2 (`rotate_half` of Hugging Face), or, `interleaved`, 2 i "
        "with 2 i + 1. Frequencies "
        "are those of theta and `scaling` (`ratrain_ir.rotary`). `inverse` is the transposed map, which is the "
        "gradient. With `documents` "
        "positions count from documents[t]. Raises IndexError where that is negative or behind the row.",
        f"x:s{_ROWS}~ documents:i32[T]?",
        {
            **dict.fromkeys(("heads", "head_dim", "seq_len"), COUNT),
            "theta": POSITIVE,
            "inverse": FLAG,
            "first_position": STARTS_AT,
            "rotary_dim": KernelOption("int | None", is_count_or_none, default=None),
            "interleaved": UNLESS_GIVEN,
            "scaling": KernelOption("str", is_scaling, default=""),
        },
        rule=_rope_rule,
    ),
    Kernel(
        "attention_forward",
        "o = softmax(scores) @ v; lse[head, t] is the log of the sum of exponentiated scores. Memory is linear "
        "in seq_len.",
        f"q:s{_Q} k:s{_KV} v:s{_KV} o:s{_Q}= lse:f32{_LSE}= {_STARTS}",
        _options_of(AttentionSpec),
        AttentionSpec,
        rule=_attention_rule,
    ),
    Kernel(
        "attention_backward",
        "Gradients of `attention_forward`, probabilities recomputed from lse. delta[heads, T] receives "
        "rowsum(do * o). The query heads "
        "of a group are summed before dk and dv are rounded.",
        f"q:s{_Q} k:s{_KV} v:s{_KV} o:s{_Q} lse:f32{_LSE} do:s{_Q} dq:s{_Q}= dk:s{_KV}= dv:s{_KV}= delta:f32{_LSE}= "
        f"{_STARTS}",
        _options_of(AttentionSpec),
        AttentionSpec,
        rule=_attention_rule,
    ),
    Kernel(
        "attention_partial_forward",
        "Takes a block of keys into the running softmax of a block of queries: peak[head, t] is log2(e) times "
        "the largest score so far, "
        "total the sum of the weights 2^(log2(e) * score - peak), acc that of weight * v. Without `accumulate` "
        "it begins, with peak = "
        "-inf, total = 0, acc = 0; a row that sees none of the keys stays as it was.",
        f"q:s{_BLOCK_Q} k:s{_BLOCK_KV} v:s{_BLOCK_KV} acc:f32{_BLOCK_Q}+ peak:f32{_BLOCK_LINE}+ "
        f"total:f32{_BLOCK_LINE}+ "
        f"{_BLOCK_STARTS}",
        {**_options_of(AttentionBlockSpec), **ADDS},
        AttentionBlockSpec,
        rule=_attention_rule,
    ),
    Kernel(
        "attention_partial_finish",
        "o and lse, as `attention_forward` leaves them, of a running softmax that has taken in all keys that "
        "its queries see.",
        f"acc:f32{_ROWS} peak:f32{_ROW_LINE} total:f32{_ROW_LINE} o:s{_ROWS}= lse:f32{_ROW_LINE}=",
        {"heads": COUNT, "head_dim": COUNT},
    ),
    Kernel(
        "attention_delta",
        "delta[head, t] = rowsum(do * o) of each head.",
        f"o:s{_ROWS} do:s{_ROWS} delta:f32{_ROW_LINE}=",
        {"heads": COUNT, "head_dim": COUNT},
    ),
    Kernel(
        "attention_partial_backward",
        "What a block of queries and a block of keys add to the gradients of their attention, probabilities "
        "recomputed from the lse over "
        "all keys: dq += ..., dk = [dk +] ..., dv = [dv +] ..., not rounded. Query heads of a group are summed.",
        f"q:s{_BLOCK_Q} k:s{_BLOCK_KV} v:s{_BLOCK_KV} lse:f32{_BLOCK_LINE} do:s{_BLOCK_Q} delta:f32{_BLOCK_LINE} "
        f"dq:f32{_BLOCK_Q}~ dk:f32{_BLOCK_KV}+ dv:f32{_BLOCK_KV}+ {_BLOCK_STARTS}",
        {**_options_of(AttentionBlockSpec), **ADDS},
        AttentionBlockSpec,
        rule=_attention_rule,
    ),
    _of_scores(
        "attention_scores_forward",
        "scores = scale * q @ k^T, with 1 / sqrt(head_dim) unless given, of each query with all keys of its "
        "sequence, seen or not.",
        f"q:s{_Q} k:s{_KV} scores:s{_SCORES}=",
    ),
    _of_scores(
        "attention_softmax_forward",
        "probs = softmax(scores [+ ALiBi's bias]) of each row, over the keys that its query sees; 0 for the others.",
        f"scores:s{_SCORES} probs:s{_SCORES}= {_STARTS}",
        ("probs", "scores"),
    ),
    _of_scores(
        "attention_values_forward",
        "o = probs @ v.",
        f"probs:s{_SCORES} v:s{_KV} o:s{_Q}=",
    ),
    _of_scores(
        "attention_values_backward",
        "Gradients of `attention_values_forward`: dprobs = do @ v^T, dv = probs^T @ do, query heads of a group "
        "summed before dv is rounded.",
        f"probs:s{_SCORES} v:s{_KV} do:s{_Q} dprobs:s{_SCORES}= dv:s{_KV}=",
    ),
    _of_scores(
        "attention_softmax_backward",
        "Gradient of `attention_softmax_forward`: dscores = probs * (dprobs - rowsum(probs * dprobs)); 0 where "
        "a query does not see a key.",
        f"probs:s{_SCORES} dprobs:s{_SCORES} dscores:s{_SCORES}= {_STARTS}",
        ("dscores", "dprobs"),
    ),
    _of_scores(
        "attention_scores_backward",
        "Gradients of `attention_scores_forward`: dq = scale * dscores @ k, dk alike, query heads of a group "
        "summed before dk is "
        "rounded.",
        f"q:s{_Q} k:s{_KV} dscores:s{_SCORES} dq:s{_Q}= dk:s{_KV}=",
    ),
    Kernel("swiglu_forward", "prod = silu(gate) * up.", "gate:s[T,f] up:s[T,f] prod:s[T,f]="),
    Kernel(
        "swiglu_backward",
        "Gradients of `swiglu_forward`.",
        "gate:s[T,f] up:s[T,f] dprod:s[T,f] dgate:s[T,f]= dup:s[T,f]=",
        in_place=tuple((out, source) for out in ("dgate", "dup") for source in ("gate", "up", "dprod")),
    ),
    Kernel(
        "geglu_forward",
        "prod = gelu(gate) * up; gelu as in `gelu_forward`.",
        "gate:s[T,f] up:s[T,f] prod:s[T,f]=",
        {"exact": UNLESS_GIVEN},
    ),
    Kernel(
        "geglu_backward",
        "Gradients of `geglu_forward`.",
        "gate:s[T,f] up:s[T,f] dprod:s[T,f] dgate:s[T,f]= dup:s[T,f]=",
        {"exact": UNLESS_GIVEN},
        in_place=tuple((out, source) for out in ("dgate", "dup") for source in ("gate", "up", "dprod")),
    ),
    Kernel(
        "gelu_forward",
        "act = gelu(up) = up * (1 + tanh(sqrt(2 / pi) * (up + 0.044715 * up^3))) / 2: Hugging Face's "
        "`gelu_new`; `exact`: "
        "up * (1 + erf(up / sqrt(2))) / 2.",
        "up:s[T,f] act:s[T,f]=",
        {"exact": UNLESS_GIVEN},
    ),
    Kernel(
        "gelu_backward",
        "Gradient of `gelu_forward`.",
        "up:s[T,f] dact:s[T,f] dup:s[T,f]=",
        {"exact": UNLESS_GIVEN},
        in_place=(("dup", "up"), ("dup", "dact")),
    ),
    Kernel("relu2_forward", "act = max(up, 0)^2.", "up:s[T,f] act:s[T,f]="),
    Kernel(
        "relu2_backward",
        "Gradient of `relu2_forward`.",
        "up:s[T,f] dact:s[T,f] dup:s[T,f]=",
        in_place=(("dup", "up"), ("dup", "dact")),
    ),
    *EXPERT_KERNELS,
    Kernel(
        "embedding_forward",
        "y[t] = scale * table[tokens[t]], 0 for the token -2. Raises IndexError where a token is outside the table.",
        "tokens:i32[T] table:s[V,h] y:s[T,h]=",
        {"scale": SCALES},
    ),
    Kernel(
        "embedding_backward",
        "dtable[tokens[t]] += scale * dy[t], over zeros unless `accumulate`. The rows of one token are summed "
        "in float32 in ascending t, "
        "then scaled, added and rounded once; -2 is no token, and the rows of `padding_token` add nothing. "
        "Raises IndexError where a token is "
        "outside the table.",
        "tokens:i32[T] dy:s[T,h] dtable:*[V,h]+",
        {**ADDS, "scale": SCALES, "padding_token": TOKEN},
    ),
    Kernel(
        "position_forward",
        "y[t] += positions[first_position + t % seq_len]: learned positions on embedded tokens. With "
        "`documents` positions count from "
        "documents[t]. Raises IndexError where that is negative or behind the row.",
        "positions:s[P,h] y:s[T,h]~ documents:i32[T]?",
        {"seq_len": COUNT, "first_position": STARTS_AT},
        rule=_position_rule,
    ),
    Kernel(
        "position_backward",
        "dpositions[p] = [dpositions[p] +] the sum of dy over the rows t of position p = first_position + t % "
        "seq_len, in float32 in "
        "ascending t, rounded once; zero, or as it was, for a position that no row has. `documents` as in "
        "`position_forward`.",
        "dy:s[T,h] dpositions:*[P,h]+ documents:i32[T]?",
        {"seq_len": COUNT, **ADDS, "first_position": STARTS_AT},
        rule=_position_gradient_rule,
    ),
    Kernel(
        "head_forward",
        "Cross-entropy of the logits xn @ table^T, in chunks of as many rows as the workspace `logits` has. "
        "lse[t] is the log-sum-exp of "
        "row t; loss[0] = [loss[0] +] the sum over ascending t of lse[t] - logit[t, label], in float64, of rows "
        "whose label is not -1 or -2. "
        "`normalise` divides each row of the table by its Euclidean norm, or 1e-12 where that is larger; else "
        "logits are multiplied by "
        "`scale_of_logits`, and with `softcap` each logit s is then softcap * tanh(s / softcap). Raises "
        "IndexError where a label is "
        "outside the table.",
        "xn:s[T,h] table:s[V,h] labels:i32[T] lse:f32[T]= loss:f64[1]+ logits:f32[c,V]=",
        {"normalise": FLAG, **ADDS, **_OF_LOGITS},
        rule=_head_rule,
    ),
    Kernel(
        "head_backward",
        "Gradients of loss * scale[0] / denominator, logits recomputed, with an lse that may be over more than "
        "these; rows with the label -1 have none; -2 is a label of none of these logits; dtable = [dtable +] ... "
        "is rounded once for each chunk of rows. Raises IndexError where a label is outside the table.",
        "xn:s[T,h] table:s[V,h] labels:i32[T] lse:f32[T] scale:f32[2] logits:f32[c,V]= dxn:s[T,h]= dtable:*[V,h]+?",
        {"denominator": DENOMINATOR, "normalise": FLAG, **ADDS, **_OF_LOGITS},
        rule=_head_rule,
    ),
    Kernel(
        "head_backward_from_logits",
        "As `head_backward`, of logits that `head_forward` left whole; dlogits receives their gradient, and "
        "dtable is rounded once.",
        "xn:s[T,h] table:s[V,h] labels:i32[T] lse:f32[T] scale:f32[2] logits:f32[T,V] dlogits:f32[T,V]= "
        "dxn:s[T,h]= dtable:*[V,h]+?",
        {"denominator": DENOMINATOR, "normalise": FLAG, **ADDS, **_OF_LOGITS},
        rule=_head_rule,
    ),
    Kernel("zero", "a = 0.", "a:*[...]="),
    Kernel("cast", "dst = src, rounded to nearest even; overflow gives infinity.", "src:*[...] dst:*[...]="),
    Kernel(
        "group_columns",
        "dst = src with its columns in `groups` runs one below the other: row j * T + t of dst is run j of row t "
        "of src, which has T rows. `inverse` puts runs that lie so side by side again.",
        "src:s[A,B] dst:s[C,D]=",
        {"groups": COUNT, "inverse": FLAG},
        rule=_columns_rule,
    ),
    Kernel(
        "add",
        "out = a + scale * b.",
        "a:*[...] b:*[...] out:*[...]=",
        {"scale": SCALES},
        in_place=(("out", "a"), ("out", "b")),
    ),
    Kernel("scale", "out = scale * a.", "a:*[...] out:*[...]=", {"scale": POSITIVE}, in_place=(("out", "a"),)),
    Kernel(
        "adamw",
        "One update as `torch.optim.AdamW` does it; view = master, rounded to its dtype. The gradient is grad * "
        "grad_multiplier, `step` "
        "counts from 1, and only the elements [start, stop) of `decay` are decayed.",
        "master:f32[n]~ m:f32[n]~ v:f32[n]~ grad:*[n] view:*[n]=?",
        {
            "step": KernelOption("int"),
            **dict.fromkeys(("grad_multiplier", "lr", "beta1", "beta2", "eps", "weight_decay"), NUMBER),
            "decay": KernelOption("Sequence[tuple[int, int]]"),
        },
        in_routines=False,
    ),
    Kernel(
        "mean_of_replicas",
        "out = [out +] (parts[0] + parts[1] + ...) * (1 / divisor), summed in the given order. Whether all "
        "parts and the result are finite.",
        "parts:*[n]... out:*[n]+",
        {"accumulate": KernelOption("bool"), "divisor": NUMBER},
        in_place=(("out", "parts"),),
        in_routines=False,
        returns="bool",
    ),
    Kernel(
        "quantise",
        "packed = a in blocks of 256 elements (`ratrain.ratrain_ir.config.quantised`): scale = largest "
        "magnitude / 127, or / 7 with 4 `bits`; code = "
        "a / scale, to nearest even. A block has the scale 0 where that would be less than 2^-126, NaN where an "
        "element is not finite; its "
        "codes are 0 then.",
        "a:*[n] packed:u8[m]=",
        {"bits": KernelOption("int")},
        in_routines=False,
    ),
    Kernel(
        "dequantise",
        "out = code * scale of each element, rounded once.",
        "packed:u8[m] out:*[...]=",
        {"bits": KernelOption("int", lambda bits: bits in FORMATS.values())},
        rule=_packed_rule,
    ),
    Kernel(
        "dequantise_nf4",
        "out = level * maximum of its block (`ratrain.ratrain_ir.config.quantised`) for each element, rounded once. "
        "The maximum is nested level * scale + offset, each operation rounded to float32.",
        "packed:u8[m] out:*[...]=",
        rule=_nf4_rule,
    ),
    Kernel(
        "mean_of_quantised",
        "`mean_of_replicas` of what the parts stand for, which are not rounded before.",
        "parts:u8[m]... out:*[n]+",
        {"accumulate": KernelOption("bool"), "divisor": NUMBER, "bits": KernelOption("int")},
        in_routines=False,
        returns="bool",
    ),
    Kernel("all_finite", "Whether no element is infinite or NaN.", "a:*[n]", in_routines=False, returns="bool"),
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _DECLARED}
"""Every kernel by its name."""
