"""Blocks: the units a model is scheduled in, with their parameters; `slots.py` has the tensors their backward needs.

A model is the chain `embed, attention.0, mlp.0, ..., attention.L-1, mlp.L-1, head`. Only this file knows the layout of
a block's parameters (for checkpoint names, and for the exemption of norms and biases from decay).

A block's parameters lie in one flat tensor, padded so that replicas own equal shards:

    | norm | q_proj | k_proj | ... | padding |      each parameter at a multiple of 64 elements
    |  shard 0   |  shard 1   |  shard 2   |      D shards of equal length

Parameters that a plan freezes (`config/training.py`) lie in a second one, and packed matrices in a third; nothing
writes these, and no replica shards them. A block whose parameters are all frozen has no other.

The mlp of a model with experts has the same place in the chain and the same name; matrices of all its experts are one
parameter each, [experts, outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.quantised import frozen_bytes
from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.adapters import adapter_shapes, is_adapter, is_linear, trains_parameter
from ratrain.ratrain_ir.model.expert_blocks import expert_shapes, mlp_shapes
from ratrain.ratrain_ir.model.parameter_names import parameter_name

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

PARAMETER_ALIGNMENT = 64
"""Alignment, in elements, of parameters within a block's flat tensor. The lengths of shards are multiples of it."""

BLOCK_KINDS = ("embed", "attention", "mlp", "head")


@frozen(eq=False)
class Block:
    """One block of the chain; `layer` is None for `embed` and `head`.

    Make blocks through `block` only: each is one object.
    """

    kind: str
    layer: int | None
    _text: str = field(init=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., Block], tuple[object, ...]]:
        return block, (self.kind, self.layer)

    @_text.default
    def _written(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    def __str__(self) -> str:
        return self._text


def block(kind: str, layer: int | None = None) -> Block:
    """Return the one object of this block; blocks compare with `is`."""
    return _block(kind, layer)


@cache
def _block(kind: str, layer: int | None) -> Block:
    return Block(kind, layer)


def parse_block(text: str) -> Block | None:
    """Return the block that a text names (`embed`, `attention.3`), or None."""
    kind, _, layer = text.partition(".")
    if kind in ("embed", "head"):
        return block(kind) if not layer else None
    if (
        kind in ("attention", "mlp")
        and layer.isascii()
        and layer.isdigit()
        and len(layer) < 10
        and str(int(layer)) == layer
    ):
        return block(kind, int(layer))
    return None


def named_block(name: str) -> Block:
    """Return the block of a name in a program. Raises ValueError if there is none."""
    owner = parse_block(name)
    if owner is None:
        raise ValueError(f"'{name}' is not a block")
    return owner


@cache
def block_chain(model: ModelConfig) -> tuple[Block, ...]:
    """Return all blocks of the model in forward order."""
    layers = [block(kind, layer) for layer in range(model.layers) for kind in ("attention", "mlp")]
    return (block("embed"), *layers, block("head"))


def next_block(model: ModelConfig, previous: Block) -> Block:
    """Return the block after `previous` in forward order; `previous` must not be the head."""
    if previous.kind == "embed":
        return block("attention", 0)
    if previous.kind == "attention":
        return block("mlp", previous.layer)
    assert previous.layer is not None
    return block("attention", previous.layer + 1) if previous.layer + 1 < model.layers else block("head")


def previous_block(later: Block, model: ModelConfig) -> Block:
    """Return the block before `later` in forward order; `later` must not be the embedding."""
    if later.kind == "head":
        return block("mlp", model.layers - 1)
    if later.kind == "mlp":
        return block("attention", later.layer)
    assert later.layer is not None
    return block("mlp", later.layer - 1) if later.layer else block("embed")


def has_experts(model: ModelConfig, block: Block) -> bool:
    """Tell whether a block is an mlp whose router sends each token to some of its experts."""
    return block.kind == "mlp" and block.layer is not None and model.has_experts(block.layer)


class Held(Enum):
    """Tensor of a block that a parameter lies in; the value is the operand of block ops."""

    TRAINED = "w"
    """flat tensor of those that train; their gradients lie alike in `g`"""
    PLAIN = "f"
    """flat tensor of frozen ones"""
    PACKED = "fq"
    """bytes of frozen matrices that are stored in few bits (`config/quantised.py`)"""

    __hash__ = object.__hash__  # members are single objects; the hash of `Enum` is several times slower


@frozen
class Parameter:
    """One parameter of a block: its checkpoint name, shape, offset (elements) in its flat tensor, and use of decay."""

    name: str
    weight: str
    """short name that kernels use"""
    shape: tuple[int, ...]
    offset: int
    decayed: bool
    trains: bool = True
    """False: it lies in the flat tensor of frozen parameters, or among the packed ones"""
    packed: str | None = None
    """format of a packed matrix, one of `FROZEN_FORMATS`; its offset then counts bytes"""

    @property
    def held(self) -> Held:
        """Tensor of its block that it lies in."""
        return Held.TRAINED if self.trains else Held.PLAIN if self.packed is None else Held.PACKED

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what is stored of it: its own, or the bytes of a packed matrix."""
        return self.shape if self.packed is None else (frozen_bytes(self.elements, self.packed),)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _shapes(model: ModelConfig, block: Block) -> list[tuple[str, tuple[int, ...]]]:
    """Return (short name, shape) of a block's parameters in flat order; matrices are [outputs, inputs]."""
    hidden, table = model.hidden_size, ("table", (model.vocab_size, model.hidden_size))
    if block.kind == "embed":
        positions = model.learned_positions
        return [table] if positions is None else [table, ("positions", (positions, hidden))]
    if block.kind == "head":
        return [table, *_norm_shapes(model, "norm", hidden)]
    shapes = _norm_shapes(model, "norm", hidden) if model.has_pre_norm else []
    if block.kind == "attention":
        widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size}
        for name, width in widths.items():
            shapes += _linear_shapes(name, width, hidden, bias=model.qkv_bias)
        shapes += _linear_shapes("o", hidden, model.q_size, bias=model.o_bias)
        for name in ("q", "k") if model.qk_norm != "none" else ():
            shapes.append((f"{name}_norm", (model.head_dim if model.qk_norm == "head" else widths[name],)))
    elif has_experts(model, block):
        shapes += expert_shapes(model)
    else:
        for name, shape in mlp_shapes(model, model.ffn_size):
            shapes += _linear_shapes(name, *shape, bias=model.mlp_bias)
    return shapes + (_norm_shapes(model, "post_norm", hidden) if model.has_post_norm else [])


