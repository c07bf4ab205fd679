"""Result of the translation of a `config.json`."""

from __future__ import annotations

from attrs import define, field


@define
class Translation:
    """Fields of a `ModelConfig` with the file's values, and for each field the key of the file that it came from."""

    fields: dict[str, object] = field(factory=dict)
    keys: dict[str, str] = field(factory=dict)
