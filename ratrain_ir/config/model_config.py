"""Configuration of a model: its sizes, and the make-up of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import asdict, evolve, field, fields, frozen

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.hf_keys import INITIALIZER_RANGE, ROPE_THETA
from ratrain.ratrain_ir.config.training import WHOLE, Training
from ratrain.ratrain_ir.support.json_fields import as_field

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import Value

CONFIG_PREFIX = "config."
"""Prefix of inert `config.json` keys among the fields of a text's header."""
_NO_MATHEMATICS = frozenset(
    {
        "name",
        "family",
        "packed_qkv",
        "initializer_range",
        "padding_token",
        "inert",
        "training",
        "layer_numbers",
        "expert_ranks",
    }
)
"""Fields that do not change a model's results with given weights: its name, and how weights are stored, drawn or
trained."""

SIZES = (
    *("name", "family", "vocab_size", "hidden_size", "layers", "heads"),
    *("kv_heads", "head_dim", "ffn_size", "norm_eps"),
)
"""Fields that every model must give."""
_ALWAYS = (
    *SIZES,
    *("position", "rope_theta", "sliding_window", "qkv_bias", "tied_embeddings"),
    *("normalised_head", "packed_qkv", "initializer_range"),
)
"""Fields that a text's header always has. It has others only if they differ from the family's usual value."""


@frozen(cache_hash=True)
class LayerKind:
    """Properties in which layers of one model may differ: visible tokens, rotation, and the kind of mlp."""

    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    rope_theta: float
    """Base of the rotary embedding; 0.0 without rotation."""
    rope_scaling: str
    """Text of a `RopeScaling`; empty: none."""
    experts: bool = False
    """True if its MLP is a mixture of experts."""


