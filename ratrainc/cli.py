"""The command line. Commands are imported when they run, so that help comes at once."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.console.failures import show_failure
from ratrain.ratrainc.console.help_text import fitted

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMMANDS = {
    "quickstart": "Plan, compile and train a small LLaMA on real text, with a report.",
    "examples": "List the example models, plans and machines, or copy them into a folder.",
    "compile": "Compile a model and a plan into a schedule (.rtir) or a program (.rtx).",
    "opt": "Run passes over a schedule.",
    "diff": "Show what differs between two schedules, in schedule terms.",
    "verify": "Prove that a schedule or a program is sound, or show the errors.",
    "lint": "Check another runtime's pipeline schedule (CSV); report its bubble and memory.",
    "export": "Write a schedule as torch.distributed's table (CSV), or as settings of Megatron-LM or torchtitan.",
    "schedule": "Print a well-known schedule as a table: one CSV row a stage.",
    "explain": "Say who holds the bytes at the peak, and price the changes that free some.",
    "simulate": "Time a program on a machine, from its own streams.",
    "report": "Draw a program's schedule as one HTML page.",
    "model": "Say what a model configuration is, and what of it is not supported.",
    "plan": "Find the plan to run on a number of clusters, and how far it can be from the best.",
    "fit": "Say whether a training run of another framework fits its devices, and what would make it fit.",
    "import-plan": "Make a plan of another framework's settings: Megatron-LM, torchtitan, axolotl, ...",
    "scale": "Show how throughput grows with the number of clusters.",
    "calibrate": "Fit constants of a machine file to measured times.",
    "validate": "Compare simulated steps with published measurements, by class of table.",
    "compare": "Simulate several strategies on one plan, or each on its best.",
    "run": "Train: execute a program on real text.",
    "finetune": "Fine-tune a model on chats, completions or texts: plan, compile, train, evaluate, export.",
    "watch": "Draw the logs of runs as one HTML page, again and again while they go on.",
    "launch": "Start a run with a process a rank and watch over it.",
    "postmortem": "Say where the ranks of a run were, and why it ended or makes no progress.",
    "generate": "Print what a trained model says behind a prompt.",
    "export-weights": "Write a checkpoint's weights as a Hugging Face model directory.",
    "disasm": "Print a program's streams, routines and addresses.",
    "doctor": "Say what this machine offers a run.",
    "precompile": "Compile ahead of time the loops that a first run would compile.",
    "alloc": "Give buffers with known lifetimes addresses in one memory.",
    "machines": "List the built-in machines, or the figures of one and where they come from.",
    "strategies": "List the named pass pipelines.",
    "passes": "List the passes and their options.",
    "completion": "Print what lets bash, zsh or fish complete the words of ratrainc.",
}

_ROOMS = {
    **dict.fromkeys(("examples", "machines", "model", "passes", "strategies"), "lists"),
    **dict.fromkeys(("quickstart", "run", "finetune", "launch", "watch", "postmortem", "precompile"), "training"),
    **dict.fromkeys(("generate", "export-weights"), "training"),
}
"""Rooms of commands that are not in `commands` itself."""

EXAMPLES = """\b
Examples:
  ratrainc quickstart
  ratrainc examples examples
  ratrainc compile --model llama-2-7b --plan examples/llama-2-7b-256.toml -o 7b.rtir
  ratrainc verify 7b.rtir
  ratrainc compile 7b.rtir -o 7b.rtx && ratrainc simulate 7b.rtx
