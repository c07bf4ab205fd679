"""`ratrainc completion`."""

from __future__ import annotations

import click

from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc completion bash
\b
Where it goes, for every new shell:
  bash   echo 'source <(ratrainc completion bash)' >> ~/.bashrc
  zsh    echo 'source <(ratrainc completion zsh)' >> ~/.zshrc
  fish   ratrainc completion fish > ~/.config/fish/completions/ratrainc.fish
\b
Of bash it takes 4.4 or newer; in ~/.zshrc the line stands behind compinit.
"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what lets a shell complete commands, options, presets, machines, strategies and passes."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    completion = made(click.get_current_context().find_root().command, {}, "ratrainc", "_RATRAINC_COMPLETE")
    # `source` of bash would look for a bash here and now; the script is the same for all
    echo(completion.source_template % completion.source_vars(), wrap=False)
