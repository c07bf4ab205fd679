"""Options that several commands share, written once."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ratrain.ratrainc.choices.plan_choices import LEAST_TOKENS, LONG_SEQUENCE
from ratrain.ratrainc.commands.words import completing
from ratrain.ratrainc.console.terminal import echo
from ratrain.targets.runtime.settings import AUTO_KERNELS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ratrain.ratrainc.choices.strategies import Strategy

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")
_MOST_JOBS = 256
_MOST_STEPS = 10**9
"""Most steps of a run: with more, the remaining time could not be shown as a date."""


class FiniteRange(click.FloatRange):
    """A `FloatRange` without nan, which no comparison finds outside of it, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raise a usage error if it is not one within the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class KernelSetName(click.Choice[str]):
    """A kernel set: one of the project's own, which help shows, or one that a plugin brings; or `auto` if `chosen`."""

    def __init__(self, *, chosen: bool = False) -> None:
        names = ("fast", "reference", "tiled", "torch", "torch-device", "torch-triton")
        super().__init__((AUTO_KERNELS, *names) if chosen else names)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; raise a usage error if no kernel set has it."""
        if value not in self.choices:
            from ratrain.targets.runtime.kernels import KERNEL_SETS

            if KERNEL_SETS.place(value) is not None:
                return value
        return super().convert(value, param, ctx)


def device_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check the value of `--device`: a name that devices can have. The device itself is looked for when it is used."""
    if value is not None and _DEVICE.fullmatch(value) is None:
        raise click.BadParameter(f"'{value}' is no device: cpu, cuda or cuda:N", context, parameter)
    return value