def _norm_shapes(model: ModelConfig, weight: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
    names = (weight, f"{weight}_bias") if model.has_layer_norm else (weight,)
    return [(name, (width,)) for name in names]


def _linear_shapes(name: str, outputs: int, inputs: int, *, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    matrix: tuple[str, tuple[int, ...]] = (f"{name}_proj", (outputs, inputs))
    return [matrix, (f"{name}_bias", (outputs,))] if bias else [matrix]


@cache
def parameters(model: ModelConfig, block: Block) -> tuple[Parameter, ...]:
    """Return a block's parameters in flat order, each at a multiple of `PARAMETER_ALIGNMENT` elements of its tensor.

    Adapters come last. Frozen parameters count their offsets apart: they have a flat tensor of their own. What trains
    is said by the model (`rank_model`, `trained_model`); of a model as it is read all parameters train.
    """
    training = model.training
    placed: list[Parameter] = []
    ends = dict.fromkeys(Held, 0)
    shapes = _shapes(model, block)
    if training.adapts:
        shapes += adapter_shapes(model, block.kind, block.layer, training, shapes)
    for weight, shape in shapes:
        name = parameter_name(model, block.kind, block.layer, weight)
        trains = trains_parameter(training, name, adapter=is_adapter(weight))
        packed = training.base_format if not trains and is_linear(weight) and len(shape) == 2 else None
        parameter = Parameter(name, weight, shape, 0, len(shape) > 1, trains, packed)
        placed.append(evolve(parameter, offset=ends[parameter.held]))
        size = prod(parameter.stored_shape)
        ends[parameter.held] += -(-size // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
    return tuple(placed)


@cache
def trained_parameters(model: ModelConfig, block: Block) -> tuple[Parameter, ...]:
    """Return the parameters of a block that train, in flat order."""
    return tuple(parameter for parameter in parameters(model, block) if parameter.trains)


@cache
def trained_blocks(model: ModelConfig) -> tuple[Block, ...]:
    """Return the blocks with parameters that train, in forward order."""
    return tuple(owner for owner in block_chain(model) if trained_parameters(model, owner))


@cache
def parameter_counts(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters that train and all of them, adapters included; a tied matrix counts once."""
    named = {each.name: each for owner in block_chain(model) for each in parameters(model, owner)}
    return sum(each.elements for each in named.values() if each.trains), sum(each.elements for each in named.values())


def trained_words(model: ModelConfig) -> str:
    """Return how many parameters train, and their share, in words; empty where all do."""
    trained, all_of_them = parameter_counts(model)
    return "" if trained == all_of_them else f"{trained:,} parameters or {100 * trained / all_of_them:.2g} % train"


def parameters_within(
    model: ModelConfig, block: Block, start: int, elements: int, held: Held = Held.TRAINED
) -> Iterator[tuple[Parameter, int, int]]:
    """Yield (parameter, start, exclusive end) of those in `elements` elements from `start` of a block's flat tensor.

    The range is that of the parameter's elements inside this part, counted from `start`. The tensor is that of the
    parameters that train, or of plain frozen ones.
    """
    for parameter in (each for each in parameters(model, block) if each.held is held):
        low = max(parameter.offset - start, 0)
        high = min(parameter.offset + parameter.elements - start, elements)
        if low < high:
            yield parameter, low, high


@cache
def flat_elements(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Return the elements of a block's flat tensors: a tensor-parallel rank's parameters, padded to D equal shards.

    With tied embeddings that train the flat tensors of `embed` and `head` start with the same table. Both are padded to
    the longer one, so that shards of equal index hold the same rows and can be summed. 0 if nothing of the block
    trains.
    """
    tied = ties_gradients(model, plan) and owner.kind in ("embed", "head")
    model = rank_model(model, plan)
    owners = (block("embed"), block("head")) if tied else (owner,)
    # a group of replicas divides their number, so its larger shards are aligned too
    quantum = PARAMETER_ALIGNMENT * holders(model, plan, owner)
    ends = [last.offset + last.elements for each in owners for last in trained_parameters(model, each)]
    return -(-max(ends, default=0) // quantum) * quantum


def holders(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Return the number of a stage's replicas with the same parameters of a block: all of them, or a share.

    Where neighbouring replicas share out experts, mlps with experts are alike on one in `ep`.
    """
    return plan.replicas // plan.ep if has_experts(model, owner) else plan.replicas


def trains(model: ModelConfig, plan: Plan, owner: Block) -> bool:
    """Tell whether any parameter of a block trains."""
    return not plan.training or flat_elements(model, plan, owner) > 0


@cache
def first_trained(model: ModelConfig, plan: Plan) -> Block:
    """Return the lowest block with a parameter that trains: blocks below it have no backward."""
    return next(owner for owner in block_chain(model) if trains(model, plan, owner))


@cache
def _with_backward(model: ModelConfig, plan: Plan) -> frozenset[Block]:
    chain = block_chain(model)
    return frozenset(chain[chain.index(first_trained(model, plan)) :])


def has_backward(model: ModelConfig, plan: Plan, owner: Block) -> bool:
    """Tell whether a block has a backward: it or a block below it trains."""
    return not plan.training or owner in _with_backward(model, plan)


def passes_gradient_on(model: ModelConfig, plan: Plan, owner: Block) -> bool:
    """Tell whether the backward of a block makes the gradient of its input: a block below it trains."""
    if not plan.training or owner.kind == "embed":
        return owner.kind != "embed"
    return owner is not first_trained(model, plan) and has_backward(model, plan, owner)


@cache
def ties_gradients(model: ModelConfig, plan: Plan) -> bool:
    """Tell whether embedding and head have one table that trains, so that its gradients of both ends are summed."""
    return model.tied_embeddings and parameters(rank_model(model, plan), block("embed"))[0].trains


def tied_table_elements(model: ModelConfig) -> int:
    """Return the elements of the table that `embed` and `head` share at the start of their flat tensors; else 0."""
    table = parameters(model, block("embed"))[0]
    return table.elements if model.tied_embeddings and table.trains else 0
