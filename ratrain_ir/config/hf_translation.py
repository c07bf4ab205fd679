"""What a `config.json` is translated into."""

from __future__ import annotations

from attrs import define, field


@define
class Translation:
    """Fields of a `ModelConfig`, values as the file has them, and the key of the file each field is known by."""

    fields: dict[str, object] = field(factory=dict)
    keys: dict[str, str] = field(factory=dict)
