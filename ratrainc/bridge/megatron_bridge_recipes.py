"""Recipes of Megatron-Bridge that its YAML files override, as far as memory depends on them.

Read in NVIDIA-NeMo/Megatron-Bridge, commit 067f987d (2026-08-22): src/megatron/bridge/recipes/llama/h100/llama3.py,
with _pretrain_common, _sft_common and _peft_common of recipes/common.py.
"""

from __future__ import annotations

import re

from attrs import frozen

SOURCE = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/recipes/llama/h100/llama3.py"

_ROWS = """
    llama32_1b_pretrain_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 8192 512
    llama32_3b_pretrain_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 8192 512
    llama3_8b_pretrain_2gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 1 1 1 2 8192 512
    llama3_8b_pretrain_16gpu_h100_bf16_16k meta-llama/Meta-Llama-3-8B 4 2 1 2 16384 512 rows
    llama3_8b_pretrain_32gpu_h100_bf16_64k meta-llama/Meta-Llama-3-8B 4 2 1 4 65536 512 rows
    llama3_8b_pretrain_64gpu_h100_bf16_128k meta-llama/Meta-Llama-3-8B 4 2 1 8 131072 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 4 4 5 2 8192 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16_deterministic meta-llama/Meta-Llama-3-70B 4 4 5 2 8192 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16_16k meta-llama/Meta-Llama-3-70B 8 2 1 2 16384 512 rows
    llama3_70b_pretrain_256gpu_h100_bf16_64k meta-llama/Meta-Llama-3-70B 8 4 1 8 65536 512 rows
    llama31_8b_pretrain_2gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 1 1 1 2 8192 512
    llama31_70b_pretrain_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 4 4 5 2 131072 512 rows
    llama31_405b_pretrain_256gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 8 8 2 4 131072 512 rows
    llama31_405b_pretrain_256gpu_h100_bf16_deterministic meta-llama/Meta-Llama-3.1-405B 8 8 2 4 131072 512 rows
    llama32_1b_sft_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 4096 8
    llama32_3b_sft_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 4096 8
    llama3_8b_sft_2gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 2 1 1 1 4096 8
    llama31_8b_sft_2gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 2 1 1 1 4096 8
    llama3_70b_sft_32gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 8 4 1 1 4096 8
    llama31_70b_sft_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 8 4 1 1 4096 8
    llama31_405b_sft_128gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 8 16 1 1 2048 16 rows
    llama32_1b_peft_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 4096 8 lora 32 32
    llama32_3b_peft_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 4096 8 lora 32 32
    llama3_8b_peft_1gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 1 1 1 1 4096 8 lora 8 16
    llama31_8b_peft_1gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 1 1 1 1 4096 8 lora 8 16
    llama3_70b_peft_8gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 8 1 1 1 4096 8 lora 16 32
    llama31_70b_peft_8gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 8 1 1 1 4096 8 lora 16 32
    llama31_405b_peft_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 4 8 8 1 2048 32 rows lora 16 32 linear_qkv
"""
"""Recipes: name without `_config`, model, tensor and pipeline ranks, chunks a rank, context ranks, length of sequences,
sequences of a step; `rows` with sequence parallelism; `lora` with rank, alpha and targets. A micro-batch is 1 sequence.
"""
_NAME = re.compile(r"\b([a-z]+\d*\w*_(?:pretrain|sft|peft|finetune)\w*_config)\b")
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@frozen
class Recipe:
    """What a recipe says before a file overrides it."""

    name: str
    model: str
    """hub name"""
    tp: int
    pp: int
    virtual_stages: int
    cp: int
    seq_len: int
    batch: int
    sequence_sharding: bool
    lora: tuple[int, float, tuple[str, ...]] | None
    """rank, alpha and targets"""

    @property
    def method(self) -> str:
        """Return `pretrain`, `full` or `lora`, as a job has it."""
        return "pretrain" if "_pretrain_" in self.name else "full" if self.lora is None else "lora"

    @property
    def distributed_optimizer(self) -> bool:
        """Return true if masters and moments are shared out.

        Recipes with adapters switch it off for ddp and optimizer; elsewhere the optimizer's own switch is on, and the
        two are made equal (training/config.py, _validate_and_sync_distributed_optimizer_settings).
        """
        return self.lora is None


def recipe_named(text: str) -> str | None:
    """Return the name of the first recipe that a text names; None if it names none."""
    found = _NAME.search(text)
    return None if found is None else found[1]


def recipe(name: str) -> Recipe | None:
    """Return a recipe by its function's name; None if it is not known here."""
    row = next(
        (line.split() for line in _ROWS.splitlines() if line.split()[:1] == [name.removesuffix("_config")]), None
    )
    if row is None:
        return None
    numbers, rest = [int(each) for each in row[2:8]], row[8:]
    lora = None
    if "lora" in rest:
        rank, alpha, *targets = rest[rest.index("lora") + 1 :]
        lora = (int(rank), float(alpha), tuple(targets) or TARGETS)
    tp, pp, chunks, cp, seq_len, batch = numbers
    return Recipe(name, row[1], tp, pp, chunks, cp, seq_len, batch, "rows" in rest, lora)
