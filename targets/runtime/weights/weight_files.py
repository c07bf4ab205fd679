"""Weights written as Hugging Face files: one safetensors file, or several with an index of their tensors.

Names, packing and files are as `weights.read_weights` and the model classes in `transformers` read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.files import path_errors, replacing, write_lines
from ratrain.targets.runtime.arena.tensor_file import metadata_of, write_tensors
from ratrain.targets.runtime.weights.weights import INDEX_FILE, WEIGHTS_FILE, Stored, stored_layout

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.model.blocks import Parameter
    from ratrain.targets.runtime.arena.tensor_file import Float32

_METADATA = {"format": "pt", "written_by": "ratrain"}
"""Metadata of files written here. PyTorch programs require the first entry; nobody else uses the second."""
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def write_weights(path: str, model: ModelConfig, source: Callable[[str], Float32], dtype: Dtype = Dtype.F32) -> None:
    """Write all parameters of a model as one safetensors file, each asked for once and rounded to f32 or bf16.

    The file appears when it is whole. Raises RT002 where it cannot be written.
    """
    write_layout(path, stored_layout(model), source, dtype)


def write_weight_files(
    folder: Path, model: ModelConfig, source: Callable[[str], Float32], most_bytes: int, dtype: Dtype = Dtype.F32
) -> list[str]:
    """Write all parameters of a model to a directory; return the names of the files, the index included.

    `source` returns the values of the parameter of a name; they are stored as `dtype`. Above `most_bytes` of tensors
    they are several files and their index; a tensor that is larger has a file of its own. Weight files of an earlier
    export are replaced. If this is interrupted, the directory reads as one of the two models, or as none. Raises RT002
    where the files cannot be written.
    """
    layout = stored_layout(model)
    shards = _shards(layout, most_bytes, dtype)
    before, index = weight_files(folder), folder / INDEX_FILE
    if len(shards) == 1:
        written = [WEIGHTS_FILE]
        write_weights(str(folder / WEIGHTS_FILE), model, source, dtype)
        _remove([index])
    else:
        written = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        _remove(
            [index]
        )  # first: it would mix old files with new ones of the same names. Without it, a partial export is no model
        for name, held in zip(written, shards, strict=True):
            write_layout(str(folder / name), held, source, dtype)
        weight_map = {tensor: name for name, held in zip(written, shards, strict=True) for tensor in held}
        total = {
            "total_parameters": model.parameters,
            "total_size": sum(_bytes_of(held, dtype) for held in layout.values()),
        }
        content = {"metadata": total, "weight_map": weight_map}
        write_lines(str(index), [json.dumps(content, indent=2)])
        written = [*written, INDEX_FILE]
    _remove([folder / name for name in before if name not in written])
    return written


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files in a directory, without their index. Raises RT002."""
    with path_errors(f"cannot read the directory '{folder}'"):
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    return sorted(name for name in names if name == WEIGHTS_FILE or _SHARD.fullmatch(name))


def is_written_here(path: str) -> bool:
    """Return True if a weight file was written by this program, so that a new one may replace it."""
    return metadata_of(path) == _METADATA


def write_layout(path: str, layout: Mapping[str, Stored], source: Callable[[str], Float32], dtype: Dtype) -> None:
    """Write the tensors of a layout to one file, each assembled from its parameters. Raises RT002."""

    def tensors() -> Iterator[list[Float32]]:
        parts: tuple[Parameter, ...] = ()
        values: list[Float32] = []
        for held in layout.values():
            if held.parts != parts:  # else the next expert of the same stack, which is asked for once
                parts, values = held.parts, []
                values = [source(part.name) for part in parts]
            yield [held.joined(values)]

    shapes = {name: held.shape for name, held in layout.items()}
    with replacing(path) as stream:
        write_tensors(stream, shapes, tensors(), _METADATA, dtype)


def _bytes_of(held: Stored, dtype: Dtype) -> int:
    return prod(held.shape) * dtype.itemsize


def _shards(layout: Mapping[str, Stored], most_bytes: int, dtype: Dtype) -> list[dict[str, Stored]]:
    """Distribute the tensors over files in order; start a new file where the next would exceed `most_bytes`."""
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, held in layout.items():
        if shards[-1] and size + _bytes_of(held, dtype) > most_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = held
        size += _bytes_of(held, dtype)
    return shards


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with path_errors(f"cannot remove '{path}'"):
            path.unlink(missing_ok=True)
