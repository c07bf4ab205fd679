"""`ratrainc disasm`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import InputFile, misuse_of_command, refuse_idle
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc disasm tiny.rtx | less
  ratrainc disasm tiny.rtx --stage 0 --engine compute
  ratrainc disasm tiny.rtx --routines
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --machine mt3000-tiles -o tiles.rtx
  ratrainc disasm tiles.rtx --tiles --core 5 --limit 1000 | less
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtx")
@click.option("--stage", type=click.IntRange(min=0), help="Only this stage.")
@click.option("--engine", metavar="ENGINE", help="Only this engine: compute, send, recv, collective or host.")
@click.option("--routines", is_flag=True, help="Print the routines instead: kernels, operands, workspace.")
@click.option("--tiles", is_flag=True, help="Print the tile schedules instead: buffers, transfers, waits.")
@click.option(
    "--core", type=click.IntRange(min=0), default=0, show_default=True, help="With --tiles: the core to follow."
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=60, show_default=True, help="With --tiles: events of each schedule."
)
def command(
    file: str, stage: int | None, engine: str | None, routines: bool, tiles: bool, core: int, limit: int
) -> None:
    """Print a program: each engine's stream with addresses and waits, its routines, or their tile schedules."""
    if routines and tiles:
        raise click.UsageError("--routines and --tiles exclude each other")
    if routines or tiles:
        refuse_idle("is for streams: it does not go with --routines or --tiles", "stage", "engine")
    if not tiles:
        refuse_idle("goes with --tiles", "core", "limit")
    from ratrain import api

    with misuse_of_command():
        if tiles:
            lines = api.disassemble_tiles(file, core=core, limit=limit)
        elif routines:
            lines = api.disassemble_routines(file)
        else:
            lines = api.disassemble(file, stage=stage, engine=engine)
    echo("\n".join(lines))
