"""`ratrainc run`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

import click

from ratrain.ratrainc.commands.options import (
    FiniteRange,
    Result,
    Source,
    choice_option,
    json_option,
    machine_option,
    refuse_idle,
    steps_option,
)

if TYPE_CHECKING:
    from ratrain.ratrainc.training import RunResult
    from ratrain.targets.runtime.kernels import KernelName

_EPILOG = """\b
Examples:
  ratrainc run tiny.rtx --steps 100                            the English text that ships inside Python
  ratrainc run tiny.rtx --data book.txt --steps 200 --log losses.jsonl --save run1
  ratrainc run tiny.rtx --data book.txt --steps 200 --resume run1 --save run1
  ratrainc run tiny.rtx --data book.txt --steps 500 --eval-every 100 --plot loss.svg
  ratrainc run 1b.rtx --data corpus.txt --tokenizer tokenizer.json --steps 100
  ratrainc run 1b.rtx --data tokens.bin --order sequential --init model.safetensors --steps 20
  ratrainc run tiny.rtx --steps 5 --interleave 7               another legal order, the same losses
  mpirun -n 4 ratrainc run tiny.rtx --steps 100 --engine mpi   a process a rank, the same losses
"""

_MOST_THREADS = 1 << 16


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), metavar="FILE.rtx|FILE.rtir")
@click.option(
    "--data",
    type=Source("data"),
    metavar="TEXT|TOKENS.bin",
    help="UTF-8 text (byte tokens) or token file. Default: Python's own help texts.",
)
@click.option(
    "--data-dtype",
    type=click.Choice(["uint16", "uint32"]),
    help="Element type of a .bin file; by default the vocabulary decides.",
)
@click.option(
    "--tokenizer",
    type=Source("tokenizer"),
    metavar="TOKENIZER.json|bytes",
    help="Tokenise text with this, or take a byte as a token. Default: the tokenizer.json of --init's directory, or of the checkpoint's run; else bytes.",
)
@steps_option(10, "Steps to run; further ones with --resume.")
@choice_option(
    "--engine", "local", "mpi", text="Where ranks run: all in this process, or each in its own, started by mpirun."
)
@choice_option(
    "--rank-order",
    "pp-first",
    "dp-first",
    "mapping",
    text="Of MPI processes: consecutive ones are the stages of a replica, the replicas of a stage, or a tile of the plan's mapping.",
)
@choice_option(
    "--reduction",
    "ordered",
    "mpi",
    text="Sums over MPI: in rank order, the bits of the local engine; or as MPI likes.",
)
@choice_option(
    "--kernels",
    "fast",
    "reference",
    "tiled",
    text="BLAS and fused loops; plain numpy; or products and attention tile by tile, through buffers as large as the machine's.",
)
@click.option(
    "--interleave",
    type=click.IntRange(min=0),
    metavar="SEED",
    help="Run ready instructions in a random order instead of a fixed round.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, _MOST_THREADS),
    help="With more than one, engines run side by side, and each rank's kernels share its part of them. Default: one a core, or one where kernels are small.",
)
@click.option(
    "--check-memory", is_flag=True, help="Hold every access against the plan's lives; stop at the first difference."
)
@click.option(
    "--poison", is_flag=True, help="Fill freed bytes with NaNs, so that a use after release shows; checks memory too."
)
@click.option(
    "--init", type=Source("weights"), metavar="W.safetensors|DIR", help="Start from these weights (Hugging Face names)."
)
@click.option(
    "--save", type=Result("checkpoint"), metavar="DIR", help="Write a checkpoint at the end, or when interrupted."
)
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write a checkpoint after every N steps too, each in a directory of its own in DIR.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many of these to keep.",
)
@click.option(
    "--resume",
    type=Source("checkpoint"),
    metavar="DIR",
    help="Go on from a checkpoint, or from the newest sound one of several.",
)
@click.option("--new-data", is_flag=True, help="With --resume: go on with other data, or other tokens, than so far.")
@click.option(
    "--run-dir",
    type=Result("run"),
    metavar="DIR",
    help="Where ranks say where they are, for 'ratrainc postmortem DIR'. Default: run/ beside checkpoints.",
)
@click.option(
    "--hang-timeout",
    type=FiniteRange(min=0),
    default=8.0,
    show_default=True,
    metavar="SECONDS",
    help="Without progress for so long, say who waits for whom, and end a run that cannot go on; 0: never.",
)
@click.option(
    "--log",
    type=Result("log"),
    metavar="losses.jsonl",
    help="Write one JSON line a step: step, loss, tokens, tokens_per_second. With --resume, go on in that file.",
)
@click.option(
    "--eval-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Evaluate the held-out loss after every N steps and at the end.",
)
@click.option(
    "--eval-data",
    type=Source("data"),
    metavar="TEXT|TOKENS.bin",
    help="Held-out data. Default: the last part of --data.",
)
@click.option(
    "--eval-fraction",
    type=FiniteRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="The part of --data that is held out and never trained on, where there is no --eval-data.",
)
@click.option(
    "--eval-batches", type=click.IntRange(min=1), metavar="N", help="Evaluate on N steps' worth of it at most."
)
@click.option("--live", is_flag=True, help="Show a dashboard while the run goes on, where this is a terminal.")
@click.option(
    "--profile",
    "profile_path",
    type=Result("profile", ".json"),
    metavar="FILE.json",
    help="Write the wall time of every op, for Perfetto and 'ratrainc calibrate'.",
)
@click.option(
    "--plot",
    type=Result("picture", ".svg", ".png"),
    metavar="LOSS.svg|LOSS.png",
    help="Draw the losses at the end (needs the extra 'plot').",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of initial weights and data order. Default: the plan's.")
@choice_option("--order", "shuffled", "sequential", text="Order of the training sequences.")
@machine_option
@json_option
def command(
    file: str,
    data: str | None,
    data_dtype: str | None,
    tokenizer: str | None,
    steps: int,
    engine: Literal["local", "mpi"],
    rank_order: Literal["pp-first", "dp-first", "mapping"],
    reduction: Literal["ordered", "mpi"],
    kernels: KernelName,
    interleave: int | None,
    threads: int | None,
    check_memory: bool,
    poison: bool,
    init: str | None,
    save: str | None,
    save_every: int | None,
    keep_last: int,
    resume: str | None,
    new_data: bool,
    run_dir: str | None,
    hang_timeout: float,
    log: str | None,
    eval_every: int | None,
    eval_data: str | None,
    eval_fraction: float,
    eval_batches: int | None,
    live: bool,
    profile_path: str | None,
    plot: str | None,
    seed: int | None,
    order: Literal["shuffled", "sequential"],
    machine: str | None,
    as_json: bool,
) -> int:
    """Train: execute a program on text, all ranks in this process or, under mpirun, each in its own.

    Ctrl-C ends the run after the step it is in, and saves if --save was given; a second Ctrl-C stops at once. SIGTERM and SIGHUP (unless
    ignored, as under nohup) do the same, with exit code 75 where the state was saved; SIGUSR1 has it say where its ranks are and what they wait for.
    """
    if init is not None and resume is not None:
        raise click.UsageError("--init and --resume exclude each other: a checkpoint holds its weights")
    if new_data and resume is None:
        raise click.UsageError("--new-data is about going on from a checkpoint: --resume is missing")
    if engine == "mpi" and interleave is not None:
        raise click.UsageError("--interleave is of the local engine: over MPI the order is that of the machine")
    if save is None and save_every is not None:
        raise click.UsageError("--save-every says when to save, --save DIR where: that is missing")
    if eval_every is None and (eval_data is not None or eval_batches is not None):
        raise click.UsageError("--eval-every says when to evaluate: it is missing")
    if engine == "local":
        refuse_idle("is of processes: it goes with --engine mpi", "rank_order", "reduction")
    if interleave is not None and threads is not None and threads > 1:
        raise click.UsageError("--interleave takes instructions one by one: it does not go with --threads above 1")
    if save_every is None:
        refuse_idle("goes with --save-every: a checkpoint at the end is one", "keep_last")
    if eval_every is None or eval_data is not None:
        refuse_idle("cuts --data for --eval-every: it does not go with --eval-data", "eval_fraction")
    from attrs import evolve

    from ratrain import api
    from ratrain.ratrainc.job import job_of
    from ratrain.ratrainc.pictures import picture_kind
    from ratrain.ratrainc.signals import saying_where
    from ratrain.ratrainc.training import check_outputs, default_threads, run_training
    from ratrain.ratrainc.training_data import DataChoice
    from ratrain.targets.program.program_verifier import check_program
    from ratrain.targets.runtime.training import RunSettings

    if plot is not None:
        picture_kind(plot)
    settings = RunSettings(
        steps=steps,
        kernels=kernels,
        order=order,
        seed=seed,
        interleave_seed=interleave,
        init=init,
        resume=resume,
        new_data=new_data,
        save=save,
        save_every=save_every,
        keep_last=keep_last,
        run_folder=run_dir,
        hang_timeout=hang_timeout,
        sums="rank order" if reduction == "ordered" else reduction,
        check_memory=check_memory,
        poison=poison,
        eval_every=eval_every or 0,
    )
    chosen = DataChoice(
        path=data,
        dtype=data_dtype,
        tokenizer=tokenizer,
        evaluated=eval_every is not None,
        eval_path=eval_data,
        eval_fraction=eval_fraction,
        eval_batches=eval_batches,
        weights=init,
        resume=resume,
    )
    with (
        saying_where("where the run is: it is starting, no step has begun"),
        job_of(engine, rank_order, reduction, as_json=as_json) as job,
    ):
        if job.speaks:
            is_series = save_every is not None or job.count > 1
            check_outputs(settings, log=log, plot=plot, profile_path=profile_path, is_series=is_series)
        program = api.load(file, machine=machine)
        check_program(program)
        result = run_training(
            program,
            chosen,
            evolve(settings, threads=threads or default_threads(program)),
            log if job.speaks else None,
            quiet=as_json or not job.speaks,
            plot=plot if job.speaks else None,
            profile_path=profile_path,
            live=live and job.speaks,
            processes=job.processes(program),
        )
        if job.speaks:
            _report(result, as_json=as_json)
        return result.exit_code


def _report(result: RunResult, *, as_json: bool) -> None:
    """Say what the run did, whose exit code counts: there may be nobody left to hear it, after a signal above all."""
    from ratrain.ratrainc.console import print_json
    from ratrain.ratrainc.terminal import leave_lost_readers
    from ratrain.ratrainc.training import show_run

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
