"""Settings formats of frameworks that bring their own trainer, in the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.deepspeed_job import DEEPSPEED_JOB
from ratrain.ratrainc.bridge.jobs.llm_foundry_job import LLM_FOUNDRY
from ratrain.ratrainc.bridge.jobs.megatron_bridge_job import MEGATRON_BRIDGE
from ratrain.ratrainc.bridge.jobs.megatron_job import MEGATRON_JOB
from ratrain.ratrainc.bridge.jobs.nanotron_job import NANOTRON
from ratrain.ratrainc.bridge.jobs.torchtitan_job import TORCHTITAN_JOB
from ratrain.ratrainc.bridge.jobs.torchtune_job import TORCHTUNE

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job_reader import SettingsFormat

OTHER_FORMATS: tuple[SettingsFormat, ...] = (
    TORCHTUNE,
    NANOTRON,
    TORCHTITAN_JOB,
    MEGATRON_JOB,
    MEGATRON_BRIDGE,
    DEEPSPEED_JOB,
    LLM_FOUNDRY,
)
