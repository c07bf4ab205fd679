"""FSDP as accelerate runs it, from any file of the family that has an `fsdp_config`.

Names differ by file: accelerate's have the prefix `fsdp_`, transformers' and axolotl's may have it or not. Version 2
knows `reshard_after_forward: true | false`; version 1 has strategies (`FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`,
`HYBRID_SHARD`, `HYBRID_SHARD_ZERO2`), by name or by number from 1.
"""

from __future__ import annotations

from attrs import frozen

from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said
from ratrain.ratrainc.bridge.jobs.job import Checkpointing, Sharding
from ratrain.ratrainc.bridge.reasons import OF_ORDER

PLUGIN = "accelerate src/accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin"
LAUNCH = "accelerate src/accelerate/commands/launch.py, launch_command_parser"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies of version 1 by their numbers: accelerate src/accelerate/utils/constants.py, FSDP_SHARDING_STRATEGY."""
AHEAD = "layers that are gathered ahead of their use are not counted"
_WRAPPED = "TRANSFORMER_BASED_WRAP"
INERT_FSDP = {
    r"fsdp_config\.(fsdp_)?(backward_prefetch(_policy)?|forward_prefetch|cpu_ram_efficient_loading|sync_module_states"
    r"|use_orig_params|state_dict_type|limit_all_gathers|final_state_dict_type|cpu_offload_pin_memory)": OF_ORDER,
}
"""Settings of the table of transformers and axolotl that change no byte of a device."""


@frozen
class FsdpDefaults:
    """Defaults of one kind of file: value and source each."""

    version: tuple[int, str]
    wrap: tuple[str, str]
    """wrapping policy: `NO_WRAP` makes one unit of the whole model"""
    strategy: bool = False
    """true if `sharding_strategy` of version 1 is read: accelerate's launcher alone does so"""


ACCELERATE_DEFAULTS = FsdpDefaults(
    (1, f"{LAUNCH} (--fsdp_version)"),
    ("NO_WRAP", f"{PLUGIN}.auto_wrap_policy, which the launcher leaves open"),
    strategy=True,
)
ARGUMENTS_DEFAULTS = FsdpDefaults(
    (2, "transformers src/transformers/training_args.py, TrainingArguments._process_fsdp_args"),
    ("TRANSFORMER_BASED_WRAP", "transformers src/transformers/training_args.py, TrainingArguments._process_fsdp_args"),
)


def put_fsdp(reader: HfReader, prefix: str, defaults: FsdpDefaults, version: str = "") -> None:
    """Set sharding, offload and checkpointing by FSDP from the settings under `prefix`.

    `version` names a setting outside the table that has the version, and goes before the one in it.
    """

    def key(*names: str) -> str:
        return reader.first(*(f"{prefix}{form}{name}" for name in names for form in ("", "fsdp_")))

    version_key = reader.first(*((version,) if version else ()), key("version"))
    chosen = reader.said(version_key, int, *defaults.version)
    if chosen.value not in (1, 2):
        way_out = "1 or 2 (per-parameter sharding)"
        reader.wrong(
            version_key, f"{version_key} is {shown(chosen.value)}: there are versions 1 and 2", way_out=way_out
        )
        return
    strategy, reshard = key("sharding_strategy"), key("reshard_after_forward")
    if chosen.value == 2:
        reader.lay("sharding", Said(Sharding.FSDP2, chosen.key, chosen.source))
        reader.lay("reshard_after_forward", reader.said(reshard, bool, True, f"{PLUGIN}.reshard_after_forward"))
        reader.ignore(strategy, "FSDP 2 does not read it; reshard_after_forward says it")
    else:
        _put_strategy(reader, chosen, strategy, reshard, defaults.strategy)
    # transformers src/transformers/trainer.py, Trainer.create_accelerator_and_postprocess
    ahead = key("limit_all_gathers")
    if chosen.value == 1 and reader.has(ahead) and not reader.truth(ahead):
        reader.unknown(ahead, AHEAD)
    offload = key("offload_params", "cpu_offload")
    if reader.truth(offload):
        # Parameters live on the host, and so do their gradients and what the optimizer keeps of them.
        reader.put("offload_parameters", True, offload)
        reader.put("offload_optimizer", True, offload)
    again = key("activation_checkpointing")
    if reader.truth(again):
        reader.put("checkpointing", Checkpointing.FULL, again)
    _put_units(reader, key("auto_wrap_policy"), defaults)
    for name in ("transformer_layer_cls_to_wrap", "min_num_params", "mixed_precision_policy"):
        reader.taken.add(key(name))
    if reader.has(policy := key("mixed_precision_policy")):
        reader.unknown(policy, "types of FSDP's own policy are not read")


def _put_strategy(reader: HfReader, version: Said, key: str, reshard: str, read: bool) -> None:
    """Set the sharding of version 1 from its strategy.

    accelerate gives `sharding_strategy`, FULL_SHARD by default, precedence over `reshard_after_forward`, which so has
    no effect in version 1 (accelerator.py, Accelerator.prepare_model).
    """
    words = {name: _strategy(reader, name) for name in (key, reshard)}
    for name, word in words.items():
        if word not in (None, "FULL_SHARD") and not (read and name == key):
            reader.unknown(name, "version 1 does not read it here: state is sharded as FULL_SHARD")
    said = words[key] if read else None
    word = said or "FULL_SHARD"
    kind = Sharding.DDP if word == "NO_SHARD" else Sharding.FSDP1
    if said:
        origin = Said(kind, key)
    elif reader.has(version.key):
        origin = Said(kind, version.key)
    else:
        origin = Said(kind, key, f"{PLUGIN}.sharding_strategy")
    reader.lay("sharding", origin)
    reader.lay("reshard_after_forward", Said(word in ("FULL_SHARD", "HYBRID_SHARD"), origin.key, origin.source))
    if word.startswith("HYBRID"):
        devices, machines = reader.values.get("devices"), reader.size("accelerate.num_machines")
        if devices and machines and devices % machines == 0:
            reader.put("shard_size", devices // machines, key)
        else:
            reader.unknown(key, "the devices of a node share out state: how many they are is not said")


def _strategy(reader: HfReader, key: str) -> str | None:
    """Take a strategy by name or number; report one that does not exist."""
    reader.taken.add(key)
    if not reader.has(key):
        return None
    word = str(reader.settings[key].value).upper()
    if word.isdecimal() and 1 <= int(word) <= len(STRATEGIES):
        word = STRATEGIES[int(word) - 1]
    if word == "TRUE" and key.endswith("forward"):
        return "FULL_SHARD"
    if word not in (*STRATEGIES, *(("FALSE",) if key.endswith("forward") else ())):
        text = f"{key} is {shown(reader.settings[key].value)}, which is no strategy"
        reader.wrong(key, text, way_out=f"one of {', '.join(STRATEGIES)}")
        return None
    return word


def _put_units(reader: HfReader, key: str, defaults: FsdpDefaults) -> None:
    """Note a wrapping policy under which the units that are gathered are not single layers."""
    policy = reader.said(key, str, *defaults.wrap)
    if str(policy.value).upper() == _WRAPPED:
        reader.ignore(key, "one layer is gathered at a time")
    elif policy.source:
        reader.doubt(key, policy.value, "the whole model is one unit, which is gathered whole")
    else:
        reader.unknown(key, "the units that are gathered are not single layers")
