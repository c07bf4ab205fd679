"""Adapters as PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`, read and written.

    model.layers.0.self_attn.q_proj.lora_A.weight     here, and in checkpoints
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     in PEFT's files

A layer that a family's files pack has one adapter there, and one A here; its B is cut into the parts here:

    transformer.h.0.attn.c_attn.lora_A.weight, ....attn.q_proj.lora_B.weight, ....attn.k_proj.lora_B.weight, ...
    base_model.model.transformer.h.0.attn.c_attn.lora_A.weight, ....attn.c_attn.lora_B.weight

Both matrices are stored as those of a plain linear layer, also beside GPT-2's `Conv1D`, whose own matrix is transposed.

Adapters of stacks of experts are those of PEFT's target parameters (huggingface/peft 0.21.2, `ParamWrapper`): beside
`gate_up_proj` and `down_proj` of [experts, outputs, inputs], with E experts,

    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight [E rank, in], ....lora_B.weight [out, rank E]
    base_model.model.model.layers.0.mlp.experts.lora_A.weight [E rank, in], ....lora_B.weight [out, rank E]

Rows of A are those of expert 0, then 1, ...; columns of B count experts first. The matrix of a router is such a
parameter too, `mlp.gate.weight`, and has the adapter of a linear layer.

Names and keys are those of huggingface/peft (`get_peft_model_state_dict`, `LoraConfig`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.adapters import FIRST, SECOND, is_stack
from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.model.parameter_names import head_module, is_router_module
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena.tensor_file import FLOAT_TYPES, StoredTensor, cut, open_tensors
from ratrain.targets.runtime.weights.adapter_config import config_of, peft_path, read_config, ties_saved
from ratrain.targets.runtime.weights.weight_files import write_layout
from ratrain.targets.runtime.weights.weights import Stored, layout_of, named_parameters, weights_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.model.blocks import Parameter
    from ratrain.targets.runtime.arena.tensor_file import Float32
    from ratrain.targets.runtime.weights.weight_source import WeightSource

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOST_SHOWN = 8


def adapter_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of a model's adapters, and of modules that train whole, by name, in forward order."""
    return {name: each for name, each in named_parameters(model).items() if each.trains}


