"""`ratrainc generate`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import click
from attrs import evolve

from ratrain.ratrainc.choices.run_choices import Generation, Prompt, Ranks
from ratrain.ratrainc.commands.training.data_options import chat_template_option
from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    choice_option,
    in_groups,
    json_option,
    refuse_idle,
)
from ratrain.targets.runtime.settings import Sampling, available_threads

_EPILOG = """\b
Examples:
  ratrainc generate run1 --prompt "The statement"                      the likeliest token, again and again
  ratrainc generate run1 --prompt "The statement" --tokens 200 --temperature 0.8 --top-p 0.95 --seed 3
  ratrainc generate SmolLM2-135M/ --prompt "Gravity is" --json         a Hugging Face directory
  ratrainc generate tuned/best --init SmolLM2-135M/ --chat "Who are you?"    what 'ratrainc finetune' made
  ratrainc generate run1 --prompt-tokens 17,4,93 --eos none            a model without a tokenizer
  mpirun -n 4 ratrainc generate run1 --prompt "$(cat book)" --engine mpi    keys and values over four processes
"""

_MOST_TOKENS = 1 << 20
_MOST_THREADS = 1 << 16


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if not all(word.isascii() and word.isdecimal() and len(word) < 20 for word in words):
        raise click.BadParameter(f"'{text}' is not a list of token numbers like 17,4,93")
    return tuple(int(word) for word in words)


@click.command(epilog=_EPILOG)
@click.argument("path", type=InputFile("checkpoint"), metavar="CKPT|DIR")
@click.option("--prompt", "prompt_text", metavar="TEXT", help="What the text begins with.")
@click.option("--chat", "prompt_chat", metavar="TEXT", help="Or what a user says in a chat: the model answers.")
@click.option(
    "--prompt-tokens",
    "prompt_tokens",
    callback=_numbers,
    metavar="17,4,93",
    help="The same as token numbers.",
)
@click.option(
    "--tokens",
    "asked_tokens",
    type=click.IntRange(1, _MOST_TOKENS),
    default=64,
    show_default=True,
    metavar="N",
    help="The most tokens to add.",
)
@click.option(
    "--temperature",
    "asked_sampling_temperature",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    metavar="T",
    help="Draw tokens, of logits divided by T: below 1 likelier ones. 0: always the likeliest.",
)
@click.option(
    "--top-p",
    "asked_sampling_top_p",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="P",
    help="Draw from the likeliest tokens alone whose probabilities add up to P.",
)
@click.option(
    "--seed",
    "asked_sampling_seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the draws: the same one draws the same text.",
)
@click.option(
    "--tokenizer",
    "asked_tokenizer",
    type=InputFile("tokenizer"),
    metavar="TOKENIZER.json|bytes",
    help="What makes tokens of text. Default: the tokenizer that the run used, or that is in the directory.",
)
@click.option(
    "--eos",
    "asked_eos",
    metavar="ID|tokenizer|none",
    help="Stop at this token, at the tokenizer's own, or at none. Default: the one at the end of the run's "
    "documents, or of config.json.",
)
@chat_template_option("asked_chat_template")
@click.option(
    "--init",
    "asked_init",
    type=InputFile("weights"),
    metavar="W.safetensors|DIR",
    help="The weights that the run began with, of a checkpoint of adapters or of some parameters.",
)
@click.option(
    "--dtype",
    "asked_dtype",
    type=click.Choice(["f16", "bf16", "f32"]),
    help="Type of weights and activations. Default: that of the run's plan; f32 for a directory.",
)
@choice_option("--kernels", "asked_kernels", "fast", "reference", text="BLAS and fused loops; or plain numpy.")
@click.option(
    "--threads", "threads", type=click.IntRange(1, _MOST_THREADS), help="Threads of a kernel. Default: one a core."
)
@choice_option(
    "--engine",
    "engine",
    "local",
    "mpi",
    "torch",
    text="Who keeps keys and values: this process; or, each a part, those that mpirun or torchrun started.",
)
@json_option
@in_groups(prompt=Prompt, asked_sampling=Sampling, asked=Generation)
def command(
    path: str,
    prompt: Prompt,
    asked: Generation,
    threads: int | None,
    engine: Literal["local", "mpi", "torch"],
    as_json: bool,
) -> int:
    """Continue a prompt with a model: a look at the result of a training.

    It uses the routines and kernels of training. Memory: the weights, the activations of one layer, and keys and values
    of all tokens. With several processes each has the weights and a part of keys and values: they share out the prompt,
    then attend to each token together. The text is the same but for rounding.
    """
    if sum(said is not None for said in (prompt.text, prompt.tokens, prompt.chat)) != 1:
        raise click.UsageError("give what the text begins with: --prompt TEXT, --chat TEXT, or --prompt-tokens 17,4,93")
    if prompt.chat is None:
        refuse_idle("is for --chat", "asked_chat_template")
    if not asked.sampling.temperature:
        refuse_idle(
            "is for tokens that are drawn: it goes with --temperature above 0",
            "asked_sampling_top_p",
            "asked_sampling_seed",
        )
    from ratrain.ratrainc.console.console import print_json, status
    from ratrain.ratrainc.console.heartbeat import speaking
    from ratrain.ratrainc.console.terminal import echo
    from ratrain.ratrainc.running.generation import generate
    from ratrain.ratrainc.running.job import job_of

    asked = evolve(asked, threads=threads or available_threads())
    with ExitStack() as ending:
        job = ending.enter_context(job_of(Ranks(engine), as_json=as_json))
        ending.enter_context(speaking(job.speaks))
        with status("generating: new kernels are compiled") as tell:
            made = generate(
                path,
                prompt,
                asked,
                lambda at: tell(f"generating, {at.done} of {at.total} tokens at most"),
                job.holders(),
            )
        if not job.speaks:
            return 0
    if as_json:
        print_json(made.to_json())
    elif made.whole is None:
        echo(",".join(map(str, (*made.prompt, *made.tokens))), wrap=False)
    else:
        echo(made.text or "" if prompt.chat is not None else made.whole, wrap=False)
    return 0
