"""`ratrainc import-plan`."""

from __future__ import annotations

import click

from ratrain.ratrain_ir.support.limits import MAX_MICRO_BATCH, MAX_PARALLEL, MAX_SEQ_LEN
from ratrain.ratrainc.bridge.settings import Asked
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    Result,
    in_groups,
    json_option,
    misuse_of_command,
    named_model,
    result_option,
    target_options,
)
from ratrain.ratrainc.commands.words.variables import variables
from ratrain.ratrainc.console.terminal import echo, echo_document

_EPILOG = """\b
Examples:
  ratrainc import-plan --from megatron pretrain.sh -o P.toml
  ratrainc import-plan --from megatron train.sbatch --set SLURM_NNODES=4 --set FP8=0 -o P.toml
  ratrainc import-plan --from deepspeed ds_config.json --clusters 16 --seq-len 4096 -o P.toml
  ratrainc import-plan --from torchtitan job.toml --clusters 64 --machine h100-node --json
  ratrainc import-plan train.yaml --devices 8 --steps 2000 --f32-state -o P.toml  of axolotl, torchtune, ...
  ratrainc import-plan sft.yaml --beside fsdp.yaml --model ./smollm -o P.toml
"""
_NAMES = (
    *("megatron", "deepspeed", "torchtitan", "axolotl", "llama-factory", "torchtune", "nanotron", "accelerate", "trl"),
    *("transformers", "llm-foundry", "megatron-bridge"),
)


def _auto(text: str) -> str:
    return f"{text}, where a ds_config says 'auto' or nothing, or another file leaves it open."


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("settings"), metavar="FILE")
@click.option(
    "--from",
    "framework",
    type=click.Choice(_NAMES),
    help="Whose settings they are: a launch script or flags of megatron, a ds_config.json, a job's TOML of torchtitan, "
    "a YAML or JSON of the others, or a launch script of megatron-bridge. Without it, the file's content says it.",
)
@click.option(
    "--beside",
    type=InputFile("settings"),
    multiple=True,
    metavar="FILE",
    help="A further file of the same run: an accelerate or FSDP file, a ds_config.json; may be repeated.",
)
@click.option(
    "--model",
    type=InputFile("model"),
    metavar="M",
    callback=named_model,
    help="A preset, a name on the Hugging Face Hub that is known here, or a config.json, in place of FILE's: names of "
    "layers in [train] are checked against it, and made where FILE says others.",
)
@click.option(
    "--clusters",
    "--devices",
    "asked_clusters",
    type=click.IntRange(1, MAX_PARALLEL),
    metavar="N",
    help="Ranks, where the file does not say.",
)
@click.option(
    "--pp",
    "asked_pp",
    type=click.IntRange(1, MAX_PARALLEL),
    metavar="P",
    help="Stages, where a ds_config does not say.",
)
@click.option(
    "--seq-len",
    "asked_seq_len",
    type=click.IntRange(1, MAX_SEQ_LEN),
    metavar="S",
    help="Tokens of a sequence, where the file does not say.",
)
@click.option(
    "--micro-batch-size",
    "asked_micro_batch_size",
    type=click.IntRange(1, MAX_MICRO_BATCH),
    metavar="N",
    help=_auto("Sequences of a micro-batch"),
)
@click.option(
    "--global-batch",
    "asked_global_batch",
    type=click.IntRange(1, 1 << 40),
    metavar="N",
    help=_auto("Sequences of a step"),
)
@click.option(
    "--dtype",
    "asked_dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    help=_auto("Type of the parameters that blocks compute with"),
)
@click.option("--lr", "asked_lr", type=FiniteRange(0), metavar="RATE", help=_auto("The learning rate"))
@click.option(
    "--weight-decay", "asked_weight_decay", type=FiniteRange(0), metavar="RATE", help=_auto("How fast weights shrink")
)
@click.option(
    "--max-norm",
    "asked_max_norm",
    type=FiniteRange(0),
    metavar="NORM",
    help=_auto("Largest norm of the gradient; 0: not held"),
)
@click.option(
    "--warmup-steps",
    "asked_warmup_steps",
    type=click.IntRange(1, 1 << 40),
    metavar="N",
    help=_auto("Steps until the learning rate is reached"),
)
@click.option(
    "--steps",
    "asked_steps",
    type=click.IntRange(1, 1 << 40),
    metavar="N",
    help=_auto("Step at which the learning rate has come down"),
)
@click.option(
    "--f32-state",
    "asked_f32_state",
    is_flag=True,
    help="Keep masters and moments in f32 where the file keeps them in fewer bits, which no plan does.",
)
@click.option(
    "--set",
    "asked_given",
    multiple=True,
    callback=variables,
    metavar="NAME=VALUE",
    help="A variable of a launch script that its environment sets, as SLURM_NNODES=4, or an argument of it, as "
    "1=7B; may be repeated.",
)
@result_option("-o --output", Result("plan", ".toml"), "P.toml", "Write the plan; without it, it goes to stdout.")
@target_options
@json_option
@in_groups(asked=Asked, target=MachineChoice)
def command(
    file: str,
    framework: str | None,
    beside: tuple[str, ...],
    model: str | None,
    asked: Asked,
    target: MachineChoice,
    output: str | None,
    as_json: bool,
) -> None:
    """Convert a settings file of another framework to a plan.

    FILE holds settings of Megatron-LM, Megatron-Bridge, DeepSpeed, torchtitan, axolotl, LLaMA-Factory, torchtune,
    nanotron, accelerate, TRL, transformers or LLM Foundry. Adapters (LoRA, rsLoRA, QLoRA) become [train], and so do the
    layers that LLaMA-Factory trains alone. What no plan trains or holds is refused by name: other adapters, dropout,
    float8.

    The plan's head lists each setting that is not carried over, with the reason, first those without which something
    else is trained, and each default that comes from the framework; with -o or --json the former are listed on stderr
    too, the others by name. The plan's file names the machine of --machine, which other commands then take.
    Contradictions are refused, as is an unknown name that may decide what is trained. Scripts are read, not run.
    """
    import shlex

    from attrs import asdict

    from ratrain import api
    from ratrain.ratrain_ir.support.files import write_text
    from ratrain.ratrain_ir.support.text import shown
    from ratrain.ratrainc.bridge.importing import NO_MACHINE, imported_json
    from ratrain.ratrainc.console.console import print_json

    machine = target if target.words else None
    with misuse_of_command():
        options = asdict(asked) | {"beside": beside, "model": model, "machine": machine}
        made = api.import_plan(framework, file, **options)
    if output is not None:
        write_text(output, made.text(output))
    if as_json:
        print_json(imported_json(made, output))
    elif output is None:
        echo_document(made.text())
    if output is not None or as_json:  # else the head that was printed names it
        for line in made.told():
            echo(line, err=True)
        if machine is None:
            echo(NO_MACHINE, err=True)
    for name, value in made.unset.items():
        if value:
            echo(f"not set: {name}, so the script has {shown(value)} (--set {name}=...)", err=True)
    if made.passes:
        echo(f"passes to say: --passes {shlex.quote(','.join(made.passes))}", err=True)
    if output is not None:
        echo(f"wrote {output}", err=True)
