"""The page of typical mistakes: sound schedules, spoilt by small edits, and what `ratrainc verify` says about each.

Every output is made when the page is, so the page cannot say what the verifier does not. The edits find their lines by what
stands in them, and fail where such a line is not there exactly once.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrainc.cli import main
from ratrain.targets.program.rtx import write_program
from ratrain.targets.verifier.program_verifier import check_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

FILES = {
    "tiny.json": """\
{
  "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5
}
""",
    "two.toml": """\
parallel = { pp = 2, dp = 2, cuts = [1] }
batch = { micro_batch_size = 1, micro_batches = 3, seq_len = 32 }
""",
    "three.toml": """\
parallel = { pp = 3, dp = 2, cuts = [1, 2] }
batch = { micro_batch_size = 1, micro_batches = 4, seq_len = 32 }
""",
}
"""Files that a reader of the page writes first, by name."""
FILES["tied.json"] = FILES["tiny.json"].replace("{", '{ "tie_word_embeddings": true,', 1)
MODEL, TIED, PLAN, THREE_STAGES = "tiny.json", "tied.json", "two.toml", "three.toml"
ORDERED, RELEASED, ALLOCATED = "place-1f1b", "place-1f1b,insert-release", "place-1f1b,allocate-ddr"

Lines = list[str]
Edit = Callable[[Lines], Lines]


@frozen
class Mistake:
    """One mistake: the schedule it is made in, the edit that makes it, and why it matters."""

    title: str
    model: str
    """name in `FILES`, as that of the plan"""
    plan: str
    passes: str
    edit: Edit
    why: str


def _find(lines: Lines, stage: int, start: str) -> int:
    """Where a stage has the one line that starts so, without its indentation."""
    owner, hits = -1, []
    for at, line in enumerate(lines):
        owner += line.startswith("  stage ")
        if owner == stage and line.strip().startswith(start):
            hits.append(at)
    if len(hits) != 1:
        raise ValueError(f"{len(hits)} lines of stage @{stage} start with '{start}'")
    return hits[0]


def _move(stage: int, start: str, *, before: str) -> Edit:
    def edit(lines: Lines) -> Lines:
        lines = list(lines)
        line = lines.pop(_find(lines, stage, start))
        lines.insert(_find(lines, stage, before), line)
        return lines

    return edit


def _drop(stage: int, start: str) -> Edit:
    def edit(lines: Lines) -> Lines:
        at = _find(lines, stage, start)
        return lines[:at] + lines[at + 1 :]

    return edit


def _change(stage: int, start: str, old: str, new: str) -> Edit:
    def edit(lines: Lines) -> Lines:
        at = _find(lines, stage, start)
        return [*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]

    return edit


def _then(*edits: Edit) -> Edit:
    def edit(lines: Lines) -> Lines:
        for each in edits:
            lines = each(lines)
        return lines

    return edit


def _share_bytes(stage: int, start: str, other: str) -> Edit:
    """Give a tensor the offset of another."""

    def edit(lines: Lines) -> Lines:
        offset = lines[_find(lines, stage, other)].rpartition(" at ")[2]
        at = _find(lines, stage, start)
        return [*lines[:at], re.sub(r"0x[0-9a-f]+$", offset, lines[at]), *lines[at + 1 :]]

    return edit


MISTAKES = (
    Mistake(
        "Two receives in the other order",
        MODEL,
        THREE_STAGES,
        ORDERED,
        _move(1, "%x.attention.1.m1 = recv", before="%x.attention.1.m0 = recv"),
        "Messages of a channel are matched by order, not by name: a runtime would train on another micro-batch's activations, and "
        "the loss would still fall.",
    ),
    Mistake(
        "A receive posted before what it depends on has been sent",
        MODEL,
        THREE_STAGES,
        ORDERED,
        _move(1, "%dx.attention.2.m0 = recv gradient m0 @2", before="%x.attention.1.m0 = recv"),
        "An engine is blocked by its head: the receives behind it never start, nothing is sent on, and the job hangs without a word. "
        "The notes are the circle of who waits for whom.",
    ),
    Mistake(
        "A tensor released too early",
        MODEL,
        PLAN,
        RELEASED,
        _move(0, "release (%x.attention.1.m0)", before="send activation m0 @1"),
        "Its bytes go to the next tensor while they are still to be sent: the neighbour trains on something else, and nobody says so.",
    ),
    Mistake(
        "A tensor never released",
        MODEL,
        PLAN,
        RELEASED,
        _drop(1, "release (%x.head.m1"),
        "Memory that looks sufficient in the first step is gone in the hundredth.",
    ),
    Mistake(
        "Two live tensors at one address",
        MODEL,
        PLAN,
        ALLOCATED,
        _share_bytes(0, "saved %s.mlp.0.m0.gate", "saved %s.mlp.0.m0.up"),
        "Whichever is written later destroys the other; the loss may fall all the same.",
    ),
    Mistake(
        "A gradient reduced before the last micro-batch has added to it",
        MODEL,
        PLAN,
        ORDERED,
        _move(0, "%gs.mlp.0, %flag.mlp.0 = reduce_scatter", before="%dx.mlp.0.m2 = %g.mlp.0 +="),
        "Overlap at any price: the replicas agree on a gradient that lacks a micro-batch, and the last contribution is lost.",
    ),
    Mistake(
        "Weights gathered before they are updated",
        MODEL,
        PLAN,
        ORDERED,
        _move(0, "%w.mlp.0 = all_gather", before="%p.mlp.0, %m1.mlp.0, %m2.mlp.0, %t.mlp.0 += update"),
        "The next step would run on the old weights, the masters on new ones: a training that is one step behind itself.",
    ),
    Mistake(
        "Tied embeddings that are not summed",
        TIED,
        PLAN,
        ORDERED,
        _then(_drop(0, "%gs.embed, %flag.embed += all_reduce"), _drop(1, "%gs.head, %flag.head += all_reduce")),
        "Both ends would update their copy with half of the gradient, and the copies drift apart.",
    ),
    Mistake(
        "A forward more than the schedule has room for",
        MODEL,
        PLAN,
        ORDERED,
        _then(
            _move(1, "%x.attention.1.m1 = recv", before="%dx.head.m0, %g.head"),
            _move(1, "%x.mlp.1.m1, %s", before="%dx.head.m0, %g.head"),
        ),
        "Every micro-batch in flight keeps its activations: the peak is no longer the one that was planned for.",
    ),
)


def _verify(name: str) -> str:
    """What `ratrainc verify` prints about a file of the current directory.

    Raises ValueError where it finds nothing wrong.
    """
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        code = main(["verify", name])
    if code != 1:
        raise ValueError(f"{name} is sound, or something else went wrong (exit {code}): {out.getvalue()}")
    return out.getvalue()


def _difference(before: Lines, after: Lines) -> str:
    """What was changed, without line numbers; distant places are separated by dots."""
    changes = []
    for line in list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]:
        text = "  ..." if line.startswith("@@") else line[:1] + " " + line[1:].strip()
        changes.append(text)
    return "\n".join(changes[1:])


def _compiled(model: str, plan: str, passes: str) -> tuple[str, str]:
    """The command that makes a schedule, and the text that it writes."""
    words = f"compile --model {model} --plan {plan} --passes {passes} -o mistake.rtir"
    with contextlib.redirect_stdout(io.StringIO()):
        if main(words.split()) != 0:
            raise ValueError(words)
    return f"ratrainc {words}", Path("mistake.rtir").read_text("utf-8")


def _section(number: int, title: str, command: str, change: str, name: str, why: str) -> str:
    parts = [
        f"## {number}. {title}\n",
        f"    {command}\n",
        f"```diff\n{change}\n```\n",
        f"```\n$ ratrainc verify {name}\n{_verify(name)}```\n",
        why,
    ]
    return "\n".join(parts) + "\n"


def _schedule_sections() -> Iterator[str]:
    for number, item in enumerate(MISTAKES, 1):
        command, text = _compiled(item.model, item.plan, item.passes)
        lines = text.split("\n")
        edited = item.edit(lines)
        Path("mistake.rtir").write_text("\n".join(edited), "utf-8")
        yield _section(number, item.title, command, _difference(lines, edited), "mistake.rtir", item.why)


def _race_section() -> str:
    """A program that lacks one wait, and has no other fault: the edit is shown in the words of `ratrainc disasm`."""
    command, text = _compiled(MODEL, PLAN, ALLOCATED)
    program = api.emit(parse_module(text, file="mistake.rtir"))
    before, number = _disassembly(program), len(MISTAKES) + 1
    command = command.replace(".rtir", ".rtx")
    for stream in (stream for stage in program.stages for stream in stage.streams.values()):
        for at, item in enumerate(stream):
            for wait in item.waits:
                stream[at] = evolve(item, waits=tuple(other for other in item.waits if other is not wait))
                if _codes(program) == {"RT081"}:
                    change = _difference(before, _disassembly(program))
                    why = (
                        "A program is no text to be edited: the wait was taken out in Python, and what is shown of it is what "
                        "`ratrainc disasm` prints before and after. "
                        "Nothing but waits orders the engines: without this one it is left to chance which of the two comes first. The "
                        "checker knows no timing, so it finds the race every time."
                    )
                    return _section(number, "A wait that was left out", command, change, "mistake.rtx", why)
                stream[at] = item
    raise ValueError("every wait that is left out breaks an earlier rule too")


def _codes(program: Program) -> set[str]:
    try:
        check_program(program)
    except DiagnosticError as error:
        return {item.code for item in error.diagnostics}
    return set()


def _disassembly(program: Program) -> Lines:
    write_program(program, "mistake.rtx")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["disasm", "mistake.rtx"])
    return out.getvalue().split("\n")


def _writing() -> str:
    """Return the shell commands that write `FILES`."""
    return "".join(f"cat > {name} <<'END'\n{text}END\n" for name, text in FILES.items())


def page() -> str:
    """The whole page."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in FILES.items():
                Path(name).write_text(text, "utf-8")
            sections = [*_schedule_sections(), _race_section()]
        finally:
            os.chdir(before)
    start = (
        "# Ten mistakes, and what the verifier says\n\n"
        "Each of these is one small edit of a sound schedule, and each is a way in which real pipelines have hung, run out of memory or "
        "trained on wrong gradients without a word. Lines that start with `-` were taken out, lines with `+` put in.\n\n"
        "To follow them, write these files; the command above each edit makes its schedule. Its `--passes` leave out all that is not "
        "needed: with addresses (what `compile` gives without `--passes`) an edit breaks a rule about bytes too, and more is said.\n\n"
        f"```sh\n{_writing()}```\n\n"
        "<!-- written by docs/generate.py, which runs every command -->\n"
    )
    return "\n".join([start, *sections])
