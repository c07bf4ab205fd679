"""One training under several plans and strategies: the same losses."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from ratrain.ratrain_ir.config.model_files import parse_config
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from tests.parity.harness import STEPS, Layout, Trainer, show, tiny_config, worst_relative

CONFIG = tiny_config(num_key_value_heads=2)
ONE_STAGE = Layout(pp=1, dp=1, micro_batches=8, micro_batch_size=1)
TWO_BY_TWO = Layout(pp=2, dp=2, micro_batches=4, micro_batch_size=1)
FOUR_STAGES = Layout(pp=4, dp=1, micro_batches=8, micro_batch_size=1)


def random_weights(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of `CONFIG` by Hugging Face names: matrices keep the variance, norms are spread around 1."""
    random = np.random.default_rng(seed)
    model = parse_config(CONFIG, name="tiny", file="config.json")
    weights = {}
    for unit in block_chain(model):
        for parameter in parameters(model, unit):
            values = random.standard_normal(parameter.shape)
            scaled = values / math.sqrt(parameter.shape[1]) if len(parameter.shape) == 2 else 1 + 0.2 * values
            weights[parameter.name] = scaled.astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Everything a run of `CONFIG` needs."""
    folder = tmp_path_factory.mktemp("equivalence")
    return Trainer.prepare(folder, CONFIG, random_weights(3), STEPS * ONE_STAGE.global_batch)


@pytest.fixture(scope="module")
def one_stage_losses(trainer: Trainer) -> list[float]:
    """Losses without any parallelism."""
    losses = trainer.run(trainer.compile(ONE_STAGE, "f32", "full-save"), STEPS)
    assert losses[-1] < losses[0] - 0.5, "the model does not learn: equal losses would say little"
    return losses


# One worker of pytest-xdist: the fixtures run once.
pytestmark = pytest.mark.xdist_group("run-equivalence")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_BY_TWO, id="2-stages-2-replicas"),
        pytest.param(FOUR_STAGES, id="4-stages", marks=pytest.mark.full),
    ],
)
def test_the_layout_does_not_change_the_training(
    trainer: Trainer, one_stage_losses: list[float], layout: Layout
) -> None:
    assert layout.global_batch == ONE_STAGE.global_batch
    losses = trainer.run(trainer.compile(layout, "f32", "full-save"), STEPS)
    first, _ = worst_relative(losses[:1], one_stage_losses[:1])
    worst, step = worst_relative(losses, one_stage_losses)
    show(f"P={layout.pp}, D={layout.dp}: first loss deviates by {first:.1e}, worst is {worst:.1e} in step {step}")
    assert first <= 1e-6
    assert worst <= 1e-5


@pytest.mark.full  # tests/end_to_end/test_equivalence.py holds the same on smaller models in every run
@pytest.mark.parametrize("view_dtype", ["f32", "bf16", "f16"])
def test_recomputation_does_not_change_a_bit(trainer: Trainer, view_dtype: str) -> None:
    kept, recovered = (
        trainer.run(trainer.compile(TWO_BY_TWO, view_dtype, strategy), STEPS)
        for strategy in ("full-save", "baseline-1f1b")
    )
    assert recovered == kept
