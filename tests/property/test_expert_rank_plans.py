"""Drawn models and plans whose replicas share out experts: any router fits the addresses, and trains as without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from tests.end_to_end.test_experts import F32, ROUTERS, trained, with_router
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

POLICIES = ("none", "full", "attention", "auto budget=200KB")


@frozen
class Case:
    """One drawn case: a model, the keys of its plan, passes, and a router."""

    model: ModelConfig
    keys: dict[str, Any]
    passes: str
    router: str
    kernels: str

    def program(self, ranks: int) -> Program:
        """Program of the case with a number of expert ranks."""
        plan = make_plan(self.model, **{**self.keys, **F32, "ep": ranks})
        return api.emit(api.compile(self.model, plan, passes=self.passes))

    @classmethod
    def drawn(cls, seed: int) -> Case:
        """Case of a seed."""
        random = np.random.default_rng(seed)
        ranks, own = int(random.integers(2, 5)), int(random.integers(1, 4))
        experts = ranks * own
        family = ("olmoe", "mixtral", "qwen3_moe", "granitemoe", "qwen2_moe")[seed % 5]
        sizes: dict[str, Any] = {"experts": experts, "experts_per_token": int(random.integers(1, experts + 1))}
        if family in ("qwen3_moe", "qwen2_moe"):
            sizes["expert_size"] = int(random.integers(3, 30))
        if family == "qwen2_moe":
            sizes["shared_expert_size"] = int(random.integers(3, 30))
        if family in ("olmoe", "qwen2_moe", "qwen3_moe"):
            sizes["router_normalised"] = bool(random.integers(2))
        if family == "granitemoe":
            sizes |= {"residual_scale": 0.5, "embedding_scale": 3.0, "logit_scale": 0.25, "attention_scale": 0.2}
        norms = {"olmoe": {"qk_norm": "whole"}, "qwen3_moe": {"qk_norm": "head"}, "qwen2_moe": {"qkv_bias": True}}
        model = evolve(MODEL, family=family, layers=3, **sizes, **norms.get(family, {}))
        pp, copies = int(random.integers(1, 4)), int(random.integers(1, 3))
        zero = int(random.integers(0, 4))
        each = copies > 1 and zero >= 2 and bool(random.integers(2))
        keys = {
            "pp": pp,
            "cuts": tuple(range(1, pp)),
            "dp": ranks * copies,
            "ep": ranks,
            "micro_batches": int(random.integers(1, 4)),
            "micro_batch_size": int(random.integers(1, 3)),
            "zero": zero,
            "reduce": "each-micro-batch" if each else "last",
            "router": RouterLosses(0.1, 0.01) if random.integers(2) else RouterLosses(),
        }
        policy = POLICIES[int(random.integers(len(POLICIES)))]
        if "mlp_kinds" in FAMILY[family].free:
            model = evolve(model, mlp_kinds=("", "dee", "ede", "ded")[int(random.integers(4))])
        return cls(
            model,
            keys,
            f"place-1f1b,bucket-grad-sync,insert-prefetch,recompute{{policy={policy}}},allocate-ddr",
            ROUTERS[int(random.integers(len(ROUTERS)))],
            ("reference", "fast")[int(random.integers(2))],
        )


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(each, marks=pytest.mark.full) for each in range(6, 200))])
def test_drawn_plans_train_like_replicas_with_all_experts(seed: int) -> None:
    case = Case.drawn(seed)
    values = with_router(case.model, case.router)
    shared = trained(case.program(case.keys["ep"]), values, 2, kernels=case.kernels, check_memory=True, poison=True)
    whole = trained(case.program(1), values, 2, kernels=case.kernels)
    assert losses(shared) == pytest.approx(losses(whole), rel=2e-5)
