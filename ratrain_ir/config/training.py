"""Keys of a plan that say what trains: everything, all but some frozen parameters, or adapters beside a frozen model.

LoRA (Hu et al., 2021) leaves a linear layer's matrix W [out, in] as it is and trains two thin ones beside it, A [rank,
in] and B [out, rank]:

    y = x W^T + s (x A^T) B^T        s = alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, 2023)

B starts at zero, so the first step has the loss of the model without adapters. Only A and B have gradients, master
weights and moments. Defaults of rank and alpha are those of PEFT (huggingface/peft, `LoraConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.fields import as_float
from ratrain.ratrain_ir.config.plan_keys import flag, integer, key, number, word
from ratrain.ratrain_ir.config.quantised import FROZEN_FORMATS
from ratrain.ratrain_ir.support.module_patterns import EXPRESSION, ModuleNumbers, expression_error, expression_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.config.fields import FieldReader

FULL, LORA = "full", "lora"
METHODS = (FULL, LORA)
ADAPTER_KEYS = ("rank", "alpha", "rslora", "targets", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Keys that change nothing without adapters."""
AS_VIEWS = "view"
"""Value of `base`: frozen matrices are stored as views are."""
ALL_LINEAR = "all-linear"
"""Value of `targets` that names every linear layer but the output head."""
ALL_WITH_EXPERTS: Mapping[str, str] = dict.fromkeys(
    ("mixtral", "qwen3_moe", "olmoe"),
    "q_proj, k_proj, v_proj, o_proj, gate, experts.gate_up_proj, experts.down_proj",
)
"""Targets that "all-linear" stands for in families whose routers and experts were linear layers once.

Their `gate_up_proj` has twice the rank and alpha, as one adapter for what were two layers (huggingface/peft 0.21.2 with
transformers 5: peft/utils/transformers_weight_conversion.py, `_convert_peft_config_moe`). In Qwen2-MoE and GraniteMoE
routers and experts are parameters there, which "all-linear" does not name."""
_DOUBLED = "experts.gate_up_proj"
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


def _read_targets(reader: FieldReader, name: str, default: Any) -> str:
    """Read names, or a regular expression after `re:`."""
    said = reader.values.get(name, default)
    expression = expression_of(said) if isinstance(said, str) else None
    if expression is None:
        return _read_names(reader, name, default)
    expected = f"a regular expression after {EXPRESSION}, as Python's re reads it ({expression_error(expression)}),"
    return reader.text(name, lambda _: bool(expression) and expression_error(expression) is None, expected)


def _numbers_by_module(accept: Callable[[float], bool], expected: str) -> Any:
    """Return a reading of `ModuleNumbers` from a text or a table, or of None if absent; `accept` approves numbers."""

    def read(reader: FieldReader, name: str, default: Any) -> ModuleNumbers | None:
        said = reader.values.get(name, default)
        if said is None:
            return None
        if isinstance(said, Mapping):
            read = [(str(pattern), as_float(value)) for pattern, value in said.items()]
            known = [(pattern, value) for pattern, value in read if value is not None]
            numbers = ModuleNumbers.of_entries(known, accept) if len(known) == len(read) else None
            reader.values = {**reader.values, name: said if numbers is None else str(numbers)}
        text = reader.text(name, lambda text: ModuleNumbers.parse(text, accept) is not None, expected)
        return ModuleNumbers.parse(text, accept)

    return read


def _are_names(text: str) -> bool:
    return bool(names := split_names(text)) and all(names)


def split_names(text: str) -> tuple[str, ...]:
    """Split names with commas between them; none of an empty text."""
    return tuple(each.strip() for each in text.split(",")) if text.strip() else ()


