"""Keys of a plan that say what trains: everything, all but some frozen parameters, or adapters beside a frozen model.

LoRA (Hu et al., 2021) leaves a linear layer's matrix W [out, in] as it is and trains two thin ones beside it, A [rank,
in] and B [out, rank]:

    y = x W^T + s (x A^T) B^T        s = alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, 2023)

B starts at zero, so the first step has the loss of the model without adapters. Only A and B have gradients, master
weights and moments. Defaults of rank and alpha are those of PEFT (huggingface/peft, `LoraConfig`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan_keys import flag, integer, key, number, word
from ratrain.ratrain_ir.config.quantised import FROZEN_FORMATS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import FieldReader

FULL, LORA = "full", "lora"
METHODS = (FULL, LORA)
AS_VIEWS = "view"
"""Value of `base`: frozen matrices are stored as views are."""
ALL_LINEAR = "all-linear"
"""Value of `targets` that names every linear layer but the output head."""
_MAX_RANK, _MAX_ALPHA = 1 << 16, 1e6


def _read_names(reader: FieldReader, name: str, default: Any) -> str:
    """Read names as one text with commas, or as a list of texts; return them with a comma and a space between."""
    said = reader.values.get(name, default)
    if isinstance(said, list) and said and all(isinstance(each, str) for each in said):
        reader.values = {**reader.values, name: ", ".join(said)}
    elif said == default:
        return str(default)
    expected = "names with commas between them"
    return ", ".join(split_names(reader.text(name, _are_names, expected)))


def _are_names(text: str) -> bool:
    return bool(names := split_names(text)) and all(names)


def split_names(text: str) -> tuple[str, ...]:
    """Split names with commas between them; none of an empty text."""
    return tuple(each.strip() for each in text.split(",")) if text.strip() else ()


@frozen
class Training:
    """Parameters of a model that train; by default all of them."""

    method: str = field(
        default=FULL,
        metadata=key(
            "train",
            "`full`: the model's own parameters; `lora`: two thin matrices beside each targeted linear layer, and the "
            "model itself is frozen",
            word(METHODS),
            in_header_if_default=False,
            not_in_file=lambda own: own.method == FULL,
        ),
    )
    rank: int = field(
        default=8,
        metadata=key(
            "train",
            "rows of an adapter's first matrix, columns of its second",
            integer(1, _MAX_RANK),
            in_header_if_default=False,
            not_in_file=lambda own: own.method == FULL,
        ),
    )
    alpha: float = field(
        default=8.0,
        metadata=key(
            "train",
            "adapters are scaled by alpha / rank",
            number(lambda value: 0 < value <= _MAX_ALPHA, f"a number above 0, up to {_MAX_ALPHA:.0f}"),
            in_header_if_default=False,
            not_in_file=lambda own: own.method == FULL,
        ),
    )
    rslora: bool = field(
        default=False,
        metadata=key(
            "train",
            "adapters are scaled by alpha / sqrt(rank) instead",
            flag,
            in_header_if_default=False,
            not_in_file=lambda own: not own.rslora,
        ),
    )
    targets: str = field(
        default=ALL_LINEAR,
        metadata=key(
            "train",
            'linear layers that get an adapter: last parts of their names in the checkpoint, as "q_proj, v_proj", or '
            '"all-linear": all but the output head',
            _read_names,
            in_header_if_default=False,
            not_in_file=lambda own: own.method == FULL,
        ),
    )
    freeze: str = field(
        default="",
        metadata=key(
            "train",
            "parameters that do not train, by name in the checkpoint; `*` stands for any characters: "
            '"model.embed_tokens.*, model.layers.0.*"',
            _read_names,
            in_header_if_default=False,
            not_in_file=lambda own: not own.freeze,
        ),
    )
    base: str = field(
        default=AS_VIEWS,
        metadata=key(
            "train",
            "how frozen matrices of linear layers are stored: `view`, as blocks compute with them, in blocks of 256 "
            "elements with one scale, in 8 or 4 bits each, or in `nf4` of bitsandbytes, double-quantised",
            word((AS_VIEWS, *FROZEN_FORMATS)),
            in_header_if_default=False,
            not_in_file=lambda own: own.base == AS_VIEWS,
        ),
    )

    def __bool__(self) -> bool:
        """Tell whether less than the whole model trains."""
        return self.method == LORA or bool(self.freeze)

    @property
    def adapts(self) -> bool:
        """True if adapters train beside a frozen model."""
        return self.method == LORA

    @property
    def base_format(self) -> str | None:
        """Format of frozen matrices, one of `FROZEN_FORMATS`; None if they are stored as views are."""
        return None if self.base == AS_VIEWS else self.base

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def words(self) -> str:
        """Everything that it says, for a message."""
        stored = "" if self.base == AS_VIEWS else f", frozen in {self.base}"
        if self.adapts:
            factor = f"alpha {self.alpha:g}{', rslora' if self.rslora else ''}"
            return f"adapters of rank {self.rank}, {factor}, on {self.targets}{stored}"
        return f"all but {self.freeze}{stored}" if self.freeze else "everything"

    @property
    def summary(self) -> str:
        """Word or two for a plan's summary, after a space; empty if everything trains."""
        return f" lora rank {self.rank}" if self.adapts else " partly frozen" if self else ""


WHOLE = Training()
"""Training of a whole model."""
