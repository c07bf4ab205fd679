"""A mixture of experts as `transformers` trains it on a GPU, its experts as grouped products."""

from __future__ import annotations

import json

from processes import ROOT
from torch import Tensor, nn
from torch.nn import functional

PRESETS = ROOT / "ratrain_ir" / "config" / "presets"


class Mixture(nn.Module):
    """The class of a preset in `transformers`, with weights of its own; `forward` gives the mean loss.

    `sizes` replace keys of the preset's config.json, to rehearse on a processor.
    """

    def __init__(self, preset: str, **sizes: int) -> None:
        import transformers

        super().__init__()
        keys = {**json.loads((PRESETS / f"{preset}.json").read_text("utf-8")), **sizes}
        config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        self.network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
