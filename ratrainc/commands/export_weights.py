"""`ratrainc export-weights`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.options import Result, Source, json_option, output_directory

_EPILOG = """\b
Examples:
  ratrainc export-weights run1 -o run1-hf
  python -c "import transformers; transformers.AutoModelForCausalLM.from_pretrained('run1-hf')"
  ratrainc run other.rtx --init run1-hf --steps 100          a new run from these weights
"""


@click.command(epilog=_EPILOG)
@click.argument("checkpoint", type=Source("checkpoint"), metavar="CKPT")
@click.option(
    "-o",
    "--output",
    type=Result("weights"),
    callback=output_directory,
    required=True,
    metavar="DIR",
    help="Directory to write; made if it is not there.",
)
@json_option
def command(checkpoint: str, output: str, as_json: bool) -> int:
    """Write the master weights of a checkpoint as a Hugging Face model: config.json and model.safetensors, in f32.

    The names and packing are those of the model's family. Optimizer state stays behind; --resume takes the checkpoint itself.
    """
    from ratrain.ratrainc.console import print_json, say
    from ratrain.ratrainc.weight_export import export_weights

    model = export_weights(checkpoint, output)
    if as_json:
        print_json({"output": output, "model": model.name, "family": model.family, "parameters": model.parameters})
    else:
        say(f"wrote {output}: {model.name}, {model.family}, {model.parameters:,} parameters in f32")
    return 0
