"""Writes `docs/models.md`: `python -m tests.parity.models_page`. Needs PyTorch and `transformers` (extras `parity`, `transformers`); takes minutes.

Every figure on the page is measured here, on the tiny models of `tests/parity/test_families.py`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.families import FAMILY, Family
from ratrain.ratrain_ir.config.hub_names import hub_names
from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from ratrain.ratrainc.console.markdown_text import wrapped
from tests.end_to_end.tiny_runs import start
from tests.parity import test_experts as experts
from tests.parity.test_families import MODELS, gradients, program_of, reference, saved

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

Written by `python -m tests.parity.models_page`, which trains what it speaks of. A decoder of one of these families
compiles, plans and trains exactly, or is refused by the name of the key that is not supported. `ratrainc model CONFIG` says what a
configuration is.

## Describe one

`ratrainc model M` takes a preset, a name on the Hub of one, a `config.json` or a directory with one. It prints the parameters by block, the operations of a token
in training, the width of keys and values, the bytes that a token has between layers and as keys and values, what a layer keeps of a
sequence for its backward under each policy of `recompute`, and what differs from LLaMA-2. If a model is not supported, it names the keys
that are the reason and exits with 1. `ratrainc plan` prints a short form.

## Families

What a family does not name is as in LLaMA: RMSNorm before each block, rotary positions, grouped queries where there are
fewer key-value heads, no biases, a gated SiLU MLP. A configuration may choose what stands under "by choice".

In families with experts every layer has them, or in Qwen's some, and each token goes to its chosen ones, none dropped.
Routers have losses of their own if the plan says so ([experts](experts.md)).

Tensor-parallel ranks (`tp` in the plan) share out all of them but olmoe, which norms whole queries and keys behind a norm of
the input. They refuse norms of what attention and MLP side by side add, which no family has.

"""
MEASURED = """
## Against transformers

Tiny models of four layers with random weights (norms and biases too), saved by `transformers` {version}, loaded here, one
step of two micro-batches of two sequences through two stages with the fast kernels. "loss" and "gradient" in f32: the
difference to the float64 loss of the class in `transformers`, of that loss; the largest difference of an element of any
gradient, of the largest element of that gradient. "f16" and "bf16": the loss with views and activations of that type.
Parameters are those of the tiny model, equal to what `transformers` counts. `tests/parity/test_families.py` holds the
f32 figures under 2e-6 and 3e-5, after 20 steps and an export the loss of unseen sequences under 1e-6; models with experts
are those of `tests/parity/test_experts.py`, which does the same.

| model | parameters | loss | gradient | f16 | bf16 |
|---|---|---|---|---|---|
"""


@frozen
class Measured:
    """What one tiny model came to beside `transformers`."""

    parameters: int
    loss: float
    gradient: float
    f16: float
    bf16: float


def measured(name: str) -> Measured:
    """Train a step of one of `MODELS`, here or of experts, and hold it against its class."""
    with TemporaryDirectory() as folder:
        network = (saved if name in MODELS else experts.saved)(name, Path(folder))
        count = sum(parameter.numel() for parameter in network.parameters())
        model = load_model(folder)
        assert model.parameters == count
        program = program_of(model)
        run = start(program, 1, init=folder, order="sequential")
        (step,) = run.steps()
        loss, wanted = (reference if name in MODELS else experts.reference)(network, program)
        found = gradients(run, model)
        error = max(float(np.abs(found[key] - value).max() / np.abs(value).max()) for key, value in wanted.items())

        def of_type(dtype: str, **keys: Any) -> float:
            other = start(program_of(model, view_dtype=dtype, **keys), 1, init=folder, order="sequential")
            (only,) = other.steps()
            return abs(only.report.loss - loss) / loss

        half = of_type("f16", grad_dtype="f16", grad_shard_dtype="f16", loss_scale=1024.0)
        brain = of_type("bf16", grad_dtype="bf16", grad_shard_dtype="bf16")
        return Measured(count, abs(step.report.loss - loss) / loss, error, half, brain)


def presets_text() -> str:
    """Table of the presets: family, parameters, and names on the Hub that settings files of other tools may have."""
    lines = ["## Presets", "", "| preset | family | parameters | also read as |", "|---|---|---|---|"]
    for name in preset_names():
        model = load_model(name)
        named = ", ".join(f"`{each}`" for each in hub_names(name)[:1])
        lines.append(f"| {name} | {model.family} | {model.parameters:,} | {named} |")
    return "\n".join(lines) + "\n"


def family_text(name: str, family: Family) -> str:
    """A family: its classes, what it implies, what a configuration chooses."""
    implied = [f"`{field} = {_shown(value)}`" for field, value in family.implied.items()]
    free = [f"`{field}`" for field in sorted(family.free)]
    text = f"**{name}** ({', '.join(f'`{each}`' for each in family.architectures)})"
    text += f": {', '.join(implied)}" if implied else ": as LLaMA"
    text += f"; by choice {', '.join(free)}." if free else "."
    return wrapped(f"- {text}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def page() -> str:
    """The whole page."""
    import transformers

    lines = [HEAD]
    for name, family in FAMILY.items():
        lines.append(family_text(name, family) + "\n")
    lines.append(f"\n{presets_text()}")
    lines.append(MEASURED.format(version=transformers.__version__))
    for name in (*MODELS, *experts.MODELS):
        row = measured(name)
        figures = " | ".join(f"{figure:.1e}" for figure in (row.loss, row.gradient, row.f16, row.bf16))
        lines.append(f"| {name} | {row.parameters:,} | {figures} |\n")
    return wrapped("".join(lines))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
