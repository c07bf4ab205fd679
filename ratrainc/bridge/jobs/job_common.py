"""Parts that readers of several frameworks share: options of the command, models, and phrases in a file's words."""

from __future__ import annotations

import math
import re
from ast import literal_eval
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import model_of_hub_name
from ratrain.ratrain_ir.support.module_patterns import EXPRESSION, expression_error, expression_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.job import Context, Job, Note, Origin
from ratrain.ratrainc.bridge.settings import as_integer, as_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?")
TYPE_WORDS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""PyTorch's names of types."""
ON_THE_COMMAND_LINE = "the command line"
LISTS_LINEARS = ("axolotl", "llama-factory")
"""Frameworks that list the linear layers of a model by the last parts of their names: axolotl
src/axolotl/loaders/adapter.py, find_all_linear_names; LLaMA-Factory src/llamafactory/model/model_utils/misc.py,
find_all_linear_modules. Others leave "all-linear" to PEFT."""
_OPTIONS = {
    "devices": "--devices",
    "device_bytes": "--memory",
    "seq_len": "--seq-len",
    "micro_batch_size": "--micro-batch-size",
}
"""Options of the command that give a field which the file leaves open."""


def model_of_name(name: str | None) -> ModelConfig | None:
    """Return the model that a hub name stands for; None if the name is not known here."""
    return None if name is None else model_of_hub_name(name)


def put_model(reader: JobReader, asked: Asked, name: str | None, key: str, described: ModelConfig | None) -> None:
    """Set the model and its name: by --model, else as the file describes it, else by its hub name.

    `key` is the setting that names or describes it.
    """
    reader.put("model_name", name, key)
    if asked.model is not None:
        reader.values["model"] = asked.model
        reader.origins["model"] = Origin("--model", ON_THE_COMMAND_LINE)
    else:
        reader.put("model", described if described is not None else model_of_name(name), key)


def note_ratio(reader: JobReader, key: str) -> None:
    """Note the part of the state that DeepSpeed offloads: below 1 the rest stays on the device.

    (deepspeed runtime/zero/offload_config.py, DeepSpeedZeroOffloadOptimizerConfig.ratio)
    """
    ratio = reader.take(key, float)
    if ratio is not None and ratio < 1:
        reader.unknown(key, "the part of the state that stays on the device is not counted")
    else:
        reader.ignore(key, "all of it is offloaded, as is counted")


