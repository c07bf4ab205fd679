"""A checkpoint's weights as a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.files import is_there, made_directory, replacing, write_lines
from ratrain.ratrain_ir.frontend.hf_export import hugging_face_config
from ratrain.targets.runtime.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint_series import latest_tokenizer, latest_weights
from ratrain.targets.runtime.weights import is_written_here, write_weights

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_SHARDS = "model.safetensors.index.json"


def export_weights(checkpoint: str, directory: str) -> ModelConfig:
    """Write `model.safetensors`, `config.json` and the tokenizer of the run, if it had one, replacing those of an earlier export; the model.

    Raises `DiagnosticError` RT002 (cannot be read or written), RT091 (the directory holds a model that was not written here) and RT092
    (not a sound checkpoint, or weights would go into one).
    """
    model, source = latest_weights(checkpoint)
    tokenizer = latest_tokenizer(checkpoint)
    _check_place(directory, [_WEIGHTS, _CONFIG, *tokenizer])
    folder = made_directory(directory)
    write_weights(str(folder / _WEIGHTS), model, source)
    config = json.dumps(hugging_face_config(model), indent=2)
    write_lines(str(folder / _CONFIG), [config])
    for name, content in tokenizer.items():
        with replacing(str(folder / name)) as stream:
            stream.write(content)
    return model


def _check_place(directory: str, names: Sequence[str]) -> None:
    """Refuse a directory where files of these names would take the place of a model that was not written here, or of a checkpoint."""
    folder = Path(directory)
    if is_there(folder / MANIFEST_FILE):
        fail(
            "RT092",
            f"'{directory}' is a checkpoint: with weights in it, no run could replace it by its next one",
            help="name another directory",
        )
    link = next((name for name in names if (folder / name).is_symlink()), None)
    if link is not None:
        fail(
            "RT091",
            f"'{folder / link}' is a link: what it leads to is not replaced by exported weights",
            help="name another directory",
        )
    other = next((name for name in (*names, _SHARDS) if is_there(folder / name)), None)
    if other is not None and not is_written_here(str(folder / _WEIGHTS)):
        fail(
            "RT091",
            f"'{directory}' holds a model that 'ratrainc export-weights' did not write ('{other}'): it is not replaced",
            help="name a new or empty directory",
        )
