"""Weights: drawn at random, read from Hugging Face files, and laid out flat as blocks hold them.

A `WeightSource` gives parameters by their Hugging Face names, piece by piece. Files store some of them in another form
than blocks:

- query, key and value as one matrix: `W_pack` of Baichuan, `c_attn` of GPT-2, `query_key_value` of GPT-NeoX (head by
  head);
- linear layers as [inputs, outputs]: GPT-2;
- the matrices of each expert alone, where blocks have one stack of all experts; in GraniteMoE a stack whose matrices
  are an expert's gate rows, then its up rows;
- a tied matrix once.

`stored_layout` alone knows this.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.hf_keys import PADDING_TOKEN_KEY, keys_of
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.model.blocks import Block, Parameter, block_chain, parameters, trained_parameters
from ratrain.ratrain_ir.model.parameter_names import packed_module
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Diagnostics, Severity, fail
from ratrain.ratrain_ir.support.files import is_directory, is_there, read_text
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena import tensor_file
from ratrain.targets.runtime.arena.tensor_file import (
    FLOAT_TYPES,
    Float32,
    StoredTensor,
    cut,
    open_tensors,
)
from ratrain.targets.runtime.weights.weight_buffers import follows_from
from ratrain.targets.runtime.weights.weight_source import WeightSource

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
"""File with all weights in a model's directory."""
INDEX_FILE = "model.safetensors.index.json"
"""File that maps tensors to weight files, if there are several."""
_WEIGHTS_KEY = 1  # keeps the random numbers of the weights apart from those of the data order
_RESIDUAL = ("o_proj", "down_proj")  # matrices that write to the residual stream, two per layer
_SCALED_BY_DEPTH = {"gpt2"}  # families whose `transformers` class draws them narrower in deeper models
_HEAD = "lm_head.weight"
_GPT2_PREFIX = "transformer."
_MOST_SHOWN = 24  # problems named one by one: a wrong model has hundreds


