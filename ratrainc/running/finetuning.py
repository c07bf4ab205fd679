"""Fine-tuning in one go: read the data, plan, compile, train, evaluate, export.

The folder that it writes:

    plan.toml, program.rtx     what was planned and compiled; 'ratrainc run' takes the program
    log.jsonl                  a line a step
    last/                      checkpoint: the state when the run ended, which --resume goes on from
    best/                      checkpoint: the state with the lowest held-out loss
    adapter/ or model/         the best state (without held-out data the last), for PEFT or transformers
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_text import changes_text, plan_to_toml
from ratrain.ratrain_ir.model.blocks import trained_words
from ratrain.ratrain_ir.support.diagnostics import fail, misuse
from ratrain.ratrain_ir.support.files import is_directory, is_there, made_directory, path_errors, read_bytes, write_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.choices.run_choices import (
    BYTES,
    CHATS,
    COMPLETION_KEY,
    PROMPT_KEY,
    TOKENIZERS_EOS,
    Display,
    Outputs,
    Ranks,
)
from ratrain.ratrainc.compiling.proving import sound_program
from ratrain.ratrainc.console.console import say, status
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.running.finetune_plan import Amounts, amounts, is_small, planned
from ratrain.ratrainc.running.run_checks import for_program, refuse_contradictions
from ratrain.ratrainc.running.run_result import RunResult, run_parts
from ratrain.ratrainc.running.training import check_outputs, run_training
from ratrain.ratrainc.running.training_data import open_streams
from ratrain.ratrainc.running.weight_export import export_adapter, export_weights
from ratrain.targets.program.rtx import program_bytes, read_program, write_program
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_step
from ratrain.targets.runtime.data.chat_template import has_template
from ratrain.targets.runtime.data.chats import MESSAGES_KEYS, PAIRS
from ratrain.targets.runtime.data.corpus import DOCUMENTS, data_files, kind_of
from ratrain.targets.runtime.data.jsonl import lines_of, object_in
from ratrain.targets.runtime.data.token_file import text_bytes
from ratrain.targets.runtime.data.tokenizer import names_end, tokenizer_of_weights
from ratrain.targets.runtime.settings import (
    AUTO_KERNELS,
    HOST_DEVICE,
    Evaluation,
    Execution,
    RunSettings,
    Saving,
    Start,
)
from ratrain.targets.runtime.weights.companions import is_byte_tokenizer
from ratrain.targets.runtime.weights.weights import check_weights_place

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.finetune_choice import FinetuneChoice
    from ratrain.ratrainc.choices.run_choices import DataChoice
    from ratrain.targets.program.program import Program

PLAN_FILE, PROGRAM_FILE, LOG_FILE = "plan.toml", "program.rtx", "log.jsonl"
LAST, BEST, ADAPTER, MODEL = "last", "best", "adapter", "model"


@frozen(repr=False)
class Finetuned(Shown):
    """The run of a fine-tuning, and the folders that it wrote."""

    model: ModelConfig
    """with what trained"""
    amounts: Amounts
    run: RunResult
    output: str
    exported: str | None
    """folder for PEFT or transformers; None if the run was interrupted before it"""
    of_best: bool
    """True if it holds the state with the lowest held-out loss"""

    @property
    def exit_code(self) -> int:
        """The exit code of the run."""
        return self.run.exit_code

    def parts(self) -> Iterator[Part]:
        """Yield the report in sentences."""
        yield from run_parts(self.run)
        if self.exported is None:
            yield f"interrupted: the same command with --resume goes on from {self.output}"
            return
        state = "the lowest held-out loss" if self.of_best else "the last step"
        yield f"wrote {self.exported}: weights after {state}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        best = [step.eval_loss for step in self.run.steps if step.eval_loss is not None]
        return {
            "output": self.output,
            "exported": self.exported,
            "trains": trained_words(self.model) or "everything",
            "seq_len": self.amounts.seq_len,
            "sequences": self.amounts.sequences,
            "batch": self.amounts.batch,
            "steps": self.amounts.steps,
            "lowest_eval_loss": min(best, default=None),
            "run": self.run.to_json(),
        }


def finetune(choice: FinetuneChoice, display: Display | None = None) -> Finetuned:
    """Fine-tune a model on data and write the folder `choice.output`; see the module.

    Raises `DiagnosticError` if model or data cannot be used, nothing fits the memory, or the folder holds another run.
    """
    try:
        return _finetuned(choice, display or Display())
    except KeyboardInterrupt as error:
        if is_there(Path(choice.output) / LAST):
            raise
        said = str(error) or "interrupted before a step was saved"
        again = "the same command, without --resume, begins again"
        raise KeyboardInterrupt(f"{said}\nthere is nothing to go on with: {again}") from None


def _finetuned(choice: FinetuneChoice, display: Display) -> Finetuned:
    folder = Path(choice.output)
    model = _model(choice)
    data = _data(choice)
    judging = choice.judging
    evaluation = Evaluation(every=1, paths=judging.paths, fraction=judging.fraction)
    start = Start(weights=choice.model)
    with status("reading the data"):
        stream, held = open_streams(model.vocab_size, data, evaluation, start)
    counts = amounts(choice, stream, held)
    _tell(display, choice, counts)
    settings = RunSettings(
        counts.steps,
        evaluation=evolve(evaluation, every=counts.eval_every, patience=judging.patience),
        saving=Saving(str(folder / LAST), best=str(folder / BEST)),
        execution=Execution(
            "fast" if is_small(choice) else AUTO_KERNELS,
            device=choice.device,
            ram_bytes=choice.ram_bytes if choice.device == HOST_DEVICE else None,
        ),
        start=start,
    )
    outputs = Outputs(log=str(folder / LOG_FILE), trackers=choice.trackers)
    settings = _resumed(choice, settings, folder)
    refuse_contradictions(settings, data, Ranks(), None, outputs)
    program = planned(model, choice, counts, settings)
    made_directory(str(folder))
    _write(folder, program, resumes=choice.resume)
    check_outputs(settings, outputs, 1)
    program = sound_program(str(folder / PROGRAM_FILE))
    settings = for_program(program, settings, Ranks(), None)
    result = run_training(program, data, settings, outputs, display)
    exported, of_best = None, False
    if not result.interrupted:
        exported, of_best = _exported(choice, folder, whole=not program.plan.training.adapts)
    return Finetuned(program.trained_model, counts, result, choice.output, exported, of_best)


def _model(choice: FinetuneChoice) -> ModelConfig:
    if not is_directory(choice.model):
        text = f"'{choice.model}' is no directory: fine-tuning takes a model's config.json, weights and tokenizer"
        fail("RT002", text, help="name a folder as transformers' save_pretrained writes it")
    model = load_model(choice.model)
    check_weights_place(choice.model)
    return model


def _data(choice: FinetuneChoice) -> DataChoice:
    """Return the way the data are read: as its first line shows, where nobody says it."""
    data = choice.data
    tokenizer = data.tokenizer or tokenizer_of_weights(choice.model)
    if data.train_on == "all" and data.chat_key is None and data.text_key is None:
        data = evolve(data, train_on=_kind(data, tokenizer))
    of_bytes = tokenizer is None or tokenizer == BYTES or is_byte_tokenizer(tokenizer)
    if data.train_on not in CHATS and tokenizer is not None and not of_bytes and names_end(tokenizer):
        data = evolve(data, eos=TOKENIZERS_EOS)
    return evolve(data, pack="whole")


def _kind(data: DataChoice, tokenizer: str | None) -> Any:
    """Tell chats from pairs and texts by the first line of the data."""
    file = next((each for each in data_files(data.paths) if kind_of(each) == DOCUMENTS), None)
    lines = () if file is None else lines_of(file, text_bytes(file))
    line = next((each for each in lines if each.content.strip()), None)
    if file is None or line is None:
        return "all"
    held = object_in(file, line)
    if any(key in held for key in MESSAGES_KEYS):
        return "answers"
    named = data.prompt_key is not None or data.completion_key is not None
    usual = (data.prompt_key or PROMPT_KEY, data.completion_key or COMPLETION_KEY)
    pair = next((each for each in ((usual,) if named else PAIRS) if held.keys() >= set(each)), None)
    if pair is None:
        if named:
            fields = ", ".join(map(shown, held))
            fail("RT090", f"'{file}' has no fields {' and '.join(map(shown, usual))}; it has {fields}")
        return "all"
    if data.chat_template is not None or (tokenizer not in (None, BYTES) and has_template(str(tokenizer))):
        return "answers"
    if pair != usual:
        text = f"'{file}' has instructions and outputs, and no chat template says how they become a text"
        ways = "--chat-template chatml is the usual one; or --prompt-key and --completion-key join two fields"
        fail("RT090", text, help=ways)
    return "completion"


def _tell(display: Display, choice: FinetuneChoice, counts: Amounts) -> None:
    """Say how many steps the data make."""
    if display.quiet:
        return
    passes = counts.steps * counts.batch / counts.sequences
    sequences, steps = number_of(counts.sequences, "sequence", ","), number_of(counts.steps, "step", ",")
    are = "is" if counts.steps == 1 else "are"
    say(
        f"{sequences} of {number_of(counts.seq_len, 'token', ',')}, {counts.batch} a step: {steps} {are} "
        f"{number_of(passes, 'epoch', '.3g')}"
    )
    if not choice.judging.paths and counts.eval_every is not None:
        every = "step" if counts.eval_every == 1 else number_of(counts.eval_every, "step")
        say(f"held out: the last {100 * choice.judging.fraction:g} %, evaluated every {every}")


def _resumed(choice: FinetuneChoice, settings: RunSettings, folder: Path) -> RunSettings:
    """Return settings that go on from the folder's run, if asked; refuse to replace one, and to go on from none."""
    last = folder / LAST
    if not choice.resume:
        if is_there(last):
            text = f"'{choice.output}' holds a run already"
            fail("RT092", text, help="--resume goes on with it; or name another folder with -o")
        return settings
    if not is_there(last):
        fail("RT092", f"'{choice.output}' holds no run to go on with", help="leave --resume out: it begins a run")
    done = latest_step(str(last))
    if done >= settings.steps:
        text = f"the run in '{choice.output}' has done its {number_of(done, 'step')}"
        fail("RT092", text, help="name more --epochs or --steps in the first place: the learning rate depends on them")
    weights = None if choice.adapting.whole else settings.start.weights
    return evolve(
        settings, steps=settings.steps - done, start=Start(weights=weights, checkpoint=str(last), new_data=None)
    )


