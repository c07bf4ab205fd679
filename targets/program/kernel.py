"""Form of a kernel's declaration: operands, options and meaning, and the parameters that follow from them.

An operand is written `name:type[dims]`, then `=` where it is written, `+` where it is written and, with `accumulate`,
read first, `~` where it is updated, then `?` where it may be left out, or `...` where it is a sequence of them. Types:
`u8`, `i32`, `f32`, `f64`; `s` is the one storage type (f16, bf16 or f32) that all `s` operands of a call share, `*` any
storage type. A dimension is a symbol, equal wherever it stands, a number, a product of options, or one more than a
symbol, `E+1`; `[...]` is any shape that all such operands of a call share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec

if TYPE_CHECKING:
    from ratrain.targets.program.routine import Shape

Types = Mapping[str, tuple[Dtype, "Shape"]]
"""Dtype and shape of each operand of a step."""

ANY_SHAPE = ("...",)
"""Dimensions of an operand of any shape; all such operands of a call have the same shape."""

_TEXT = re.compile(r"(\w+):(u8|i32|f32|f64|s|\*)\[([^\]]*)\]([=+~]?)(\?|\.\.\.)?")


@frozen
class KernelOperand:
    """One operand of a kernel."""

    name: str
    type: str
    dims: tuple[str, ...]
    mode: str
    """empty: read; `=` written; `+` written and, with `accumulate`, read; `~` updated"""
    optional: bool
    several: bool

    @property
    def is_written(self) -> bool:
        """True if the kernel changes it."""
        return bool(self.mode)

    def is_read(self, options: Mapping[str, Any]) -> bool:
        """Return whether the kernel depends on its contents before the call."""
        return self.mode in ("", "~") or (self.mode == "+" and options.get("accumulate") is True)

    @property
    def parameter(self) -> Parameter:
        """Parameter of an implementation: by position, or by name where it may be left out."""
        array = self.type.upper() if self.type in ("u8", "i32", "f32", "f64") else "Array"
        if self.optional:
            return Parameter(self.name, Parameter.KEYWORD_ONLY, default=None, annotation=f"{array} | None")
        annotation = f"Sequence[{array}]" if self.several else array
        return Parameter(self.name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _operands(text: str) -> tuple[KernelOperand, ...]:
    return tuple(_operand(word) for word in text.split())


def _operand(text: str) -> KernelOperand:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' declares no operand")
    name, type_, dims, mode, mark = match.groups()
    return KernelOperand(name, type_, tuple(filter(None, dims.split(","))), mode, mark == "?", mark == "...")


@frozen
class KernelOption:
    """One option of a kernel."""

    annotation: str
    allows: Callable[[Any], bool] | None = None
    """returns whether a step may give a value; None: no step gives the option"""
    default: Any = Parameter.empty

    @property
    def is_optional(self) -> bool:
        """True if it may be left out."""
        return self.default is not Parameter.empty


def _no_rule(options: Mapping[str, Any], types: Types) -> str | None:
    del options, types
    return None


@frozen
class Kernel:
    """A kernel: name, meaning, operands, options."""

    name: str
    meaning: str
    operands: tuple[KernelOperand, ...] = field(converter=_operands)
    options: Mapping[str, KernelOption] = field(factory=dict)
    spec: type[AttentionSpec | AttentionBlockSpec] | None = None
    """Class that takes the options of a step that are its fields; an implementation gets it as `spec`, in their
    place."""
    in_place: tuple[tuple[str, str], ...] = ()
    """Pairs of a written operand and one that may be the very same bytes."""
    rule: Callable[[Mapping[str, Any], Types], str | None] = _no_rule
    """Returns what is wrong with options and operands that symbols alone do not say, or None."""
    in_routines: bool = True
    """True if block ops call it; the others are for updates and collectives, which the runtime does itself."""
    returns: str = "None"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Operands it writes."""
        return tuple(operand.name for operand in self.operands if operand.is_written)

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a step as an implementation takes them."""
        if self.spec is None:
            return dict(options)
        fields = {each.name for each in attrs.fields(self.spec)}
        others = {name: value for name, value in options.items() if name not in fields}
        return {"spec": self.spec(**{name: options[name] for name in options if name in fields}), **others}

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of an implementation: operands by position; scratch, options and optional operands by name."""
        parameters = [operand.parameter for operand in self.operands]
        parameters.append(Parameter("scratch", Parameter.KEYWORD_ONLY, annotation="Scratch"))
        fields = set()
        if self.spec is not None:
            parameters.append(Parameter("spec", Parameter.KEYWORD_ONLY, annotation=self.spec.__name__))
            fields = {each.name for each in attrs.fields(self.spec)}
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.annotation)
            for name, option in self.options.items()
            if name not in fields
        ]
        return {parameter.name: parameter for parameter in parameters}

    def signature_problem(self, parameters: Iterable[Parameter]) -> str | None:
        """Return how the parameters of an implementation, without `self`, differ from these, or None.

        Annotations do not count. `**options` stands for all options and optional operands that have no parameter of
        their own; an implementation passes them on to a class of `ratrain.targets.program.kernel_options`.
        """
        mine, theirs = self.parameters, {parameter.name: parameter for parameter in parameters}
        rest = [name for name, each in theirs.items() if each.kind is Parameter.VAR_KEYWORD]
        if rest:
            del theirs[rest[0]]
            together = {*self.options, *(operand.name for operand in self.operands if operand.optional)}
            theirs |= {name: each for name, each in mine.items() if name in together and name not in theirs}
        for name in [*mine, *theirs]:
            wanted, actual = (
                "nothing"
                if each is None
                else str(each.replace(annotation=Parameter.empty)) + f", {each.kind.description}"
                for each in (mine.get(name), theirs.get(name))
            )
            if wanted != actual:
                return f"'{self.name}' is declared with {wanted}; it has {actual}"
        order, given = (
            [each.name for each in parameters.values() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
            for parameters in (mine, theirs)
        )
        return None if order == given else f"'{self.name}' is declared with the order {', '.join(order)}"