def output_file(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """Check an option that names a file to write; refuse, before the work, a place that cannot be written."""
    if path is not None:
        from ratrain.ratrain_ir.support.files import check_writable

        check_writable(path)
    return path


def output_directory(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """Check an option that names a directory to write; refuse, before the work, one that cannot be written."""
    if path is not None:
        from ratrain.ratrain_ir.support.files import check_directory_writable

        check_directory_writable(path)
    return path


class TrackerName(click.types.StringParamType):
    """`tensorboard`, `tensorboard:DIR`, `wandb` or `wandb:PROJECT`: a `TrackerChoice`."""

    name = "tracker"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the tracker; raise a usage error if it is unknown, or another result uses its folder."""
        from ratrain.ratrainc.choices.run_choices import TrackerChoice

        kind, colon, place = str(value).partition(":")
        if colon and not place:
            self.fail(
                f"'{value}' ends where its {'folder' if kind == 'tensorboard' else 'project'} should stand", param, ctx
            )
        if kind not in ("tensorboard", "wandb"):
            self.fail(f"'{kind}' is none of tensorboard[:DIR] and wandb[:PROJECT]", param, ctx)
        if kind == "tensorboard" and place:
            place = Result("folder").convert(place, param, ctx)
        return TrackerChoice(kind, place or None)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the known trackers."""
        del ctx, param
        return completing.words(("tensorboard", "wandb"), incomplete)


class FilePath(click.types.StringParamType):
    """Path of a file or directory that a command reads (`InputFile`) or writes (`Result`).

    For every command, no result may replace an input or another result. The exception is an input of the same kind and
    ending, which has been read by then: `opt X.rtir -o X.rtir`.
    """

    name = "path"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return files, and names that stand for files of the kind."""
        from ratrain.ratrainc.commands.words.completing import file_or_name

        del ctx, param
        return file_or_name(self.kind, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path unchanged; raise a usage error if it is empty, or is the same file as another path."""
        path = str(value)
        if not path:
            self.fail("the path is empty", param, ctx)
        if param is None or ctx is None:
            return path
        given: list[tuple[FilePath, str, str]] = ctx.meta.setdefault(__name__, [])
        for other, place, title in given:
            if _would_replace(self, path, other, place) and _is_one_file(path, place):
                self.fail(f"'{path}' is the same file as that of {title}, and one would replace the other", param, ctx)
        given.append((self, path, param.get_error_hint(ctx)))
        return path


class InputFile(FilePath):
    """Path of a file that a command reads. Another kind's ending is refused, with the command that takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path unchanged. Raises `DiagnosticError` RT002 if it has the ending of another kind."""
        from ratrain.ratrainc.commands.words.file_kinds import refuse_wrong_kind

        path = super().convert(value, param, ctx)
        refuse_wrong_kind(self.kind, path)
        return path


class Result(FilePath):
    """Path of a result that a command writes, with the endings of its kind if it is a file.

    An existing file with another kind's ending is not replaced: `opt X.rtir -o PLAN.toml` is refused. Unknown endings,
    devices and pipes are accepted.
    """

    def __init__(self, kind: str, *endings: str) -> None:
        super().__init__(kind)
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path unchanged; raise a usage error if a file of another kind would be lost."""
        path = super().convert(value, param, ctx)
        status = _status(path)
        if not self.endings or status is None or not stat.S_ISREG(status.st_mode):
            return path
        ending = os.path.splitext(os.path.realpath(path))[1].lower()  # noqa: PTH122
        if ending in _ENDINGS and ending not in self.endings:
            mine = " or ".join(self.endings)
            self.fail(f"'{path}' is there, a {ending} file: it is not replaced by a {self.kind} ({mine})", param, ctx)
        return path


def result_option(names: str, result: Result, metavar: str, text: str, *, required: bool = False) -> Callable[[F], F]:
    """Make an option for a file to write, under names that spaces separate (the parameter's may be the last)."""
    return click.option(
        *names.split(), type=result, callback=output_file, metavar=metavar, help=text, required=required
    )


_ENDINGS = {
    ".md",
    ".rtir",
    ".rtx",
    ".toml",
    ".json",
    ".jsonl",
    ".csv",
    ".html",
    ".svg",
    ".png",
    ".safetensors",
    ".bin",
    ".pickle",
}
"""Endings that identify the kind of a file."""


def _would_replace(one: FilePath, path: str, other: FilePath, place: str) -> bool:
    """Tell whether two paths of a command are one file that must not be replaced."""
    if isinstance(one, InputFile) and isinstance(other, InputFile):
        return False
    if isinstance(one, Result) and isinstance(other, Result):
        return True
    return one.kind != other.kind or os.path.splitext(path)[1] != os.path.splitext(place)[1]  # noqa: PTH122


def _is_one_file(path: str, other: str) -> bool:
    """Tell whether two paths are one file, through any links, or would create one. Devices and folders do not count."""
    status, other_status = _status(path), _status(other)
    if status is None or other_status is None:
        return status is other_status and "\0" not in path + other and os.path.realpath(path) == os.path.realpath(other)
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, other_status)


def _status(path: str) -> os.stat_result | None:
    with suppress(OSError, ValueError):  # whoever opens it says why
        return os.stat(path)  # noqa: PTH116 - as in `ratrain.ratrain_ir.support.files`
    return None


def refuse_idle(why: str, *names: str) -> None:
    """Raise `click.UsageError` if one of these parameters was given, although nothing reads it in this call.

    `why` continues a sentence that begins with the option's name.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{' / '.join([*parameter.opts, *parameter.secondary_opts])} {why}")


@contextmanager
def misuse_of_command() -> Iterator[None]:
    """Turn a function's refusal of its arguments into a usage error of the command."""
    from ratrain.ratrain_ir.support.diagnostics import MISUSE, DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        if error.diagnostics[0].code != MISUSE:
            raise
        raise click.UsageError(error.diagnostics[0].message) from None


def in_groups(**groups: type[Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command a group of its options as one object: parameter `GROUP_FIELD` becomes the field FIELD of `GROUP`.

    Groups are built in the order of their names here, so one can be a field of another. Place the decorator below the
    options.
    """

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def call(**parameters: Any) -> R:
            for group, cls in groups.items():
                prefix = f"{group}_"
                names = [name for name in parameters if name.startswith(prefix)]
                parameters[group] = cls(**{name.removeprefix(prefix): parameters.pop(name) for name in names})
            return function(**parameters)

        return call

    return decorated


def machine_option(function: F) -> F:
    """`--machine`."""
    text = (
        "A machine file (TOML), or the name of a built-in machine ('ratrainc machines' lists them). "
        "Default: what the input was compiled for, else mt3000."
    )
    return click.option("--machine", type=InputFile("machine"), metavar="FILE", help=text)(function)


_LEAST_BARE = 1 << 12
"""Bytes of a memory below which a number without unit is taken for one whose unit is missing."""


def memory_bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse the bytes of a memory, as `byte_count` does; zero, and a small number without unit, are refused."""
    number = "" if value is None else value.strip()
    if number.isascii() and number.isdigit() and int(number) == 0:
        raise click.BadParameter(f"'{value}' is no memory at all: write for example 80GB", context, parameter)
    if number.isascii() and number.isdigit() and int(number) < _LEAST_BARE:
        words = f"'{value}' is {number} bytes, which no memory has: {number}GB or {number}GiB?"
        raise click.BadParameter(words, context, parameter)
    return byte_count(context, parameter, value)


def byte_count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse an option in bytes: a number, or one with a unit like 20GiB or 20GB; None if it is not given."""
    from ratrain.ratrain_ir.support.quantities import QuantityError, whole_bytes

    try:
        return None if value is None else whole_bytes(value)
    except QuantityError as error:
        words = f"expected bytes like 1048576, 20GB or 20GiB, got '{value}': {error.help}"
        raise click.BadParameter(words, context, parameter) from None


class TokenCount(FiniteRange):
    """A number of tokens, at least one: also `300B` or `15T`."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raise a usage error if it is not one."""
        from ratrain.ratrain_ir.support.quantities import QuantityError, parse_count

        try:
            return super().convert(parse_count(str(value)), param, ctx)
        except QuantityError as error:
            self.fail(f"{error}: {error.help}", param, ctx)


def target_options(function: F) -> F:
    """`--machine` and `--capacity`, the group `target`: a `MachineChoice`."""
    text = "A machine file (TOML), or the name of a built-in machine ('ratrainc machines' lists them). Default: mt3000."
    capacity = (
        "DDR of a cluster, like 20GiB, in place of what the machine has (of the mt3000: 20GB, which are 20 * 10^9). "
        "The machine's overheads are subtracted."
    )
    function = click.option("--capacity", "target_capacity", callback=memory_bytes, metavar="BYTES", help=capacity)(
        function
    )
    return click.option("--machine", "target_machine", type=InputFile("machine"), metavar="FILE", help=text)(function)


def json_option(function: F) -> F:
    """`--json`."""
    text = "Print one JSON object on stdout and nothing else there."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


def verbose_option(function: F) -> F:
    """`-v`."""
    text = "Say which passes were inserted, and what for."
    return click.option("-v", "--verbose", is_flag=True, help=text)(function)


def model_option(*, required: bool) -> Callable[[F], F]:
    """`--model`."""
    text = "A preset (llama-2-7b, baichuan2-13b, qwen2.5-32b, llama-2-70b, ...), its name on the Hugging Face Hub "
    text += "(meta-llama/Llama-2-7b-hf), or a config.json."
    return click.option(
        "--model", type=InputFile("model"), required=required, metavar="M", callback=named_model, help=text
    )


def named_model(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    """Return a model's name unchanged; say on stderr which preset a name on the Hub stands for."""
    if name is not None:
        from ratrain.ratrain_ir.config.model_files import preset_of_hub_name

        if (preset := preset_of_hub_name(name)) is not None and preset != name:
            echo(f"model {name}: the preset {preset}", err=True)
    return name


def steps_option(default: int, text: str, parameter: str = "steps") -> Callable[[F], F]:
    """`--steps`: the length of a run."""
    return click.option(
        "--steps", parameter, type=click.IntRange(1, _MOST_STEPS), default=default, show_default=True, help=text
    )


def seconds_option(default: float | None, text: str, parameter: str = "seconds") -> Callable[[F], F]:
    """`--seconds`: the time for a search."""
    shown = default is not None
    return click.option("--seconds", parameter, type=FiniteRange(min=0), default=default, show_default=shown, help=text)


def jobs_option(text: str = "Processes.", parameter: str = "jobs") -> Callable[[F], F]:
    """`--jobs`: processes of a search."""
    return click.option(
        "--jobs",
        parameter,
        type=click.IntRange(1, _MOST_JOBS),
        default=one_a_core,
        show_default="one a core",
        help=text,
    )


def one_a_core() -> int:
    """Return the number of cores that this process may use."""
    from ratrain.ratrain_ir.process_pool import usable_cores

    return min(_MOST_JOBS, len(usable_cores()))


def processes_option(result: str = "The result is the same with any number.") -> Callable[[F], F]:
    """Make the option `--jobs`, the number of processes; it is set globally, not passed to the command."""

    def allow(context: click.Context, _parameter: click.Parameter, count: int) -> None:
        from ratrain.ratrain_ir.process_pool import processes

        context.with_resource(processes(count))

    return click.option(
        "--jobs",
        type=click.IntRange(1, _MOST_JOBS),
        default=one_a_core,
        show_default="one a core",
        expose_value=False,
        callback=allow,
        help=f"Processes for independent work of a large schedule, above all its stages. {result}",
    )


def _levels(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not {*words} <= {"0", "1", "2", "3"}:
        raise click.BadParameter(f"'{text}' is not a list of ZeRO levels like 0,1,2")
    return tuple(int(word) for word in words)


def _ranks(_context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 1 << 16 for word in words):
        kind = {"plans_peers": "tensor-parallel", "plans_contexts": "context"}.get(parameter.name or "", "expert")
        raise click.BadParameter(f"'{text}' is not a list of numbers of {kind} ranks like 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def schedule_names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Parse a list of schedules, some with a memory (`1f1b+host`), or `all`."""
    if text is None:
        return None
    from ratrain.ratrain_ir.schedules.named import SCHEDULES
    from ratrain.ratrainc.planner.space.plan_families import problem_of

    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if names == ("all",):
        return tuple(SCHEDULES)
    if problems := [problem for name in names if (problem := problem_of(name)) is not None]:
        text = f"{problems[0]}; the schedules are {', '.join(SCHEDULES)}, or all; the memories host, file and peer"
        raise click.BadParameter(text)
    return names


def like_option(text: str, parameter: str = "like") -> Callable[[F], F]:
    """Make the option `--like`: the file of a plan that a search keeps all of but the shape."""
    return click.option("--like", parameter, type=InputFile("plan"), metavar="P.toml", help=text)


def plan_choice_options(function: F) -> F:
    """`--strategy`, `--zero`, `--tp`, `--cp`, `--ep`, `--dtype` and `--like`, the group `plans`: a `PlanChoice`."""
    like = like_option(
        "Take types, sums, chunks, [train], the optimizer and several tensor-parallel, context or expert ranks from "
        "this plan.",
        "plans_like",
    )
    zero = click.option(
        "--zero",
        "plans_zero_levels",
        default="0,1,2,3",
        show_default=True,
        callback=_levels,
        metavar="0,1,...",
        help="ZeRO levels to choose from.",
    )
    peers = click.option(
        "--tp",
        "plans_peers",
        callback=_ranks,
        metavar="1,2,...",
        help="Numbers of tensor-parallel ranks to choose from. Default: of --like, else all that divide the model.",
    )
    contexts = click.option(
        "--cp",
        "plans_contexts",
        callback=_ranks,
        metavar="1,2,...",
        help="Numbers of context ranks to choose from, which share the tokens of a sequence. Default: of --like, else "
        f"1, and for {LONG_SEQUENCE} tokens or more all that divide clusters and sequence and leave a "
        f"rank {LEAST_TOKENS}.",
    )
    expert_ranks = click.option(
        "--ep",
        "plans_expert_ranks",
        callback=_ranks,
        metavar="1,2,...",
        help="Numbers of expert ranks to choose from: replicas that share out the experts of a layer. Default: of "
        "--like, else 1 and all that divide the experts of the model, if it has some.",
    )
    name = click.option(
        "--strategy",
        "plans_strategy",
        metavar="S",
        shell_complete=completing.strategy,
        help="Plan for this strategy alone. Default: ratrain.",
    )
    dtype = click.option(
        "--dtype",
        "plans_dtype",
        type=click.Choice(("bf16", "f16", "f32")),
        help="Type of views and gradients. Default: as --like says, else f16 on the mt3000 and bf16 on GPUs.",
    )
    return name(zero(peers(contexts(expert_ranks(dtype(like(function)))))))


def refuse_idle_levels(strategy: Strategy) -> None:
    """Raise `click.UsageError` if `--zero` was given although the strategy sets the level."""
    if strategy.zero is not None:
        refuse_idle(f"does not go with the strategy '{strategy.name}', which sets the level", "plans_zero_levels")


def exhaustive_option(function: F) -> F:
    """`--exhaustive`."""
    text = "Go on until the bounds prove that nothing is left to gain."
    return click.option("--exhaustive", "effort_exhaustive", is_flag=True, help=text)(function)


def choice_option(name: str, parameter: str, *choices: str, text: str) -> Callable[[F], F]:
    """Make an option that takes one of a few words; the first is the default."""
    return click.option(name, parameter, type=click.Choice(choices), default=choices[0], show_default=True, help=text)


def rendezvous_option(function: F) -> F:
    """`--rendezvous`."""
    text = "Sends wait for their receives instead of being buffered."
    return click.option("--rendezvous", is_flag=True, help=text)(function)


def sharing_option(function: F) -> F:
    """`--sharing/--no-sharing`."""
    text = "Overlapping ops share DDR and link."
    return click.option("--sharing/--no-sharing", default=True, show_default=True, help=text)(function)


def plan_option(function: F) -> F:
    """`--plan`."""
    text = "The parallel plan, in TOML."
    return click.option("--plan", type=InputFile("plan"), metavar="P.toml", help=text)(function)