@frozen
class _StoredStack(Stored):
    """Form in which a tensor holds A or B of all experts: [experts * rank, in], or [out, rank * experts]."""

    @property
    def target(self) -> str:
        """Last part of the name of the stack that it stands beside, one of PEFT's target parameters."""
        return "down_proj" if self.parts[0].weight.startswith("down_") else "gate_up_proj"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        experts, rows, columns = self.parts[0].shape
        if self.parts[0].weight.endswith(FIRST):
            return experts * rows, columns
        return sum(part.shape[1] for part in self.parts), columns * experts

    def joined(self, arrays: list[Float32]) -> Float32:
        """Return the tensor that holds these values of its parts."""
        if self.parts[0].weight.endswith(SECOND):
            arrays = [array.transpose(1, 2, 0) for array in arrays]
        return np.concatenate(arrays).reshape(self.shape)

    def pieces(self, tensor: StoredTensor, number: int, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of part `number` from the tensor, at most `PIECE_ELEMENTS` at a time.

        Elements of an expert's B lie apart in the file, so the rows of B of all experts are read for any of them.
        """
        part = self.parts[number]
        if part.weight.endswith(FIRST):
            yield from tensor.pieces(start, stop)
            return
        experts, rows, rank = part.shape
        first = sum(each.elements for each in self.parts[:number])
        values = tensor.values(first, first + part.elements).reshape(rows, rank, experts)
        flat = values.transpose(2, 0, 1).reshape(-1)
        for low, high in cut(start, stop):
            yield flat[low:high].copy()


def adapter_layout(model: ModelConfig) -> dict[str, Stored]:
    """Return the tensors of a model's adapters by name; the B of a packed layer stacks B of its parts, as W does."""
    plain: list[Parameter] = []
    stacks: list[Parameter] = []
    for each in adapter_parameters(model).values():
        (stacks if is_stack(each.weight.rpartition("_lora_")[0]) else plain).append(each)
    layout = layout_of(model, plain)
    for (module, matrix), found in groupby(sorted(stacks, key=_experts_of), _experts_of):
        both = list(found)
        down = [each for each in both if each.weight.startswith("down_")]
        others = [each for each in both if each not in down]
        for those, inner in ((others, bool(down)), (down, False)):
            if those:  # PEFT wraps gate_up_proj first, and what it has made then for down_proj
                layout[f"{module}{'.base_layer' * inner}.lora_{matrix}"] = _StoredStack(tuple(those))
    return layout


def _experts_of(adapter: Parameter) -> tuple[str, str]:
    """Return the name of the experts that a matrix stands beside, and its own with what follows: `A.weight`."""
    stack, _, matrix = adapter.name.partition(".lora_")
    return stack.rpartition(".")[0], matrix


def read_adapter(folder: str, model: ModelConfig) -> WeightSource:
    """Open the adapters of a PEFT folder, which must be those that `model` trains.

    Raises RT002 (cannot be read) and RT091: no adapters of LoRA, another rank or scale, features that are not built,
    tensors missing, unexpected or of another shape.
    """
    read_config(str(Path(folder) / ADAPTER_CONFIG), model)
    path = str(Path(folder) / ADAPTER_WEIGHTS)
    stored = {name.removeprefix(_PREFIX): tensor for name, tensor in open_tensors(path, "RT091").items()}
    wanted = adapter_layout(model)
    _drop_tied_copy(path, model, stored)
    report = Diagnostics()
    help_text = "the plan's targets and rank must be those that the adapters were trained with"
    for name in [*(wanted.keys() - stored.keys()), *(stored.keys() - wanted.keys())][:_MOST_SHOWN]:
        text = "has no" if name in wanted else "has a tensor that the program has not:"
        report.error("RT091", f"'{path}' {text} {shown(name)}", help=help_text)
    for name in wanted.keys() & stored.keys():
        have, want = stored[name], wanted[name].shape
        if have.shape != want or have.dtype not in FLOAT_TYPES:
            text = f"'{path}': {shown(name)} is {have.dtype} {list(have.shape)}, the program's adapter {list(want)}"
            report.error("RT091", text, help=help_text)
    report.check()
    return weights_of(path, adapter_parameters(model), wanted, stored)


def _drop_tied_copy(path: str, model: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    """Drop the second copy that PEFT writes of a tied table; refuse one with other values, with RT091."""
    head, table = f"{head_module(model)}.weight", parameters(model, block("embed"))[0]
    if not ties_saved(model) or head not in stored or table.name not in stored:
        return
    one, other = stored[table.name], stored.pop(head)
    same = one.shape == other.shape == table.shape and all(
        np.array_equal(a, b)
        for a, b in zip(one.pieces(0, table.elements), other.pieces(0, table.elements), strict=True)
    )
    if not same:
        text = f"'{path}': {table.name} and {head} differ, which are one table in {model.name}"
        fail("RT091", text, help="train them with ensure_weight_tying = True in PEFT")


def write_adapter(
    folder: Path, model: ModelConfig, source: Callable[[str], Float32], base: str | None
) -> tuple[str, ...]:
    """Write the adapters of a source as a PEFT folder; return the names of the files.

    `base` is the place of the model that they belong to, if it is known. Raises RT002 where they cannot be written.
    """
    layout = {f"{_PREFIX}{name}": held for name, held in adapter_layout(model).items()}
    if ties_saved(model):  # PEFT writes the table under both names
        layout[f"{_PREFIX}{head_module(model)}.weight"] = layout[
            f"{_PREFIX}{parameters(model, block('embed'))[0].name}"
        ]
    write_layout(str(folder / ADAPTER_WEIGHTS), layout, source, Dtype.F32)
    write_text(str(folder / ADAPTER_CONFIG), json.dumps(_config(model, base), indent=2) + "\n")
    return ADAPTER_WEIGHTS, ADAPTER_CONFIG


def _config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Return PEFT's configuration of a model's adapters."""
    modules: set[str] = set()
    stacks: set[str] = set()
    for name, held in adapter_layout(model).items():
        module = name.partition(".lora_")[0]
        if module == name:
            continue
        if isinstance(held, _StoredStack):
            stacks.add(f"{module.removesuffix('.base_layer')}.{held.target}")
        elif is_router_module(module):
            stacks.add(peft_path(module))
        else:
            modules.add(module)
    return config_of(model, base, sorted(modules), sorted(stacks))
