"""`ratrainc run`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import click
from attrs import evolve

from ratrain.ratrain_ir.config.optimizer import DECAYS
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs, Ranks, of_a_process
from ratrain.ratrainc.commands.training.data_options import held_out_options, key_options, trackers_option
from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    KernelSetName,
    Result,
    choice_option,
    device_name,
    in_groups,
    json_option,
    machine_option,
    memory_bytes,
    misuse_of_command,
    refuse_idle,
    steps_option,
)
from ratrain.targets.runtime.settings import (
    AUTO_KERNELS,
    HOST_DEVICE,
    Evaluation,
    Execution,
    OptimizerKeys,
    RunSettings,
    Saving,
    Start,
    Watch,
)

if TYPE_CHECKING:
    from ratrain.ratrainc.running.run_result import RunResult

F = TypeVar("F", bound=Callable[..., Any])

_EPILOG = """\b
Examples:
  ratrainc run tiny.rtx --steps 100                            the English text that ships inside Python
  ratrainc run tiny.rtx --data book.txt --steps 200 --log losses.jsonl --save run1
  ratrainc run tiny.rtx --data book.txt --steps 200 --resume run1 --save run1
  ratrainc run tiny.rtx --data book.txt --steps 200 --lr 1e-3 --warmup-steps 20    no compiling again
  ratrainc run tiny.rtx --data book.txt --steps 500 --eval-every 100 --plot loss.svg
  ratrainc run tiny.rtx --data book.txt --steps 500 --log-to tensorboard --log-to wandb:tiny
  ratrainc run 1b.rtx --data corpus.txt --tokenizer tokenizer.json --steps 100
  ratrainc run 1b.rtx --data shards/ --data more.jsonl --init llama/ --eos tokenizer --order documents --steps 100
  ratrainc run 1b.rtx --data pairs.jsonl --train-on completion --prompt-key question --completion-key answer
  ratrainc run 1b.rtx --data chats.jsonl --train-on answers --init smollm/ --steps 100
  ratrainc run 1b.rtx --data tokens.bin --order sequential --init model.safetensors --steps 20
  ratrainc run tiny.rtx --steps 5 --interleave 7               another legal order, the same losses
  ratrainc run tiny.rtx --steps 100 --device cuda              all ranks on one device of PyTorch
  mpirun -n 4 ratrainc run tiny.rtx --steps 100 --engine mpi   a process a rank, the same losses
  torchrun --nproc-per-node 4 -m -- ratrain run tiny.rtx --steps 100 --engine torch    the same over torch.distributed