def _spaced(text: str) -> str:
    """Return names as a plan's text has them, a comma and a space between; an expression unchanged."""
    return text if expression_of(text) is not None else ", ".join(split_names(text))


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
        converter=_spaced,
        metadata=key(
            "train",
            'linear layers that get an adapter: last parts of their names in the checkpoint, as "q_proj, v_proj", or '
            '"all-linear": all but the output head; or a regular expression of whole names, as PEFT matches it, which '
            "can choose layers too (`layers_to_transform` of PEFT): 're:.*\\.[01]\\.self_attn\\.(q|v)_proj'",
            _read_targets,
            in_header_if_default=False,
            not_in_file=lambda own: own.method == FULL,
        ),
    )
    rank_pattern: ModuleNumbers | None = field(
        default=None,
        metadata=key(
            "train",
            "ranks of layers that have others than `rank`, by ends of their names, which may be regular expressions: "
            '"q_proj 4, mlp.down_proj 32", or a table; the first that matches counts, as in PEFT',
            _numbers_by_module(
                lambda value: value == int(value) and 1 <= value <= _MAX_RANK,
                f"names and ranks up to {_MAX_RANK}, like 'q_proj 4, mlp.down_proj 32',",
            ),
            text=str,
            in_header_if_default=False,
        ),
    )
    alpha_pattern: ModuleNumbers | None = field(
        default=None,
        metadata=key(
            "train",
            "alphas of layers that have others than `alpha`, as `rank_pattern` has ranks; without an entry here, "
            "`alpha` is divided by the rank that the layer has",
            _numbers_by_module(
                lambda value: 0 < value <= _MAX_ALPHA,
                f"names and numbers above 0, up to {_MAX_ALPHA:.0f}, like 'q_proj 8, mlp.down_proj 64',",
            ),
            text=str,
            in_header_if_default=False,
        ),
    )
    modules_to_save: str = field(
        default="",
        converter=_spaced,
        metadata=key(
            "train",
            "modules that train whole beside adapters, by last parts of their names: "
            '"embed_tokens, lm_head"; tied ones are named both',
            _read_names,
            in_header_if_default=False,
            not_in_file=lambda own: not own.modules_to_save,
        ),
    )
    freeze: str = field(
        default="",
        converter=_spaced,
        metadata=key(
            "train",
            "parameters that do not train, by name in the checkpoint; `*` stands for any characters, `[0-7]` for one "
            'of these: "model.embed_tokens.*, model.layers.[0-7].*"',
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

    def in_family(self, family: str) -> Training:
        """Return the same training with the layers named that "all-linear" stands for in a family with experts."""
        if not self.adapts or self.targets != ALL_LINEAR or family not in ALL_WITH_EXPERTS:
            return self
        ranks, alphas = tuple(self.rank_pattern or ()), tuple(self.alpha_pattern or ())
        return evolve(
            self,
            targets=ALL_WITH_EXPERTS[family],
            rank_pattern=ModuleNumbers((*ranks, (_DOUBLED, 2 * self.rank))),
            alpha_pattern=ModuleNumbers((*alphas, (_DOUBLED, 2 * self.alpha))),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter beside a linear layer."""
        return self.rank if self.rank_pattern is None else int(self.rank_pattern.of(module, self.rank))

    def alpha_of(self, module: str) -> float:
        """Return the alpha of the adapter beside a linear layer."""
        return self.alpha if self.alpha_pattern is None else self.alpha_pattern.of(module, self.alpha)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of the adapter beside a linear layer."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (rank**0.5 if self.rslora else rank)

    @property
    def words(self) -> str:
        """Everything that it says, for a message."""
        stored = "" if self.base == AS_VIEWS else f", frozen in {self.base}"
        if self.adapts:
            factor = f"alpha {self.alpha:g}{', rslora' if self.rslora else ''}"
            ranks = "" if self.rank_pattern is None else f" ({self.rank_pattern})"
            factor += "" if self.alpha_pattern is None else f" ({self.alpha_pattern})"
            whole = f", and {self.modules_to_save} whole" if self.modules_to_save else ""
            return f"adapters of rank {self.rank}{ranks}, {factor}, on {self.targets}{whole}{stored}"
        return f"all but {self.freeze}{stored}" if self.freeze else "everything"

    @property
    def summary(self) -> str:
        """Word or two for a plan's summary, after a space; empty if everything trains."""
        return f" lora rank {self.rank}" if self.adapts else " partly frozen" if self else ""


WHOLE = Training()
"""Training of a whole model."""