"""


class _ReaderGoneError(Exception):
    """A broken pipe, as an error that click does not turn into an exit code."""


@contextmanager
def _seeing_lost_readers() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGoneError from None


class _Commands(click.Group):
    """A group that knows the names and summaries of its commands, and imports one when it is called."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        with _seeing_lost_readers():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _seeing_lost_readers():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        room = f".{_ROOMS[cmd_name]}" if cmd_name in _ROOMS else ""
        name = f"ratrain.ratrainc.commands{room}.{cmd_name.replace('-', '_')}"
        command: click.Command = import_module(name).command
        if command.epilog:
            command.epilog = fitted(command.epilog)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from ratrain.ratrain_ir.support.diagnostics import nearest

        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in _COMMANDS:
            hint = nearest(name, _COMMANDS)
            ctx.fail(f"there is no command '{name}'" + (f"; {hint}" if hint else ""))
        found, command, words = super().resolve_command(ctx, args)
        if found is not None and command is not None and not ctx.resilient_parsing:
            from ratrain.ratrainc.commands.words.refused_words import refuse_extra_words, refuse_said_twice

            refuse_said_twice(command, words, found, ctx)
            refuse_extra_words(command, words, found, ctx)
        return found, command, words

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands or options that begin with `incomplete`, without importing a command."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return found if not incomplete.startswith("-") else click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def project_version() -> str:
    """Return the installed version."""
    try:
        return version("ratrain")
    except PackageNotFoundError:
        return "0 (not installed)"


_RENAMED_OPTIONS = {"explain-losers": "explain-rejected"}
"""Options of 0.1 under their names since 0.2; the old ones are understood until 0.3, and no help shows them."""


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: _RENAMED_OPTIONS.get(name, name),
    },
    epilog=fitted(EXAMPLES),
)
@click.version_option(project_version(), prog_name="ratrainc")
@click.option(
    "--plugin",
    "plugin_names",
    multiple=True,
    metavar="MODULE|FILE.py",
    help="Import passes and targets of your own first. May stand anywhere, and several times.",
)
def commands(plugin_names: tuple[str, ...]) -> None:
    """Compile LLM training schedules for machines whose memory is small, explicit and slow to reach.

    A model and a parallel plan go in; out comes, for every pipeline stage, a program that says which block runs when,
    which byte of memory every tensor lives at and what travels when. The same program is verified, timed and executed.
    """
    if plugin_names:
        from ratrain.ratrain_ir.support.plugins import load_plugin

        for name in plugin_names:
            load_plugin(name)


@contextmanager
def _keeping_ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C after the block, if the block changed it.

    Only the main thread can. A handler that was not set from Python is not restored.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is not before and before is not None:
            signal.signal(signal.SIGINT, before)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    It is 0 on success, 1 if the input is at fault, 2 for wrong usage, 70 for an internal error, 130 if interrupted.
    """
    words = _plugins_first(sys.argv[1:] if arguments is None else arguments)
    _write_whole()
    with _keeping_ctrl_c():
        return _exit_code_of(words)


def _plugins_first(words: list[str]) -> list[str]:
    """Move every `--plugin NAME` before the command, since the command's options may need what the plugin brings."""
    plugin_words, others, rest = [], [], iter(words)
    for word in rest:
        if word == "--plugin":
            plugin_words += [word, *([name] if (name := next(rest, None)) is not None else [])]
        elif word.startswith("--plugin="):
            plugin_words.append(word)
        else:
            others.append(word)
    return plugin_words + others


def _exit_code_of(words: list[str]) -> int:
    try:
        from ratrain.ratrainc.console.terminal import warnings_in_words

        with warnings_in_words():
            result = commands.main(args=words, prog_name="ratrainc", standalone_mode=False)
    except (_ReaderGoneError, BrokenPipeError):
        from ratrain.ratrainc.console.terminal import leave_lost_readers

        leave_lost_readers()
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - none may show a traceback
        return show_failure(error, as_json="--json" in words)
    return result if isinstance(result, int) else 0


def _write_whole() -> None:
    """Give an unbuffered stdout (PYTHONUNBUFFERED) a buffer.

    Without one, a write that the system cuts short loses its rest silently.
    """
    stream, raw = sys.stdout, getattr(sys.stdout, "buffer", None)
    if stream is sys.__stdout__ and isinstance(raw, io.RawIOBase):  # one that somebody put there is theirs
        whole = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(whole, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