def dense(
    name: str,
    family: str,
    *,
    vocabulary: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None,
    ffn: int,
    eps: float,
    **more: Any,
) -> ModelConfig:
    """Return a dense model of a family, with the fields that the family fixes; `more` are further fields.

    `head_dim` is the width by the heads unless `more` says it.
    """
    fields = {"head_dim": hidden // heads, **FAMILY[family].implied, **more}
    return ModelConfig(
        name=name,
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        ffn_size=ffn,
        norm_eps=eps,
        **fields,
    )


def take_options(reader: JobReader, asked: Asked) -> None:
    """Set the fields that the file leaves open to what the command line says; report a contradiction."""
    for name, option in _OPTIONS.items():
        given, said = getattr(asked, name), reader.values.get(name)
        if given is None or given == said:
            continue
        if said is None:
            reader.values[name] = given
            reader.origins[name] = Origin(option, ON_THE_COMMAND_LINE)
        else:
            origin = reader.origins.get(name)
            key = "" if origin is None else origin.key
            reader.wrong(key, f"{option} {given} contradicts {key or 'the file'}, which says {said}", code="RT064")


def check_devices(reader: JobReader) -> int | None:
    """Return the data-parallel ranks, None while the devices are not known.

    Report devices that are not a multiple of the tensor, pipeline and context ranks.
    """
    degrees: dict[str, int] = {name: reader.values.get(name, 1) for name in ("tp", "pp", "cp")}
    each = math.prod(degrees.values())
    devices: int | None = reader.values.get("devices")
    if devices is None:
        return None
    if devices < 1 or devices % each:
        product = " * ".join(f"{name} {count}" for name, count in degrees.items() if count > 1)
        text = f"{devices} devices are not a multiple of {product or 1}"
        reader.wrong(reader.origins["devices"].key, text, code="RT064", way_out=f"give --devices {each}, or a multiple")
        return None
    return devices // each


def put_accumulation(reader: JobReader, batch: int | None, key: str, replicas: int | None) -> None:
    """Set the micro-batches of a step and device by the sequences of a step over all; report a remainder.

    Nothing is set while the micro-batch or the replicas are not known.
    """
    size = reader.values.get("micro_batch_size")
    if batch is None or size is None or replicas is None:
        return
    if batch < 1 or batch % (size * replicas):
        text = f"{key} {batch} is not a multiple of micro-batches of {size} * {replicas} data-parallel ranks"
        reader.wrong(key, text, code="RT064", way_out="change one of them, or the number of devices")
    else:
        reader.put("gradient_accumulation", batch // (size * replicas), key)
        reader.put("whole_batch", batch, key)


def ignore_used(reader: JobReader, used: set[str]) -> None:
    """Note settings that exist for others to take their value from, unless the framework reads them too."""
    for name in used - reader.taken:
        reader.ignore(name, "other settings of the file take their value from it")


def refuse_texts(reader: JobReader, title: str, sections: Collection[str]) -> None:
    """Report numbers that a file has as texts, such as YAML's `1e-4`, in sections whose types a framework checks."""
    for name, setting in reader.settings.items():
        checked = name.split(".")[0] in sections
        if checked and isinstance(setting.value, str) and _NUMBER.fullmatch(setting.value):
            text = f"{name} is the text {shown(setting.value)}: {title} expects a number"
            reader.wrong(name, text, way_out=f"write it as a number: {_as_number(setting.value)}")


def _as_number(text: str) -> str:
    """Return a number as every YAML and TOML reads one: with a dot if it has an exponent."""
    if "e" not in text.lower() or "." in text:
        return text
    mantissa, exponent = text.lower().split("e")
    return f"{mantissa}.0e{exponent}"


def one_word(reader: JobReader, key: str, words: tuple[str, ...], default: str) -> tuple[str, bool]:
    """Take a word that must be one of `words`; return it, and true if the file says it.

    Return the default without it. Report another one, and return the default.
    """
    said = reader.take(key, str)
    if said is None:
        return default, False
    if said not in words:
        reader.wrong(key, f"{key} is {shown(said)}: one of {', '.join(words)} is expected")
        return default, False
    return said, True


STRIDE = "heads_k_stride"
"""Heads of keys that ring-flash-attn's gathering form gathers at a time, as axolotl and a job's `sizes` name them."""
EXCHANGES = {"allgather": Context.GATHER, "alltoall": Context.RING}
"""Forms of context ranks by PyTorch's names (torch/distributed/tensor/experimental/_context_parallel/_attention.py
set_rotate_method); it gathers by default."""


def put_context(reader: JobReader, key: str, forms: Mapping[str, Context], usual: str, source: str) -> None:
    """Set the form of context ranks: what the setting `key` says, else the word `usual`.

    With one context rank the setting has no effect, and the form is that of the ranks which a way out proposes.
    """
    if (reader.values.get("cp") or 1) > 1:
        word, says = one_word(reader, key, tuple(forms), usual)
        reader.put_or_assume("context", forms[word], key, source, says=says)
    else:
        said = str(reader.settings[key].value) if reader.has(key) else usual
        reader.values["context"] = forms.get(said, forms[usual])


def in_own_words(job: Job, own: Callable[[str], str]) -> Job:
    """Return the job with the names of settings that its files have; `own` gives a file's name for a reader's."""

    def named(notes: tuple[Note, ...]) -> tuple[Note, ...]:
        return tuple(evolve(each, key=own(each.key)) for each in notes)

    origins = {name: evolve(each, key=own(each.key)) for name, each in job.origins.items()}
    return evolve(job, origins=origins, not_understood=named(job.not_understood), ignored=named(job.ignored))


# adapters


def names_of(reader: JobReader, key: str) -> tuple[str, ...]:
    """Take names of modules from a list, or from a text with commas; report another value.

    A text that is a regular expression with a comma, which its parts are not, is one name.
    """
    reader.taken.add(key)
    said = reader.settings[key].value if reader.has(key) else []
    names = [each.strip() for each in said.split(",")] if isinstance(said, str) else said
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        reader.wrong(key, f"{key} is {shown(said)}: names of modules are expected", way_out=f"{key}: [q_proj, v_proj]")
        return ()
    whole = isinstance(said, str) and expression_error(said) is None
    cut = any(expression_error(each) is not None or each.count("{") != each.count("}") for each in names)
    return (str(said),) if whole and cut else tuple(names)


_EXCLUDED = "linears that get an adapter in some layers and none in others are counted as if they got one in all"


def note_excluded(reader: JobReader, key: str, excluded: Iterable[str]) -> None:
    """Note what is excluded in some layers alone; what is in all of them counts without adapters."""
    if any(expression_of(each) is not None or re.search(r"\.\d+\.", each) for each in excluded):
        reader.ignore(key, _EXCLUDED, less=True)


def excluded_of(reader: JobReader, key: str) -> tuple[str, ...]:
    """Take what gets no adapter: names of modules from a list, or a text, which is one expression for whole names.

    An expression comes after `re:`, as targets of a plan have it.
    (huggingface/peft 0.21.2, peft/tuners/tuners_utils.py, `check_target_module_exists`)
    """
    said = reader.settings[key].value if reader.has(key) else None
    if isinstance(said, str):
        reader.taken.add(key)
        return (f"{EXPRESSION}{said}",) if said else ()
    return names_of(reader, key)


def layers_of(reader: JobReader, key: str) -> tuple[int, ...]:
    """Take numbers of layers, or one; report another value."""
    reader.taken.add(key)
    said = reader.settings[key].value if reader.has(key) else []
    numbers = [as_integer(each) for each in (said if isinstance(said, list) else [said])]
    known = tuple(each for each in numbers if each is not None and each >= 0)
    if len(known) < len(numbers):
        reader.wrong(key, f"{key} is {shown(said)}: numbers of layers are expected", way_out=f"{key}: [0, 1]")
    return known


def numbers_of(reader: JobReader, key: str) -> tuple[tuple[str, float], ...]:
    """Take numbers by ends of names of modules, from a table; report another value."""
    names = [name for name in reader.settings if name.startswith(f"{key}.")]
    reader.taken.update((key, *names))
    found = []
    for name in names:
        pattern, number = name.removeprefix(f"{key}."), as_number(reader.settings[name].value)
        if number is None:
            text = f"{name} is {shown(reader.settings[name].value)}: a number is expected"
            reader.wrong(name, text, way_out=f"{name}: 8")
        elif pattern[:1] in ("'", '"'):  # a name with dots in YAML
            found.append((str(literal_eval(pattern)), number))
        else:
            found.append((pattern, number))
    if reader.has(key):
        said = shown(reader.settings[key].value)
        reader.wrong(key, f"{key} is {said}: a table of numbers is expected", way_out=f"{key}: {{q_proj: 8}}")
    return tuple(found)


# phrases


def yaml_said(*pairs: tuple[str, Any]) -> str:
    """Return settings as a YAML file says them, by dotted names: `optimizer.fused: true and compile: true`."""
    return " and ".join(f"{key}: {word(value)}" for key, value in pairs)


def toml_said(*pairs: tuple[str, Any]) -> str:
    """Return settings as a TOML file says them, by dotted names: `training.seq_len = 2048`."""
    texts = [(key, f'"{value}"' if isinstance(value, str) else word(value)) for key, value in pairs]
    return " and ".join(f"{key} = {text}" for key, text in texts)


def word(value: Any) -> str:
    """Return a value in the words that YAML, TOML and JSON share."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