@frozen(cache_hash=True)
class ModelConfig:
    """Decoder-only language model: its sizes, and the make-up of its blocks.

    Defaults are as in LLaMA: pre-norm RMSNorm, gated SiLU MLP, causal attention, no biases. `head_dim * heads` need not
    equal `hidden_size`. With `experts` MLPs are mixtures, in all layers or where `mlp_kinds` says so: a router sends
    each token to some of them.
    """

    name: str
    family: str
    """`model_type` of its `config.json` (one of `FAMILIES`); determines the names of exported weights."""
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves `heads // kv_heads` query heads."""
    head_dim: int
    ffn_size: int
    norm_eps: float
    position: str = "rope"
    """`rope`, `alibi` or `learned`."""
    rope_theta: float = ROPE_THETA
    """Base of the rotary embedding; 0.0 without rotation."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, in all layers or in those that `layer_kinds` marks; None: all
    before it."""
    qkv_bias: bool = False
    """True if the projections to queries, keys and values have biases."""
    tied_embeddings: bool = False
    """True if embedding and head share one matrix."""
    normalised_head: bool = False
    """True if the head's rows are scaled to unit length before use."""
    packed_qkv: bool = False
    """True if checkpoints store query, key and value as one matrix; the mathematics is the same."""
    learned_positions: int | None = None
    """Rows of the table of learned positions, so the longest possible sequence; None without such a table."""
    initializer_range: float = INITIALIZER_RANGE
    """Standard deviation of the initial matrices of a run that is given no weights."""
    inert: Mapping[str, object] = field(factory=dict, eq=False)
    """Keys of its `config.json` that change nothing here (lengths, token numbers, ...); exported unchanged."""
    norm: str = "rms"
    """`rms` (RMSNorm) or `layer` (layer norm with biases)."""
    norm_placement: str = "pre"
    """`pre`: a block norms its input; `post`: it norms its output before adding it to the stream; `both`."""
    norm_unit_offset: bool = False
    """True if norms scale by 1 + weight."""
    parallel_residual: bool = False
    """True if attention and MLP are parallel: both computed from the layer's input."""
    qk_norm: str = "none"
    """Norm of queries and keys before rotation: `none`, of each `head` with shared weights, or of the `whole`
    projection."""
    o_bias: bool = False
    """True if the output projection of attention has a bias."""
    mlp_bias: bool = False
    """True if the linear layers of the MLP have biases."""
    activation: str = "silu"
    """`silu`, `gelu` (exact), `gelu-tanh` or `relu2`."""
    gated_mlp: bool = True
    """True if the MLP is activation(gate) * up, else activation(up)."""
    rotary_dim: int | None = None
    """Number of rotated elements of a head, its first ones; None: all."""
    rope_interleaved: bool = False
    """True if rotated pairs are neighbours, else elements half the rotated width apart."""
    rope_scaling: str = ""
    """Text of a `ratrain_ir.config.rope_scaling.RopeScaling`; empty: none."""
    local_rope_theta: float | None = None
    """Unscaled rotary base of the layers with a window; None: as in other layers."""
    layer_kinds: str = ""
    """One letter per layer, if layers differ: `f` full attention, `w` with the window, `n` full and not rotated."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Cap of attention scores: s becomes cap * tanh(s / cap); None: no cap."""
    logit_softcap: float | None = None
    """Cap of logits, in the same way."""
    embedding_scale: float = 1.0
    """Factor of embedded tokens."""
    residual_scale: float = 1.0
    """Factor of each block's output before it is added to the stream."""
    logit_scale: float = 1.0
    """Factor of logits."""
    experts: int | None = None
    """Experts of each MLP that has some; None: all MLPs are dense."""
    experts_per_token: int | None = None
    """Experts that the router chooses for each token."""
    expert_size: int | None = None
    """Inner width of one expert; None: `ffn_size`."""
    shared_expert_size: int | None = None
    """Inner width of an expert that every token passes through, weighted by a sigmoid gate of its own; None: none."""
    router_normalised: bool = True
    """True if the weights of a token's experts sum to 1 (softmax over the chosen), else softmax over all experts."""
    mlp_kinds: str = ""
    """One letter per layer, if layers differ: `e` a mixture of experts, `d` a dense MLP of width `ffn_size`."""
    padding_token: int | None = None
    """Token whose embedding row gets no gradient from lookups; a negative number counts from the vocabulary's end."""
    training: Training = WHOLE
    """Parameters that train, from a plan: `rank_model` sets it. It is in no text of a model."""
    expert_ranks: int = 1
    """Ranks that share out the experts of every layer, from a plan: `rank_model` sets it. In no text of a model."""
    layer_numbers: tuple[int, ...] = ()
    """Numbers that its layers have in a larger model, which `of_layers` takes them of; empty: their own. In no text."""

    @property
    def padding_row(self) -> int | None:
        """Embedding row that gets no gradient from lookups; None if all do."""
        return None if self.padding_token is None else self.padding_token % self.vocab_size

    @property
    def q_size(self) -> int:
        """Width of the queries of one token: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def has_layer_norm(self) -> bool:
        """True if norms subtract a mean and have biases."""
        return self.norm == "layer"

    @property
    def has_pre_norm(self) -> bool:
        """True if blocks norm their input."""
        return self.norm_placement in ("pre", "both")

    @property
    def has_post_norm(self) -> bool:
        """True if blocks norm their output before adding it to the stream."""
        return self.norm_placement in ("post", "both")

    @property
    def mlp_matrices(self) -> tuple[str, ...]:
        """Names of an MLP's linear layers."""
        return ("gate", "up", "down") if self.gated_mlp else ("up", "down")

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_size or self.ffn_size

    def has_experts(self, layer: int) -> bool:
        """Tell whether the MLP of a layer is a mixture of experts."""
        # A slice in place of an index: a text may name a layer that the model has not, until the verifier refuses it.
        return self.experts is not None and (not self.mlp_kinds or self.mlp_kinds[layer : layer + 1] == "e")

    @property
    def expert_layers(self) -> int:
        """Number of layers whose MLP is a mixture of experts."""
        return 0 if self.experts is None else self.mlp_kinds.count("e") if self.mlp_kinds else self.layers

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the window, the rotation and the kind of MLP of a layer."""
        experts = self.has_experts(layer)
        letter = self.layer_kinds[layer] if self.layer_kinds else "f" if self.sliding_window is None else "w"
        window = self.sliding_window if letter == "w" else None
        if letter == "n" or self.position != "rope":
            return LayerKind(window, 0.0, "", experts)
        if letter == "w" and self.local_rope_theta is not None:
            return LayerKind(window, self.local_rope_theta, "", experts)
        return LayerKind(window, self.rope_theta, self.rope_scaling, experts)

    def first_alike(self, kind: str, layer: int) -> int:
        """Return the first layer whose block of a kind (`attention` or `mlp`) computes as a layer's does.

        It represents all such layers; 0 for a layer that the model has not.
        """
        letters = self.mlp_kinds if kind == "mlp" else self.layer_kinds
        return letters.find(letters[layer : layer + 1])

    def of_layers(self, numbers: tuple[int, ...]) -> ModelConfig:
        """Return the model with some of its layers alone, whose parameters keep their names."""
        kinds, mlps = (
            "".join(letters[number] for number in numbers) if letters else ""
            for letters in (self.layer_kinds, self.mlp_kinds)
        )
        return evolve(self, layers=len(numbers), layer_kinds=kinds, mlp_kinds=mlps, layer_numbers=numbers)

    @property
    def widest_window(self) -> int | None:
        """Tokens that a token sees in the layer that shows most; None: all before it."""
        return None if set(self.layer_kinds) & set("fn") else self.sliding_window

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding block: a row per token and per learned position."""
        return (self.vocab_size + (self.learned_positions or 0)) * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size: weights, and biases if it is a layer norm."""
        return self.hidden_size * (2 if self.has_layer_norm else 1)

    def layer_matrix_elements(self, layer: int) -> int:
        """Return the elements of a layer's matrices that each token is multiplied by.

        They are query, key, value, output, and the MLP's. Of experts count the chosen ones, the router and, if there is
        one, the shared expert with its gate.
        """
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + self._mlp_elements(layer, self.experts_per_token or 0)

    @property
    def matrix_elements(self) -> int:
        """Elements of all layers' matrices that each token is multiplied by."""
        return sum(map(self.layer_matrix_elements, range(self.layers)))

    def _mlp_elements(self, layer: int, experts: int) -> int:
        """Return the elements of the matrices of a layer's MLP, with the given number of its experts if it has some."""
        if self.experts is None or not self.has_experts(layer):
            return len(self.mlp_matrices) * self.hidden_size * self.ffn_size
        shared = 0 if self.shared_expert_size is None else len(self.mlp_matrices) * self.shared_expert_size + 1
        return self.hidden_size * (self.experts + experts * len(self.mlp_matrices) * self.expert_width + shared)

    @property
    def _block_norm_parameters(self) -> int:
        return (self.has_pre_norm + self.has_post_norm) * self.norm_parameters

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block: norms, query, key, value and output, with biases if any."""
        projected = self.q_size + 2 * self.kv_size
        biases = (projected if self.qkv_bias else 0) + (self.hidden_size if self.o_bias else 0)
        normed = {"none": 0, "head": 2 * self.head_dim, "whole": self.q_size + self.kv_size}[self.qk_norm]
        return self._block_norm_parameters + self.hidden_size * (projected + self.q_size) + biases + normed

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer: attention, and an MLP with norms, matrices (of all experts) and biases."""
        biases = (len(self.mlp_matrices) - 1) * self.ffn_size + self.hidden_size if self.mlp_bias else 0
        mlp = self._block_norm_parameters + self._mlp_elements(layer, self.experts or 0) + biases
        return self.attention_parameters + mlp

    @property
    def head_parameters(self) -> int:
        """Parameters that the head block computes with: final norm and output matrix, even if that is tied."""
        return self.norm_parameters + self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model; a tied matrix counts once."""
        total = self.embedding_parameters + sum(map(self.layer_parameters, range(self.layers))) + self.head_parameters
        return total - (self.vocab_size * self.hidden_size if self.tied_embeddings else 0)

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts that routers choose from, in all layers; 0 without."""
        of_one = len(self.mlp_matrices) * self.hidden_size * self.expert_width
        return self.expert_layers * (self.experts or 0) * of_one

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but those of the experts that its routers do not choose."""
        idle = (self.experts or 0) - (self.experts_per_token or 0)
        return self.parameters - (self.expert_parameters * idle // self.experts if self.experts else 0)

    def to_fields(self) -> dict[str, Value]:
        """Return the configuration as flat `field = value`, as in the header of the IR text."""
        values: dict[str, Value] = asdict(self, recurse=False)
        del values["inert"], values["training"], values["layer_numbers"], values["expert_ranks"]
        for name in values.keys() - set(_ALWAYS):
            if values[name] == usual_value(self.family, name):
                del values[name]
        return values | {f"{CONFIG_PREFIX}{key}": as_field(value) for key, value in self.inert.items()}

    def differences(self, other: ModelConfig) -> Iterator[tuple[str, object, object]]:
        """Yield the fields that change results with the same weights: (name, value here, value there)."""
        for name in (attribute.name for attribute in fields(ModelConfig) if attribute.name not in _NO_MATHEMATICS):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield name, mine, theirs


def usual_value(family: str, name: str) -> object:
    """Return the value of a field that nobody sets: the family's, else the default."""
    implied = FAMILY[family].implied if family in FAMILY else {}
    return implied.get(name, getattr(fields(ModelConfig), name).default)