@cache
def named_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Return all parameters by Hugging Face name in forward order; a tied matrix once, as in `embed`."""
    by_name: dict[str, Parameter] = {}
    for block in block_chain(model):
        for parameter in parameters(model, block):
            by_name.setdefault(parameter.name, parameter)
    return by_name


@frozen
class Stored:
    """Form in which a tensor of a weight file holds parameters."""

    parts: tuple[Parameter, ...]
    """parameters whose rows it stacks, in forward order"""
    turned: bool = False
    """True if it holds the transposed stack, [inputs, outputs], as GPT-2's `Conv1D` does"""
    groups: int = 1
    """groups of rows that each part is cut into; the tensor has the first group of every part, then the second ones,
    and so on"""
    expert: int | None = None
    """number of the expert whose matrix it holds, out of a part that stacks all experts' matrices; None: whole parts"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        shape = self.parts[0].shape
        if self.expert is not None:
            return shape[1:]
        axis = max(0, len(shape) - 2)  # of rows; a stack of matrices has an axis of experts before it
        stacked = (*shape[:axis], sum(part.shape[axis] for part in self.parts), *shape[axis + 1 :])
        return stacked[::-1] if self.turned else stacked

    def joined(self, arrays: list[Float32]) -> Float32:
        """Return the tensor that holds these values of its parts."""
        if self.expert is not None:
            own: Float32 = arrays[0][self.expert]
            return own
        if len(arrays) == 1:
            whole = arrays[0]
        else:
            grouped = [
                array.reshape(self.groups, -1, _width(part)) for array, part in zip(arrays, self.parts, strict=True)
            ]
            whole = np.concatenate(grouped, axis=1).reshape(self.shape[::-1] if self.turned else self.shape)
        return whole.T if self.turned else whole

    def pieces(self, tensor: StoredTensor, number: int, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of part `number` from the tensor, at most `PIECE_ELEMENTS` at a time.

        If the tensor is a single expert's matrix, yield only the elements that lie in it.
        """
        if self.expert is not None:
            own = self.expert * tensor.elements
            yield from tensor.pieces(max(start - own, 0), max(min(stop - own, tensor.elements), 0))
            return
        rows = [part.elements // _width(part) for part in self.parts]
        before = sum(rows[:number])
        if self.turned:
            yield from _turned_pieces(tensor, before, start, stop)
            return
        # With parts q, k, v in 2 groups the tensor is q0 k0 v0 q1 k1 v1: a part's groups are runs of `run` elements,
        # `apart` elements from one to the next, the first one `first` elements from the start.
        row = _width(self.parts[number])
        run = rows[number] // self.groups * row
        apart = sum(rows) // self.groups * row
        first = before // self.groups * row
        for group in range(start // run, -(-stop // run)):
            shift = group * (apart - run) + first
            yield from tensor.pieces(max(start, group * run) + shift, min(stop, (group + 1) * run) + shift)


def _width(part: Parameter) -> int:
    """Return the elements of one row of a parameter: its inputs, or 1 if it is a vector."""
    return part.shape[-1] if len(part.shape) > 1 else 1


def _turned_pieces(tensor: StoredTensor, before: int, start: int, stop: int) -> Iterator[Float32]:
    """Yield elements [start, stop) of a part that is stored transposed, in columns from `before` on."""
    inputs, outputs = tensor.shape
    # A row of the part is a column of the tensor. Its columns are gathered from all rows of the file, some rows at a
    # time.
    together = max(1, tensor_file.PIECE_ELEMENTS // outputs)
    for low, high in cut(start // inputs, -(-stop // inputs), max(1, tensor_file.PIECE_ELEMENTS // inputs)):
        values = np.empty((high - low, inputs), np.float32)
        for first, last in cut(0, inputs, together):
            rows = tensor.values(first * outputs, last * outputs).reshape(-1, outputs)
            values[:, first:last] = rows[:, before + low : before + high].T
        yield values.reshape(-1)[max(start - low * inputs, 0) : stop - low * inputs]


_PACKED_BY_HEAD = ("gpt_neox", "internlm2")
"""Families that store query, key and value together for each key-value head in turn."""

_STACKED = ("granitemoe",)
"""Families whose files have stacks of all experts; files of other families have a tensor per expert."""


def _stored_name(model: ModelConfig, parameter: Parameter) -> str:
    """Return the name of the tensor that holds a parameter."""
    layer, of, kind = parameter.name.rpartition(".")
    module, lora, matrix = layer.partition(".lora_")
    packed = packed_module(model, module)
    return parameter.name if packed is None else f"{packed}{lora}{matrix}{of}{kind}"


@cache
def stored_layout(model: ModelConfig) -> dict[str, Stored]:
    """Return the tensors of a weight file by name, in forward order."""
    return layout_of(model, named_parameters(model).values())


def layout_of(model: ModelConfig, parameters: Iterable[Parameter]) -> dict[str, Stored]:
    """Return the tensors that hold these parameters in files of a model's family, by name."""
    parts: dict[str, tuple[Parameter, ...]] = {}
    for parameter in parameters:
        stored = _stored_name(model, parameter)
        parts[stored] = (*parts.get(stored, ()), parameter)
    layout: dict[str, Stored] = {}
    for name, those in parts.items():
        if those[0].weight.endswith("_experts") and model.family not in _STACKED:
            before, after = name.split(".experts.")
            for expert in range(those[0].shape[0]):
                layout[f"{before}.experts.{expert}.{after}"] = Stored(those, expert=expert)
            continue
        groups = 1
        if len(those) > 1:
            stack = len(those[0].shape) > 2
            groups = those[0].shape[0] if stack else model.kv_heads if model.family in _PACKED_BY_HEAD else 1
        layout[name] = Stored(those, model.family == "gpt2" and those[0].weight.endswith("_proj"), groups)
    return layout


def named_stream(seed: int, name: str) -> np.random.Generator:
    """Return the random numbers of a parameter: they depend neither on the order of parameters nor on who draws."""
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u4")
    seeds = np.random.SeedSequence(seed, spawn_key=(_WEIGHTS_KEY, *(int(word) for word in words)))
    return np.random.Generator(np.random.PCG64(seeds))


def random_weights(model: ModelConfig, seed: int) -> WeightSource:
    """Return initial weights, distributed as the family's class in `transformers` draws them.

    Matrices are normal with standard deviation `initializer_range`, norms 1, biases and the padding token's row 0. In
    GPT-2 the matrices that write to the residual stream have that deviation / sqrt(2 * layers), so that its variance
    does not grow with depth (its paper, section 2.3). Experts are drawn as other matrices are, those of all experts as
    one parameter. A parameter depends on `seed` and its name only, not on the plan.
    """
    return RandomWeights(named_parameters(model), model, seed)


@frozen(eq=False)
class RandomWeights(WeightSource):
    """Weights drawn at random; a parameter's values are one stream of numbers, whichever part is asked for."""

    model: ModelConfig
    seed: int

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        parameter = self.parameters[name]
        constant = self._constant(parameter)
        if constant is not None:
            for low, high in cut(start, stop):
                yield np.full(high - low, constant, np.float32)
            return
        generator = named_stream(self.seed, name)
        for low, high in cut(0, start):  # draw and drop: a normal number takes a varying count of raw words, so no jump
            generator.standard_normal(high - low, np.float32)
        deviation = np.float32(self._deviation(parameter))
        for low, high in cut(start, stop):
            values = generator.standard_normal(high - low, np.float32)
            values *= deviation
            first, last = (min(max(low, end), high) - low for end in self._zeros(parameter))
            values[first:last] = 0
            yield values

    def _zeros(self, parameter: Parameter) -> tuple[int, int]:
        """Return the range [first, stop) of a parameter's flat values that are zero while the others are drawn.

        It is the padding token's row of the embedding; empty for other parameters, or without such a token.
        """
        row, width = self.model.padding_row, parameter.shape[-1]
        if row is None or parameter is not next(iter(self.parameters.values())):  # the embedding is first
            return 0, 0
        return row * width, (row + 1) * width

    def _constant(self, parameter: Parameter) -> float | None:
        """Return the value of all elements of a parameter that is not drawn; None if it is drawn."""
        if parameter.weight.endswith("norm"):
            return 0.0 if self.model.norm_unit_offset else 1.0
        return 0.0 if parameter.weight.endswith("_bias") else None

    def _deviation(self, parameter: Parameter) -> float:
        deviation = self.model.initializer_range
        if parameter.weight in _RESIDUAL and self.model.family in _SCALED_BY_DEPTH:
            return deviation / math.sqrt(2 * self.model.layers)
        return deviation


def read_weights(path: str, model: ModelConfig) -> WeightSource:
    """Open the weights in a .safetensors file, or in a directory with one or with an index of several (f32, f16, bf16).

    Names, shapes and types are checked at once, values when they are read. Raises RT002 (cannot be read) and RT091: not
    sound safetensors files, tensors missing, unexpected, of another shape or type, tied matrices that differ, values
    that are not finite (by the source).
    """
    stored = _named_as_exported(model, _open_weights(path))
    _check_stored(path, model, stored)
    return weights_of(path, named_parameters(model), stored_layout(model), stored)


def weights_of(
    path: str,
    parameters: Mapping[str, Parameter],
    layout: Mapping[str, Stored],
    stored: Mapping[str, StoredTensor],
) -> WeightSource:
    """Return the parameters that the open tensors of a file hold in a layout, which must fit."""
    places: dict[str, list[tuple[Stored, StoredTensor, int]]] = {}
    for name, held in layout.items():
        for number, part in enumerate(held.parts):
            places.setdefault(part.name, []).append((held, stored[name], number))
    return _FileWeights(parameters, path, places)


@frozen(eq=False)
class _FileWeights(WeightSource):
    """Weights of files."""

    path: str
    places: Mapping[str, Sequence[tuple[Stored, StoredTensor, int]]]
    """by parameter, for each tensor that holds values of it, in their order: the tensor's form, the tensor, and the
    number of the parameter among its parts"""

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values. Raises RT091 where some are not finite."""
        for held, tensor, number in self.places[name]:
            for values in held.pieces(tensor, number, start, stop):
                if not np.isfinite(values).all():
                    fail("RT091", f"'{self.path}': the tensor of {shown(name)} holds values that are not finite")
                yield values


def check_weights_place(path: str) -> None:
    """Check that a path names weights that can be opened, before anything is derived from what stands beside them.

    Raises RT002 (cannot be read) and RT091 (no weights, no sound files), as `read_weights` does.
    """
    try:
        Path(path).stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fail("RT002", f"cannot read the weights '{path}': {reason}", help=_KINDS_OF_WEIGHTS)
    _open_weights(path)


def model_directory(path: str) -> str | None:
    """Return the Hugging Face model directory of weights: the path, or the parent of `model.safetensors`; else None.

    Raises RT002 where that cannot be told.
    """
    if is_directory(path):
        return path
    place = Path(path)
    return str(place.parent) if place.name == WEIGHTS_FILE else None


def check_weights_config(path: str, model: ModelConfig) -> tuple[Mapping[str, object], list[Diagnostic]]:
    """Compare the `config.json` next to weights with the model that will use them; return its inert keys and warnings.

    Shapes alone do not tell: a model of another rotary base, window, norm epsilon or number of heads takes the same
    tensors and computes something else. A warning says that a directory has no such file, or that its padding token
    differs. A weight file of another name has no known directory, so nothing is compared. Raises RT091 for every field
    that differs, and RT060, RT061 and RT062 where the file describes no supported model.
    """
    directory = model_directory(path)
    if directory is None:
        return {}, []
    config_file = Path(directory) / CONFIG_FILE
    if not is_there(config_file):
        if directory != path:
            return {}, []
        text = (
            f"'{path}' has no {CONFIG_FILE}: rotary base, window, norm epsilon and heads of these weights "
            "are taken to be the program's"
        )
        return {}, [Diagnostic("RT091", text, severity=Severity.WARNING)]
    config = load_model(str(config_file))
    report = Diagnostics()
    for name, have, want in config.differences(model):
        key = keys_of(model.family).renamed.get(name, (name,))[0]
        report.error(
            "RT091",
            f"'{config_file}': these weights are of a model with {key} = {shown(have)}, the program's has "
            f"{shown(want)}",
            help=f"compile the program with --model {directory}",
        )
    report.check()
    return config.inert, other_padding(f"'{config_file}'", config, model, "RT091")


def other_padding(what: str, saved: ModelConfig, model: ModelConfig, code: str) -> list[Diagnostic]:
    """Return a warning if the saved model has another padding token, whose embedding row gets no gradient."""
    if saved.padding_row == model.padding_row:
        return []
    have, want = (shown(each.padding_token) for each in (saved, model))
    text = (
        f"{what} has {PADDING_TOKEN_KEY} = {have}, this program {want}: the row of that token gets no "
        "gradient from its lookups"
    )
    return [Diagnostic(code, text, severity=Severity.WARNING)]


def block_elements(model: ModelConfig, block: Block) -> int:
    """Return the elements of a block's flat tensor up to its last parameter's end: no padding, same for any plan.

    Frozen parameters are not in that tensor; 0 if nothing of the block trains.
    """
    return max((each.offset + each.elements for each in trained_parameters(model, block)), default=0)


_KINDS_OF_WEIGHTS = f"weights are a .safetensors file, or a folder with {WEIGHTS_FILE} or {INDEX_FILE}"


def _open_weights(path: str) -> dict[str, StoredTensor]:
    """Open the tensors of a file or directory, unchecked. Raises `DiagnosticError` RT091 if there are none."""
    folder = Path(path)
    if not is_directory(path):
        return open_tensors(path, "RT091")
    if is_there(folder / WEIGHTS_FILE):
        return open_tensors(str(folder / WEIGHTS_FILE), "RT091")
    if not is_there(folder / INDEX_FILE):
        fail(
            "RT091",
            f"the directory '{path}' holds no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            help=f"{_KINDS_OF_WEIGHTS}; PyTorch pickles (*.bin) have to be converted to it first",
        )
    return _open_shards(folder)


def _named_as_exported(model: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename tensors to the whole model's names; published GPT-2 files name those of the model without head."""
    if model.family != "gpt2" or any(name.startswith(_GPT2_PREFIX) for name in stored):
        return stored
    return {name if name == _HEAD else f"{_GPT2_PREFIX}{name}": tensor for name, tensor in stored.items()}


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    """Open all files that an index names; index and files must agree on the place of each tensor."""
    weight_map = _read_index(str(folder / INDEX_FILE))
    report = Diagnostics()
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors = open_tensors(str(folder / file), "RT091")
        listed = {name for name, where in weight_map.items() if where == file}
        for name in sorted(listed - tensors.keys()):
            report.error("RT091", f"'{folder / file}' lacks the tensor {shown(name)}, which the index places there")
        for name in sorted(tensors.keys() - listed):
            report.error(
                "RT091", f"'{folder / file}' has the tensor {shown(name)}, which the index does not place there"
            )
        stored.update((name, tensor) for name, tensor in tensors.items() if name in listed)
    _check_some(report)
    return stored


def _read_index(path: str) -> dict[str, str]:
    """Return the `weight_map` of an index: tensor name -> name of a file in the same directory.

    Raises `DiagnosticError` RT091 if the file is no such index, or names files elsewhere.
    """
    try:
        index = json.loads(read_text(path, "index of the weights"))
    except (ValueError, RecursionError):
        fail("RT091", f"'{path}' is no JSON")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        fail("RT091", f"'{path}' is no index of safetensors files: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in {"", ".."} or "\0" in file:
            fail("RT091", f"'{path}': the file of {shown(name)} is {shown(file)}, not a file of this directory")
    return weight_map


def _check_stored(path: str, model: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Check that every tensor of the model is there, in its shape and a readable type, and no other."""
    report = Diagnostics()
    layout = stored_layout(model)
    embedding = next(iter(named_parameters(model)))  # first in forward order
    for name, held in layout.items():
        shape = held.shape
        if name not in stored:
            help_text = _missing_help(name, embedding, stored)
            report.error("RT091", f"'{path}' lacks {shown(name)}, shape {list(shape)}", help=help_text)
        elif stored[name].shape != shape:
            have = shown(list(stored[name].shape))
            report.error("RT091", f"'{path}': {shown(name)} has shape {have}, but the model's is {list(shape)}")
        elif stored[name].dtype not in FLOAT_TYPES:
            types = ", ".join(FLOAT_TYPES)
            report.error(
                "RT091", f"'{path}': {shown(name)} is of type {stored[name].dtype}; weights are one of {types}"
            )
    for name, tensor in stored.items():
        if name in layout or follows_from(model, name) or (name == _HEAD and model.tied_embeddings):
            continue
        shape_text = shown(list(tensor.shape))
        report.error("RT091", f"'{path}' has {shown(name)}, shape {shape_text}, which is no parameter of {model.name}")
    _check_some(report)
    if model.tied_embeddings and _HEAD in stored:
        _check_tied(path, embedding, stored[embedding], stored[_HEAD])


def _missing_help(name: str, embedding: str, stored: Mapping[str, StoredTensor]) -> str | None:
    """Return advice for a missing tensor that suggests another kind of model, else None."""
    if name == _HEAD and embedding in stored:
        return "if embedding and head share one matrix, the model's config.json says tie_word_embeddings = true"
    return None


def _check_tied(path: str, name: str, embedding: StoredTensor, head: StoredTensor) -> None:
    """Refuse, with RT091, a head that is stored although it is tied, and differs from the embedding."""
    same = head.dtype in FLOAT_TYPES and head.shape == embedding.shape
    if not (same and all(_are_equal(embedding, head, low, high) for low, high in cut(0, head.elements))):
        fail(
            "RT091",
            f"'{path}': {_HEAD} differs from {name}, but the model has tied embeddings",
            help="these weights are of a model whose config.json says tie_word_embeddings = false",
        )


def _are_equal(one: StoredTensor, other: StoredTensor, start: int, stop: int) -> bool:
    return np.array_equal(one.values(start, stop), other.values(start, stop), equal_nan=True)


def _check_some(report: Diagnostics) -> None:
    """Raise the problems reported, cut to a number that a person reads."""
    more = len(report.items) - _MOST_SHOWN
    if more > 0:
        del report.items[_MOST_SHOWN:]
        report.error("RT091", f"{more} more tensors do not fit", help="are these the weights of this model?")
    report.check()
