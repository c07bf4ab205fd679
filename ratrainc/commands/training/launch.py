"""`ratrainc launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NoReturn

import click

from ratrain.ratrainc.commands.words.options import InputFile, choice_option, misuse_of_command

_EPILOG = """\b
Examples:
  ratrainc launch -n 4 tiny.rtx --steps 100 --save run1 --save-every 20
  ratrainc launch tiny.rtx --steps 100 --save run1     as many as it has ranks
  ratrainc launch -n 4 tiny.rtx --steps 100 --resume run1 --save run1 \\
      --save-every 20 --rank-order dp-first
  ratrainc launch -n 4 --mpirun /opt/openmpi/bin/mpirun tiny.rtx --steps 100
  ratrainc launch --engine torch tiny.rtx --steps 100  torchrun in place of mpirun

All options after FILE are those of 'ratrainc run'.
"""


class _Launch(click.Command):
    """A command whose own options must come before its first argument; it reports one that comes later."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words as any command does.

        Raises `UsageError` if a required option of this command is missing because it stands after FILE, where it would
        go to 'ratrainc run'; the error says where it belongs.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as missing:
            if missing.param is not None and any(_begins(word, missing.param.opts) for word in given):
                self._refuse(missing.param, ctx)
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Run the command as any other, after checking that all its options came before FILE."""
        for parameter in self.params:
            if isinstance(parameter, click.Option) and any(
                _begins(word, parameter.opts) for word in ctx.params["words"]
            ):
                self._refuse(parameter, ctx)
        return super().invoke(ctx)

    def _refuse(self, parameter: click.Parameter, ctx: click.Context) -> NoReturn:
        option = max(parameter.opts, key=len)
        raise click.UsageError(
            f"{option} stands before FILE ('ratrainc launch {option} ... FILE'): the options after FILE are "
            "those of 'ratrainc run'",
            ctx,
        )


def _begins(word: str, names: Collection[str]) -> bool:
    """Tell whether a word is one of these options, with or without its value: -n, -n4, --mpirun=PATH."""
    return any(word.partition("=")[0] == name or (len(name) == 2 and word[:2] == name) for name in names)


@click.command(
    cls=_Launch, epilog=_EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(min=1),
    help="Processes: stages times replicas times tensor-parallel ranks. Default: as many as FILE has ranks.",
)
@click.option(
    "--mpirun",
    type=InputFile("launcher"),
    metavar="PATH",
    help="The launcher. Default: the first mpirun next to Python or on the PATH.",
)
@choice_option(
    "--engine",
    "engine",
    "mpi",
    "torch",
    text="What starts ranks and moves their bytes: mpirun and MPI, or torchrun and torch.distributed.",
)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtx|FILE.rtir")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN OPTIONS]...")
def command(
    ranks: int | None, mpirun: str | None, engine: Literal["mpi", "torch"], file: str, words: tuple[str, ...]
) -> int:
    """Start a run with one process per rank, by mpirun or torchrun, and watch over it.

    Ctrl-C, SIGTERM and SIGHUP let the ranks end their step and save; SIGUSR1 makes them report their positions. If a
    rank is lost (killed, out of memory), the others are ended, and a report says where it was. Exit codes are as for
    'ratrainc run'; 1 if ranks were lost.
    """
    from ratrain import api
    from ratrain.ratrainc.commands.training.run import command as run_command
    from ratrain.ratrainc.commands.words.refused_words import refuse_said_twice

    refuse_said_twice(run_command, [file, *words], "run", None)
    with misuse_of_command():
        return api.launch(file, ranks, words, engine=engine, mpirun=mpirun)
