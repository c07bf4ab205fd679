"""`ratrainc finetune`."""

from __future__ import annotations

import click
from attrs import evolve

from ratrain.ratrain_ir.config.optimizer import DECAYS
from ratrain.ratrain_ir.config.quantised import FROZEN_FORMATS
from ratrain.ratrain_ir.config.training import ALL_LINEAR, AS_VIEWS
from ratrain.ratrainc.choices.finetune_choice import AUTO, CONSTANT, Adapting, FinetuneChoice, Judging, Schedule
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.commands.training.data_options import held_out_options, key_options, trackers_option
from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    Result,
    choice_option,
    device_name,
    in_groups,
    json_option,
    memory_bytes,
    misuse_of_command,
    output_directory,
    refuse_idle,
)
from ratrain.targets.runtime.settings import HOST_DEVICE

_EPILOG = """\b
Examples:
  ratrainc finetune --model smollm/ --data chats.jsonl -o tuned            adapters of rank 16, for PEFT
  ratrainc finetune --model smollm/ --data pairs.jsonl -o tuned --ram 4GiB --epochs 1
  ratrainc finetune --model llama/ --data chats.jsonl -o tuned --lora 32 --base nf4 --seq-len 1024
  ratrainc finetune --model smollm/ --data chats.jsonl -o tuned --full --lr 1e-5 --patience 3
  ratrainc finetune --model smollm/ --data chats.jsonl -o tuned --resume   after an interruption
  ratrainc generate tuned/best --init smollm/ --chat "Hello"               what was made of it
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--model",
    "choice_model",
    required=True,
    type=InputFile("weights"),
    metavar="DIR",
    help="A Hugging Face model: config.json, weights, tokenizer.",
)
@click.option(
    "--data",
    "choice_data_paths",
    type=InputFile("data"),
    multiple=True,
    required=True,
    metavar="CHATS.jsonl|PAIRS.jsonl|TEXT|DIR",
    help="JSONL, or a JSON array, of chats (messages, conversations), of prompts with completions, or of texts; or "
    "text files. The first line tells which. Of chats and pairs the answers alone are in the loss.",
)
@click.option(
    "-o",
    "--output",
    "choice_output",
    type=Result("run"),
    callback=output_directory,
    required=True,
    metavar="DIR",
    help="Folder for plan, program, log, checkpoints and the weights.",
)
@click.option(
    "--lora",
    "choice_adapting_rank",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="RANK",
    help="Train adapters of this rank; the model itself is frozen.",
)
@click.option("--full", "choice_adapting_whole", is_flag=True, help="Train the whole model instead.")
@click.option(
    "--alpha",
    "choice_adapting_alpha",
    type=FiniteRange(min=0, min_open=True),
    help="Adapters are scaled by alpha / rank. Default: twice the rank.",
)
@click.option(
    "--targets",
    "choice_adapting_targets",
    default=ALL_LINEAR,
    show_default=True,
    metavar="NAMES",
    help="Linear layers that get an adapter, as q_proj,v_proj; or an expression of names, as in a plan.",
)
@choice_option(
    "--base",
    "choice_adapting_base",
    AUTO,
    AS_VIEWS,
    *FROZEN_FORMATS,
    text="How frozen matrices are stored; auto packs them in 4 bits if they do not fit otherwise.",
)
@choice_option(
    "--dtype",
    "choice_dtype",
    AUTO,
    "f32",
    "bf16",
    "f16",
    text="The type of weights and activations in the step; auto: bf16 where this processor multiplies it or memory "
    "asks for it, else f32.",
)
@click.option(
    "--ram",
    "choice_ram_bytes",
    callback=memory_bytes,
    metavar="BYTES",
    help="Hold no more than this in memory, or on the device, like 8GiB. Default: 90 % of what there is.",
)
@click.option(
    "--device",
    "choice_device",
    default=HOST_DEVICE,
    show_default=True,
    metavar="cpu|cuda|cuda:N",
    callback=device_name,
    help="What trains: this processor, or a device of PyTorch (needs the extra 'torch').",
)
@click.option(
    "--seq-len",
    "choice_schedule_seq_len",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Tokens of a sequence; longer documents are cut. Default: the longest document, rounded up to a multiple of "
    "64, at most 2048.",
)
@click.option(
    "--batch",
    "choice_schedule_batch",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Sequences a step, at most those there are.",
)
@click.option(
    "--epochs",
    "choice_schedule_epochs",
    type=FiniteRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Passes over the data.",
)
@click.option(
    "--steps", "choice_schedule_steps", type=click.IntRange(min=1), metavar="N", help="Steps, instead of epochs."
)
@click.option(
    "--lr",
    "choice_schedule_lr",
    type=FiniteRange(min=0, min_open=True),
    metavar="RATE",
    help="Learning rate. Default: 2e-4 for adapters, 2e-5 with --full.",
)
@choice_option(
    "--schedule",
    "choice_schedule_decay",
    *DECAYS,
    CONSTANT,
    text="How the learning rate comes down to zero after the warm-up.",
)
@click.option(
    "--decay-steps",
    "choice_schedule_decay_steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Come down in the last N steps only, and stay level before (WSD).",
)
@click.option(
    "--warmup-steps",
    "choice_schedule_warmup_steps",
    type=click.IntRange(min=0),
    metavar="N",
    help="Steps until the learning rate is reached. Default: 3 % of all.",
)
@held_out_options("choice_judging", " Default: twice an epoch.")
@key_options("choice_data")
@click.option(
    "--tokenizer",
    "choice_data_tokenizer",
    type=InputFile("tokenizer"),
    metavar="TOKENIZER.json|bytes",
    help="Default: the tokenizer.json of the model.",
)
@click.option(
    "--seed", "choice_seed", type=click.IntRange(min=0), help="Seed of new adapters and of the order of the data."
)
@click.option(
    "--merge", "choice_merge", is_flag=True, help="Write the adapters merged into the model, for transformers."
)
@click.option(
    "--resume",
    "choice_resume",
    is_flag=True,
    help="Go on with the run in the output folder; give its other options again.",
)
@trackers_option("choice_trackers")
@json_option
@in_groups(
    choice_adapting=Adapting,
    choice_schedule=Schedule,
    choice_judging=Judging,
    choice_data=DataChoice,
    choice=FinetuneChoice,
)
def command(choice: FinetuneChoice, as_json: bool) -> int:
    """Fine-tune a model on this machine: plan for its memory, compile, train, evaluate, write the best weights.

    Documents are packed whole into sequences, and attention stays inside them. Adapters are written as a folder that
    PEFT loads, whole models as transformers does. Ctrl-C ends the run after its present step, with its state saved.
    """
    _refuse_idle_options(choice)
    from ratrain.ratrainc.choices.run_choices import Display
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.running.finetuning import finetune, refuse_idle_choices

    if choice.data.chat_key is not None:
        choice = evolve(choice, data=evolve(choice.data, train_on="answers"))
    with misuse_of_command():
        refuse_idle_choices(choice)
        done = finetune(choice, Display(quiet=as_json))
    if as_json:
        print_json(done.to_json())
    else:
        show(done.parts())
    return done.exit_code


def _refuse_idle_options(choice: FinetuneChoice) -> None:
    """Raise `click.UsageError` for options that were given and would change nothing."""
    if choice.adapting.whole:
        adapters = ("rank", "alpha", "targets", "base")
        refuse_idle(
            "is for adapters, and --full trains the model itself", *(f"choice_adapting_{name}" for name in adapters)
        )
    if choice.schedule.steps is not None:
        refuse_idle("is the length of the run, and so is --steps", "choice_schedule_epochs")
    if choice.judging.paths:
        refuse_idle("cuts --data, and --eval-data is held out instead", "choice_judging_fraction")
