"""Companion files of a model's weights that take no part in training: its tokenizer and its generation settings.

A checkpoint keeps its run's companions unchanged, and weights are exported with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.hf_keys import PADDING_TOKEN_KEY
from ratrain.ratrain_ir.support.files import is_regular, read_bytes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files of a tokenizer in a model's directory."""
GENERATION_FILE = "generation_config.json"
COMPANION_FILES = (*TOKENIZER_FILES, GENERATION_FILE)

_TOKEN_NUMBERS = ("bos_token_id", "eos_token_id", PADDING_TOKEN_KEY, "decoder_start_token_id")


def files_of_tokenizer(path: str) -> dict[str, bytes]:
    """Read a tokenizer.json and the files that belong to it; return contents by the names in a model's directory.

    Raises RT002 where one of them cannot be read.
    """
    place = Path(path)
    others = TOKENIZER_FILES[1:] if place.name == TOKENIZER_FILE else ()
    return {TOKENIZER_FILE: read_bytes(path, "tokenizer"), **_present(place.parent, others)}


def companions_in(directory: str) -> dict[str, bytes]:
    """Read the companion files of a model's directory, by name; of a tokenizer none unless there is a tokenizer.json.

    Raises RT002 where one of them cannot be read.
    """
    folder = Path(directory)
    tokenizer = files_of_tokenizer(str(folder / TOKENIZER_FILE)) if is_regular(folder / TOKENIZER_FILE) else {}
    return {**tokenizer, **_present(folder, (GENERATION_FILE,))}


def read_companion(folder: Path, name: str) -> bytes:
    """Read one of the companion files. Raises RT002 where it cannot be read."""
    return read_bytes(str(folder / name), "generation config" if name == GENERATION_FILE else "tokenizer")


def _present(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: read_companion(folder, name) for name in names if is_regular(folder / name)}


def replaced_companions(kept: Mapping[str, bytes], given: Mapping[str, bytes]) -> dict[str, bytes]:
    """Merge companion files; a given tokenizer replaces all files of the kept one."""
    if TOKENIZER_FILE in given:
        kept = {name: content for name, content in kept.items() if name not in TOKENIZER_FILES}
    return {**kept, **given}


def generation_config(model: ModelConfig) -> bytes | None:
    """Return a `generation_config.json` with the token numbers of a model's `config.json`; None if it has none."""
    said = {PADDING_TOKEN_KEY: model.padding_token, **model.inert}
    numbers = {key: said[key] for key in _TOKEN_NUMBERS if said.get(key) is not None}
    return json.dumps({"_from_model_config": True, **numbers}, indent=2).encode() + b"\n" if numbers else None


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the files of a tokenizer for `transformers` whose token number b is byte b of the text.

    The package's byte-level models write each byte as a printable character (`bytes_to_unicode` in GPT-2's code);
    without merges each stays a token of its own.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_characters_of_bytes())},
            "merges": [],
        },
    }
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    contents = {TOKENIZER_FILE: tokenizer, "tokenizer_config.json": config}
    return {name: json.dumps(content, indent=1).encode() + b"\n" for name, content in contents.items()}


def is_byte_tokenizer(path: str) -> bool:
    """Return True if a tokenizer.json is the one of `byte_tokenizer_files`. Raises RT002 where it cannot be read."""
    return read_bytes(path, "tokenizer") == byte_tokenizer_files()[TOKENIZER_FILE]


def _characters_of_bytes() -> list[str]:
    """Return a printable character for each byte: its own in Latin-1 if printable, others from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
