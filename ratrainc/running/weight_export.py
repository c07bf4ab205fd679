"""A checkpoint's weights as a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import fields, frozen

from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import parse_config_text
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.files import checked, is_there, made_directory, replacing, write_text
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_biases, latest_companions, latest_weights
from ratrain.targets.runtime.checkpoint.whole_weights import check_beside, whole_weights
from ratrain.targets.runtime.weights.adapter_files import ADAPTER_WEIGHTS, write_adapter
from ratrain.targets.runtime.weights.companions import GENERATION_FILE, TOKENIZER_FILES, generation_config
from ratrain.targets.runtime.weights.weight_files import is_written_here, weight_files, write_weight_files
from ratrain.targets.runtime.weights.weights import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

MOST_SHARD_BYTES = 5 * 10**9
"""Default limit on the tensor bytes of one file: the size that Hugging Face's hub and tools have long accepted."""


@frozen
class Export:
    """A model that was written, and the names of its files."""

    model: ModelConfig
    files: tuple[str, ...]


def export_weights(
    checkpoint: str,
    directory: str,
    *,
    most_shard_bytes: int = MOST_SHARD_BYTES,
    dtype: Dtype = Dtype.F32,
    init: str | None = None,
) -> Export:
    """Write weights, `config.json`, `generation_config.json` and the tokenizer of the run as far as they are known.

    Files of an earlier export are replaced. Above `most_shard_bytes` of tensors the weights are several files and an
    index. They are rounded to `dtype`, f32 or bf16. Adapters are merged into the weights that the run began with,
    `init` (see `whole_weights`). Raises `DiagnosticError` RT002 (cannot be read or written), RT091
    (the directory holds a model that was not written here) or RT092 (not a sound checkpoint, weights would go into
    one, or its routers choose with biases).
    """
    model, source = whole_weights(checkpoint, init)
    _refuse_biases(checkpoint, model)
    companions = latest_companions(checkpoint)
    generation = generation_config(model)
    if generation is not None:
        companions.setdefault(GENERATION_FILE, generation)
    _check_place(directory, [WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE, *companions])
    config = _config_text(model, dtype)
    with _made(directory) as folder:
        written = write_weight_files(folder, model, source, most_shard_bytes, dtype)
        write_text(str(folder / CONFIG_FILE), config)
        _write_companions(folder, companions)
    return Export(model, (*written, CONFIG_FILE, *companions))


def _refuse_biases(checkpoint: str, model: ModelConfig) -> None:
    """Refuse, with RT092, a checkpoint whose routers choose with biases: files of its family have no such tensor."""
    biased = [str(owner) for owner, bias in latest_biases(checkpoint).items() if bias.any()]
    if biased:
        text = f"the routers of '{checkpoint}' choose with biases (bias_update), that of {biased[0]} first"
        note = f"files of {model.family} have no such tensor: a model without it sends tokens to other experts"
        way_out = "'ratrainc generate' and evaluations use them; train with balance_loss instead to export"
        fail("RT092", text, notes=[Note(note)], help=way_out)


def export_adapter(checkpoint: str, directory: str, base: str | None = None) -> Export:
    """Write the adapters of a checkpoint as a folder that PEFT loads; `base` is where their model is, if known.

    The run's tokenizer goes with them. The folder names that place, and the run must have trained beside these
    weights. Raises `DiagnosticError` RT002 (cannot be read or written), RT091 (the directory holds weights that were
    not written here) or RT092: not a sound checkpoint, one without adapters, or one of other weights.
    """
    model, source = latest_weights(checkpoint)
    if not model.training.adapts:
        way_out = "leave --adapter out: the weights are written as a model"
        fail("RT092", f"the checkpoint '{checkpoint}' has no adapters", help=way_out)
    if base is not None:
        check_beside(checkpoint, base)
    tokenizer = {name: text for name, text in latest_companions(checkpoint).items() if name in TOKENIZER_FILES}
    _check_place(directory, [CONFIG_FILE])
    with _made(directory) as folder:
        _check_adapter_place(folder)
        written = write_adapter(folder, model, source, base)
        _write_companions(folder, tokenizer)
        return Export(model, (*written, *tokenizer))


def _write_companions(folder: Path, companions: Mapping[str, bytes]) -> None:
    for name, content in companions.items():
        with replacing(str(folder / name)) as stream:
            stream.write(content)


def _check_adapter_place(folder: Path) -> None:
    """Refuse, with RT091, a folder with adapters that were not written here."""
    path = folder / ADAPTER_WEIGHTS
    if is_there(path) and not is_written_here(str(path)):
        fail("RT091", f"'{path}' was not written by 'ratrainc export-weights'", help="name another directory")


def _config_text(model: ModelConfig, dtype: Dtype) -> str:
    """Return the `config.json` of a model. Raises `DiagnosticError` RT011 if it would not be read back as the model."""

    def read(text: str) -> None:
        back = parse_config_text(text, name=model.name, file=CONFIG_FILE)
        if back != model:
            names = [each.name for each in fields(ModelConfig) if getattr(back, each.name) != getattr(model, each.name)]
            fail("RT060", f"{', '.join(names)} would be read as something else")

    return checked(json.dumps(hugging_face_config(model, dtype), indent=2) + "\n", "model configuration", read)


@contextmanager
def _made(directory: str) -> Iterator[Path]:
    """Make a directory if needed; if an exception leaves the block, remove the new directories that are empty."""
    place = Path(directory)
    new = [each for each in (place, *place.parents) if not is_there(each)]
    try:
        yield made_directory(directory)
    except BaseException:
        with suppress(OSError):  # a directory with files stays, and so do its parents
            for each in new:
                each.rmdir()
        raise


def _check_place(directory: str, names: Sequence[str]) -> None:
    """Refuse a directory with a checkpoint (RT092), or with a model of these names not written here (RT091)."""
    folder = Path(directory)
    if is_there(folder / MANIFEST_FILE):
        fail(
            "RT092",
            f"'{directory}' is a checkpoint: with weights in it, no run could replace it by its next one",
            help="name another directory",
        )
    weights = weight_files(folder)
    link = next((name for name in (*names, *weights) if (folder / name).is_symlink()), None)
    if link is not None:
        fail(
            "RT091",
            f"'{folder / link}' is a link: its target is not replaced by exported weights",
            help="name another directory",
        )
    theirs = [name for name in weights if not is_written_here(str(folder / name))]
    others = theirs if weights else [name for name in names if is_there(folder / name)]
    if others:
        fail(
            "RT091",
            f"'{directory}' holds a model that 'ratrainc export-weights' did not write ('{others[0]}'): it is "
            "not replaced",
            help="name a new or empty directory",
        )