"""

_MOST_THREADS = 1 << 16


def optimizer_option(name: str, text: str, **more: Any) -> Callable[[F], F]:
    """Make the option for a key of the plan's optimizer, by the same name."""
    parameter = f"settings_optimizer_{name.removeprefix('--').replace('-', '_')}"
    return click.option(name, parameter, help=f"In place of the plan's: {text}.", **more)


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtx|FILE.rtir")
@click.option(
    "--data",
    "data_paths",
    type=InputFile("data"),
    multiple=True,
    metavar="TEXT|DOCS.jsonl|TOKENS.bin|DIR",
    help="UTF-8 text (byte tokens), JSONL or a JSON array of documents, token file, or a folder of them; again for "
    "more. Default: Python's own help texts.",
)
@choice_option(
    "--train-on",
    "data_train_on",
    "all",
    "completion",
    "answers",
    "last-answer",
    text="Which tokens are in the loss: all; of JSONL lines with a prompt and a completion the completions alone; of "
    "lines with a chat what the assistant says, or the last of it.",
)
@key_options("data")
@click.option(
    "--eos",
    "data_eos",
    metavar="ID|tokenizer",
    help="End every document (a JSONL line, a text file) with this token, --eos 2, or with the tokenizer's own; "
    "in token numbers (.bin) it ends one already. Default: nothing between documents.",
)
@choice_option(
    "--pack",
    "data_pack",
    "cut",
    "whole",
    text="How documents fill sequences: one after the other, cut where a sequence ends; or whole, as many in each as "
    "fit, the rest filled up with tokens that do not count.",
)
@click.option(
    "--data-dtype",
    "data_dtype",
    type=click.Choice(["uint16", "uint32"]),
    help="Element type of a .bin file; by default the vocabulary decides.",
)
@click.option(
    "--tokenizer",
    "data_tokenizer",
    type=InputFile("tokenizer"),
    metavar="TOKENIZER.json|bytes",
    help="Tokenise text with this, or take a byte as a token. Default: the tokenizer.json of --init's "
    "directory, or of the checkpoint's run; else bytes.",
)
@steps_option(10, "Steps to run; further ones with --resume.", "settings_steps")
@choice_option(
    "--engine",
    "ranks_engine",
    "local",
    "mpi",
    "torch",
    text="Where ranks run: all in this process, or each in its own, started by mpirun or by torchrun.",
)
@choice_option(
    "--rank-order",
    "ranks_order",
    "pp-first",
    "dp-first",
    "mapping",
    text="Of processes: consecutive ones are the stages of a replica, the replicas of a stage, or a tile of the "
    "plan's mapping.",
)
@choice_option(
    "--reduction",
    "ranks_reduction",
    "ordered",
    "fast",
    text="Sums over processes: in rank order, the bits of the local engine; or in an order that MPI or PyTorch "
    "chooses.",
)
@click.option(
    "--device",
    "settings_execution_device",
    default=HOST_DEVICE,
    show_default=True,
    metavar="cpu|cuda|cuda:N",
    callback=device_name,
    help="What executes it: this processor, or a device of PyTorch (needs the extra 'torch'), whose memory the "
    "arenas are in then.",
)
@click.option(
    "--graph",
    "settings_execution_graph",
    is_flag=True,
    help="With --device cuda: record a whole step as one graph, after a few that are done as usual, and repeat "
    "it, so that no kernel waits for this processor to start it.",
)
@click.option(
    "--kernels",
    "settings_execution_kernels",
    type=KernelSetName(chosen=True),
    default=AUTO_KERNELS,
    show_default=True,
    help="Chosen for the device, the program and this processor (said when the run starts; a run that goes on keeps "
    "its own); BLAS and fused loops; plain numpy; products and attention tile by tile, through buffers as large as "
    "the machine's; the fused loops with PyTorch's products of bf16; PyTorch's operations throughout, on any device; "
    "or these with kernels of Triton where they go over memory once.",
)
@click.option(
    "--interleave",
    "settings_execution_interleave_seed",
    type=click.IntRange(min=0),
    metavar="SEED",
    help="Run ready instructions in a random order instead of a fixed round.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, _MOST_THREADS),
    help="With more than one, engines run side by side, and each rank's kernels share its part of them. "
    "Default: one a core, or one where kernels are small.",
)
@click.option(
    "--check-memory",
    "settings_execution_check_memory",
    is_flag=True,
    help="Check every access against the planned lives of the tensors; stop at the first difference.",
)
@click.option(
    "--poison",
    "settings_execution_poison",
    is_flag=True,
    help="Fill freed bytes with NaNs, so that a use after release shows; checks memory too.",
)
@click.option(
    "--scratch",
    "settings_execution_store_folder",
    type=InputFile("folder"),
    metavar="DIR",
    help="Where a program that stores tensors in files has them, which go with the run. Default: where this "
    "system has temporary files.",
)
@click.option(
    "--ram",
    "settings_execution_ram_bytes",
    callback=memory_bytes,
    metavar="BYTES",
    help="Refuse to start if a process would hold more than this in memory, like 2GiB; data in files does not count.",
)
@click.option(
    "--init",
    "settings_start_weights",
    type=InputFile("weights"),
    metavar="W.safetensors|DIR",
    help="Start from these weights (Hugging Face names). With --resume: the frozen weights of a program that trains "
    "adapters or some of its parameters.",
)
@click.option(
    "--init-adapter",
    "settings_start_adapter",
    type=InputFile("weights"),
    metavar="DIR",
    help="Start from the adapters of this folder of PEFT, in a program that trains adapters.",
)
@click.option(
    "--save",
    "settings_saving_directory",
    type=Result("checkpoint"),
    metavar="DIR",
    help="Write a checkpoint at the end, or when interrupted.",
)
@click.option(
    "--save-every",
    "settings_saving_every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write a checkpoint after every N steps too, each in a directory of its own in DIR.",
)
@click.option(
    "--keep-last",
    "settings_saving_keep_last",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many of these to keep.",
)
@click.option(
    "--save-best",
    "settings_saving_best",
    type=Result("checkpoint"),
    metavar="DIR",
    help="Write a checkpoint here after each evaluation with the lowest held-out loss so far.",
)
@click.option(
    "--resume",
    "settings_start_checkpoint",
    type=InputFile("checkpoint"),
    metavar="DIR",
    help="Go on from a checkpoint, or from the newest sound one of several.",
)
@click.option(
    "--new-data",
    "settings_start_new_data",
    is_flag=True,
    help="With --resume: go on with other data, or other tokens, than so far.",
)
@click.option(
    "--run-dir",
    "settings_watch_folder",
    type=Result("run"),
    metavar="DIR",
    help="Folder of the ranks' positions, for 'ratrainc postmortem DIR'. Default: run/ next to checkpoints.",
)
@click.option(
    "--hang-timeout",
    "settings_watch_hang_timeout",
    type=FiniteRange(min=0),
    default=8.0,
    show_default=True,
    metavar="SECONDS",
    help="After this long without progress, say who waits for whom, and end a run that cannot go on; 0: never.",
)
@click.option(
    "--log",
    "outputs_log",
    type=Result("log"),
    metavar="losses.jsonl",
    help="Write one JSON line a step: step, loss, tokens, tokens_per_second. With --resume, go on in that file.",
)
@trackers_option("outputs_trackers")
@held_out_options("settings_evaluation", "")
@click.option(
    "--eval-batches",
    "settings_evaluation_batches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Evaluate on N steps' worth of it at most.",
)
@click.option(
    "--live", "display_live", is_flag=True, help="Show a dashboard while the run goes on, where this is a terminal."
)
@click.option(
    "--profile",
    "outputs_profile",
    type=Result("profile", ".json"),
    metavar="FILE.json",
    help="Write the wall time of every op, for Perfetto and 'ratrainc calibrate'.",
)
@click.option(
    "--plot",
    "outputs_plot",
    type=Result("picture", ".svg", ".png"),
    metavar="LOSS.svg|LOSS.png",
    help="Draw the losses at the end (needs the extra 'plot').",
)
@click.option(
    "--seed",
    "settings_seed",
    type=click.IntRange(min=0),
    help="Seed of initial weights and data order. Default: the plan's.",
)
@optimizer_option("--lr", "the learning rate", type=FiniteRange(min=0), metavar="RATE")
@optimizer_option(
    "--betas", "the memory of Adam's moments, as in --betas 0.9 0.95", type=FiniteRange(0, 1, max_open=True), nargs=2
)
@optimizer_option("--eps", "the least divisor of an update", type=FiniteRange(1e-30, 1))
@optimizer_option("--weight-decay", "how fast weights shrink", type=FiniteRange(min=0))
@optimizer_option("--warmup-steps", "steps until the learning rate is reached", type=click.IntRange(min=0), metavar="N")
@optimizer_option(
    "--total-steps",
    "the step at which the learning rate has come down to --min-lr",
    type=click.IntRange(min=1),
    metavar="N",
)
@optimizer_option("--min-lr", "the learning rate from then on", type=FiniteRange(min=0), metavar="RATE")
@optimizer_option("--decay", "the curve along which it comes down", type=click.Choice(DECAYS))
@optimizer_option(
    "--decay-steps",
    "the last steps before --total-steps, in which it comes down",
    type=click.IntRange(min=1),
    metavar="N",
)
@optimizer_option(
    "--max-norm", "the largest norm of the gradient, of a plan that clips", type=FiniteRange(min=0, min_open=True)
)
@choice_option(
    "--order",
    "settings_order",
    "shuffled",
    "sequential",
    "documents",
    text="Training sequences in another random order for each pass, as they stand, or as they stand after "
    "shuffling whole documents.",
)
@machine_option
@json_option
@in_groups(
    settings_optimizer=OptimizerKeys,
    settings_start=Start,
    settings_saving=Saving,
    settings_evaluation=Evaluation,
    settings_execution=Execution,
    settings_watch=Watch,
    settings=RunSettings,
    data=DataChoice,
    ranks=Ranks,
    outputs=Outputs,
    display=Display,
)
def command(
    file: str,
    settings: RunSettings,
    threads: int | None,
    data: DataChoice,
    ranks: Ranks,
    outputs: Outputs,
    display: Display,
    machine: str | None,
    as_json: bool,
) -> int:
    """Train: execute a program on text, all ranks in this process or, under mpirun or torchrun, each in its own.

    Ctrl-C ends the run after its present step, and saves if --save was given; a second Ctrl-C stops at once. SIGTERM
    and SIGHUP (unless ignored, as under nohup) do the same, with exit code 75 if the state was saved; SIGUSR1 makes it
    report where its ranks are and what they wait for.
    """
    from ratrain.ratrainc.running.run_checks import for_program, refuse_contradictions

    with misuse_of_command():
        refuse_contradictions(settings, data, ranks, threads, outputs)
    _refuse_idle_options(settings, data, ranks)
    from ratrain.ratrainc.compiling.proving import sound_program
    from ratrain.ratrainc.console.console import status
    from ratrain.ratrainc.console.heartbeat import speaking
    from ratrain.ratrainc.console.pictures import picture_kind
    from ratrain.ratrainc.console.signals import saying_where
    from ratrain.ratrainc.running.job import job_of
    from ratrain.ratrainc.running.training import check_outputs, run_training

    if outputs.plot is not None:
        picture_kind(outputs.plot)
    with (
        saying_where("where the run is: it is starting, no step has begun"),
        job_of(ranks, settings.execution.device, as_json=as_json) as job,
        ExitStack() as ending,
    ):
        ending.enter_context(speaking(job.speaks))
        if job.speaks:
            check_outputs(settings, outputs, job.count)
        with status(f"reading and verifying {file}"):
            program = sound_program(file, machine=machine)
        with misuse_of_command():
            settings = for_program(program, settings, ranks, threads)
        own, shown = of_a_process(outputs, evolve(display, quiet=as_json), speaks=job.speaks)
        result = run_training(program, data, settings, own, shown, job.processes(program))
        if job.speaks:
            _report(result, as_json=as_json)
        return result.exit_code


