"""`ratrainc precompile`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import json_option

_EPILOG = """\b
Examples:
  ratrainc precompile
  ratrainc precompile --dtype f16 --dtype bf16
  NUMBA_CACHE_DIR=/shared/loops ratrainc precompile             for ranks that start with the same setting
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["f16", "bf16", "f32"]),
    multiple=True,
    default=("f16",),
    show_default=True,
    help="The type of weights, activations and gradients of runs to come; several may be given.",
)
@json_option
def command(dtypes: tuple[str, ...], as_json: bool) -> None:
    """Compile ahead of time the loops that a first compilation and a first run would compile.

    Loops are compiled when they are first called, and cached for later processes on this processor: next to the
    package, in a folder of the user, or in NUMBA_CACHE_DIR. This command calls them all once, on a small plan of a
    LLaMA-like model, and those of expert blocks; loops that only other models need are compiled when they are first
    called. Use it after an installation, in a container image, or for a folder that many ranks share.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, spinner
    from ratrain.ratrainc.console.parts import show

    with spinner("compiling loops", "starting") as progress:
        found = api.precompile(dtypes, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
