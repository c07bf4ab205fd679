"""Targets of adapters that name experts and routers, as PEFT takes them for the classes of `transformers` 5.

In `transformers` 4 a router and the three matrices of each expert were linear layers; in 5 they are parameters, the
matrices of all experts stacked. PEFT takes the old names for the new parameters (huggingface/peft 0.21.2,
peft/utils/transformers_weight_conversion.py, `_convert_peft_config_moe`), and what were two layers has twice the rank:

    mixtral            w1 and w3 -> gate_up_proj            w2 -> down_proj          gate -> gate.weight
    qwen3_moe, olmoe   gate_proj and up_proj -> the same    down_proj -> the same    gate -> gate.weight

"all-linear" means all of these names there. In Qwen2-MoE and GraniteMoE no name is taken for another. A framework that
lists the linear layers itself finds neither stacks nor routers. `target_parameters` names parameters as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from ratrain.ratrain_ir.config.training import ALL_LINEAR, ALL_WITH_EXPERTS
from ratrain.ratrain_ir.support.module_patterns import is_named, matches_whole

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of stacks of experts."""
_OLD: Mapping[str, tuple[str, str, str]] = {
    family: ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", DOWN) for family in ALL_WITH_EXPERTS
}
"""Names of an expert's matrices for gate, up and down in `transformers` 4."""
_GATE = "gate"


@frozen
class ExpertTargets:
    """Targets of adapters on a model with experts, apart by what they name."""

    linears: tuple[str, ...]
    """names of linear layers, `ALL_LINEAR` for all that are such layers"""
    parameters: tuple[str, ...]
    """names of parameters: of stacks of experts, and of a router's matrix"""
    doubled: bool = False
    """true if the adapter of `GATE_UP` has twice the rank and alpha"""
    missing: str = ""
    """name without which PEFT stops, as one that shares a parameter with it is named"""


def touches_experts(family: str, expression: str) -> bool:
    """Tell whether a regular expression names experts or routers of a family whose old names PEFT takes.

    It is tried on names of both versions, and where it matches in some layer, all layers get an adapter.
    """
    if family not in _OLD:
        return False
    names = (_GATE, "experts", *(f"experts.{each}" for each in (*_OLD[family], GATE_UP)), "gate.weight")
    return any(matches_whole(expression, f"model.layers.{layer}.mlp.{name}") for layer in range(2) for name in names)


def expert_targets(
    family: str, targets: Iterable[str], parameters: Iterable[str] = (), *, lists_linears: bool = False
) -> ExpertTargets:
    """Return what names of `target_modules` and `target_parameters` mean for a family with experts.

    `lists_linears`: `ALL_LINEAR` stands for a list of linear layers that the framework makes, not for PEFT's word.
    """
    names = tuple(targets)
    if family not in _OLD:
        return ExpertTargets(names, tuple(parameters))
    gate, up, down = _OLD[family]
    new = {gate: GATE_UP, up: GATE_UP, down: DOWN, _GATE: f"{_GATE}.weight"}
    found: list[str] = [*parameters]
    left: list[str] = []
    old: set[str] = set()
    for name in names:
        if name == ALL_LINEAR and not lists_linears:
            left.append(name)
            old |= {*new}
            continue
        meant = next((each for each in new if is_named(name, each)), None)
        if meant is None:
            left.append(name)
        else:
            old.add(meant)
    found += [each for key, each in new.items() if key in old]
    missing = {gate, up} - old if old & {gate, up} else set()
    return ExpertTargets(tuple(left), tuple(dict.fromkeys(found)), {gate, up} <= old, next(iter(missing), ""))
