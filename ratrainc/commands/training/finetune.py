"""`ratrainc finetune`."""

from __future__ import annotations

import click
from attrs import evolve

from ratrain.ratrain_ir.config.optimizer import DECAYS
from ratrain.ratrain_ir.config.quantised import FROZEN_FORMATS
from ratrain.ratrain_ir.config.training import ALL_LINEAR, AS_VIEWS
from ratrain.ratrainc.choices.finetune_choice import AUTO, CONSTANT, Adapting, FinetuneChoice, Judging, Schedule
from ratrain.ratrainc.choices.run_choices import DataChoice, TrackerChoice
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
    required=True,
    type=InputFile("weights"),
    metavar="DIR",
    help="A Hugging Face model: config.json, weights, tokenizer.",
)
@click.option(
    "--data",
    "data_paths",
    type=InputFile("data"),
    multiple=True,
    required=True,
    metavar="CHATS.jsonl|PAIRS.jsonl|TEXT|DIR",
    help="JSONL with a chat a line (messages, conversations), a prompt and a completion, or a text; or text files. The "
    "first line tells which. Of chats and pairs the answers alone are in the loss.",
)
@click.option(
    "-o",
    "--output",
    type=Result("run"),
    callback=output_directory,
    required=True,
    metavar="DIR",
    help="Folder for plan, program, log, checkpoints and the weights.",
)
@click.option(
    "--lora",
    "adapting_rank",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="RANK",
    help="Train adapters of this rank; the model itself is frozen.",
)
@click.option("--full", "adapting_whole", is_flag=True, help="Train the whole model instead.")
@click.option(
    "--alpha",
    "adapting_alpha",
    type=FiniteRange(min=0, min_open=True),
    help="Adapters are scaled by alpha / rank. Default: twice the rank.",
)
@click.option(
    "--targets",
    "adapting_targets",
    default=ALL_LINEAR,
    show_default=True,
    metavar="NAMES",
    help="Linear layers that get an adapter, as q_proj,v_proj.",
)
@choice_option(
    "--base",
    "adapting_base",
    AUTO,
    AS_VIEWS,
    *FROZEN_FORMATS,
    text="How frozen matrices are stored; auto packs them in 4 bits if they do not fit otherwise.",
)
@choice_option(
    "--dtype",
    "dtype",
    AUTO,
    "f32",
    "bf16",
    "f16",
    text="The type of weights and activations in the step; auto: bf16 where this processor multiplies it or memory "
    "asks for it, else f32.",
)
@click.option(
    "--ram",
    "ram_bytes",
    callback=memory_bytes,
    metavar="BYTES",
    help="Hold no more than this in memory, or on the device, like 8GiB. Default: 90 % of what there is.",
)
@click.option(
    "--device",
    "device",
    default=HOST_DEVICE,
    show_default=True,
    metavar="cpu|cuda|cuda:N",
    callback=device_name,
    help="What trains: this processor, or a device of PyTorch (needs the extra 'torch').",
)
@click.option(
    "--seq-len",
    "schedule_seq_len",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Tokens of a sequence; longer documents are cut. Default: the longest document, at most 2048.",
)
@click.option(
    "--batch",
    "schedule_batch",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Sequences a step, at most those there are.",
)
@click.option(
    "--epochs",
    "schedule_epochs",
    type=FiniteRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Passes over the data.",
)
@click.option("--steps", "schedule_steps", type=click.IntRange(min=1), metavar="N", help="Steps, instead of epochs.")
@click.option(
    "--lr",
    "schedule_lr",
    type=FiniteRange(min=0, min_open=True),
    metavar="RATE",
    help="Learning rate. Default: 2e-4 for adapters, 2e-5 with --full.",
)
@choice_option(
    "--schedule",
    "schedule_decay",
    *DECAYS,
    CONSTANT,
    text="How the learning rate comes down to zero after the warm-up.",
)
@click.option(
    "--decay-steps",
    "schedule_decay_steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Come down in the last N steps only, and stay level before (WSD).",
)
@click.option(
    "--warmup-steps",
    "schedule_warmup_steps",
    type=click.IntRange(min=0),
    metavar="N",
    help="Steps until the learning rate is reached. Default: 3 % of all.",
)
@held_out_options("judging", " Default: twice an epoch.")
@key_options
@click.option(
    "--tokenizer",
    "data_tokenizer",
    type=InputFile("tokenizer"),
    metavar="TOKENIZER.json|bytes",
    help="Default: the tokenizer.json of the model.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of new adapters and of the order of the data.")
@click.option("--merge", is_flag=True, help="Write the adapters merged into the model, for transformers.")
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder; give its other options again.")
@trackers_option("trackers")
@json_option
@in_groups(adapting=Adapting, schedule=Schedule, judging=Judging, data=DataChoice)
def command(
    model: str,
    output: str,
    data: DataChoice,
    adapting: Adapting,
    schedule: Schedule,
    judging: Judging,
    dtype: str,
    ram_bytes: int | None,
    device: str,
    seed: int | None,
    merge: bool,
    resume: bool,
    trackers: tuple[TrackerChoice, ...],
    as_json: bool,
) -> int:
    """Fine-tune a model on this machine: plan for its memory, compile, train, evaluate, write the best weights.

    Documents are packed whole into sequences, and attention stays inside them. Adapters are written as a folder that
    PEFT loads, whole models as transformers does. Ctrl-C ends the run after its present step, with its state saved.
    """
    from ratrain.ratrainc.choices.run_choices import Display
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.running.finetuning import finetune, refuse_idle_choices

    if adapting.whole:
        refuse_idle(
            "is for adapters, and --full trains the model itself",
            *("adapting_rank", "adapting_alpha", "adapting_targets", "adapting_base"),
        )
    if schedule.steps is not None:
        refuse_idle("is the length of the run, and so is --steps", "schedule_epochs")
    if judging.paths:
        refuse_idle("cuts --data, and --eval-data is held out instead", "judging_fraction")
    if data.chat_key is not None:
        data = evolve(data, train_on="answers")
    choice = FinetuneChoice(
        model, output, data, adapting, schedule, judging, dtype, ram_bytes, device, seed, resume, merge, trackers
    )
    with misuse_of_command():
        refuse_idle_choices(choice)
        done = finetune(choice, Display(quiet=as_json))
    if as_json:
        print_json(done.to_json())
    else:
        show(done.parts())
    return done.exit_code
