"""A checkpoint's weights as a Hugging Face model directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ratrain_ir.diagnostics import fail
from ratrain_ir.files import is_there, made_directory, replacing, write_lines
from ratrain_ir.frontend.hf_export import hugging_face_config
from targets.runtime.checkpoint import MANIFEST_FILE
from targets.runtime.checkpoint_series import latest_tokenizer, latest_weights
from targets.runtime.weights import write_weights

if TYPE_CHECKING:
    from ratrain_ir.frontend.model_config import ModelConfig


def export_weights(checkpoint: str, directory: str) -> ModelConfig:
    """Write `model.safetensors`, `config.json` and the tokenizer of the run, if it had one, replacing files of these names; the model.

    Raises `DiagnosticError` RT002 (cannot be read or written) and RT092 (not a sound checkpoint, or weights would go into one).
    """
    model, source = latest_weights(checkpoint)
    tokenizer = latest_tokenizer(checkpoint)
    folder = made_directory(directory)
    if is_there(folder / MANIFEST_FILE):
        fail(
            "RT092",
            f"'{directory}' is a checkpoint: with weights in it, no run could replace it by its next one",
            help="name another directory",
        )
    write_weights(str(folder / "model.safetensors"), model, source)
    config = json.dumps(hugging_face_config(model), indent=2)
    write_lines(str(folder / "config.json"), [config])
    for name, content in tokenizer.items():
        with replacing(str(folder / name)) as stream:
            stream.write(content)
    return model
