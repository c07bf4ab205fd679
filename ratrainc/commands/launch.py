"""`ratrainc launch`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ratrain.ratrainc.commands.options import Source, choice_option

if TYPE_CHECKING:
    from ratrain.targets.runtime.positions import RunFolder

_EPILOG = """\b
Examples:
  ratrainc launch -n 4 tiny.rtx --steps 100 --save run1 --save-every 20
  ratrainc launch -n 4 tiny.rtx --steps 100 --resume run1 --save run1 --save-every 20 --rank-order dp-first
  ratrainc launch -n 4 --mpirun /opt/openmpi/bin/mpirun tiny.rtx --steps 100
  ratrainc launch -n 4 --engine torch tiny.rtx --steps 100                          torchrun in place of mpirun

All options after FILE are those of 'ratrainc run'.
"""


class _Launch(click.Command):
    """A command whose own options stand before its first argument, and says so of one that stands behind."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of any command, with a word on options that went to 'ratrainc run'."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as missing:
            if missing.param is not None and any(_begins(word, missing.param.opts) for word in given):
                self._refuse(missing.param, ctx)
            raise

    def invoke(self, ctx: click.Context) -> object:
        """As of any command, where all its options came to it."""
        for parameter in self.params:
            if isinstance(parameter, click.Option) and any(
                _begins(word, parameter.opts) for word in ctx.params["words"]
            ):
                self._refuse(parameter, ctx)
        return super().invoke(ctx)

    def _refuse(self, parameter: click.Parameter, ctx: click.Context) -> NoReturn:
        option = max(parameter.opts, key=len)
        raise click.UsageError(
            f"{option} stands before FILE ('ratrainc launch {option} ... FILE'): the options after FILE are those of 'ratrainc run'",
            ctx,
        )


def _begins(word: str, names: Collection[str]) -> bool:
    """Whether a word gives an option, with its value or not: -n, -n4, --mpirun=PATH."""
    return any(word.partition("=")[0] == name or (len(name) == 2 and word[:2] == name) for name in names)


@click.command(
    cls=_Launch, epilog=_EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(min=1),
    required=True,
    help="Processes: stages times replicas times tensor peers.",
)
@click.option(
    "--mpirun",
    type=Source("launcher"),
    metavar="PATH",
    help="The launcher. Default: the first mpirun beside Python or on the PATH.",
)
@choice_option(
    "--engine",
    "engine",
    "mpi",
    "torch",
    text="What starts ranks and moves their bytes: mpirun and MPI, or torchrun and torch.distributed.",
)
@click.argument("file", type=Source("program"), metavar="FILE.rtx|FILE.rtir")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN OPTIONS]...")
def command(ranks: int, mpirun: str | None, engine: str, file: str, words: tuple[str, ...]) -> int:
    """Start a run with a process a rank, by mpirun or torchrun, and watch over it.

    Ctrl-C, SIGTERM and SIGHUP let the ranks end their step and save; SIGUSR1 has them say where they are. When a rank is lost (killed, out
    of memory), the others are ended, and a report says where it was. Exit codes are those of 'ratrainc run', 1 where ranks were lost.
    """
    if engine == "torch" and mpirun is not None:
        raise click.UsageError("--mpirun is for --engine mpi: with --engine torch torchrun starts the ranks")
    from ratrain.ratrain_ir.plugins import plugins
    from ratrain.ratrainc.supervisor import Supervisor, start_command
    from ratrain.targets.runtime.positions import RunFolder

    launcher, variables = start_command(engine, ranks, mpirun)
    save, given = _value_of("--save", words), _value_of("--run-dir", words)
    place = given or _beside_checkpoints(save, ranks, words)
    advice = f"nothing that was saved is lost: go on with --resume {save}" if save else None
    with nullcontext(RunFolder(place)) if place else _temporary_folder() as folder:
        run = ["run", file, *words, "--run-dir", folder.directory, "--engine", engine]
        others = [word for name in plugins() for word in ("--plugin", name)]
        run = [sys.executable, "-m", "ratrain", *others, *run]
        named = "torchrun" if engine == "torch" else None
        return Supervisor(folder, advice, named).run([*launcher, *run], variables)


@contextmanager
def _temporary_folder() -> Iterator[RunFolder]:
    """A folder for the ranks' positions; it stays only where there is something to look into."""
    from ratrain.targets.runtime.positions import RunFolder

    folder = RunFolder(tempfile.mkdtemp(prefix="ratrain-"))
    try:
        yield folder
    finally:
        if not folder.report():
            shutil.rmtree(folder.path, ignore_errors=True)


def _beside_checkpoints(save: str | None, ranks: int, words: tuple[str, ...]) -> str | None:
    """The ranks' own place in a directory of checkpoints. One process without --save-every writes a single one, where nothing else may be."""
    from ratrain.targets.runtime.checkpoint_series import RUN_FOLDER

    is_series = ranks > 1 or _value_of("--save-every", words) is not None
    return str(Path(save) / RUN_FOLDER) if save is not None and is_series else None


def _value_of(option: str, words: tuple[str, ...]) -> str | None:
    """The value that an option of `ratrainc run` is given; the last one counts."""
    value = None
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