def _refuse_idle_options(settings: RunSettings, data: DataChoice, ranks: Ranks) -> None:
    """Raise `click.UsageError` for options that were given and would change nothing."""
    if ranks.engine == "local":
        refuse_idle("is for processes: it goes with --engine mpi or torch", "ranks_order", "ranks_reduction")
    if settings.saving.every is None:
        refuse_idle("is for --save-every: without it there is one checkpoint, at the end", "settings_saving_keep_last")
    if settings.evaluation.every is None:
        refuse_idle("cuts --data for --eval-every, which is not given", "settings_evaluation_fraction")
    if settings.evaluation.paths:
        refuse_idle("cuts --data, and --eval-data is held out instead", "settings_evaluation_fraction")
    if data.train_on == "all":
        refuse_idle("goes with --train-on completion or answers", "data_prompt_key", "data_completion_key")
    if data.train_on != "all":
        keys = "--chat-key" if data.of_chats else "--prompt-key and --completion-key"
        refuse_idle(f"is for whole texts: --train-on {data.train_on} takes {keys}", "data_text_key")
    if data.train_on == "completion":
        refuse_idle("is for chats: --train-on answers", "data_chat_key", "data_chat_template")
    elif not data.of_chats:
        refuse_idle("is for chats: --train-on answers, or --chat-key", "data_chat_template")


def _report(result: RunResult, *, as_json: bool) -> None:
    """Print the result of a run. After a signal its reader may be gone: that does not change the exit code."""
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.terminal import leave_lost_readers
    from ratrain.ratrainc.running.run_result import show_run

    try:
        if as_json:
            print_json(result.to_json())
        else:
            show_run(result)
        sys.stdout.flush()
    except OSError as error:
        if not result.interrupted and not isinstance(error, BrokenPipeError):
            raise
        leave_lost_readers()
