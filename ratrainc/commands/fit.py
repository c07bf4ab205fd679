"""`ratrainc fit`."""

from __future__ import annotations

import click

from ratrain.ratrain_ir.support.limits import MAX_DEVICES, MAX_MICRO_BATCH, MAX_SEQ_LEN
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    json_option,
    memory_bytes,
    misuse_of_command,
    named_model,
    result_option,
)
from ratrain.ratrainc.commands.words.variables import variables
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc fit train.yaml --devices 8 --memory 80GB
  ratrainc fit sft.yaml --beside accelerate.yaml --machine a100-node
  ratrainc fit pretrain.sh --memory 80GB --set SLURM_NNODES=4 --check
  ratrainc fit --model llama-3-8b --devices 8 --memory 79GiB --json
  ratrainc fit train.yaml --devices 8 --snapshot step.pickle  for PyTorch's memory viewer
  ratrainc fit train.yaml --devices 8 --machine h100-node --exact
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("settings"), metavar="[FILE]", required=False)
@click.option(
    "--beside",
    type=InputFile("settings"),
    multiple=True,
    metavar="FILE",
    help="A further file of the same run: an accelerate or FSDP file, a ds_config.json; may be repeated.",
)
@click.option(
    "--format",
    "format_",
    metavar="NAME",
    help="The framework whose settings FILE has, where its content leaves it open: axolotl, trl, torchtune, ...",
)
@click.option(
    "--model",
    type=InputFile("model"),
    metavar="M",
    callback=named_model,
    help="A preset, a name on the Hugging Face Hub that is known here, or a config.json, in place of FILE's.",
)
@click.option("--devices", type=click.IntRange(1, MAX_DEVICES), metavar="N", help="Devices, where FILE does not say.")
@click.option(
    "--memory",
    callback=memory_bytes,
    metavar="BYTES",
    help="What a device has, like 80GB or 23.6GiB. A card sold as 24 GB reports some 23.6 GiB; 24GB are 22.4 GiB.",
)
@click.option(
    "--machine",
    type=InputFile("machine"),
    metavar="FILE",
    help="A machine file or the name of a built-in machine: its memory, without --memory, and the speeds by which "
    "ways out are priced. Default for speeds: a100-node.",
)
@click.option(
    "--seq-len", type=click.IntRange(1, MAX_SEQ_LEN), metavar="S", help="Tokens of a sequence, where FILE does not say."
)
@click.option(
    "--micro-batch-size",
    type=click.IntRange(1, MAX_MICRO_BATCH),
    metavar="N",
    help="Sequences of a device and micro-batch, where FILE does not say.",
)
@click.option(
    "--set",
    "given",
    multiple=True,
    callback=variables,
    metavar="NAME=VALUE",
    help="A variable of a launch script that its environment sets; may be repeated.",
)
@result_option(
    "--snapshot",
    Result("snapshot", ".pickle"),
    "OUT.pickle",
    "Write the predicted allocations of a step, one device for each kind of rank, for PyTorch's memory viewer. "
    "Of files that are there, only such a snapshot is replaced.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Also search, compile and place a plan of ours for the same devices and batch: seconds to a minute.",
)
@click.option("--check", is_flag=True, help="Exit with 1 unless it fits for sure: for a job's first line.")
@json_option
def command(
    file: str | None,
    beside: tuple[str, ...],
    format_: str | None,
    model: str | None,
    devices: int | None,
    memory: int | None,
    machine: str | None,
    seq_len: int | None,
    micro_batch_size: int | None,
    given: dict[str, str],
    snapshot: str | None,
    exact: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Answer whether a training run of another framework fits its devices, and what would make it fit.

    FILE holds settings of axolotl, LLaMA-Factory, TRL, transformers, torchtune, torchtitan, Megatron-LM, DeepSpeed,
    nanotron or LLM Foundry. Predicted is what that framework would hold, by formulas of its code; nothing runs, and
    no GPU is needed. A setting that is not understood makes the answer a lower bound, and is named.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.fit.verdicts import Verdict

    if snapshot is not None:
        from ratrain.ratrainc.report.memory_snapshot import refuse_other_file

        refuse_other_file(snapshot)
    with misuse_of_command():
        found = api.fit(
            file,
            beside=beside,
            format=format_,
            model=model,
            devices=devices,
            memory=memory,
            machine=machine,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            given=given,
            exact=exact,
        )
    if snapshot is not None:
        found.write_snapshot(snapshot)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
    if snapshot is not None:
        echo(f"wrote {snapshot}", err=True)
    return int(check and found.verdict is not Verdict.FITS)
