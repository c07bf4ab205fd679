"""`ratrainc model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words.options import InputFile, json_option, named_model

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

_EPILOG = """\b
Examples:
  ratrainc model llama-2-7b
  ratrainc model Qwen2.5-0.5B/config.json --seq-len 8192
  ratrainc model meta-llama/Llama-2-7b-hf
  ratrainc model run1-hf --json
"""

_UNSUPPORTED = "RT061"


@click.command(epilog=_EPILOG)
@click.argument("model", type=InputFile("model"), metavar="M", callback=named_model)
@click.option(
    "--seq-len",
    type=click.IntRange(1, 1 << 20),
    metavar="S",
    help="Tokens of a sequence. Default: 2048, or as many as the model has positions for.",
)
@json_option
def command(model: str, seq_len: int | None, as_json: bool) -> int:
    """Describe a model: a preset, its name on the Hugging Face Hub, a config.json, or a directory with one.

    Prints parameters by block, operations and bytes of a token, the bytes that a layer keeps for its backward, and
    unusual features. For a model that is not supported, it lists the keys that are the reason (exit code 1).
    """
    from ratrain import api
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show

    try:
        facts = api.model_facts(model, seq_len)
    except DiagnosticError as error:
        if all(problem.code != _UNSUPPORTED for problem in error.diagnostics):
            raise
        return _refused(model, error, as_json=as_json)
    if as_json:
        print_json(facts.to_json())
    else:
        show(facts.parts())
    return 0


def _refused(model: str, error: DiagnosticError, *, as_json: bool) -> int:
    """Print the unsupported keys on stdout, as text or data, and all errors on stderr; return the exit code 1."""
    from ratrain.ratrainc.console.console import print_json, say, show_diagnostics

    unsupported = [problem for problem in error.diagnostics if problem.code == _UNSUPPORTED]
    if as_json:
        reasons = [{"key": each.key, "message": each.message, "help": each.help} for each in unsupported]
        print_json(
            {"model": model, "unsupported": reasons, "diagnostics": [each.to_json() for each in error.diagnostics]}
        )
    else:
        keys = dict.fromkeys(each.key for each in unsupported if each.key is not None)
        say(f"{model} is not supported, for: {', '.join(keys)}")
    show_diagnostics(error.diagnostics, as_json=False)
    return 1