def _write(folder: Path, program: Program, *, resumes: bool) -> None:
    """Write plan and program; of a run that goes on, check that they are what it began with."""
    place = folder / PROGRAM_FILE
    if resumes:
        if is_there(place) and read_bytes(str(place), "program") == program_bytes(program):
            return
        before = read_program(str(place)).plan
        found = changes_text(before, program.plan)
        was = changes_text(program.plan, before)
        differs = f"{found} here, and {was or 'left out'} there" if found or was else "of another model or memory"
        text = f"'{place}' is of another run than this command names: {differs}"
        fail("RT092", text, help="give the options of the first run; 'ratrainc run' goes on with other ones")
    write_text(str(folder / PLAN_FILE), plan_to_toml(program.plan))
    write_program(program, str(place))


def _exported(choice: FinetuneChoice, folder: Path, *, whole: bool) -> tuple[str, bool]:
    """Write the best weights for PEFT, or whole for transformers; return the folder, and True if they are the best."""
    of_best = is_there(folder / BEST)
    checkpoint = str(folder / (BEST if of_best else LAST))
    with status("exporting"):
        if whole or choice.merge:
            target = str(folder / MODEL)
            export_weights(checkpoint, target, init=None if whole else choice.model)
        else:
            target = str(folder / ADAPTER)
            export_adapter(checkpoint, target, str(Path(choice.model).resolve()))
    return target, of_best


def refuse_idle_choices(choice: FinetuneChoice) -> None:
    """Raise `DiagnosticError` for options that contradict each other, or would change nothing."""
    if choice.adapting.whole and choice.merge:
        misuse("--merge is for adapters: --full trains the model itself, and writes it whole")
    if not choice.data.paths:
        misuse("fine-tuning needs --data")
    with path_errors(f"cannot read '{choice.model}'"):
        is_model = os.path.realpath(choice.output) == os.path.realpath(choice.model)
    if is_model:
        misuse("-o is the folder of the model itself: name another one")
