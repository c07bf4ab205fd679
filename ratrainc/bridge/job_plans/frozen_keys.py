"""`freeze` of [train] from LLaMA-Factory's `finetuning_type: freeze`, or axolotl's expressions of what trains.

    freeze_trainable_layers   n: the last n layers; -n: the first n
    freeze_trainable_modules  modules that train in them, by the names after a layer's number; `all`
    freeze_extra_modules      modules outside of layers that train too
    use_llama_pro             n layers spread evenly: the last of each n-th part

A parameter trains if its name has one of these texts in it (src/llamafactory/model/adapter.py,
`_setup_freeze_tuning`), so `freeze_extra_modules: norm` trains the norms of all layers too. With axolotl's
`unfrozen_parameters` it trains if an expression matches the beginning of its name. A plan names what is frozen:

    24 layers, the last two train    ->   freeze = "model.embed_tokens.*, model.layers.[0-9].*, model.layers.1[0-9].*,
                                                    model.layers.2[01].*, model.norm.*"
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrainc.bridge.jobs.job import THAWED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
    from ratrain.ratrainc.bridge.jobs.job import Thawed


def put_thawed(made: JobPlan) -> None:
    """Put the parameters that stay frozen; report what cannot be said of the model, or is in it nowhere."""
    thawed, model = made.job.thawed, made.job.model
    assert thawed is not None
    name = f"{THAWED}layers"
    if model is None:
        text = f"{made.key(name)}: which parameters stay frozen depends on the model, which is not known here"
        made.wrong(name, text, "give --model: a preset, a name on the Hub, or a folder with its config.json")
        return
    if model.experts is not None:
        text = f"{made.key(name)}: names of experts, by which it finds layers, depend on the version of transformers"
        way_out = "give the settings of a full fine-tuning, and say freeze in [train] of its plan"
        made.wrong(name, text, way_out)
        return
    names = tuple(dict.fromkeys(each.name for owner in block_chain(model) for each in parameters(model, owner)))
    if thawed.rows:
        text = f"{made.key(name)}: of some parameters it trains some rows alone; in a plan they train whole"
        made.wrong(name, text, "leave the rows out")
        return
    texts = () if thawed.expressions else _texts(made, thawed, model, names)
    if texts is None:
        return
    trained = {*thawed.parameters, *(each for each in names if any(text in each for text in texts))}
    frozen = [each for each in names if each not in trained]
    if len(frozen) == len(names):
        made.wrong(
            name, f"{made.key(name)}: nothing of {model.name} is left to train", "let a layer train, or a module"
        )
    elif frozen:
        made.put("freeze", ", ".join(patterns_of(frozen, names)), name, "thawed")


def _texts(made: JobPlan, thawed: Thawed, model: ModelConfig, names: Collection[str]) -> list[str] | None:
    """Return the texts that names of trained parameters have in them; None if some setting is wrong, as reported."""
    count, key = model.layers, made.key(f"{THAWED}layers")
    if thawed.spread and (thawed.layers < 1 or count % thawed.layers):
        text = f"{key}: {count} layers of {model.name} do not come in {thawed.layers} equal parts: LLaMA-Factory stops"
        made.wrong(f"{THAWED}layers", text, "give a number that divides the layers")
        return None
    layers = thawed.numbers(count)
    inside = {each.split(".0.")[-1].split(".")[0] for each in names if ".0." in each}
    outside = {each.split(".")[-2] for each in names if _number(each) is None}
    for part, known in (("modules", {"all", *inside}), ("extra_modules", outside)):
        said = getattr(thawed, part)
        other = next((each for each in said if each not in known), None)
        if other is not None:
            text = f"{made.key(f'{THAWED}{part}')}: {model.name} has no module {other} there: LLaMA-Factory stops"
            made.wrong(f"{THAWED}{part}", text, f"use any of {', '.join(sorted(known))}")
            return None
    within = ["" if each == "all" else each for each in thawed.modules]
    return [*(f".{layer}.{module}" for layer in layers for module in within), *thawed.extra_modules]


# patterns


def patterns_of(chosen: Collection[str], names: Iterable[str]) -> list[str]:
    """Return patterns that match the chosen ones of all names of parameters, and none of the others.

    Whole layers are named by their number, then whole modules, then single parameters; numbers of alike layers are
    joined.
    """
    every = list(names)
    others = {shape for each in {*every} - {*chosen} for shape in _shapes(each)}
    found: dict[str, set[int]] = {}
    for each in chosen:
        shape = next(shape for shape in _shapes(each) if shape not in others)
        number = _number(shape)
        key = shape if number is None else shape.replace(f".{number}.", ".{}.", 1)
        found.setdefault(key, set()).update(() if number is None else {number})
    count = 1 + max((number for number in map(_number, every) if number is not None), default=-1)
    return [
        shape.replace("{}", numbers, 1).replace(".*.*", ".*")
        for shape, layers in found.items()
        for numbers in (_numbers(layers, count) if layers else [""])
    ]


def _number(name: str) -> int | None:
    """Return the number of the layer in a name."""
    match = re.search(r"\.(\d+)\.", name)
    return None if match is None else int(match[1])


def _shapes(name: str) -> Iterator[str]:
    """Yield patterns for what a parameter belongs to, from its layer, or its module outside of layers, to itself."""
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    for end in range(first + 1, len(parts)):
        yield ".".join([*parts[:end], "*"])
    yield name


def _numbers(layers: Collection[int], count: int) -> list[str]:
    """Return patterns for numbers of layers below `count`: `*` for all, else one for each row of ten."""
    if len(layers) == count:
        return ["*"]
    tens = groupby(sorted(layers), key=lambda layer: layer // 10)
    return [f"{ten or ''}{_digits([layer % 10 for layer in row])}" for ten, row in tens]


def _digits(digits: list[int]) -> str:
    """Return a pattern for ascending digits."""
    if len(digits) == 1:
        return str(digits[0])
    if len(digits) > 2 and digits[-1] - digits[0] == len(digits) - 1:
        return f"[{digits[0]}-{digits[-1]}]"
    return f"[{''.join(map(str, digits))}]"
