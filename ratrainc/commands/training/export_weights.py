"""`ratrainc export-weights`."""

from __future__ import annotations

from typing import Literal

import click

from ratrain.ratrain_ir.config.hf_export import TORCH_DTYPES
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    byte_count,
    choice_option,
    json_option,
    misuse_of_command,
    output_directory,
)

_EPILOG = """\b
Examples:
  ratrainc export-weights run1 -o run1-hf
  ratrainc export-weights run1 -o run1-hf --max-shard-size 2GB    several files and an index
  ratrainc export-weights run1 -o run1-bf16 --dtype bf16     half the bytes
  python -c "import transformers; transformers.AutoModelForCausalLM.from_pretrained('run1-hf')"
  ratrainc export-weights run2 --init llama/ -o run2-hf      adapters, merged into the model they were trained beside
  ratrainc export-weights run2 --adapter --init llama/ -o run2-peft    the adapters alone, for PEFT
  ratrainc run other.rtx --init run1-hf --steps 100          a new run from these weights
"""


@click.command(epilog=_EPILOG)
@click.argument("checkpoint", type=InputFile("checkpoint"), metavar="CKPT")
@click.option(
    "-o",
    "--output",
    type=Result("weights"),
    callback=output_directory,
    required=True,
    metavar="DIR",
    help="Directory to write; made if it is not there.",
)
@click.option(
    "--max-shard-size",
    callback=byte_count,
    metavar="BYTES",
    help="The most bytes of tensors in one file: of more there are several and an index. Default: 5GB.",
)
@choice_option(
    "--dtype",
    "dtype",
    *(dtype.value for dtype in TORCH_DTYPES),
    text="What the weights are rounded to, each to the nearest.",
)
@click.option(
    "--init",
    type=InputFile("weights"),
    metavar="W.safetensors|DIR",
    help="The weights that the run began with, where the checkpoint holds only what trained. They are merged; with "
    "--adapter they are named as the model that the adapters belong to.",
)
@click.option("--adapter", is_flag=True, help="Write the adapters alone, as a folder that PEFT loads.")
@json_option
def command(
    checkpoint: str,
    output: str,
    max_shard_size: int | None,
    dtype: Literal["f32", "bf16"],
    init: str | None,
    adapter: bool,
    as_json: bool,
) -> int:
    """Write the master weights of a checkpoint as a Hugging Face model that transformers loads.

    config.json, generation_config.json and the tokenizer are written too, if the run or its initial weights had them.
    Names and packing are as usual in the model's family. Optimizer state is left out; --resume takes the checkpoint.
    """
    from ratrain import api
    from ratrain.ratrain_ir.model.blocks import parameter_counts, trained_words
    from ratrain.ratrainc.console.console import print_json, say, status

    with misuse_of_command(), status(f"writing the weights of {checkpoint}"):
        export = api.export_weights(
            checkpoint, output, max_shard_bytes=max_shard_size, dtype=dtype, init=init, adapter=adapter
        )
    model = export.model
    if as_json:
        count = parameter_counts(model)[0] if adapter else model.parameters
        facts = {"model": model.name, "family": model.family, "parameters": count, "files": export.files}
        facts["dtype"] = dtype
        print_json({"output": output, **facts})
    else:
        what = trained_words(model) if adapter else f"{model.parameters:,} parameters in {dtype}"
        say(f"wrote {output}: {model.name}, {model.family}, {what}")
        say(f"files: {', '.join(export.files)}")
    return 0
